//! The agent's children as a program of their own, for the tests of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    muxflow_agent::child::main(std::env::args_os().skip(1))
}
