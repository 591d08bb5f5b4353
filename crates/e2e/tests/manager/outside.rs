//! A process on a GPU that is not under MPS: found, told how to come in, and never paired with; and a
//! GPU that is not there.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use muxflow_api::jobs::{JobDetail, JobState};

use crate::world::{World, inside, variable, worker};

#[test]
fn nothing_is_paired_with_a_process_outside_mps() {
    inside("outside::inner_outside", "t4");
}

/// Ends with the test.
struct Stranger(Child);

impl Stranger {
    fn start(world: &World, pipe_dir: Option<&str>) -> Self {
        let words = worker(world.base(), "stranger", 2_000, 8, 30_000);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(dir) = pipe_dir {
            command.env("CUDA_MPS_PIPE_DIRECTORY", dir);
        }
        Stranger(command.spawn().unwrap())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
#[ignore = "run inside an emulated node by nothing_is_paired_with_a_process_outside_mps"]
fn inner_outside() {
    let world = World::start("[profiler]\nenabled = false\n");
    world.wait_healthy(1);
    let stranger = Stranger::start(&world, None);
    let pid = stranger.0.id();
    world.until("it is found", || world.gpus()[0].outside_mps == [pid]);
    let remedy = world.gpus()[0].outside_mps_remedy.clone().unwrap();
    assert!(remedy.contains(&pid.to_string()) && remedy.contains("restart it with"), "{remedy}");
    world.until("`up` says so too", || world.log().contains("CUDA_MPS_PIPE_DIRECTORY="));

    // A job waits, with the reason.
    let command = world.worker(1_000);
    let mut words = vec!["submit", "--"];
    words.extend(command.iter().map(String::as_str));
    let id = world.must(&words).trim().to_owned();
    world.wait(&id, "it waits for the GPU", |job| job.reason.contains("outside MPS"));
    std::thread::sleep(Duration::from_secs(2));
    let waiting = world.job(&id);
    assert_eq!((waiting.state, waiting.run), (JobState::Queued, 0), "{waiting:#?}");

    // Started again as it was told, the stranger is no stranger, and the job comes beside it.
    drop(stranger);
    let dir = remedy.split("CUDA_MPS_PIPE_DIRECTORY=").nth(1).unwrap();
    let dir = dir.split([',', ' ']).next().unwrap();
    let known = Stranger::start(&world, Some(dir));
    world.wait(&id, "it runs", |job| {
        job.state == JobState::Running && job.iterations_per_s.is_some()
    });
    assert_eq!(world.gpus()[0].outside_mps, Vec::<u32>::new());
    drop(known);

    // One that comes while the job runs: the job leaves, and is back when it has gone.
    let stranger = Stranger::start(&world, None);
    world.wait(&id, "it leaves", |job| job.state == JobState::Queued);
    let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
    assert_eq!(detail.runs.len(), 1, "{detail:#?}");
    assert!(detail.runs[0].outcome.contains("outside MPS"), "{detail:#?}");
    drop(stranger);
    world.wait(&id, "it is back", |job| job.state == JobState::Running && job.run == 2);
    world.must(&["cancel", &id]);
    world.wait(&id, "cancelled", |job| job.state.is_final());
    world.end();
}

#[test]
fn a_gpu_that_is_gone_does_not_keep_the_others_from_starting() {
    inside("outside::inner_gone", "t4x2");
}

#[test]
#[ignore = "run inside an emulated node by a_gpu_that_is_gone_does_not_keep_the_others_from_starting"]
fn inner_gone() {
    let fault = variable("MUXFLOW_TEST_BUILT").join("muxflow-emulated-fault");
    assert!(Command::new(fault).args(["--gpu", "0", "off-bus"]).status().unwrap().success());
    let dir = tempfile::tempdir().unwrap();
    let service = |name: &str, gpu: &str| {
        let argv = worker(dir.path(), name, 2_000, 8, 20_000);
        format!("[[agent.online]]\nservice = '{name}'\ngpu = '{gpu}'\nargv = {argv:?}\n")
    };
    let more = format!(
        "[profiler]\nenabled = false\nset_aside = '0'\n{}{}{}",
        service("lost", "0"),
        service("unknown", "GPU-00112233-4455-6677-8899-aabbccddeeff"),
        service("here", "1")
    );
    let world = World::start_in(dir, &more);
    world.until("the other service runs", || {
        let gpus = world.gpus();
        gpus.len() == 1 && gpus[0].online.as_ref().is_some_and(|online| online.service == "here")
    });
    assert_eq!(world.gpus()[0].index, 1, "as the driver counts");
    let log = std::fs::read_to_string(world.base().join("up.log")).unwrap();
    for words in [
        "GPU 0 cannot be used",
        "agent: service lost: goes without its GPU",
        "agent: service unknown: goes without its GPU",
        "profiler.set_aside: goes without its GPU",
    ] {
        assert!(log.contains(words), "{words} is missing: {log}");
    }
    world.end();
}
