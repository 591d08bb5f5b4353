//! Where SM activity comes from on nodes that lack the better source, and sensors that lie.

use std::fs;
use std::time::Instant;

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
    let (from, began) = (now_us(), Instant::now());
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
    world.opens_again(began);
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}

#[test]
fn dcgm_that_fails_later_is_left_for_the_next_source_and_taken_again() {
    inside("sensors::inner_dcgm_fails");
}

#[test]
#[ignore = "run inside an emulated node by dcgm_that_fails_later_is_left_for_the_next_source_and_taken_again"]
fn inner_dcgm_fails() {
    let world = World::start("");
    world.start_service();
    let status = world.wait("healthy", |status| status.health == HealthState::Healthy);
    assert_eq!(status.source, ActivitySource::Dcgm);
    let from = now_us();
    // As after a restart of the host engine: the connection is of no use, NVML goes on.
    world.fault(&["dcgm-error", "21"]);
    world.wait("the next source counts", |status| {
        status.source == ActivitySource::ProcessUtilisation
    });
    let line = |source: &str| {
        format!("muxflow_sensor_source{{gpu=\"{}\",source=\"{source}\"}} 1\n", world.gpu)
    };
    let page = world.page();
    assert!(page.contains(&line(ActivitySource::ProcessUtilisation.as_str())), "{page}");
    // What it tells is enough to work with.
    world.start_worker_job();
    let activity = || {
        let seen = world.agent().shared(&world.gpu).unwrap().monitor.published();
        seen.sample.and_then(|sample| sample.sm_activity).map(|percent| percent.value())
    };
    world.until("activity is seen", || activity().is_some_and(|percent| percent > 1.0));
    world.fault(&["dcgm-error", "0"]);
    world.wait("DCGM counts again", |status| status.source == ActivitySource::Dcgm);
    assert!(world.page().contains(&line(ActivitySource::Dcgm.as_str())));
    // Unless this machine was held up for so long that the job had to leave.
    world.wait("the gate is open", |status| status.budget > 0.0 || status.offline.is_none());
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}

#[test]
fn the_services_metrics_carry_its_values() {
    inside("sensors::inner_online_metrics");
}

#[test]
#[ignore = "run inside an emulated node by the_services_metrics_carry_its_values"]
fn inner_online_metrics() {
    let world = World::start("");
    // A quarter of the SMs, two thirds of the time.
    world.start_service_as(world.argv("service", 20_000, "10", 10_000));
    let labels = format!("{{gpu=\"{}\",service=\"service\"}}", world.gpu);
    let number = |name: &str, labels: &str| {
        let page = world.page();
        let line = page.lines().find(|line| line.starts_with(&format!("{name}{labels} ")));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    let activity = || number("muxflow_online_sm_activity_ratio", &labels);
    // Alone, all activity is the service's.
    world.until("its activity is told", || activity().is_some_and(|ratio| ratio > 0.02));
    assert!(activity().is_some_and(|ratio| ratio < 0.5), "{:?}", activity());
    let error = number("muxflow_online_sm_activity_error_ratio", &labels);
    assert!(error.is_some_and(|ratio| (0.0..=1.0).contains(&ratio)), "{error:?}");
    let on = format!("{{gpu=\"{}\",type=\"T4\"}}", world.gpu);
    let restarts = || number("muxflow_online_restarts_total", &on);
    assert_eq!(restarts(), Some(0.0));
    let pid = world.agent().status(&world.gpu).unwrap().online.unwrap().1;
    muxflow_agent::sys::kill(pid, libc::SIGTERM).unwrap();
    world.until("its restart is counted", || restarts() == Some(1.0));
    world.until("it is told of again", || activity().is_some_and(|ratio| ratio > 0.02));
    world.end();
}
