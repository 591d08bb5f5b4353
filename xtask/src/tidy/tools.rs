//! A clean build needs a Rust toolchain and a C compiler, and no more: no package that looks for
//! protoc, cmake, OpenSSL or libclang may come into the lock file.

use std::path::Path;

use anyhow::Context;

/// Packages that need a tool or a library of the machine when they are built, and what they need.
const NEEDY: [(&str, &str); 13] = [
    ("aws-lc-sys", "cmake"),
    ("bindgen", "libclang"),
    ("clang-sys", "libclang"),
    ("cmake", "cmake"),
    ("native-tls", "OpenSSL"),
    ("openssl", "OpenSSL"),
    ("openssl-src", "Perl, to build OpenSSL"),
    ("openssl-sys", "OpenSSL"),
    ("prost-build", "protoc"),
    ("protobuf-codegen", "protoc"),
    ("protobuf-src", "cmake"),
    ("protoc-bin-vendored", "a protoc of its own"),
    ("tonic-prost-build", "protoc"),
];

/// Findings about the lock file.
pub(super) fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let path = root.join("Cargo.lock");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let found = needy(&text);
    anyhow::ensure!(text.matches("[[package]]").count() > 20, "{} is hardly one", path.display());
    Ok(found)
}

fn needy(lock: &str) -> Vec<String> {
    let names = lock.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let find = |name: &str| NEEDY.iter().find(|(needy, _)| *needy == name);
    names
        .filter_map(find)
        .map(|(name, tool)| {
            format!("Cargo.lock: {name} needs {tool} to be built; a clean build must do without")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_need_tools_are_found() {
        let lock = "[[package]]\nname = \"openssl-probe\"\n\n[[package]]\nname = \"openssl-sys\"\n\
                    dependencies = [\n \"cmake\",\n]\n";
        let found = needy(lock);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("openssl-sys needs OpenSSL"), "{found:?}");
    }
}
