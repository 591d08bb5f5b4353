//! `muxflow doctor` on nodes whose ills only a running agent or a blocked driver makes, and `muxflow
//! node`, which tells the agent what only a person knows.

use std::process::{Command, Output};
use std::sync::atomic::Ordering;
use std::time::Duration;

use muxflow_agent::gpu::{Event, Order};
use muxflow_types::{HealthState, JobId};

use crate::world::{World, inside, inside_with, variable};

fn muxflow(world: &World, words: &[&str]) -> (Output, String) {
    let mut command = Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"));
    let output = command.args(words).arg("--config").arg(world.base().join("agent.toml")).output();
    let output = output.unwrap();
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    (output, text)
}

fn doctor(world: &World, finds: &[&str]) {
    let (output, said) = muxflow(world, &["doctor"]);
    assert!(!output.status.success(), "{said}");
    let bad = said.split("BAD").skip(1).any(|finding| finds.iter().all(|w| finding.contains(w)));
    assert!(bad, "{finds:?} is not in {said}");
}

#[test]
fn the_doctor_knows_the_ills_that_the_agent_knows() {
    inside("doctor::inner_ills");
}

#[test]
#[ignore = "run inside an emulated node by the_doctor_knows_the_ills_that_the_agent_knows"]
fn inner_ills() {
    // The agent would find a server that hangs by itself, and mend it.
    let world = World::start("[mps]\nprobe_every_s = 3600\n");
    world.start_service();
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    let (output, said) = muxflow(&world, &["doctor"]);
    assert!(output.status.success(), "{said}");
    let (refused, why) = muxflow(&world, &["node", "was-reset", "0"]);
    assert!(!refused.status.success() && why.contains("is not disabled"), "{why}");

    // Disabled, and the driver shows no reset: a person says so.
    world.fault(&["xid", "74"]);
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    let remedy = format!("`muxflow node was-reset {}`", world.gpu);
    doctor(&world, &["disabled it", "waits for a reset of the GPU", &remedy]);
    let (told, said) = muxflow(&world, &["node", "was-reset", "0"]);
    assert!(told.status.success() && said.contains("has taken note"), "{said}");
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    let (refused, why) = muxflow(&world, &["node", "was-reset", "GPU-nowhere"]);
    assert!(!refused.status.success() && why.contains(&world.gpu), "{why}");

    // The daemon says that all is well, and whoever comes hangs.
    let starts = world.agent().status(&world.gpu).unwrap().mps_starts;
    world.fault(&["mps-hang"]);
    doctor(&world, &["hangs while attaching", "echo quit", "mps.probe_every_s"]);
    let status = world.agent().status(&world.gpu).unwrap();
    assert_eq!(status.mps_starts, starts, "it was the doctor who found it");

    // A driver whose calls do not return.
    world.fault(&["nvml-block"]);
    doctor(&world, &["GPU", "does not answer", "reset the GPU or reboot"]);
    world.fault(&["nvml-unblock"]);
    world.end();
}

#[test]
fn a_person_who_has_looked_lets_evictions_go_on() {
    inside_with("t4x3", "doctor::inner_believed");
}

#[test]
#[ignore = "run inside an emulated node by a_person_who_has_looked_lets_evictions_go_on"]
fn inner_believed() {
    // One eviction is believed, and no more.
    let world = World::start("[breaker]\nalways = 1\nshare_pct = 1\ncalm_for_s = 3600\n");
    let gpus = world.agent().gpus().to_vec();
    let status = |gpu: &String| world.agent().status(gpu).unwrap();
    world.until("they take jobs", || {
        gpus.iter().all(|gpu| status(gpu).placeable && status(gpu).share.is_some())
    });
    for (index, gpu) in gpus.iter().enumerate() {
        let mut spec = World::spec(world.argv("job", 500, "8", 1_000));
        spec.job = JobId::new(&format!("job-{index}")).unwrap();
        world.agent().order(gpu, Order::StartOffline(Box::new(spec))).unwrap();
    }
    world.until("all jobs launch", || {
        gpus.iter().all(|gpu| status(gpu).offline.is_some_and(|(_, c)| c.launches > 20))
    });
    for gpu in &gpus {
        let shared = world.agent().shared(gpu).unwrap();
        shared.slo_us.store(10_000, Ordering::Relaxed);
        shared.latency_us.store(100_000, Ordering::Relaxed);
    }
    let held = || gpus.iter().filter(|gpu| status(gpu).held > 0).count();
    world.until("the others are held at their gates", || held() == 2);
    world.until("one has left", || gpus.iter().any(|gpu| status(gpu).offline.is_none()));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(gpus.iter().filter(|gpu| status(gpu).offline.is_some()).count(), 2);
    let alert = world.event(
        "a person is told how",
        |event| matches!(event, Event::Alert(text) if text.contains("too many evictions")),
    );
    let Event::Alert(text) = alert else { unreachable!() };
    assert!(text.contains("`muxflow node sensors-are-right`"), "{text}");
    let (told, said) = muxflow(&world, &["node", "sensors-are-right"]);
    assert!(told.status.success() && said.contains("evictions go on"), "{said}");
    world.until("all have left", || gpus.iter().all(|gpu| status(gpu).offline.is_none()));
    // Nobody is held now, so there is nobody to be told, and nothing is left for later.
    let (nobody, said) = muxflow(&world, &["node", "sensors-are-right"]);
    assert!(!nobody.status.success() && said.contains("none holds evictions back"), "{said}");
    assert!(!world.base().join("state/sensors-are-right").exists());
    world.end();
}
