//! Tasks that link the libraries are programs of `crates/workbench`: what `cargo xtask demo` builds
//! first stays small.

use std::ffi::{OsStr, OsString};
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Args;

/// Arguments that the other program reads, `--help` among them.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

impl Passed {
    /// Measures an area with them, built as it is shipped: the development build checks every
    /// addition for overflow.
    pub(crate) fn bench(&self, area: &str) -> anyhow::Result<()> {
        let head = ["bench", area].map(OsStr::new);
        run(&["--release"], head.into_iter().chain(self.rest.iter().map(OsString::as_os_str)))
    }
}

/// Builds the program and runs it where the caller is.
pub(crate) fn workbench<A: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = A>,
) -> anyhow::Result<()> {
    run(&[], arguments)
}

fn run<A: AsRef<OsStr>>(
    profile: &[&str],
    arguments: impl IntoIterator<Item = A>,
) -> anyhow::Result<()> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["run", "--quiet", "--locked"])
        .args(profile)
        .arg("--manifest-path")
        .arg(crate::ci::root().join("crates/workbench/Cargo.toml"))
        .arg("--")
        .args(arguments)
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("muxflow-workbench: {status}");
    }
    Ok(())
}
