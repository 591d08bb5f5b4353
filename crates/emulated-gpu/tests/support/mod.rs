//! Builds the libraries and a C client once, and starts nodes for tests.

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use muxflow_emulated_gpu::launcher::{Plan, Running, start};
use muxflow_emulated_gpu::node::parse_gpus;
use tempfile::TempDir;

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
        cargo.args(["-p", "muxflow-examples"]);
        must(cargo.current_dir(env!("CARGO_MANIFEST_DIR")));
        program.parent().expect("a directory").to_owned()
    })
}

/// The C client.
pub(crate) fn client() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| compiled("client"))
}

/// A C program of `tests/c`, compiled when its source or the header has changed: test programs run side by side and
/// take over each other's.
pub(crate) fn compiled(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let source = sources.join(format!("{name}.c"));
    let out = built().join(format!("emulated-{name}"));
    let lock = File::create(out.with_extension("lock")).expect("a lock file");
    lock.lock().expect("the lock");
    let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    if changed(&out) < changed(&source).max(changed(&sources.join("call.h"))) {
        must(
            Command::new("cc")
                .args(["-O2", "-w", "-o"])
                .arg(&out)
                .arg(source)
                .args(["-ldl", "-lpthread"]),
        );
    }
    out
}

/// A node, and its directory, which goes with it also when a test fails. An MPS daemon that was left
/// there ends by itself when its directory is gone.
#[derive(Debug)]
pub(crate) struct Home {
    // Dropped in this order: nobody writes there any more when the directory goes.
    running: Running,
    _directory: TempDir,
}

impl Deref for Home {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.running
    }
}

/// A node with these GPUs.
pub(crate) fn node(gpus: &str, time_factor: f64) -> Home {
    // A short name: those of sockets have little room.
    let directory = tempfile::Builder::new().prefix("mxe").tempdir().expect("a directory");
    let plan = Plan {
        gpus: parse_gpus(gpus).expect("a list of GPUs"),
        time_factor,
        seed: 1,
        directory: Some(directory.path().to_owned()),
        built: built().to_owned(),
    };
    Home { running: start(&plan).expect("the node starts"), _directory: directory }
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
