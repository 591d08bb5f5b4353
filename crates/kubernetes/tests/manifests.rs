//! The committed definitions of the custom resources are those of the Rust types, in both places from
//! which they are installed.

use std::path::Path;

#[test]
fn the_definitions_are_not_stale() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    for folder in ["kubernetes/crds", "helm/muxflow/crds"].map(|f| deploy.join(f)) {
        for (file, text) in muxflow_kubernetes::manifest::definitions() {
            let path = folder.join(file);
            if std::env::var_os("MUXFLOW_UPDATE").is_some() {
                std::fs::write(&path, &text).unwrap();
            }
            let committed = std::fs::read_to_string(&path).unwrap_or_default();
            let path = path.display();
            assert!(committed == text, "{path} is stale: run this test with MUXFLOW_UPDATE=1");
        }
    }
}
