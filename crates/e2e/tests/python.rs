//! Programs in Python that we did not write, unmodified, on emulated GPUs: cuda-bindings with NVRTC,
//! numba-cuda, nvidia-ml-py, and the usual tools that show GPUs, nvitop and gpustat.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_e2e::build::{cargo, must, target};
use muxflow_e2e::python::{python, script};
use muxflow_emulated_gpu::launcher::{Plan, Running, start};
use muxflow_emulated_gpu::node::parse_gpus;
use serde_json::Value;

/// A node with these GPUs, in a directory that goes with it.
fn node(gpus: &str) -> (Running, tempfile::TempDir) {
    let mut build = cargo();
    build.args(["build", "--quiet", "-p", "muxflow-emulated-gpu", "-p", "muxflow-emulated-cuda"]);
    build.args(["-p", "muxflow-emulated-nvml", "-p", "muxflow-examples"]);
    must(build.current_dir(env!("CARGO_MANIFEST_DIR")));
    let home = tempfile::Builder::new().prefix("mxp").tempdir().unwrap();
    let plan = Plan {
        gpus: parse_gpus(gpus).unwrap(),
        time_factor: 1.0,
        seed: 1,
        directory: Some(home.path().to_owned()),
        built: target().join("debug").canonicalize().unwrap(),
    };
    (start(&plan).unwrap(), home)
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn passes(name: &str, arguments: &[&str]) {
    let Some(python) = python() else { return };
    let (node, _home) = node("t4");
    let mut command = Command::new(python);
    command.args(["-W", "ignore"]).arg(script(name)).args(arguments).envs(node.environment());
    assert_eq!(output(&mut command), "ok", "{name}");
}

#[test]
fn nvidia_ml_py_reads_the_gpu() {
    passes("nvml_idle.py", &[]);
}

#[test]
fn cuda_bindings_and_nvrtc_compute() {
    passes("bindings_client.py", &["compute"]);
}

#[test]
fn numba_cuda_compiles_launches_and_copies() {
    passes("numba_client.py", &["timed"]);
}

/// A job that keeps the first GPU busy until it is dropped.
struct Busy(Child);

impl Busy {
    fn start(node: &Running) -> Busy {
        let mut command = Command::new(target().join("debug/muxflow-example-training"));
        command.args(["--network", "vgg16", "--iterations", "0"]).envs(node.environment());
        Busy(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// What gpustat says, as JSON, once the first GPU has come to be busy.
fn gpustat(python: &Path, node: &Running) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut command = Command::new(python.with_file_name("gpustat"));
        let said = output(command.arg("--json").envs(node.environment()));
        let said: Value = serde_json::from_str(&said).unwrap();
        if said["gpus"][0]["utilization.gpu"].as_u64().unwrap() > 50 {
            return said;
        }
        assert!(Instant::now() < deadline, "the GPU does not get busy: {said:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn gpustat_and_nvitop_show_names_memory_utilisation_and_processes() {
    let Some(python) = python() else { return };
    let (node, _home) = node("t4,h100");
    let job = Busy::start(&node);
    let pid = job.0.id();

    let said = gpustat(python, &node);
    let [t4, h100] = said["gpus"].as_array().unwrap().as_slice() else { panic!("{said:#}") };
    assert_eq!(t4["name"], "Tesla T4");
    assert_eq!(h100["name"], "NVIDIA H100 80GB HBM3");
    let used_mib = t4["memory.used"].as_u64().unwrap();
    // Weights of VGG16 alone are 528 MiB.
    assert!((600..4_000).contains(&used_mib), "{used_mib} MiB");
    assert!(t4["memory.total"].as_u64().unwrap() > 15_000);
    assert!(t4["power.draw"].as_u64().unwrap() > 20 && t4["temperature.gpu"].as_u64() > Some(30));
    assert_eq!(t4["processes"][0]["pid"], pid);
    assert_eq!(t4["processes"][0]["command"], "muxflow-example-training");
    assert_eq!(t4["processes"][0]["gpu_memory_usage"], used_mib);
    assert_eq!(h100["utilization.gpu"], 0);
    assert_eq!(h100["processes"].as_array().unwrap().len(), 0);

    let mut command = Command::new(python.with_file_name("nvitop"));
    // Rows are cut to the width of the terminal.
    command.args(["--once", "--no-unicode"]).env("COLUMNS", "120").env("TERM", "dumb");
    let said = output(command.envs(node.environment()));
    let row = |words: &[&str]| {
        let fits = |line: &&str| words.iter().all(|word| line.contains(word));
        said.lines().find(fits).unwrap_or_else(|| panic!("no row with {words:?} in:\n{said}"))
    };
    row(&["0", "Tesla T4", "00000000:3B:00.0"]);
    row(&["1", "H100 80GB HBM3"]);
    let load = row(&["MiB / 15", "%"]);
    let percent = load.rsplit('|').find_map(|cell| cell.trim().split_once('%'));
    let percent: u32 = percent.unwrap().0.trim().parse().unwrap();
    assert!(percent > 50, "{load}");
    // Processes: GPU, process, kind, memory, SM utilisation.
    let process = row(&[&pid.to_string(), " C ", "MiB"]);
    assert!(process.trim_start_matches(['|', ' ']).starts_with('0'), "{process}");
}
