//! The agent on an emulated GPU: real processes, a real interposer, a real (emulated) driver.
//!
//! Each test starts an emulated node and runs itself again inside it, so that the agent finds the
//! node's libraries the way it finds a real driver's.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::print_stdout, reason = "measured times are for whoever runs the tests")]

mod behaviour;
mod burst;
mod command;
mod defences;
mod doctor;
mod driver_side;
mod ends;
mod faults;
mod guests;
mod host;
mod inside;
mod mends;
mod parties;
mod reliability;
mod room;
mod sensors;
mod strangers;
mod world;
