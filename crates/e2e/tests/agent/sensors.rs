//! Where SM activity comes from on nodes that lack the better source, and sensors that lie.

use std::fs;

use muxflow_agent::monitor::ActivitySource;
use muxflow_types::HealthState;

use crate::world::{World, inside, inside_with, now_us, variable};

#[test]
fn without_dcgm_an_h100_is_watched_through_gpm() {
    inside_with("h100", "sensors::inner_gpm");
}

#[test]
#[ignore = "run inside an emulated node by without_dcgm_an_h100_is_watched_through_gpm"]
fn inner_gpm() {
    let laws = tempfile::NamedTempFile::new().unwrap();
    let name = "H100-80GB-HBM3";
    let clocks = format!(
        "[gpu.{name}]\nlike = 'T4'\n\
         [gpu.{name}.clock]\nthreshold_mhz = 1200\nhighest_mhz = 1980\n\
         [gpu.{name}.sm_clock_mhz]\nhealthy = 1050.0\nunhealthy = 900.0\noverlimit = 750.0\n"
    );
    fs::write(laws.path(), clocks).unwrap();
    let settings = format!("laws = '{}'\n", laws.path().display());
    watched_without_dcgm(ActivitySource::Gpm, &settings);
}

#[test]
fn without_dcgm_and_gpm_a_t4_is_watched_through_its_processes() {
    inside("sensors::inner_processes");
}

#[test]
#[ignore = "run inside an emulated node by without_dcgm_and_gpm_a_t4_is_watched_through_its_processes"]
fn inner_processes() {
    watched_without_dcgm(ActivitySource::ProcessUtilisation, "");
}

/// The node has no DCGM: an idle GPU takes a job, the source is told, and activity is seen.
fn watched_without_dcgm(source: ActivitySource, settings: &str) {
    for name in ["libdcgm.so", "libdcgm.so.4"] {
        fs::remove_file(variable("MUXFLOW_EMULATED_DIR").join("lib").join(name)).unwrap();
    }
    let world = World::start(settings);
    let status = world.wait("an idle GPU takes a job", |status| {
        status.health == HealthState::Healthy && status.placeable && status.share.is_some()
    });
    assert_eq!(status.source, source);
    let line = format!(
        "muxflow_sensor_source{{gpu=\"{}\",source=\"{}\"}} 1\n",
        world.gpu,
        source.as_str()
    );
    let page = world.page();
    assert!(page.contains(&line), "{line} is not in {page}");
    assert_eq!(page.matches("muxflow_sensor_source{").count(), 1);
    let activity = || {
        let seen = world.agent().shared(&world.gpu).unwrap().monitor.published();
        seen.sample.and_then(|sample| sample.sm_activity).map(|percent| percent.value())
    };
    assert_eq!(activity(), Some(0.0), "idle, and not unknown");
    world.start_service();
    world.start_worker_job();
    world.until("activity is seen", || activity().is_some_and(|percent| percent > 1.0));
    let status = world.agent().status(&world.gpu).unwrap();
    assert!(status.stops.is_empty() && status.offline.is_some(), "{:?}", status.stops);
    world.serve(10);
    world.end();
}

#[test]
fn sensors_that_lie_close_the_gate_and_are_counted() {
    inside("sensors::inner_lie");
}

#[test]
#[ignore = "run inside an emulated node by sensors_that_lie_close_the_gate_and_are_counted"]
fn inner_lie() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    assert_eq!(world.agent().status(&world.gpu).unwrap().glitches, 0);
    let from = now_us();
    // More memory than there is, at a clock that no such GPU has.
    world.fault(&["sensor-lie", "150"]);
    let status = world.wait("the gate is shut", |status| status.budget == 0.0);
    assert!(status.glitches > 0, "they are counted");
    assert_ne!(status.health, HealthState::Disabled);
    let told = |page: &str| {
        let line = page.lines().find(|line| line.starts_with("muxflow_sensor_glitches_total{"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap()
    };
    assert!(told(&world.page()) > 0.0);
    world.fault(&["sensor-lie", "0"]);
    world.wait("it opens again", |status| status.budget > 0.0 || status.offline.is_none());
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}
