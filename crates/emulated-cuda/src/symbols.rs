//! The whole list of driver symbols: stubs for those that nobody implements, and their addresses.

use muxflow_abi::cuda::CUresult;

use crate::api::{
    array::*, context::*, copy::*, device::*, event::*, fill::*, function::*, graph::*,
    graph_node::*, graph_params::*, ipc::*, launch::*, library::*, lookup::*, memory::*, module::*,
    pool::*, stream::*, virtual_memory::*,
};

/// An address of a function.
pub(crate) struct Address(pub(crate) *const ());
// SAFETY: only an address.
unsafe impl Sync for Address {}

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
