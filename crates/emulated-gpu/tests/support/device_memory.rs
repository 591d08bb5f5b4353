//! What a device says about its memory.

use muxflow_emulated_gpu::facts::Stats;
use muxflow_emulated_gpu::launcher::Running;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};

/// Bytes in use on the first GPU, asked of the device itself.
pub(crate) fn used_bytes(node: &Running) -> u64 {
    let socket = Socket::connect(&node.node().socket(0)).expect("the device listens");
    let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).expect("it answers");
    Stats::from_bytes(&answer.tail).expect("statistics").used_bytes
}
