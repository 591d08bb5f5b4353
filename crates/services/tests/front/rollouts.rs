//! Replicas are replaced one after another, and what serves stays until its successor does.

use std::sync::atomic::Ordering;

use muxflow_api::service::ServiceView;

use crate::ready;
use crate::world::{self, Load, World, declaration, get};

#[test]
fn a_rolling_restart_costs_no_request() {
    for (gpus, replicas) in [(2, 2), (3, 2), (1, 1)] {
        let world = World::start(gpus);
        let more = format!(r#", "min_replicas": {replicas}, "max_replicas": {replicas}"#);
        let front = world.declare(&more);
        world.wait("all are ready", |view| ready(view) == replicas);
        let before: Vec<Option<u32>> = world.view().replicas.iter().map(|r| r.pid).collect();
        let load = Load::start(front, 4, "GET /");
        load.wait_for(40);
        world.manager.restart("test").unwrap();
        world.wait("it is over", |view| {
            let fresh = view.replicas.iter().all(|replica| !before.contains(&replica.pid));
            fresh && view.to_restart == 0 && ready(view) == replicas
        });
        load.wait_for(40);
        let (done, failed) = load.stop();
        let after: Vec<Option<u32>> = world.view().replicas.iter().map(|r| r.pid).collect();
        println!("{replicas} replicas on {gpus} GPUs: {done} requests, {failed} failed");
        assert_eq!(failed, 0, "of {done}, {replicas} replicas on {gpus} GPUs");
        assert!(after.iter().all(|pid| !before.contains(pid)), "{before:?} {after:?}");
    }
}

#[test]
fn a_rollout_that_fails_leaves_what_serves_alone() {
    let world = World::start(3);
    let front = world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("two are ready", |view| ready(view) == 2);
    let pids = |view: &ServiceView| view.replicas.iter().map(|r| r.pid).collect::<Vec<_>>();
    let before = pids(&world.view());
    let load = Load::start(front, 2, "GET /");
    let sick = r#", "min_replicas": 2, "max_replicas": 2, "env": {"SICK": "1"}"#;
    world.manager.declare(&declaration("test", 3_000, sick)).unwrap();
    world.wait("it is over", |view| {
        view.to_restart == 0 && view.replicas.len() == 2 && view.waiting_for.is_some()
    });
    let view = world.view();
    assert_eq!(pids(&view), before, "{view:#?}");
    let why = view.waiting_for.unwrap();
    assert!(why.contains("test-2 was not ready within 3 s"), "{why}");
    load.wait_for(40);
    assert_eq!(load.stop().1, 0, "nobody noticed");
    // The next declaration is carried out as any other.
    world.declare(r#", "min_replicas": 2, "max_replicas": 2, "env": {"A": "1"}"#);
    world.wait("replaced", |view| {
        let fresh = pids(view).iter().all(|pid| !before.contains(pid));
        fresh && ready(view) == 2 && view.to_restart == 0 && view.waiting_for.is_none()
    });
}

/// Whatever keeps the new one from starting, if it is not the lack of a GPU, the old one goes on.
#[test]
fn the_old_one_stays_while_a_new_one_cannot_be_started() {
    let world = World::start(2);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let before = world.pids();
    let load = Load::start(front, 2, "GET /");
    *world.executor.refuses.lock().unwrap() = Some("no keeper can be started".to_owned());
    let says = |view: &ServiceView, what: &str| {
        view.waiting_for.as_ref().is_some_and(|why| why.contains(what))
    };
    world.declare(r#", "env": {"A": "1"}"#);
    world.wait("it says why it waits", |view| says(view, "no keeper can be started"));
    load.wait_for(100);
    assert_eq!((world.pids(), ready(&world.view())), (before.clone(), 1));
    assert_eq!(world.view().to_restart, 1, "it is not forgotten");
    // A GPU that is not here does not come by stopping what serves.
    world.declare(r#", "gpu_type": "H100""#);
    world.wait("it says what is missing", |view| says(view, "this machine has no H100"));
    load.wait_for(100);
    assert_eq!((world.pids(), ready(&world.view())), (before.clone(), 1));
    *world.executor.refuses.lock().unwrap() = None;
    world.declare(r#", "env": {"A": "2"}"#);
    world.wait("replaced", |view| {
        ready(view) == 1 && view.to_restart == 0 && view.waiting_for.is_none()
    });
    assert_ne!(world.pids(), before);
    let (done, failed) = load.stop();
    assert_eq!(failed, 0, "of {done}");
}

fn cannot_be_written_down(view: &ServiceView) -> bool {
    view.waiting_for.as_ref().is_some_and(|why| why.contains("cannot be written down"))
}

/// On the only GPU the old one leaves first, and no new one may come that cannot be written down.
#[test]
fn a_restart_on_a_full_disk_leaves_what_serves_alone() {
    let world = World::start(1);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let load = Load::start(front, 2, "GET /");
    // The second time too: what was told of the first disk is over.
    for _ in 0..2 {
        let before = world.pids();
        world.fill_disk();
        world.manager.restart("test").unwrap();
        world.wait("it says why it waits", cannot_be_written_down);
        // Longer than it takes to try again.
        let until = std::time::Instant::now() + std::time::Duration::from_millis(2_500);
        while std::time::Instant::now() < until {
            load.wait_for(40);
            let view = world.view();
            assert_eq!((world.pids(), ready(&view), view.to_restart), (before.clone(), 1, 1));
        }
        world.empty_disk();
        world.wait("replaced", |view| {
            let fresh = view.replicas.iter().all(|r| r.pid.is_none_or(|pid| pid != before[0]));
            fresh && ready(view) == 1 && view.to_restart == 0 && view.waiting_for.is_none()
        });
    }
    let (done, failed) = load.stop();
    assert_eq!(failed, 0, "of {done}");
    assert_eq!(world.executor.starts.load(Ordering::Relaxed), 3);
}

/// Sent away it would be missed until there is room; it may come to itself before.
#[test]
fn a_broken_replica_stays_while_the_disk_is_full() {
    let world = World::start(1);
    let front = world.manager.declare(&declaration("test", 2_000, "")).unwrap();
    world.wait("ready", |view| ready(view) == 1);
    let before = world.pids();
    world.fill_disk();
    world::hang(before[0]);
    world.wait("it says why nothing is done", cannot_be_written_down);
    world::go_on(before[0]);
    world.wait("it came to itself", |view| ready(view) == 1 && view.waiting_for.is_none());
    assert_eq!((world.pids(), get(front, "/").0), (before.clone(), 200));
    // With room it is replaced as ever.
    world.empty_disk();
    world::hang(before[0]);
    world.wait("replaced", |view| ready(view) == 1 && view.replicas[0].pid != Some(before[0]));
}
