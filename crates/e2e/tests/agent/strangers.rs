//! Programs of a job that the interposer does not get into: linked statically, or with a loader that
//! goes on without it. They use the GPU all the same, and are stopped.

use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, Order, StopReason};
use muxflow_agent::sys;
use muxflow_e2e::build::{client, products, scratch, xcuda};
use muxflow_policy::node::fault::Fault;

use crate::world::{Inside, LONG, World, variable};

/// A program that no loader starts.
fn static_program() -> String {
    client("without_libcuda", &["-static"]).display().to_string()
}

/// Whether a 64-bit program names one (`PT_INTERP`).
fn asks_for_a_loader(elf: &[u8]) -> bool {
    let half = |at: usize| usize::from(u16::from_le_bytes([elf[at], elf[at + 1]]));
    let first = usize::try_from(u64::from_le_bytes(elf[32..40].try_into().unwrap())).unwrap();
    let (size, count) = (half(54), half(56));
    (0..count).any(|header| elf[first + header * size..][..4] == [3, 0, 0, 0])
}

/// How such a job ends, and what is told of it meanwhile.
fn stopped(world: &World) {
    let (mut alerted, mut answered) = (None, None);
    let ended = world.event("the job is stopped", |event| {
        match event {
            Event::Alert(text) if text.contains("without the interposer") => {
                alerted = Some(text.clone());
            }
            Event::Fault { seen, .. } if seen.fault == Fault::UngatedProcess => answered = seen.pid,
            _ => {}
        }
        matches!(event, Event::JobEnded { .. })
    });
    let Event::JobEnded { reason, requeue, blamed, .. } = ended else { unreachable!() };
    let reason = reason.unwrap();
    assert_eq!(reason, StopReason::Fault(Fault::UngatedProcess));
    assert!(requeue && blamed, "it waits before it runs again");
    let (alert, pid) = (alerted.unwrap(), answered.unwrap());
    assert!(alert.contains(&format!("process {pid} of job job ")), "{alert}");
    assert!(alert.contains("static program"), "{alert}");
    let page = world.page();
    let counted = |line: &str| {
        line.starts_with("muxflow_faults_total{") && line.contains("process.ungated")
            || line.starts_with("muxflow_stops_total{") && line.contains("reason=\"fault\"")
    };
    assert!(page.lines().filter(|line| counted(line)).count() >= 2, "{page}");
    world.serve(10);
    assert_eq!(world.restarts(), 0, "its stop harms nobody");
}

#[test]
fn a_static_program_that_uses_the_gpu_is_stopped() {
    let program = static_program();
    assert!(!asks_for_a_loader(&fs::read(&program).unwrap()), "{program} is not static");
    Inside::new("strangers::inner_static").set("MUXFLOW_TEST_STATIC", &program).run();
}

#[test]
#[ignore = "run inside an emulated node by a_static_program_that_uses_the_gpu_is_stopped"]
fn inner_static() {
    let world = World::start("");
    // Killed in the middle of a kernel, such a job would take the service along.
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    world.start_job(vec![variable("MUXFLOW_TEST_STATIC").display().to_string()]);
    let shared = world.agent().shared(&world.gpu).unwrap();
    world.until("it works on the GPU", || world.job_output().contains("ready"));
    let seen = shared.job().map(|job| job.block.registered());
    assert_eq!(seen.unwrap_or_default(), [] as [u32; 0], "the interposer is not in it");
    stopped(&world);
    world.end();
}

#[test]
fn a_program_whose_loader_goes_on_without_the_interposer_is_stopped() {
    // As a library for another system or another C library: the loader says so, and ignores it.
    let mut foreign = fs::read(xcuda()).unwrap();
    // The byte that names the system; the agent looks at class and processor alone.
    assert_eq!((&foreign[..4], foreign[7]), (&b"\x7fELF"[..], 0));
    foreign[7] = 0xff;
    let path = scratch().join("foreign-libxcuda.so");
    fs::write(&path, foreign).unwrap();
    Inside::new("strangers::inner_ignored").set("MUXFLOW_TEST_XCUDA", &path).run();
}

#[test]
#[ignore = "run inside an emulated node by a_program_whose_loader_goes_on_without_the_interposer_is_stopped"]
fn inner_ignored() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    world.start_job(world.argv("job", 300_000, "8", 0));
    stopped(&world);
    let errors = world.base().join("state/workloads/offline-job/stderr.log");
    let said = fs::read_to_string(errors).unwrap();
    assert!(said.contains("foreign-libxcuda.so") && said.contains("ignored"), "{said}");
    world.end();
}

#[test]
fn the_log_says_why_a_static_program_was_stopped() {
    products();
    let program = static_program();
    Inside::new("strangers::inner_log").set("MUXFLOW_TEST_STATIC", &program).run();
}

#[test]
#[ignore = "run inside an emulated node by the_log_says_why_a_static_program_was_stopped"]
fn inner_log() {
    let dir = tempfile::tempdir().unwrap();
    let job = format!(
        "[[offline]]\njob = 'static'\nargv = ['{}']\n",
        variable("MUXFLOW_TEST_STATIC").display()
    );
    let (file, ..) = World::settings(dir.path(), &job);
    let log = dir.path().join("agent.log");
    let mut agent = Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"))
        .args(["agent", "--config"])
        .arg(&file)
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let said = |all: &[&str]| {
        let text = fs::read_to_string(&log).unwrap_or_default();
        text.lines().any(|line| all.iter().all(|words| line.contains(words)))
    };
    let deadline = Instant::now() + LONG;
    let wanted: [&[&str]; 4] = [
        &["job static uses the GPU without the interposer", "static program"],
        &["job is stopped", "fault process.ungated"],
        &["job is to blame", "static"],
        &["job left", "Failed"],
    ];
    while !wanted.iter().all(|words| said(words)) {
        let text = fs::read_to_string(&log).unwrap_or_default();
        if Instant::now() > deadline {
            drop(agent.kill());
            drop(agent.wait());
            panic!("never: it is stopped, and the log says why: {text}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    sys::kill(agent.id(), libc::SIGTERM).unwrap();
    assert!(agent.wait().unwrap().success());
    World::start_in(dir.path(), "").end();
}

#[test]
fn without_the_interposer_no_job_starts() {
    Inside::new("strangers::inner_lacking").set("MUXFLOW_TEST_XCUDA", "/no/libxcuda.so").run();
}

#[test]
#[ignore = "run inside an emulated node by without_the_interposer_no_job_starts"]
fn inner_lacking() {
    let world = World::start("");
    world.wait("the GPU takes jobs", |status| status.placeable && status.share.is_some());
    let spec = World::spec(world.argv("job", 500, "8", 0));
    world.agent().order(&world.gpu, Order::StartOffline(Box::new(spec))).unwrap();
    let event = world.event("it is refused or starts", |event| {
        matches!(event, Event::JobRefused { .. } | Event::JobStarted { .. })
    });
    let Event::JobRefused { unstartable, reason, .. } = event else { panic!("{event:?}") };
    assert!(!unstartable, "it waits until there is one");
    for part in ["/no/libxcuda.so", "cargo build --profile xcuda"] {
        assert!(reason.contains(part), "{reason}");
    }
    world.end();
}
