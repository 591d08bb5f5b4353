//! One Python for all tests, with every client pinned and installed at once, so that no test changes a
//! package that another one is running.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::build::target;

const PACKAGES: [&str; 7] = [
    "cuda-bindings==13.4.4",
    "gpustat==1.1.1",
    "numba-cuda[cu13]==0.30.4",
    "numpy==2.4.6",
    "nvidia-cuda-nvrtc==13.4.92",
    "nvidia-ml-py==13.615.71",
    "nvitop==1.7.2",
];

/// Says that something could not be had; with CI=true that is a failure.
#[expect(clippy::print_stderr, reason = "a skipped client must be seen")]
pub fn skip(what: &str, why: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{what}: {why}");
    eprintln!("SKIPPED {what}: {why}");
}

/// A Python with the clients in it, made once under the target directory; none when they cannot be had.
pub fn python() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(|| match install() {
        Ok(python) => Some(python),
        Err(why) => {
            skip("the Python clients (python3 with venv and a package index bring them)", &why);
            None
        }
    })
    .as_deref()
}

/// A script of `py/`.
#[must_use]
pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("py").join(name)
}

fn install() -> Result<PathBuf, String> {
    let root = target().join("clients");
    let venv = root.join("venv");
    let marker = root.join("installed");
    std::fs::create_dir_all(&root).map_err(|e| format!("{}: {e}", root.display()))?;
    let lock = std::fs::File::create(root.join("lock")).map_err(|e| e.to_string())?;
    lock.lock().map_err(|e| e.to_string())?;
    let wanted = PACKAGES.join("\n");
    if !std::fs::read_to_string(&marker).is_ok_and(|have| have == wanted) {
        let run = |command: &mut Command| match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(error) => Err(format!("{command:?}: {error}")),
        };
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        run(Command::new(venv.join("bin/pip"))
            .args(["install", "-q", "--disable-pip-version-check"])
            .args(PACKAGES))?;
        std::fs::write(&marker, wanted).map_err(|e| e.to_string())?;
    }
    Ok(venv.join("bin/python"))
}
