//! House rules as a check that fails, so that nobody has to remember them.

mod edges;
mod files;
mod prose;
mod tools;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::ci::root;

/// Runs every check and reports all findings at once.
pub(crate) fn run() -> anyhow::Result<()> {
    let root = root();
    let tracked = tracked_files(&root)?;
    let mut findings = edges::check(&root)?;
    findings.extend(tools::check(&root)?);
    findings.extend(files::check(&root, &tracked)?);
    findings.extend(prose::check(&root, &tracked)?);
    if findings.is_empty() {
        println!("tidy: {} files, nothing to mend", tracked.len());
        return Ok(());
    }
    for finding in &findings {
        println!("tidy: {finding}");
    }
    bail!("{} house rules broken", findings.len())
}

/// Files that git tracks or would track, relative to the root.
fn tracked_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot run git to list the files")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    Ok(text.lines().map(PathBuf::from).filter(|p| root.join(p).is_file()).collect())
}
