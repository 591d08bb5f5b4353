//! Where the other parts of this installation are: beside the program, or where `cargo xtask dist` puts
//! them.

use std::path::PathBuf;

use anyhow::{Context, bail};

/// Directories to look in, first to last.
fn places() -> anyhow::Result<Vec<PathBuf>> {
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    // An installed program is often reached through a link.
    let own = own.canonicalize().unwrap_or(own);
    let beside = own.parent().map(PathBuf::from).unwrap_or_default();
    Ok(vec![beside.clone(), beside.join("../lib/muxflow")])
}

/// A program of ours. `MUXFLOW_EMULATED_PROGRAMS` names another directory for all of them.
pub(crate) fn program(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os("MUXFLOW_EMULATED_PROGRAMS") {
        let path = PathBuf::from(directory).join(name);
        if path.is_file() {
            return Ok(path);
        }
        bail!("{} is not there: MUXFLOW_EMULATED_PROGRAMS points elsewhere", path.display());
    }
    let places = places()?;
    let found = places.iter().map(|place| place.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "{} is not there: build everything with `cargo xtask demo --build-only`, or set \
             MUXFLOW_EMULATED_PROGRAMS to the directory of a build",
            places[0].join(name).display()
        )
    })
}

/// The interposer's library. `MUXFLOW_XCUDA` names another file.
pub(crate) fn interposer() -> anyhow::Result<PathBuf> {
    const NAME: &str = "libxcuda.so";
    if let Some(path) = std::env::var_os("MUXFLOW_XCUDA").map(PathBuf::from) {
        if path.is_file() {
            return Ok(path);
        }
        bail!("{} is not there: MUXFLOW_XCUDA points elsewhere", path.display());
    }
    let mut places = places()?;
    // Where cargo puts it: a profile of its own.
    places.push(places[0].join("../xcuda"));
    let found = places.iter().map(|place| place.join(NAME)).find(|path| path.is_file());
    let found = found.and_then(|path| path.canonicalize().ok());
    found.context(
        "libxcuda.so is not there: build it with `cargo build --profile xcuda -p muxflow-xcuda`, or \
         set MUXFLOW_XCUDA to its path",
    )
}
