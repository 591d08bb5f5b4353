//! Room for the service: no job keeps it from starting, and none comes while it is away.

use std::time::Instant;

use muxflow_agent::gpu::{Event, Order, StopReason};
use muxflow_types::{Bytes, ServiceId};

use crate::world::{World, inside};

#[test]
fn a_job_leaves_when_the_service_cannot_start_beside_it() {
    inside("room::inner_start");
}

#[test]
#[ignore = "run inside an emulated node by a_job_leaves_when_the_service_cannot_start_beside_it"]
fn inner_start() {
    let world = World::start("");
    // A service that is not there holds no memory, and will want it when it comes.
    let away = World::service_spec(vec!["/no/such/program".into()]);
    world.wait("the GPU takes jobs", |status| status.placeable && status.share.is_some());
    // An order that waited too long is for a run that was given up.
    let mut late = World::spec(world.argv("job", 500, "8", 0));
    late.not_after = Some(Instant::now());
    let reason = world.refused(late);
    assert!(reason.contains("came too late"), "{reason}");
    world.agent().order(&world.gpu, Order::StartOnline(Box::new(away))).unwrap();
    world.wait("it takes none now", |status| status.unsettled && !status.placeable);
    let reason = world.refused(World::spec(world.argv("job", 500, "8", 0)));
    assert!(reason.contains("service service does not run"), "{reason}");
    let service = ServiceId::new("service").unwrap();
    world.agent().order(&world.gpu, Order::StopOnline(service)).unwrap();

    // A job that holds 10 GiB, and then a service that needs 8 of 15, in one piece: no sample shows
    // that it was refused.
    let mut job = world.argv("job", 500, "8", 0);
    job.push("hold=all".into());
    let mut spec = World::spec(job);
    spec.quota = Some(Bytes::from_gib(10));
    world.start_job_as(spec);
    world.until("the job has all it gets", || world.job_output().contains("ready"));
    let mut argv = world.argv("service", 2_000, "16", 20_000);
    argv.push("piece=8192".into());
    let spec = World::service_spec(argv);
    world.agent().order(&world.gpu, Order::StartOnline(Box::new(spec))).unwrap();
    let ended = world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { reason, requeue, .. } = ended else { unreachable!() };
    let why = "the service cannot start beside it";
    assert_eq!(reason, Some(StopReason::Health(why.into())));
    assert!(requeue, "it is not the job's fault");
    world.serve(20);
    assert!(world.restarts() >= 2, "it tried beside the job: {}", world.restarts());
    // The next job would take the memory away while the service is still taking it.
    let reason = world.refused(World::spec(world.argv("job", 500, "8", 0)));
    assert!(reason.contains("times and has not run for"), "{reason}");
    assert!(!world.agent().status(&world.gpu).unwrap().placeable);
    world.end();
}
