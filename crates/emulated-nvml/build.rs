//! Writes stubs for the functions of NVML that no source file here implements.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=src");
    let mut implemented = BTreeSet::new();
    for entry in std::fs::read_dir("src").into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        for part in text.split("fn ").skip(1) {
            let head = part.split('(').next().unwrap_or("");
            implemented.extend(head.split(',').map(|n| n.trim().to_owned()));
        }
    }
    let mut code = String::new();
    for row in muxflow_abi::nvml::NVML {
        if !implemented.contains(row.symbol) {
            let name = row.symbol;
            writeln!(
                code,
                "#[unsafe(no_mangle)]\nextern \"C\" fn {name}() -> nvmlReturn_t {{ \
                 NVML_ERROR_NOT_SUPPORTED }}"
            )
            .expect("writing to a string");
        }
    }
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("stubs.rs"), code).expect("the build directory");
    for flag in ["-Wl,-Bsymbolic", "-Wl,-soname,libnvidia-ml.so.1"] {
        println!("cargo:rustc-cdylib-link-arg={flag}");
    }
}
