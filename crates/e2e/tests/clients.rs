//! Real clients that we did not write, unmodified, under quota and gate on an emulated GPU. Each:
//! within quota fine, over quota a clean out-of-memory error, SIGTERM in the middle of launches leaves
//! no context behind.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use muxflow_abi::control::{Limits, SlotState};
use muxflow_e2e::python::{pycuda, python, skip};
use muxflow_e2e::{Job, Outcome, build};

const QUOTA: u64 = 256 << 20;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The program that runs a command on emulated GPUs, and what it needs beside it.
fn node() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build::products().join("muxflow-emulated-node"))
}

/// A client on one emulated T4 under the interposer.
fn command(job: &Job, client: &[&str], arguments: &[&str]) -> Command {
    let mut command = Command::new(node());
    command
        .args(["--gpus", "t4", "--"])
        .args(client)
        .args(arguments)
        .env("LD_PRELOAD", build::xcuda())
        .env("MUXFLOW_CONTROL", job.block.directory())
        .env("MUXFLOW_NVML_CLAMP", "1");
    command
}

fn run(client: &[&str], arguments: &[&str]) -> Outcome {
    let job = Job::new(QUOTA);
    command(&job, client, arguments).output().expect("it runs").into()
}

/// SIGTERM in the middle of launches: the process itself says that its contexts are gone.
fn stops_cleanly(client: &[&str]) {
    let job = Job::new(QUOTA);
    // Interpreted kernels take milliseconds: with few in flight the drain stays within its limit.
    job.block.agent().set_limits(&Limits { in_flight: 32, ..Limits::OPEN });
    let mut child = command(&job, client, &["loop", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    reader.read_line(&mut line).expect("a line");
    assert_eq!(line.trim(), "looping", "{client:?}");
    std::thread::sleep(Duration::from_millis(300));
    let process = *job.block.processes().first().expect("it has registered");
    let pid = i32::try_from(process.owner.pid).expect("an id");
    // SAFETY: a process of this job, alive.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let until = Instant::now() + Duration::from_secs(20);
    while child.try_wait().expect("a status").is_none() {
        assert!(Instant::now() < until, "{client:?} did not stop");
        std::thread::sleep(Duration::from_millis(10));
    }
    let last = job.block.processes().into_iter().find(|c| c.owner == process.owner);
    let last = last.expect("its slot stands until it is reclaimed");
    assert_eq!(last.state, SlotState::Released, "{client:?}");
    assert!(last.launches > 0 && last.in_flight == 0, "{client:?}: {last:?}");
    job.block.reclaim(|_| {});
    assert_eq!(job.charged(), 0, "{client:?}");
}

fn whole(client: &[&str]) {
    let quota = QUOTA.to_string();
    let fits = run(client, &["fit", &quota]);
    assert_eq!(fits.stdout.trim(), "ok", "{client:?}: {}", fits.stderr);
    let over = run(client, &["over", &(4 * QUOTA).to_string()]);
    assert!(over.stdout.lines().count() > 0, "{client:?}: {}", over.stderr);
    assert!(over.stdout.lines().all(|line| line == "refused 2"), "{client:?}: {}", over.stdout);
    assert!(over.status.success(), "{client:?}: {}", over.stderr);
    stops_cleanly(client);
}

fn script(name: &str) -> String {
    muxflow_e2e::python::script(name).to_str().expect("a path in UTF-8").to_owned()
}

fn python_client(name: &str) {
    let Some(python) = python() else { return };
    whole(&[python.to_str().expect("a path"), &script(&format!("{name}_client.py"))]);
}

#[test]
fn cudarc() {
    // Cargo builds the examples of a package with its tests, but tells no test where they are.
    let mut build = build::cargo();
    build.args(["build", "--quiet", "--workspace", "--example", "cudarc_client"]);
    build::must(build.current_dir(workspace()));
    let client = build::target().join("debug/examples/cudarc_client");
    whole(&[client.to_str().expect("a path")]);
}

#[test]
fn cuda_bindings_with_nvrtc() {
    python_client("bindings");
}

#[test]
fn numba_cuda() {
    python_client("numba");
}

/// Linked against `libcuda.so.1` by name: the exported symbols, and the oldest interfaces.
#[test]
fn pycuda_by_direct_linking() {
    let Some(python) = python() else { return };
    match pycuda(python) {
        Ok(packages) => {
            let path = format!("PYTHONPATH={}", packages.display());
            let python = python.to_str().expect("a path");
            whole(&["env", &path, python, &script("pycuda_client.py")]);
        }
        Err(why) => skip("pycuda (needs a C++ compiler and the headers of Python)", &why),
    }
}

#[test]
fn nvidia_ml_py() {
    let Some(python) = python() else { return };
    let client = [python.to_str().expect("a path"), &script("nvml_client.py")];
    let told = run(&client, &["fit", &QUOTA.to_string()]);
    assert_eq!(told.stdout.trim(), "ok", "{}", told.stderr);
}

/// Handlers of Python run in its own time, long after the signal: the program leaves as it says.
#[test]
fn a_handler_of_python_runs_and_the_program_ends_as_it_likes() {
    const SCRIPT: &str = "
import ctypes, signal, sys
cuda = ctypes.CDLL('libcuda.so.1')
context = ctypes.c_void_p()
assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print('looping', flush=True)
while not told:
    cuda.cuLaunchKernel(64, 1, 1, 1, 1, 1, 1, 0, None, None, None)
assert not cuda.cuLaunchKernel(64, 1, 1, 1, 1, 1, 1, 0, None, None, None)
sys.exit(9)
";
    let Some(python) = python() else { return };
    let job = Job::new(QUOTA);
    let mut command = job.command(python, muxflow_e2e::stub_driver());
    command.env("STUB_KERNEL_US", "300").args(["-c", SCRIPT]).stdout(Stdio::piped());
    let mut child = muxflow_e2e::default_signals(&mut command).spawn().expect("it starts");
    let mut line = String::new();
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    reader.read_line(&mut line).expect("a line");
    assert_eq!(line.trim(), "looping");
    let pid = i32::try_from(child.id()).expect("an id");
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    assert_eq!(child.wait().expect("it ends").code(), Some(9));
    let log = job.stub_log();
    let last = log.lines().rfind(|line| line.starts_with("destroy")).expect("it released");
    assert!(last.contains("in_flight_us 0 "), "{log}");
}
