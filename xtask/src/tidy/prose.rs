//! Rules about documents: links that lead somewhere, paths that exist, an architecture text that is
//! short and complete.

use std::path::{Path, PathBuf};

use anyhow::Context;

const ARCHITECTURE_LINES: usize = 300;

/// All findings in documents.
pub(super) fn check(root: &Path, tracked: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for path in tracked.iter().filter(|p| p.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(root.join(path))
            .with_context(|| format!("cannot read {}", path.display()))?;
        let folder = root.join(path.parent().unwrap_or(Path::new("")));
        for target in dead_links(&text, &folder).into_iter().chain(dead_paths(&text, root)) {
            findings.push(format!("{}: `{target}` leads nowhere", path.display()));
        }
    }
    let architecture = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    let lines = architecture.lines().count();
    if lines == 0 || lines > ARCHITECTURE_LINES {
        findings.push(format!("ARCHITECTURE.md: {lines} lines, wanted 1 to {ARCHITECTURE_LINES}"));
    }
    for crate_folder in std::fs::read_dir(root.join("crates")).context("cannot list crates/")? {
        let name = crate_folder?.file_name().to_string_lossy().into_owned();
        if !architecture.contains(&format!("`{name}`")) {
            findings.push(format!("ARCHITECTURE.md does not name the crate `{name}`"));
        }
    }
    Ok(findings)
}

/// Targets of `](target)` that are files and do not exist.
fn dead_links(text: &str, folder: &Path) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains("://") && !target.contains(' '))
        .filter(|target| !folder.join(target).exists())
        .map(str::to_owned)
        .collect()
}

/// Words in backticks that look like files of this project and do not exist.
fn dead_paths(text: &str, root: &Path) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| {
            ["crates/", "xtask/", "docs/"].iter().any(|p| word.starts_with(p))
                && !word.contains([' ', '*', '<', '{', '\n', ':'])
        })
        .filter(|word| !root.join(word).exists())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_and_paths_are_found() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(
            dead_links("[a](Cargo.toml) [b](nowhere.md#x) [c](https://x.y)", here),
            ["nowhere.md"]
        );
        let root = here.parent().unwrap();
        assert_eq!(
            dead_paths("`xtask/src/main.rs` `crates/none/src/x.rs` `crates/*`", root),
            ["crates/none/src/x.rs"]
        );
    }
}
