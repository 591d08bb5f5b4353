//! `muxflow run --explain`: which calls the interposer handles, which it only forwards, and where it
//! would find the driver.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use muxflow_abi::driver::{Category, DRIVER};
use muxflow_abi::handled::is_handled;

use super::program;

/// Where the loader looks for the driver, in its order.
fn candidates() -> Vec<(String, PathBuf)> {
    let mut places = Vec::new();
    if let Some(named) = std::env::var_os("MUXFLOW_REAL_LIBCUDA") {
        places.push(("MUXFLOW_REAL_LIBCUDA".to_owned(), PathBuf::from(named)));
    }
    for directory in std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths) {
        places.push(("LD_LIBRARY_PATH".to_owned(), directory.join("libcuda.so.1")));
    }
    let system = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/local/nvidia/lib64",
        "/usr/local/cuda/compat",
        "/usr/lib/wsl/lib",
    ];
    places.extend(system.map(|dir| ("system".to_owned(), Path::new(dir).join("libcuda.so.1"))));
    places
}

/// What is done about those calls of a category that are handled.
fn treatment(category: Category) -> &'static str {
    match category {
        Category::Alloc => "charged; over quota CUDA_ERROR_OUT_OF_MEMORY",
        Category::AllocHost => "host memory is not charged",
        Category::Free => "given back",
        Category::Implicit => "charged as far as it can be known",
        Category::Launch => "through the launch gate",
        Category::LaunchHost => "host functions are never held back",
        Category::GraphNode => "counted, so that a graph costs what its kernels cost",
        Category::MemoryInfo => "tells the quota",
        Category::Context => "followed, and released at the end",
        Category::Lookup => "answered with these handlers; cuGetExportTable untouched",
        Category::Capture => "followed: captured launches are not gated",
        Category::Share => "exports are remembered, so that the job's own imports are free",
        Category::Other => "followed, for what it tells of work in flight",
    }
}

pub(super) fn run(interposer: &Path, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "interposer  {}", interposer.display())?;
    let mut found = false;
    for (why, path) in candidates() {
        let there = path.exists();
        let mark = if there && !found { "driver      " } else { "            " };
        if there || why != "system" {
            let state = if there { "found" } else { "not there" };
            writeln!(out, "{mark}{} ({why}, {state})", path.display())?;
        }
        found |= there;
    }
    if !found {
        writeln!(out, "driver      none found: the loader's own cache is asked last")?;
    }
    if let Some(name) = command.first() {
        match program::find(name) {
            None => writeln!(out, "program     {}: not found", name.to_string_lossy())?,
            Some(path) => {
                let kind = program::kind(&std::fs::read(&path)?);
                writeln!(out, "program     {} ({kind:?})", path.display())?;
            }
        }
    }
    let mut by_category: BTreeMap<String, (Category, Vec<&str>)> = BTreeMap::new();
    for row in &DRIVER {
        let entry = by_category.entry(format!("{:?}", row.category));
        entry.or_insert((row.category, Vec::new())).1.push(row.symbol);
    }
    writeln!(
        out,
        "calls       {} in all, by dlsym, cuGetProcAddress and direct linking",
        DRIVER.len()
    )?;
    for (name, (category, symbols)) in &by_category {
        let (handled, rest): (Vec<&str>, Vec<&str>) =
            symbols.iter().copied().partition(|symbol| is_handled(symbol));
        if !handled.is_empty() {
            writeln!(out, "\n{name} ({}): {}", handled.len(), treatment(*category))?;
            writeln!(out, "  {}", handled.join(" "))?;
        }
        if !rest.is_empty() {
            writeln!(out, "\n{name}, forwarded as it is ({})", rest.len())?;
            if *category != Category::Other {
                writeln!(out, "  {}", rest.join(" "))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
