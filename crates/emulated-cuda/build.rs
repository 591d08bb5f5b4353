//! Writes what must exist once per driver symbol: stubs for those that are not implemented, and
//! the table for look-ups. Implemented are those for which a source file here has a function.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

fn main() {
    let mut implemented = BTreeSet::new();
    println!("cargo:rerun-if-changed=src");
    let mut folders = vec![Path::new("src").to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                names(&text, &mut implemented);
            }
        }
    }
    let mut code = String::new();
    for row in &muxflow_abi::driver::DRIVER {
        if !implemented.contains(row.symbol) {
            let name = row.symbol;
            writeln!(
                code,
                "#[unsafe(no_mangle)]\npub(crate) extern \"C\" fn {name}() -> CUresult {{ \
                 crate::ffi::missing(\"{name}\") }}"
            )
            .expect("writing to a string");
        }
    }
    let count = muxflow_abi::driver::DRIVER.len();
    writeln!(code, "pub(crate) static ADDRESSES: [Address; {count}] = [").expect("a string");
    for row in &muxflow_abi::driver::DRIVER {
        writeln!(code, "    Address({} as *const ()),", row.symbol).expect("a string");
    }
    code.push_str("];\n");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("symbols.rs"), code).expect("the build directory");
    for flag in ["-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={flag}");
    }
}

/// Names after `fn`, and those that follow after a comma, as in `fn cuX, cuX_ptsz(`.
fn names(text: &str, found: &mut BTreeSet<String>) {
    for part in text.split("fn ").skip(1) {
        let head = part.split('(').next().unwrap_or("");
        let list = head.split(',').map(str::trim);
        found.extend(list.filter(|n| n.starts_with("cu")).map(str::to_owned));
    }
}
