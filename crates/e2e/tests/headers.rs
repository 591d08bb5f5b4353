//! Our tables and layouts against NVIDIA's own headers, for CUDA 12 and 13: C that is compiled, and
//! does not compile when one is wrong. And NVIDIA's real runtime over the stub driver, with and without
//! the interposer in front, up to its own refusal (103) of a driver that is not NVIDIA's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use muxflow_abi::cuda::*;
use muxflow_abi::driver::DRIVER;
use muxflow_abi::nvml::*;
use muxflow_e2e::{Job, Outcome, build, stub_driver};

/// Where each version's files are, or a loud reason why not.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
fn headers() -> Option<[(u32, PathBuf, PathBuf, PathBuf); 2]> {
    build::must(
        build::cargo()
            .args(["run", "--quiet", "-p", "xtask", "--", "codegen", "--check"])
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")),
    );
    let root = build::target().join("headers");
    let (twelve, thirteen) = (root.join("12/nvidia"), root.join("13/nvidia/cu13"));
    if !twelve.exists() || !thirteen.exists() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "no headers, and this is CI");
        eprintln!("SKIPPED: NVIDIA's headers are not there; `cargo xtask codegen` fetches them");
        return None;
    }
    Some([
        (
            12,
            twelve.join("cuda_runtime/include"),
            twelve.join("nvml_dev/include"),
            twelve.join("cuda_runtime/lib"),
        ),
        (13, thirteen.join("include"), thirteen.join("include"), thirteen.join("lib")),
    ])
}

/// `sizeof` and `offsetof` assertions for a struct whose fields bear NVIDIA's names.
macro_rules! layout {
    ($text:ident, $rust:ty as $c:literal { $($field:ident),* $(,)? }) => {
        let size = size_of::<$rust>();
        writeln!($text, "_Static_assert(sizeof({}) == {size}, \"{}\");", $c, $c).expect("a string");
        $(
            let offset = offset_of!($rust, $field);
            let field = stringify!($field).trim_end_matches('_');
            writeln!($text, "_Static_assert(offsetof({}, {field}) == {offset}, \"{}.{field}\");", $c, $c)
                .expect("a string");
        )*
    };
}

