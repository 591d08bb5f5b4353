//! Fetches NVIDIA's public headers (and the static runtime) from PyPI, once, into `target/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Where the headers of each CUDA version are.
#[derive(Debug)]
pub(crate) struct Headers {
    pub(crate) cuda12: PathBuf,
    pub(crate) cuda13: PathBuf,
    pub(crate) nvml12: PathBuf,
    pub(crate) nvml13: PathBuf,
    /// Who reads them also writes beside them: one at a time.
    _lock: std::fs::File,
}

const PACKAGES_12: [&str; 2] =
    ["nvidia-cuda-runtime-cu12==12.9.79", "nvidia-nvml-dev-cu12==12.9.79"];
const PACKAGES_13: [&str; 4] = [
    "nvidia-cuda-runtime==13.4.92",
    "nvidia-nvml-dev==13.4.92",
    "nvidia-cuda-crt==13.4.92",
    "nvidia-cuda-profiler-api==13.4.92",
];

/// The workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The headers, from the cache or from PyPI.
pub(crate) fn fetch() -> Result<Headers> {
    let dir = root().join("target/headers");
    std::fs::create_dir_all(&dir)?;
    // Two tests ask for them at the same moment; without a lock one reads what the other unpacks, or
    // the sources that it writes for the compiler.
    let lock = std::fs::File::create(dir.join("lock"))?;
    lock.lock().with_context(|| format!("locking {}", dir.display()))?;
    install(&dir.join("12"), &PACKAGES_12)?;
    install(&dir.join("13"), &PACKAGES_13)?;
    Ok(Headers {
        cuda12: dir.join("12/nvidia/cuda_runtime/include"),
        cuda13: dir.join("13/nvidia/cu13/include"),
        nvml12: dir.join("12/nvidia/nvml_dev/include"),
        nvml13: dir.join("13/nvidia/cu13/include"),
        _lock: lock,
    })
}

/// Installs once: the marker is written last, so that a broken download is tried again.
fn install(target: &Path, packages: &[&str]) -> Result<()> {
    let marker = target.join(".complete");
    if std::fs::read_to_string(&marker).is_ok_and(|text| text == packages.join("\n")) {
        return Ok(());
    }
    std::fs::create_dir_all(target)?;
    let venv = target.with_file_name("venv");
    if !venv.join("bin/pip").exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    run(Command::new(venv.join("bin/pip"))
        .args(["install", "-q", "--no-deps", "--upgrade", "--disable-pip-version-check"])
        .arg("--target")
        .arg(target)
        .args(packages))?;
    std::fs::write(&marker, packages.join("\n"))?;
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("running {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}
