//! The emulated MPS server: started by the control daemon, never by hand.

use std::path::Path;
use std::process::ExitCode;

use muxflow_emulated_gpu::mps::server;
use muxflow_emulated_gpu::node::Node;

#[expect(clippy::print_stderr, reason = "this is where errors reach the daemon's log")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, directory, gpus, control] = arguments.as_slice() else {
        eprintln!("nvidia-cuda-mps-server: it is started by nvidia-cuda-mps-control");
        return ExitCode::FAILURE;
    };
    let gpus: Vec<usize> = gpus.split(',').filter_map(|g| g.parse().ok()).collect();
    match server::run(&Node::at(directory), &gpus, Path::new(control)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvidia-cuda-mps-server: {error}");
            ExitCode::FAILURE
        }
    }
}
