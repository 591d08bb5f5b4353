//! One Python for all tests, with every client pinned and installed at once, so that no test changes a
//! package that another one is running.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::build::{stub_driver, target};

const PACKAGES: [&str; 15] = [
    "cuda-bindings==13.4.4",
    "gpustat==1.1.1",
    "numba-cuda[cu13]==0.30.4",
    "numpy==2.4.6",
    "nvidia-cuda-nvrtc==13.4.92",
    "nvidia-ml-py==13.615.71",
    "nvitop==1.7.2",
    // What pycuda is built with, and what it runs with.
    "nvidia-cuda-runtime==13.4.92",
    "nvidia-cuda-crt==13.4.92",
    "nvidia-cuda-profiler-api==13.4.92",
    "setuptools==80.9.0",
    "wheel==0.48.0",
    "pytools==2026.1.1",
    "platformdirs==4.14.5",
    "mako==1.4.3",
];

/// Has no wheels: built here, into a directory of its own, so that the others need not wait for it.
const PYCUDA: &str = "pycuda==2026.1";

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

/// Runs an installing command.
fn step(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// Does `work` once among all tests and runs, unless `place` was made for the same `wanted` before.
fn once(
    place: &Path,
    wanted: &str,
    work: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    std::fs::create_dir_all(place).map_err(|e| format!("{}: {e}", place.display()))?;
    let lock = std::fs::File::create(place.join("lock")).map_err(|e| e.to_string())?;
    lock.lock().map_err(|e| e.to_string())?;
    let marker = place.join("installed");
    if std::fs::read_to_string(&marker).is_ok_and(|have| have == wanted) {
        return Ok(());
    }
    work()?;
    std::fs::write(&marker, wanted).map_err(|e| e.to_string())
}

fn install() -> Result<PathBuf, String> {
    let root = target().join("clients");
    let venv = root.join("venv");
    once(&root, &PACKAGES.join("\n"), || {
        step(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        step(
            Command::new(venv.join("bin/pip"))
                .args(["install", "-q", "--disable-pip-version-check"])
                .args(PACKAGES),
        )
    })?;
    Ok(venv.join("bin/python"))
}

/// Builds pycuda against NVIDIA's headers and the stub's `libcuda.so`; gives the directory with it.
///
/// # Errors
/// What the step that failed said.
pub fn pycuda(python: &Path) -> Result<PathBuf, String> {
    let place = target().join("clients/pycuda");
    let packages = place.join("packages");
    once(&place, PYCUDA, || {
        let asked = Command::new(python)
            .args(["-c", "import nvidia.cu13 as n; print(list(n.__path__)[0])"])
            .output()
            .map_err(|e| e.to_string())?;
        let cuda = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
        // Its set-up reads options from a file in the home directory only.
        let options = format!(
            "CUDA_INC_DIR = [{:?}]\nCUDADRV_LIB_DIR = [{:?}]\nCUDA_ENABLE_CURAND = False\nCXXFLAGS = [\"-O0\", \"-g0\", \"-w\"]\n",
            format!("{cuda}/include"),
            stub_driver().display().to_string(),
        );
        std::fs::write(place.join(".aksetup-defaults.py"), options).map_err(|e| e.to_string())?;
        let home = std::env::var("HOME").unwrap_or_default();
        let of_user = |variable: &str, directory: &str| {
            std::env::var(variable).unwrap_or_else(|_| format!("{home}/{directory}"))
        };
        step(
            Command::new(python)
                .args(["-m", "pip", "install", "-q", "--disable-pip-version-check"])
                .args(["--no-deps", "--no-build-isolation", "--upgrade", "--target"])
                .args([packages.as_os_str(), PYCUDA.as_ref()])
                .env("XDG_CONFIG_HOME", of_user("XDG_CONFIG_HOME", ".config"))
                .env("XDG_CACHE_HOME", of_user("XDG_CACHE_HOME", ".cache"))
                .env("HOME", &place),
        )
    })?;
    Ok(packages)
}
