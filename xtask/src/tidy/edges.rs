//! Which crate may depend on which: the invariants of the architecture, as a table.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde_json::Value;

/// The crates of the workspace that each crate may depend on. A new edge needs a line here, a commit
/// of its own and a word in `docs/adr`.
const ALLOWED: &[(&str, &[&str])] = &[
    ("muxflow-types", &[]),
    ("muxflow-matching", &[]),
    ("muxflow-predictor", &["muxflow-types"]),
    ("muxflow-policy", &["muxflow-types", "muxflow-matching"]),
    ("muxflow-gpu-model", &["muxflow-types"]),
    ("muxflow-abi", &[]),
    ("muxflow-api", &["muxflow-types"]),
    ("muxflow-store", &["muxflow-types"]),
    ("muxflow-xcuda", &["muxflow-abi"]),
    ("muxflow-emulated-gpu", &["muxflow-abi", "muxflow-gpu-model", "muxflow-types"]),
    ("muxflow-emulated-cuda", &["muxflow-abi", "muxflow-emulated-gpu"]),
    ("muxflow-emulated-nvml", &["muxflow-abi", "muxflow-emulated-gpu"]),
    ("muxflow-emulated-dcgm", &["muxflow-abi", "muxflow-emulated-gpu"]),
    ("muxflow-agent", &["muxflow-types", "muxflow-policy", "muxflow-abi"]),
    ("muxflow-services", &["muxflow-types", "muxflow-api", "muxflow-agent"]),
    (
        "muxflow-kubernetes",
        &[
            "muxflow-types",
            "muxflow-agent",
            "muxflow-policy",
            "muxflow-predictor",
            "muxflow-matching",
            "muxflow-api",
        ],
    ),
    (
        "muxflow-manager",
        &[
            "muxflow-types",
            "muxflow-policy",
            "muxflow-predictor",
            "muxflow-store",
            "muxflow-api",
            "muxflow-agent",
            "muxflow-services",
            "muxflow-abi",
        ],
    ),
    ("muxflow-control-plane", &[]),
    ("muxflow-test-cluster", &["muxflow-control-plane"]),
    (
        "muxflow-workbench",
        &[
            "muxflow-types",
            "muxflow-policy",
            "muxflow-predictor",
            "muxflow-gpu-model",
            "muxflow-sim",
            "muxflow-test-cluster",
        ],
    ),
    ("muxflow-examples", &["muxflow-abi"]),
    ("muxflow-e2e", &["muxflow-abi"]),
    (
        "muxflow-sim",
        &[
            "muxflow-types",
            "muxflow-policy",
            "muxflow-predictor",
            "muxflow-matching",
            "muxflow-gpu-model",
            "muxflow-api",
        ],
    ),
    (
        "muxflow-cli",
        &[
            "muxflow-types",
            "muxflow-policy",
            "muxflow-predictor",
            "muxflow-matching",
            "muxflow-gpu-model",
            "muxflow-api",
            "muxflow-store",
            "muxflow-abi",
            "muxflow-sim",
            "muxflow-agent",
            "muxflow-services",
            "muxflow-kubernetes",
            "muxflow-manager",
        ],
    ),
];

/// Crates that may use nothing from outside the workspace, or only what is listed.
const OUTSIDE: &[(&str, &[&str])] = &[
    ("muxflow-abi", &[]),
    ("muxflow-matching", &[]),
    ("muxflow-types", &["thiserror"]),
    ("muxflow-xcuda", &["libc"]),
];

/// Edges that are not in the table.
pub(super) fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")?;
    Ok(findings(&metadata))
}

fn findings(metadata: &Value) -> Vec<String> {
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let outside: BTreeMap<_, _> = OUTSIDE.iter().copied().collect();
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        // What only tests use may see anything.
        for dependency in dependencies.filter(|d| d["kind"].as_str() != Some("dev")) {
            let on = dependency["name"].as_str().unwrap_or_default();
            let ours = on.starts_with("muxflow-");
            let fine = match (ours, allowed.get(name), outside.get(name)) {
                (true, Some(list), _) => list.contains(&on),
                (false, _, Some(list)) => list.contains(&on),
                _ => true,
            };
            if !fine {
                findings
                    .push(format!("{name} must not depend on {on} (see xtask/src/tidy/edges.rs)"));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forbidden_edge_is_found() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "muxflow-policy", "dependencies": [
                { "name": "muxflow-types", "kind": null },
                { "name": "muxflow-gpu-model", "kind": null },
                { "name": "muxflow-gpu-model", "kind": "dev" },
            ]},
            { "name": "muxflow-abi", "dependencies": [{ "name": "libc", "kind": null }] },
        ]});
        let found = findings(&metadata);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("muxflow-policy must not depend on muxflow-gpu-model"));
        assert!(found[1].contains("muxflow-abi must not depend on libc"));
    }
}
