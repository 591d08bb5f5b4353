//! Writes the driver and NVML tables of `crates/abi` from NVIDIA's public headers.
//!
//! The headers come from PyPI packages into a throw-away directory under `target/`; only names,
//! versions and flags are taken from them. `--check` says when the committed tables are stale.

mod category;
mod headers;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub(crate) use headers::{Headers, fetch, root};

/// One driver entry point as it will stand in the table.
struct Row {
    symbol: String,
    base: String,
    per_thread: bool,
    since: u32,
    origin: &'static str,
    in_12: bool,
}

/// Writes the tables, or with `check` only compares them with what is committed.
pub(crate) fn run(check: bool) -> Result<()> {
    let headers = match fetch() {
        Ok(headers) => headers,
        Err(error) if check && std::env::var("CI").as_deref() != Ok("true") => {
            eprintln!(
                "SKIPPED codegen --check: no headers ({error:#}); it needs pip and a network"
            );
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let out = root().join("crates/abi/src/generated");
    let files = [
        ("driver.rs", driver_table(&headers)?),
        ("symbols.rs", symbol_macro(&headers)?),
        ("nvml.rs", nvml_table(&headers)?),
    ];
    for (name, text) in files {
        let path = out.join(name);
        if check {
            let committed = std::fs::read_to_string(&path).unwrap_or_default();
            if committed != text {
                bail!("{} is stale: run `cargo xtask codegen`", path.display());
            }
        } else {
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            println!("wrote {}", path.display());
        }
    }
    Ok(())
}

/// The views of a header that between them show every symbol: defaults, old names, per-thread.
const VIEWS: [&[&str]; 4] = [
    &[],
    &["-D__CUDA_API_VERSION_INTERNAL"],
    &["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"],
    &["-D__CUDA_API_VERSION_INTERNAL", "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"],
];

/// Every function that a header declares, in any view.
fn declared(include: &Path, header: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let stubs = stub_headers()?;
    for view in VIEWS {
        let source = stubs.join(format!("{}.c", header.trim_end_matches(".h")));
        std::fs::write(&source, format!("#include <cuda.h>\n#include <{header}>\n"))?;
        let output = Command::new("cc")
            .args(["-E", "-P", "-I"])
            .arg(include)
            .arg("-I")
            .arg(&stubs)
            .args(view)
            .arg(&source)
            .output()
            .context("running cc -E (a C compiler is needed)")?;
        if !output.status.success() {
            bail!("cc -E {header}: {}", String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        // Inline helpers of the header (they have a body) are not symbols of the library.
        for declaration in text.split(';').filter(|d| !d.contains('{') || d.contains('}')) {
            let tail = declaration.rsplit('}').next().unwrap_or(declaration);
            let Some(open) = tail.find('(') else { continue };
            let head = tail[..open].trim_end();
            let name = head.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
            let Some(name) = name else { continue };
            let returns = head[..head.len() - name.len()].trim();
            if returns.ends_with("CUresult")
                && !returns.contains("typedef")
                && !returns.contains("static")
                && name.starts_with("cu")
            {
                names.insert(name.to_owned());
            }
        }
    }
    Ok(names)
}

/// Empty headers for what cudaGL.h and its kin include and this machine may not have.
fn stub_headers() -> Result<PathBuf> {
    let dir = root().join("target/headers/stub");
    for name in ["GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h", "vdpau/vdpau_x11.h"] {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().context("a stub header has a directory")?)?;
        std::fs::write(path, "")?;
    }
    Ok(dir)
}

/// `PFN_cuX_vNNNN[_pt*]` typedefs: which API versions a base name has.
fn versions(include: &Path, header: &str) -> Result<BTreeMap<(String, bool), Vec<u32>>> {
    let path = include.join(header);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut found: BTreeMap<(String, bool), Vec<u32>> = BTreeMap::new();
    for (at, _) in text.match_indices("*PFN_cu") {
        let rest = &text[at + "*PFN_".len()..];
        let Some(end) = rest.find(')') else { continue };
        let name = &rest[..end];
        let (name, per_thread) = strip_per_thread(name);
        let Some((base, version)) = name.rsplit_once("_v") else { continue };
        let version = version.parse().with_context(|| format!("version of PFN_{name}"))?;
        found.entry((base.to_owned(), per_thread)).or_default().push(version);
    }
    for versions in found.values_mut() {
        versions.sort_unstable();
    }
    Ok(found)
}

fn strip_per_thread(symbol: &str) -> (&str, bool) {
    match symbol.strip_suffix("_ptsz").or_else(|| symbol.strip_suffix("_ptds")) {
        Some(name) => (name, true),
        None => (symbol, false),
    }
}

/// `cuMemAlloc_v2` -> (`cuMemAlloc`, 2): the number orders the symbols of one base name.
fn strip_version(symbol: &str) -> (&str, u32) {
    match symbol.rsplit_once("_v").map(|(base, number)| (base, number.parse())) {
        Some((base, Ok(number))) => (base, number),
        _ => (symbol, 1),
    }
}

const HEADERS: [(&str, &str, &str); 5] = [
    ("cuda.h", "cudaTypedefs.h", "Driver"),
    ("cudaProfiler.h", "cudaProfilerTypedefs.h", "Profiler"),
    ("cudaGL.h", "cudaGLTypedefs.h", "Gl"),
    ("cudaEGL.h", "cudaEGLTypedefs.h", "Egl"),
    ("cudaVDPAU.h", "cudaVDPAUTypedefs.h", "Vdpau"),
];

fn rows(headers: &Headers) -> Result<Vec<Row>> {
    let in_12 = declared(&headers.cuda12, "cuda.h")?;
    let mut rows = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for (header, typedefs, origin) in HEADERS {
        let symbols: BTreeSet<_> = declared(&headers.cuda13, header)?
            .into_iter()
            .filter(|name| seen.insert(name.clone()))
            .collect();
        let mut grouped: BTreeMap<(String, bool), Vec<(u32, String)>> = BTreeMap::new();
        for symbol in symbols {
            let (name, per_thread) = strip_per_thread(&symbol);
            let (base, number) = strip_version(name);
            grouped.entry((base.to_owned(), per_thread)).or_default().push((number, symbol));
        }
        let versions = versions(&headers.cuda13, typedefs)?;
        for ((base, per_thread), mut symbols) in grouped {
            symbols.sort();
            let since = versions
                .get(&(base.clone(), per_thread))
                .with_context(|| format!("{typedefs} has no PFN_ typedef for {base}"))?;
            if since.len() != symbols.len() {
                bail!("{base}: {} symbols but {} typedefs", symbols.len(), since.len());
            }
            for ((_, symbol), &since) in symbols.into_iter().zip(since) {
                let in_12 = origin != "Driver" || in_12.contains(&symbol);
                let base = base.clone();
                rows.insert(symbol.clone(), Row { symbol, base, per_thread, since, origin, in_12 });
            }
        }
    }
    Ok(rows.into_values().collect())
}

fn driver_table(headers: &Headers) -> Result<String> {
    let rows = rows(headers)?;
    let mut text = String::from(
        "//! Every entry point of the CUDA driver library, sorted by symbol. Written by `cargo xtask\n\
         //! codegen`; do not edit.\n\n\
         use crate::driver::Category::*;\n\
         use crate::driver::Origin::*;\n\
         use crate::driver::{DriverFn, row};\n\n",
    );
    writeln!(text, "/// All entry points of CUDA 13.4, by symbol.")?;
    writeln!(text, "#[rustfmt::skip]")?;
    writeln!(text, "pub static DRIVER: [DriverFn; {}] = [", rows.len())?;
    for row in &rows {
        writeln!(
            text,
            "    row(\"{}\", \"{}\", {}, {}, {}, {}, {}),",
            row.symbol,
            row.base,
            row.per_thread,
            row.since,
            category::of(&row.symbol),
            row.origin,
            row.in_12
        )?;
    }
    text.push_str("];\n");
    Ok(text)
}

fn symbol_macro(headers: &Headers) -> Result<String> {
    let rows = rows(headers)?;
    let mut text = String::from(
        "//! The symbols as a macro, for code that must be written once per symbol. Written by `cargo\n\
         //! xtask codegen`; do not edit.\n\n\
         /// Calls `$callback! { symbol index, ... }` with every driver symbol and its place in\n\
         /// [`DRIVER`](crate::driver::DRIVER).\n\
         #[macro_export]\n#[rustfmt::skip]\n\
         macro_rules! driver_symbols {\n    ($callback:ident) => {\n        $callback! {\n",
    );
    for (index, row) in rows.iter().enumerate() {
        writeln!(text, "            {} {index},", row.symbol)?;
    }
    text.push_str("        }\n    };\n}\n");
    Ok(text)
}

/// nvml.h marks each function with `DECLDIR`, deprecated ones too.
fn nvml_declared(include: &Path) -> Result<BTreeSet<String>> {
    let path = include.join("nvml.h");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let after = text.split("DECLDIR").skip(1).filter_map(|rest| rest.split('(').next());
    let names = after.map(str::trim).filter(|name| name.starts_with("nvml"));
    Ok(names.filter(|name| !name.contains(char::is_whitespace)).map(str::to_owned).collect())
}

fn nvml_table(headers: &Headers) -> Result<String> {
    let new = nvml_declared(&headers.nvml13)?;
    let old = nvml_declared(&headers.nvml12)?;
    let all: BTreeSet<_> = new.union(&old).cloned().collect();
    let mut text = String::from(
        "//! Every function that nvml.h declares, sorted. Written by `cargo xtask codegen`; do not edit.\n\n\
         use crate::nvml::{NvmlFn, nvml};\n\n",
    );
    writeln!(text, "/// NVML functions: name, declared by 12.9, declared by 13.4.")?;
    writeln!(text, "#[rustfmt::skip]")?;
    writeln!(text, "pub static NVML: [NvmlFn; {}] = [", all.len())?;
    for name in &all {
        writeln!(text, "    nvml(\"{name}\", {}, {}),", old.contains(name), new.contains(name))?;
    }
    text.push_str("];\n");
    Ok(text)
}
