//! The time that the manager writes down: microseconds since 1970, so that it means the same after
//! a restart of the machine.

use std::time::{SystemTime, UNIX_EPOCH};

use muxflow_types::Micros;

/// Now.
pub fn now() -> Micros {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