fn layouts(version: u32) -> String {
    let mut t = String::new();
    layout!(t, CUDA_MEMCPY2D as "CUDA_MEMCPY2D" { srcXInBytes, srcMemoryType, srcHost, srcDevice, srcPitch, dstXInBytes, dstDevice, WidthInBytes, Height });
    layout!(t, CUDA_MEMCPY3D as "CUDA_MEMCPY3D" { srcLOD, srcMemoryType, srcPitch, dstLOD, dstDevice, dstHeight, Depth });
    layout!(t, CUmemAllocationProp as "CUmemAllocationProp" { type_, requestedHandleTypes, location, win32HandleMetaData, allocFlags });
    layout!(t, CUmemPoolProps as "CUmemPoolProps" { allocType, location, maxSize, usage });
    layout!(t, CUmemLocation as "CUmemLocation" { type_, id });
    layout!(t, CUmemAccessDesc as "CUmemAccessDesc" { location, flags });
    layout!(t, CUDA_ARRAY_DESCRIPTOR as "CUDA_ARRAY_DESCRIPTOR" { Width, Height, Format, NumChannels });
    layout!(t, CUDA_ARRAY3D_DESCRIPTOR as "CUDA_ARRAY3D_DESCRIPTOR" { Width, Height, Depth, Format, NumChannels, Flags });
    layout!(t, CUDA_EXTERNAL_MEMORY_HANDLE_DESC as "CUDA_EXTERNAL_MEMORY_HANDLE_DESC" { type_, handle, size, flags });
    layout!(t, CUDA_EXTERNAL_MEMORY_BUFFER_DESC as "CUDA_EXTERNAL_MEMORY_BUFFER_DESC" { offset, size, flags });
    layout!(t, CUlaunchConfig as "CUlaunchConfig" { gridDimX, blockDimX, sharedMemBytes, hStream, attrs, numAttrs });
    layout!(t, CUlaunchAttribute as "CUlaunchAttribute" { id, value });
    layout!(t, CUDA_LAUNCH_PARAMS as "CUDA_LAUNCH_PARAMS" { function, gridDimX, sharedMemBytes, hStream, kernelParams });
    layout!(t, CUDA_KERNEL_NODE_PARAMS as "CUDA_KERNEL_NODE_PARAMS_v2" { func, gridDimX, kernelParams, extra, kern, ctx });
    layout!(t, CUDA_MEM_ALLOC_NODE_PARAMS as "CUDA_MEM_ALLOC_NODE_PARAMS_v2" { poolProps, accessDescs, accessDescCount, bytesize, dptr });
    layout!(t, CUgraphNodeParams as "CUgraphNodeParams" { type_, reserved0, reserved2 });
    writeln!(t, "_Static_assert(offsetof(CUgraphNodeParams, alloc) == 16, \"alloc\");")
        .expect("a string");
    layout!(t, CUDA_GRAPH_INSTANTIATE_PARAMS as "CUDA_GRAPH_INSTANTIATE_PARAMS" { flags, hUploadStream, hErrNode_out, result_out });
    layout!(t, CUmulticastObjectProp as "CUmulticastObjectProp" { numDevices, size, handleTypes, flags });
    layout!(t, CUipcMemHandle as "CUipcMemHandle" { reserved });
    layout!(t, CUuuid as "CUuuid" { bytes });
    layout!(t, nvmlMemory_t as "nvmlMemory_t" { total, free, used });
    layout!(t, nvmlMemory_v2_t as "nvmlMemory_v2_t" { version, total, reserved, free, used });
    layout!(t, nvmlUtilization_t as "nvmlUtilization_t" { gpu, memory });
    layout!(t, nvmlProcessInfo_v1_t as "nvmlProcessInfo_v1_t" { pid, usedGpuMemory });
    layout!(t, nvmlProcessInfo_v2_t as "nvmlProcessInfo_v2_t" { pid, usedGpuMemory, gpuInstanceId, computeInstanceId });
    layout!(t, nvmlProcessUtilizationSample_t as "nvmlProcessUtilizationSample_t" { pid, timeStamp, smUtil, decUtil });
    layout!(t, nvmlEventData_t as "nvmlEventData_t" { device, eventType, eventData, gpuInstanceId });
    layout!(t, nvmlPciInfo_t as "nvmlPciInfo_t" { busIdLegacy, domain, pciDeviceId, busId });
    layout!(t, nvmlGpmMetric_t as "nvmlGpmMetric_t" { metricId, nvmlReturn, value });
    layout!(t, nvmlBAR1Memory_t as "nvmlBAR1Memory_t" { bar1Total, bar1Used });
    let constants = [
        ("CUDA_ERROR_OUT_OF_MEMORY", u64::from(result::CUDA_ERROR_OUT_OF_MEMORY)),
        ("CUDA_ERROR_SYSTEM_NOT_READY", u64::from(result::CUDA_ERROR_SYSTEM_NOT_READY)),
        ("CUDA_ERROR_CONTEXT_IS_DESTROYED", u64::from(result::CUDA_ERROR_CONTEXT_IS_DESTROYED)),
        ("CUDA_ERROR_NOT_READY", u64::from(result::CUDA_ERROR_NOT_READY)),
        ("CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT", 5),
        ("CU_MEM_LOCATION_TYPE_DEVICE", 1),
        ("CU_GRAPH_NODE_TYPE_MEM_ALLOC", 10),
        ("CU_STREAM_CAPTURE_MODE_RELAXED", 2),
        ("CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT", 2),
        ("CU_LIMIT_MALLOC_HEAP_SIZE", 2),
        (
            "CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM",
            CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
        ),
    ];
    for (name, value) in constants {
        writeln!(t, "_Static_assert({name} == {value}, \"{name}\");").expect("a string");
    }
    writeln!(t, "_Static_assert(CUDA_VERSION / 1000 == {version}, \"version\");")
        .expect("a string");
    t
}

/// Bytes that an argument of a handler takes, by its Rust type.
fn argument_bytes(ty: &str) -> usize {
    match ty.trim() {
        "c_uint" | "c_int" | "u32" | "i32" | "CUdevice" => 4,
        "CUipcMemHandle" => 64,
        _ => 8,
    }
}

/// Every handler of the interposer: its symbols and the sizes of its arguments, read from source.
fn handlers() -> BTreeMap<String, Vec<usize>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xcuda/src");
    let mut found = BTreeMap::new();
    for file in std::fs::read_dir(sources).expect("the interposer's sources") {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("text");
        let Some((_, hooks)) = text.split_once("\nhooks! {") else { continue };
        for handler in hooks.split("\n    fn ").skip(1) {
            let Some((names, rest)) = handler.split_once('(') else { continue };
            let Some((arguments, _)) = rest.split_once(") |real|") else { continue };
            let sizes: Vec<usize> = arguments
                .split(',')
                .filter_map(|argument| argument.split_once(':'))
                .map(|(_, ty)| argument_bytes(ty))
                .collect();
            for name in names.split('|') {
                found.insert(name.trim().to_owned(), sizes.clone());
            }
        }
    }
    found
}

