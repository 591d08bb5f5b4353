//! `cargo xtask ci`: the one test command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

/// Programs that the tests start, and the Debian package of each.
const TOOLS: &[(&str, &[&str], &str)] = &[
    ("cc", &["--version"], "gcc"),
    ("c++", &["--version"], "g++"),
    ("chromium", &["--version"], "chromium"),
    ("git", &["--version"], "git"),
    ("python3", &["-c", "import venv, ensurepip"], "python3-venv"),
    ("python3", &["-c", PYTHON_HEADERS], "python3-dev"),
];

/// Succeeds where C extensions can be compiled.
const PYTHON_HEADERS: &str =
    "import sysconfig; open(sysconfig.get_path('include') + '/Python.h').close()";

/// All checks and all tests.
pub(crate) fn run() -> anyhow::Result<()> {
    install_tools()?;
    cargo(&["fmt", "--all", "--check"])?;
    super::tidy::run()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    documentation()?;
    cargo(&["test", "--workspace", "--locked"])?;
    kubernetes()
}

/// The scenarios on a real Kubernetes, where its control plane was built before or is named. Building
/// it here would take a quarter of the time that all tests may take.
fn kubernetes() -> anyhow::Result<()> {
    if super::kubernetes::at_hand() {
        let begin = Instant::now();
        super::kubernetes::test(&[])?;
        println!("  Kubernetes: {:.0} s", begin.elapsed().as_secs_f64());
        return Ok(());
    }
    println!(
        "\n*** NOT RUN: the scenarios on a real Kubernetes; `cargo xtask kubernetes test` builds one (about 900 CPU-seconds, once) and runs them ***\n"
    );
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
    let status = command.status().with_context(|| format!("cannot start {shown}"))?;
    println!("  {:.0} s", begin.elapsed().as_secs_f64());
    if !status.success() {
        bail!("{shown} failed: {status}");
    }
    Ok(())
}

/// Installs what the tests need and the machine lacks, where that can be done; says what to install
/// where it cannot.
fn install_tools() -> anyhow::Result<()> {
    let missing: Vec<&str> = TOOLS
        .iter()
        .filter(|(tool, args, _)| !works(tool, args))
        .map(|(_, _, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !works("apt-get", &["--version"]) {
        bail!("the tests need {}: please install them", missing.join(", "));
    }
    step(Command::new("apt-get").args(["update", "-qq"]))?;
    step(
        Command::new("apt-get")
            .args(["install", "-y", "-qq", "--no-install-recommends"])
            .args(&missing),
    )
    .with_context(|| format!("the tests need {}: please install them", missing.join(", ")))
}

fn works(tool: &str, args: &[&str]) -> bool {
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output();
    output.is_ok_and(|o| o.status.success())
}
