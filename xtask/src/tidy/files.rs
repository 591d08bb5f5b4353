//! Rules about source files: module docs, length, names, unfinished marks, purity of the pure crates.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// Longest source file. A longer one has a second noun in it.
const MAX_LINES: usize = 500;
/// Names that say nothing.
const EMPTY_NAMES: &[&str] = &["util", "utils", "common", "helper", "helpers", "misc"];
/// Marks of work that is not done.
const UNFINISHED: &[&str] = &["todo!(", "unimplemented!(", "FIXME", "XXX"];
/// Crates without IO, clock or environment.
const PURE: &[&str] = &["types", "matching", "predictor", "policy", "gpu-model"];

/// All findings in source files.
pub(super) fn check(root: &Path, tracked: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for path in tracked.iter().filter(|p| p.extension().is_some_and(|e| e == "rs")) {
        let text = std::fs::read_to_string(root.join(path))
            .with_context(|| format!("cannot read {}", path.display()))?;
        findings.extend(source(path, &text));
    }
    for name in PURE.iter().filter(|n| root.join("crates").join(n).is_dir()) {
        findings.extend(purity(root, name));
    }
    Ok(findings)
}

fn source(path: &Path, text: &str) -> Vec<String> {
    let shown = path.display();
    let mut findings = Vec::new();
    let generated = path.components().any(|c| c.as_os_str() == "generated");
    if !text.trim_start().starts_with("//!") {
        findings
            .push(format!("{shown}: the file must begin with `//!` docs that say why it exists"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES && !generated {
        findings.push(format!(
            "{shown}: {lines} lines, at most {MAX_LINES}: find the second noun in it"
        ));
    }
    if path.components().any(|c| {
        let name =
            Path::new(c.as_os_str()).file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        EMPTY_NAMES.contains(&name)
    }) {
        findings.push(format!("{shown}: a name that says nothing; name what is in it"));
    }
    // This file must be able to spell the marks.
    if !path.ends_with("tidy/files.rs") {
        for mark in UNFINISHED.iter().filter(|m| text.contains(*m)) {
            findings.push(format!("{shown}: `{mark}` marks work that is not done"));
        }
    }
    findings
}

fn purity(root: &Path, name: &str) -> Vec<String> {
    let folder = root.join("crates").join(name);
    let mut findings = Vec::new();
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_default();
    if !read("clippy.toml").contains("std::time::Instant::now") {
        findings.push(format!(
            "crates/{name}: a pure crate needs the strict clippy.toml of crates/types"
        ));
    }
    if !read("src/lib.rs").contains("#![deny(unsafe_code)]") {
        findings.push(format!("crates/{name}: a pure crate needs #![deny(unsafe_code)]"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_can_fail() {
        let found = |path: &str, text: &str| source(Path::new(path), text).join("\n");
        assert_eq!(found("crates/a/src/lib.rs", "//! Why.\n"), "");
        assert!(found("crates/a/src/lib.rs", "fn f() {}").contains("docs that say why"));
        assert!(
            found("crates/a/src/lib.rs", &format!("//! W\n{}", "x\n".repeat(501)))
                .contains("second noun")
        );
        assert!(found("crates/a/src/util.rs", "//! W").contains("says nothing"));
        assert!(found("crates/a/src/lib.rs", "//! W\n// FIXME").contains("not done"));
        assert_eq!(
            found("crates/a/src/generated/t.rs", &format!("//! W\n{}", "x\n".repeat(501))),
            ""
        );
    }
}