/// Assertions that a handler's arguments are as many and as large as those of NVIDIA's typedef.
fn signatures(include: &Path, version: u32) -> String {
    let typedefs = std::fs::read_to_string(include.join("cudaTypedefs.h")).expect("cudaTypedefs.h");
    let mut text = String::new();
    let handlers = handlers();
    assert!(handlers.len() > 90, "only {} handlers were found in the sources", handlers.len());
    for (symbol, sizes) in handlers {
        let row = DRIVER.iter().find(|row| row.symbol == symbol).expect("a driver symbol");
        if version == 12 && !row.in_12 {
            continue;
        }
        let suffix = symbol.rfind("_pt").map_or("", |at| &symbol[at..]);
        let name = format!("*PFN_{}_v{}{suffix})(", row.base, row.since);
        let (_, after) = typedefs.split_once(&name).unwrap_or_else(|| panic!("{name} in typedefs"));
        let list = after.split(");").next().unwrap_or_default();
        let types: Vec<String> = list
            .split(',')
            .map(|parameter| parameter.trim().to_owned())
            .filter(|parameter| parameter != "void" && !parameter.is_empty())
            .map(|parameter| {
                let name = parameter.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                parameter[..=name.unwrap_or(parameter.len() - 1)].trim().to_owned()
            })
            .collect();
        assert_eq!(types.len(), sizes.len(), "{symbol}: ({list}) against {sizes:?}");
        for (ty, bytes) in types.iter().zip(sizes) {
            writeln!(text, "_Static_assert(sizeof({ty}) == {bytes}, \"{symbol}: {ty}\");")
                .expect("a string");
        }
    }
    text
}

#[test]
fn symbols_signatures_and_layouts_are_nvidias() {
    let Some(versions) = headers() else { return };
    for (version, cuda, nvml, _) in versions {
        let mut text = String::from(
            "#define __CUDA_API_VERSION_INTERNAL\n#include <stddef.h>\n#include <cuda.h>\n#include <nvml.h>\n",
        );
        text += &layouts(version);
        text += &signatures(&cuda, version);
        let source = build::scratch().join(format!("layout-{version}.c"));
        std::fs::write(&source, text).expect("written");
        build::must(
            Command::new("cc")
                .args(["-std=gnu11", "-fsyntax-only", "-w", "-I"])
                .arg(&cuda)
                .arg("-I")
                .arg(&nvml)
                .arg(&source),
        );
    }
}

const RUNTIME: &str = r#"
#include <stdio.h>
#include <stdlib.h>
typedef int cudaError_t;
cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaRuntimeGetVersion(int *);
int main(void) {
    int count = -1, version = 0;
    void *memory;
    int error = cudaRuntimeGetVersion(&version);
    printf("version %d %d\n", error, version);
    error = cudaGetDeviceCount(&count);
    printf("count %d %d\n", error, count);
    printf("malloc %d\n", cudaMalloc(&memory, 1 << 20));
    fflush(stdout);
    _Exit(0);
}
"#;

#[test]
fn nvidias_static_runtime_behaves_the_same_with_the_interposer_in_front() {
    let Some(versions) = headers() else { return };
    for (version, _, _, libraries) in versions {
        let source = build::scratch().join("runtime.c");
        std::fs::write(&source, RUNTIME).expect("written");
        let program = build::scratch().join(format!("runtime-{version}"));
        build::must(
            Command::new("cc")
                .args(["-w", "-o"])
                .arg(&program)
                .arg(&source)
                .arg(libraries.join("libcudart_static.a"))
                .args(["-lpthread", "-ldl", "-lrt"]),
        );
        let job = Job::new(1 << 30);
        let run = |command: &mut Command, log: &Path| -> (Outcome, String) {
            let outcome = command.env("STUB_LOOKUPS", log).output().expect("it runs").into();
            (outcome, std::fs::read_to_string(log).unwrap_or_default())
        };
        let mut direct = Command::new(&program);
        direct.env("LD_LIBRARY_PATH", stub_driver());
        let (plain, asked) = run(&mut direct, &job.path("direct"));
        let (under, asked_under) =
            run(&mut job.command(&program, stub_driver()), &job.path("under"));
        assert!(asked.lines().count() > 300, "{version}: {} {}", plain.stdout, plain.stderr);
        assert_eq!(asked, asked_under, "{version}: the same look-ups in the same order");
        // The last thing it asks for is the check, which nobody here answers; the refusal is its own.
        assert!(asked.trim_end().lines().last().is_some_and(|line| line.starts_with("table ")));
        assert!(plain.stdout.contains("count 103 -1\nmalloc 103\n"), "{version}: {}", plain.stdout);
        assert_eq!(plain.stdout, under.stdout, "{version}: {}", under.stderr);
        assert_eq!(plain.status, under.status);
        println!("{version}: {} look-ups, then {:?}", asked.lines().count(), plain.stdout);
    }
}
