//! `cargo xtask ci`: the one test command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use muxflow_control_plane::{Error, find_or_build, find_or_build_runtime};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

/// Programs that the tests start, and the Debian package of each.
const TOOLS: &[(&str, &[&str], &str)] = &[
    ("cc", &["--version"], "gcc"),
    ("buildah", &["--version"], "buildah"),
    ("c++", &["--version"], "g++"),
    ("chromium", &["--version"], "chromium"),
    ("git", &["--version"], "git"),
    ("man", &["--version"], "man-db"),
    ("python3", &["-c", "import venv, ensurepip"], "python3-venv"),
    ("python3", &["-c", PYTHON_HEADERS], "python3-dev"),
    ("runc", &["--version"], "runc"),
    ("systemd-analyze", &["--version"], "systemd"),
];

/// Succeeds where C extensions can be compiled.
const PYTHON_HEADERS: &str =
    "import sysconfig; open(sysconfig.get_path('include') + '/Python.h').close()";

/// All checks and all tests. The control plane of Kubernetes is built meanwhile with what the others
/// leave of the processors: tests with real processes wait much of their time.
pub(crate) fn run() -> anyhow::Result<()> {
    install_tools()?;
    let control_plane = std::thread::spawn(|| {
        let begin = Instant::now();
        let built = find_or_build().and_then(|program| find_or_build_runtime().map(|_| program));
        (built, begin.elapsed())
    });
    cargo(&["fmt", "--all", "--check"])?;
    super::tidy::run()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    documentation()?;
    step(
        Command::new(cargo_program())
            .args(["test", "--workspace", "--locked", "--no-fail-fast"])
            .env(super::kubernetes::SCENARIOS, "later")
            .current_dir(root()),
    )?;
    kubernetes(control_plane)
}

/// The scenarios on a real Kubernetes. Without one, this fails: what CI does not run is not shown.
fn kubernetes(built: JoinHandle<(Result<PathBuf, Error>, Duration)>) -> anyhow::Result<()> {
    let begin = Instant::now();
    let Ok((program, took)) = built.join() else { bail!("the build of Kubernetes broke down") };
    let waited = begin.elapsed().as_secs_f64();
    let program = program.context("the scenarios on a real Kubernetes cannot run")?;
    println!(
        "{}: ready after {:.0} s beside the tests and {waited:.0} s of waiting",
        program.display(),
        took.as_secs_f64() - waited
    );
    let begin = Instant::now();
    super::kubernetes::test(&[])?;
    println!("  {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

/// Runs cargo in the root and fails when it fails.
pub(crate) fn cargo(args: &[&str]) -> anyhow::Result<()> {
    step(Command::new(cargo_program()).args(args).current_dir(root()))
}

fn cargo_program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Broken links in the documentation of the code are errors.
fn documentation() -> anyhow::Result<()> {
    step(
        Command::new(cargo_program())
            .args([
                "doc",
                "--workspace",
                "--no-deps",
                "--locked",
                "--document-private-items",
                "--quiet",
            ])
            .env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links")
            .current_dir(root()),
    )
}

/// Runs one step, says what it is and how long it took.
fn step(command: &mut Command) -> anyhow::Result<()> {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|w| Path::new(w).file_name().unwrap_or(w).to_string_lossy().into_owned())
        .collect();
    let shown = words.join(" ");
    println!("$ {shown}");
    let begin = Instant::now();
    if std::env::var("CI").as_deref() == Ok("true") {
        // Nothing is compiled twice there, and what makes that fast costs time the first time.
        command.env("CARGO_INCREMENTAL", "0");
    }
    let status = command.status().with_context(|| format!("cannot start {shown}"))?;
    println!("  {:.0} s", begin.elapsed().as_secs_f64());
    if !status.success() {
        bail!("{shown} failed: {status}");
    }
    Ok(())
}

/// What root types to install packages; others put `sudo` before it.
const INSTALL: [&str; 5] = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"];

/// Installs what the tests need and the machine lacks, where that can be done without asking anybody;
/// says what to install where it cannot.
fn install_tools() -> anyhow::Result<()> {
    let missing: Vec<&str> = TOOLS
        .iter()
        .filter(|(tool, args, _)| !works(tool, args))
        .map(|(_, _, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    // SAFETY: plain system call that cannot fail.
    let is_root = unsafe { libc::geteuid() } == 0;
    let able = works("apt-get", &["--version"]);
    if !able || !(is_root || works("sudo", &["-n", "apt-get", "--version"])) {
        bail!(what_to_install(&missing));
    }
    let as_root = |words: &[&str]| {
        let words = if is_root { words.to_vec() } else { [&["sudo", "-n"], words].concat() };
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap_or("apt-get"));
        command.args(words);
        command
    };
    let installed = step(&mut as_root(&["apt-get", "update", "-qq"]))
        .and_then(|()| step(as_root(&INSTALL).args(&missing)));
    installed.with_context(|| what_to_install(&missing))
}

/// For a person: what is missing, and the line that installs it on Debian.
fn what_to_install(missing: &[&str]) -> String {
    let line = INSTALL.iter().filter(|word| **word != "-qq").copied();
    let line: Vec<&str> = line.chain(missing.iter().copied()).collect();
    format!(
        "the tests need {}: please install them, on Debian with\n  sudo {}",
        missing.join(", "),
        line.join(" ")
    )
}

fn works(tool: &str, args: &[&str]) -> bool {
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output();
    output.is_ok_and(|o| o.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_type_names_every_package() {
        let said = what_to_install(&["buildah", "man-db"]);
        assert!(said.starts_with("the tests need buildah, man-db: "), "{said}");
        let line = "\n  sudo apt-get install -y --no-install-recommends buildah man-db";
        assert!(said.ends_with(line), "{said}");
    }
}
