//! Finds the interposer, and refuses programs that it could not get into: the loader would only
//! warn and then run them free.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// The interposer's library.
pub(super) fn interposer(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let set = std::env::var_os("MUXFLOW_XCUDA").map(PathBuf::from);
    if let Some(path) = named.or(set.as_deref()) {
        let found = path.canonicalize();
        return found.with_context(|| format!("the interposer {}", path.display()));
    }
    let own = std::env::current_exe().context("where this program is")?;
    let beside = own.parent().unwrap_or(Path::new("."));
    let places =
        ["libxcuda.so", "../lib/libxcuda.so", "../lib/muxflow/libxcuda.so", "../xcuda/libxcuda.so"];
    let found = places.iter().map(|place| beside.join(place)).find(|path| path.is_file());
    match found.and_then(|path| path.canonicalize().ok()) {
        Some(path) => Ok(path),
        None => bail!(
            "libxcuda.so is not beside {}: build it with `cargo build --profile xcuda -p \
             muxflow-xcuda`, or name it with --interposer",
            own.display()
        ),
    }
}

/// The file that a command name stands for.
pub(super) fn find(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return path.is_file().then(|| path.to_owned());
    }
    let list = std::env::var_os("PATH")?;
    std::env::split_paths(&list).map(|dir| dir.join(path)).find(|path| path.is_file())
}

/// What kind of program a file is, as far as a preload is concerned.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Glibc,
    Musl,
    Static,
    /// A script, or nothing that we know: its interpreter decides.
    Other,
}

/// Refuses what would run free.
pub(super) fn check(name: &OsStr) -> anyhow::Result<()> {
    let Some(path) = find(name) else {
        bail!("{}: no such program", name.to_string_lossy());
    };
    match kind(&fs::read(&path).with_context(|| path.display().to_string())?) {
        Kind::Glibc | Kind::Other => Ok(()),
        Kind::Musl => bail!(
            "{} is built for musl: the interposer needs glibc, and musl would run it free",
            path.display()
        ),
        Kind::Static => bail!(
            "{} is statically linked: no interposer can be loaded into it, and it would run free",
            path.display()
        ),
    }
}

/// Looks for the ELF interpreter. Anything short or strange is `Other`.
pub(super) fn kind(file: &[u8]) -> Kind {
    const PT_DYNAMIC: u64 = 2;
    const PT_INTERP: u64 = 3;
    let word = |at: usize, bytes: usize| -> Option<u64> {
        let field = file.get(at..at.checked_add(bytes)?)?;
        Some(field.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
    };
    let parse = || -> Option<Kind> {
        if file.get(..5)? != b"\x7fELF\x02" {
            return Some(Kind::Other);
        }
        let table = usize::try_from(word(32, 8)?).ok()?;
        let (size, count) = (word(54, 2)?, word(56, 2)?);
        let mut dynamic = false;
        for index in 0..count {
            let at = table.checked_add(usize::try_from(index * size).ok()?)?;
            match word(at, 4)? {
                PT_INTERP => {
                    let from = usize::try_from(word(at.checked_add(8)?, 8)?).ok()?;
                    let length = usize::try_from(word(at.checked_add(32)?, 8)?).ok()?;
                    let text = file.get(from..from.checked_add(length)?)?;
                    let musl = text.windows(7).any(|part| part == b"ld-musl");
                    return Some(if musl { Kind::Musl } else { Kind::Glibc });
                }
                PT_DYNAMIC => dynamic = true,
                _ => {}
            }
        }
        Some(if dynamic { Kind::Other } else { Kind::Static })
    };
    parse().unwrap_or(Kind::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(kind(&own), Kind::Glibc);
        assert_eq!(kind(b"#!/bin/sh\n"), Kind::Other);
        assert_eq!(kind(b""), Kind::Other);
        let mut musl = own.clone();
        let at = musl.windows(9).position(|part| part == b"ld-linux-").unwrap();
        musl[at..at + 9].copy_from_slice(b"ld-musl-x");
        assert_eq!(kind(&musl), Kind::Musl);
        for cut in 0..256 {
            kind(&own[..cut]);
        }
    }
}
