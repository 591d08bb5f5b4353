//! Shadow mode through `up`: plans are made and reported, and nothing is started.

use std::fs;

use muxflow_api::cluster::{HealthView, PlanRecord};
use muxflow_api::events::EventList;
use muxflow_api::jobs::JobState;
use muxflow_api::service::ServiceView;

use crate::world::{World, inside};

#[test]
fn shadow_mode_plans_and_reports_and_starts_nothing() {
    inside("shadow::inner_shadow", "t4x2");
}

#[test]
#[ignore = "run inside an emulated node by shadow_mode_plans_and_reports_and_starts_nothing"]
fn inner_shadow() {
    let mut world = World::start("shadow = true\n");
    world.wait_healthy(2);
    let health: HealthView = world.client.get("/v1/health").unwrap();
    assert!(health.shadow && world.log().contains("shadow mode"));
    let trace = world.base().join("started");
    let script = format!("echo $MUXFLOW_JOB >> {}", trace.display());
    let id = world.must(&["submit", "--", "sh", "-c", &script]).trim().to_owned();
    let late = world.must(&["submit", "--deadline", "1", "--", "sh", "-c", &script]);
    let late = late.trim();
    // It says where it would put them.
    let plan = || world.client.get::<PlanRecord>("/v1/plan/record").ok();
    world.until("both are planned for", || {
        plan().is_some_and(|plan| plan.plan.contains(&id) && plan.plan.contains(late))
    });
    let plan = plan().unwrap();
    assert!(!plan.applied && plan.findings.is_empty(), "{plan:#?}");
    let assigned: serde_json::Value = serde_json::from_str(&plan.plan).unwrap();
    assert_eq!(assigned["assignments"].as_array().unwrap().len(), 2, "{}", plan.plan);
    let told = || world.client.get::<EventList>("/v1/events?kind=plan").unwrap().items;
    world.until("it is reported", || {
        told().iter().any(|event| event.text.contains("would start, restart or move 2 of 2 jobs"))
    });
    assert!(world.must(&["replay"]).contains(&id));
    // A service that is declared is known, and has no process.
    let declared = serde_json::json!({ "name": "web", "command": ["sleep", "1000"] });
    let path = world.base().join("web.json");
    fs::write(&path, declared.to_string()).unwrap();
    world.must(&["service", "declare", path.to_str().unwrap()]);
    world.until("the deadline has passed", || world.job(late).waited_us > 2_000_000);
    let view: ServiceView = world.client.get("/v1/services/web").unwrap();
    assert!(view.replicas.iter().all(|replica| replica.pid.is_none()), "{view:#?}");
    for id in [id.as_str(), late] {
        let job = world.job(id);
        assert_eq!((job.state, job.run), (JobState::Queued, 0), "{job:#?}");
    }
    assert!(world.must(&["describe", &id]).contains("nothing is started in shadow mode"));
    let gpus = world.gpus();
    assert!(gpus.iter().all(|gpu| gpu.offline.is_none() && gpu.online.is_none()), "{gpus:#?}");
    assert!(!trace.exists(), "something was started");
    world.must(&["service", "remove", "web"]);
    // Without the shadow the same queue is carried out.
    world.leave();
    world.change(|text| text.replace("shadow = true", "[profiler]\nenabled = false"));
    world.up();
    let ended = world.wait(&id, "done", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run), (JobState::Done, 1), "{ended:#?}");
    let expired = world.wait(late, "failed", |job| job.state.is_final());
    assert!(expired.reason.contains("deadline has passed"), "{expired:#?}");
    assert_eq!(fs::read_to_string(&trace).unwrap().trim(), id);
    world.end();
}
