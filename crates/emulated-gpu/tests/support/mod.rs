//! Builds the libraries and a C client once, and starts nodes for tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use muxflow_emulated_gpu::launcher::{Plan, Running, start};
use muxflow_emulated_gpu::node::parse_gpus;

fn must(command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

/// The directory with the built libraries and programs.
pub(crate) fn built() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_muxflow-emulated-device"));
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "muxflow-emulated-cuda"]);
        cargo.args(["-p", "muxflow-emulated-nvml", "-p", "muxflow-emulated-dcgm"]);
        must(cargo.current_dir(env!("CARGO_MANIFEST_DIR")));
        program.parent().expect("a directory").to_owned()
    })
}

/// The C client, compiled once per source.
pub(crate) fn client() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/client.c");
        let out = built().join(format!("emulated-client-{}", std::process::id()));
        must(Command::new("cc").args(["-O2", "-w", "-o"]).arg(&out).arg(source).arg("-ldl"));
        out
    })
}

/// A node with these GPUs.
pub(crate) fn node(gpus: &str, time_factor: f64) -> Running {
    let plan = Plan {
        gpus: parse_gpus(gpus).expect("a list of GPUs"),
        time_factor,
        seed: 1,
        directory: Some(scratch()),
        built: built().to_owned(),
    };
    start(&plan).expect("the node starts")
}

/// A short directory of its own: socket names have little room.
fn scratch() -> PathBuf {
    let directory = tempfile::Builder::new().prefix("mxe").tempdir().expect("a directory");
    directory.keep()
}

/// A command that sees the node.
pub(crate) fn on(node: &Running, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.envs(node.environment());
    command
}

/// What a client printed; it must end well.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
