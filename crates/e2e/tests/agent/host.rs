//! Eviction for the host's sake, on and off, on a machine whose memory a job uses up.
//!
//! The machine is a control group with a limit above those of service and job: the kernel counts what
//! they use and kills in it as it does on a machine that has no more. What is left of it is told where
//! an agent in a container reads of its host.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use muxflow_agent::gpu::Event;
use muxflow_e2e::python::skip;

use crate::behaviour::write_host;
use crate::world::{World, inside, now_us};

const MACHINE_BYTES: u64 = 160 << 20;

#[test]
fn jobs_leave_a_host_that_runs_out_of_memory_and_without_the_defence_the_service_is_harmed() {
    inside("host::inner_memory");
}

/// Tells how much of the machine is left, as long as it is there.
struct Meter {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Meter {
    fn start(group: PathBuf, host: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let inside = Arc::clone(&stop);
        let body = move || {
            while !inside.load(Ordering::Acquire) {
                let left = MACHINE_BYTES.saturating_sub(used_bytes(&group));
                write_host(&host, left * 1_000_000 / MACHINE_BYTES, 0, 0.0);
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        Meter { stop, thread: Some(std::thread::spawn(body)) }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// What the kernel counts of a group, in version 2 or 1.
fn used_bytes(group: &Path) -> u64 {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse().ok();
    read("memory.current").or_else(|| read("memory.usage_in_bytes")).unwrap_or(0)
}

fn limit(group: &Path) -> std::io::Result<()> {
    let files = ["memory.max", "memory.limit_in_bytes"].map(|name| group.join(name));
    let file = files.iter().find(|file| file.exists());
    fs::write(file.unwrap_or(&files[0]), MACHINE_BYTES.to_string())
}

/// A job that uses the machine's memory up, more while each of its kernels runs: how it ended, how
/// often the service had to restart and how many of its requests failed. A killed job takes all
/// clients of MPS with it. None where there are no control groups for memory.
fn used_up(host_eviction: bool) -> Option<(Event, u64, usize)> {
    let host = tempfile::tempdir().unwrap();
    write_host(host.path(), 900_000, 0, 0.0);
    let world = World::start(&format!(
        "[defences]\nhost_eviction = {host_eviction}\n[host]\nproc = '{}'\nmemory_used_pct = 60\n",
        host.path().display()
    ));
    let Some(group) = world.memory_group().filter(|group| limit(group).is_ok()) else {
        world.end();
        return None;
    };
    let meter = Meter::start(group, host.path().to_owned());
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    world.serve(20);
    let from = now_us();
    // Long kernels: the kernel looks for memory for a while before it kills.
    let mut job = world.argv("job", 600_000, "8", 0);
    job.push("ram=12".into());
    world.start_job(job);
    let ended = world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
    // A lost context shows with the next requests.
    world.serve(50);
    let (restarts, errors) = (world.restarts(), world.served_since(from).errors);
    drop(meter);
    world.end();
    Some((ended, restarts, errors))
}

#[test]
#[ignore = "run inside an emulated node by jobs_leave_a_host_that_runs_out_of_memory_and_without_the_defence_the_service_is_harmed"]
fn inner_memory() {
    let Some((left, restarts, errors)) = used_up(true) else {
        let remedy = "run as root on a machine with control groups for memory";
        return skip("a host that runs out of memory", remedy);
    };
    let Event::JobEnded { reason, .. } = &left else { unreachable!() };
    let reason = reason.as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(reason.contains("host memory"), "it left for another reason: {left:?}");
    assert_eq!((restarts, errors), (0, 0), "the service noticed: {left:?}");

    let (killed, harmed, lost) = used_up(false).unwrap();
    let Event::JobEnded { exit, .. } = &killed else { unreachable!() };
    assert_eq!(exit.signal, Some(libc::SIGKILL), "the kernel ends it: {killed:?}");
    println!(
        "MEASURED | eviction for the host | restarts of the service, and requests that failed, beside a job that uses the machine's memory up | {restarts} and {errors} | {harmed} and {lost} |"
    );
    assert!(harmed > 0, "without it the service must be harmed: {killed:?}");
}
