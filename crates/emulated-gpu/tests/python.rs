//! Clients that we did not write, unmodified: nvidia-ml-py, cuda-bindings with NVRTC, numba-cuda.

#![expect(clippy::print_stderr, reason = "a skipped test must say so")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use support::{built, client, node, on, output};

const PACKAGES: [&str; 5] = [
    "nvidia-ml-py==13.615.71",
    "cuda-bindings==13.4.4",
    "nvidia-cuda-nvrtc==13.4.92",
    "numba-cuda[cu13]==0.30.4",
    "numpy==2.4.6",
];

/// Python with the clients in it, made once and kept in the target directory; none when they
/// cannot be had, which is an error where `CI=true`.
fn python() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(|| {
        let venv = built().parent()?.join("emulated-clients");
        let python = venv.join("bin/python");
        let done = venv.join("installed");
        let lock = std::fs::File::create(venv.with_extension("lock")).ok()?;
        lock.lock().ok()?;
        let wanted = PACKAGES.join("\n");
        if std::fs::read_to_string(&done).is_ok_and(|have| have == wanted) {
            return Some(python);
        }
        let run = |command: &mut Command| command.status().is_ok_and(|s| s.success());
        let made = run(Command::new("python3").args(["-m", "venv"]).arg(&venv))
            && run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES));
        if made && std::fs::write(&done, wanted).is_ok() {
            return Some(python);
        }
        assert!(std::env::var("CI").as_deref() != Ok("true"), "the Python clients are missing");
        eprintln!(
            "SKIPPED: the Python clients cannot be installed here; with python3 and access to a \
             package index they are installed by this test itself"
        );
        None
    })
    .as_deref()
}

fn passes(script: &str) {
    let Some(python) = python() else { return };
    let node = node("t4", 1.0);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/py").join(script);
    assert_eq!(output(on(&node, python).arg("-W").arg("ignore").arg(path)), "ok", "{script}");
    // And the GPU is as empty as before.
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
}

#[test]
fn nvidia_ml_py_reads_the_gpu() {
    passes("nvml.py");
}

#[test]
fn cuda_bindings_and_nvrtc_compute() {
    passes("nvrtc.py");
}

#[test]
fn numba_cuda_compiles_launches_and_copies() {
    passes("numba_client.py");
}
