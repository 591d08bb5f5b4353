//! The manager goes and comes back: what ran is found, nothing is sent away, and what nobody knows of
//! is cleared away.

use std::future::Future as _;
use std::sync::atomic::Ordering;
use std::task::Poll;

use muxflow_services::ServiceError;

use crate::ready;
use crate::world::{self, Load, World, declaration, get};

#[test]
fn replicas_outlive_the_manager_and_are_found_again() {
    let mut world = World::start(2);
    let front = world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("ready", |view| ready(view) == 2);
    let before: Vec<Option<u32>> = world.view().replicas.iter().map(|r| r.pid).collect();
    world.restart_manager();
    world.wait("found", |view| ready(view) == 2);
    let after: Vec<Option<u32>> = world.view().replicas.iter().map(|r| r.pid).collect();
    assert_eq!(before, after, "nothing was started again");
    assert_eq!(get(front, "/").0, 200, "at the same port");
}

/// A manager that leaves in order: requests under way get their answers, new ones find nobody.
#[test]
fn requests_under_way_are_finished_when_the_manager_leaves() {
    let mut world = World::start(1);
    // Answers are held back for as long as this is there.
    let held = world.dir().join("held");
    std::fs::write(&held, "").unwrap();
    let front = world.declare(&format!(r#", "env": {{"TEST_HELD": {held:?}}}"#));
    world.wait("ready", |view| ready(view) == 1);
    let asked: Vec<_> = (0..3).map(|_| std::thread::spawn(move || get(front, "/held"))).collect();
    world.wait("all are under way", |view| view.replicas[0].outstanding == 3);
    let release = std::thread::spawn(move || {
        world::until("nobody listens", || std::net::TcpStream::connect(front).is_err());
        std::fs::remove_file(held).unwrap();
    });
    let spare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let runtime = std::mem::replace(&mut world.runtime, spare);
    let began = std::time::Instant::now();
    world.manager.close(runtime, std::time::Duration::from_secs(30));
    assert!(began.elapsed() < std::time::Duration::from_secs(25), "it waits no longer than needed");
    for one in asked {
        assert_eq!(one.join().unwrap(), (200, "late but sure".to_owned()));
    }
    release.join().unwrap();
    assert!(std::net::TcpStream::connect(front).is_err(), "nobody listens");
}

/// Whoever asked for the removal may hang up: the name is free once the service is gone.
#[test]
fn a_removal_that_nobody_waits_for_frees_the_name() {
    let world = World::start(1);
    world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let mut removal = Box::pin(world.manager.remove("test"));
    world.runtime.block_on(std::future::poll_fn(|context| {
        assert!(removal.as_mut().poll(context).is_pending(), "it takes longer than that");
        Poll::Ready(())
    }));
    drop(removal);
    world::until("it is gone", || world.executor.running() == 0);
    world::until("nobody knows of it", || world.manager.get("test").is_err());
    world.declare("");
    world.wait("ready again", |view| ready(view) == 1);
}

/// One that is started and not written down would be a stranger to the next manager.
#[test]
fn no_replica_is_started_that_cannot_be_written_down() {
    let world = World::start(2);
    let front = world.declare(r#", "max_replicas": 2, "load_per_replica": 1"#);
    world.wait("ready", |view| ready(view) == 1);
    world.fill_disk();
    let load = Load::start(front, 6, "GET /");
    world.wait("it says what is wrong", |view| {
        view.waiting_for.as_ref().is_some_and(|why| why.contains("cannot be written down"))
    });
    load.wait_for(40);
    assert_eq!(world.executor.starts.load(Ordering::Relaxed), 1);
    world.empty_disk();
    world.wait("two", |view| ready(view) == 2 && view.waiting_for.is_none());
    assert_eq!(load.stop().1, 0, "nobody noticed");
    assert_eq!(*world.executor.unwritten.lock().unwrap(), Vec::<String>::new());
}

#[test]
fn one_that_cannot_be_taken_up_does_not_stop_the_others() {
    let mut world = World::start(3);
    let front = world.declare("");
    world.manager.declare(&declaration("asked", 30_000, "")).unwrap();
    world.wait("ready", |view| ready(view) == 1);
    let asked = |world: &World| world.manager.get("asked").unwrap();
    world::until("ready", || ready(&asked(&world)) == 1);
    let pid = asked(&world).replicas[0].pid.unwrap();
    world.stop_manager();
    // Its user was deleted, one file was cut short, and one is of another program's version.
    let file = world.dir().join("asked.json");
    let mut state: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    state["declared"]["user"] = "no-such-user-here".into();
    std::fs::write(&file, state.to_string()).unwrap();
    std::fs::write(world.dir().join("cut.json"), "{\"version\": 1, \"decl").unwrap();
    std::fs::write(world.dir().join("newer.json"), "{\"version\": 9}").unwrap();
    world.start_manager();
    world.wait("the good one is found", |view| ready(view) == 1);
    assert_eq!(get(front, "/").0, 200);
    let says = |world: &World, name: &str| world.manager.get(name).unwrap().waiting_for.unwrap();
    assert!(says(&world, "asked").contains("no user here"), "{}", says(&world, "asked"));
    assert!(says(&world, "cut").contains("cut.json"), "{}", says(&world, "cut"));
    assert!(says(&world, "newer").contains("`version` is 9"), "{}", says(&world, "newer"));
    let error = world.manager.restart("asked").unwrap_err();
    assert!(matches!(error, ServiceError::NotTakenUp { .. }), "{error}");
    assert!(world.dir().join("cut.json").exists(), "files are kept");
    world.runtime.block_on(world.manager.remove("cut")).unwrap();
    assert!(!world.dir().join("cut.json").exists());
    // Declared as it was started it has the replica that it had; declared otherwise it replaces it.
    assert!(world::is_alive(pid));
    world.manager.declare(&declaration("asked", 30_000, "")).unwrap();
    world::until("taken up", || ready(&asked(&world)) == 1);
    assert_eq!((asked(&world).replicas[0].pid, asked(&world).to_restart), (Some(pid), 0));
    world.manager.declare(&declaration("asked", 30_000, r#", "env": {"A": "1"}"#)).unwrap();
    world::until("replaced", || {
        let view = asked(&world);
        ready(&view) == 1 && view.to_restart == 0 && view.replicas[0].pid != Some(pid)
    });
    assert!(!world::is_alive(pid));
    assert_eq!(world.executor.running(), 2, "none was left without a service");
    let names: Vec<_> = world.manager.list().into_iter().map(|v| v.declared.name).collect();
    assert_eq!(names, ["asked", "newer", "test"]);
}

#[test]
fn a_taken_port_is_told_and_not_fatal() {
    let mut world = World::start(1);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let pid = world.view().replicas[0].pid.unwrap();
    world.stop_manager();
    let other = std::net::TcpListener::bind(front).unwrap();
    world.start_manager();
    let why = world.view().waiting_for.unwrap();
    assert!(why.contains("cannot listen on") && why.contains("in use"), "{why}");
    drop(other);
    assert_eq!(world.declare(&format!(r#", "port": {}"#, front.port())), front);
    world.wait("served again", |view| ready(view) == 1);
    assert_eq!(world.view().replicas[0].pid, Some(pid), "with the replica that it had");
    world.runtime.block_on(world.manager.remove("test")).unwrap();
    assert!(!world::is_alive(pid));
}

#[test]
fn a_restart_under_load_sends_no_replica_away() {
    let mut world = World::start(3);
    let front = world.declare(r#", "max_replicas": 3, "load_per_replica": 1"#);
    world.wait("ready", |view| ready(view) == 1);
    let load = Load::start(front, 6, "GET /");
    world.wait("three", |view| view.wanted_replicas == 3 && ready(view) == 3);
    let before = world.pids();
    world.restart_manager();
    world.wait("found", |view| ready(view) == 3);
    for _ in 0..150 {
        assert_eq!(get(front, "/").0, 200);
    }
    assert_eq!((world.pids(), world.view().wanted_replicas), (before, 3));
    load.stop();
    assert_eq!(world.executor.starts.load(Ordering::Relaxed), 3);
}

#[test]
fn what_is_declared_is_on_the_disk_and_replicas_are_before_they_start() {
    let world = World::start(3);
    world.declare(r#", "slo_ms": 7"#);
    assert_eq!(world.written()["declared"]["slo_ms"], 7.0, "before anybody is told");
    world.wait("ready", |view| ready(view) == 1);
    for slo in 8..13 {
        world.declare(&format!(r#", "slo_ms": {slo}, "min_replicas": 2, "max_replicas": 2"#));
        assert_eq!(world.written()["declared"]["slo_ms"], f64::from(slo), "a change too");
        assert_eq!(world.view().declared.slo_ms, Some(f64::from(slo)));
    }
    world.wait("two", |view| ready(view) == 2);
    assert!(world.executor.unwritten.lock().unwrap().is_empty(), "{:?}", world.executor.unwritten);
    // What cannot be written is not done: a directory stands where the file would be made.
    for name in ["test", "other"] {
        std::fs::create_dir(world.dir().join(format!("{name}.new"))).unwrap();
    }
    let refused = world.manager.declare(&declaration("test", 30_000, r#", "slo_ms": 99"#));
    assert!(matches!(refused, Err(ServiceError::NotWritten { .. })), "{refused:?}");
    assert_eq!(world.view().declared.slo_ms, Some(12.0));
    let refused = world.manager.declare(&declaration("other", 30_000, ""));
    assert!(matches!(refused, Err(ServiceError::NotWritten { .. })), "{refused:?}");
    assert!(matches!(world.manager.get("other"), Err(ServiceError::Unknown { .. })));
}

/// As after a kill between the start of a replica and writing it down, or a file that was removed.
#[test]
fn a_replica_that_is_not_written_down_does_not_block_its_service() {
    let mut world = World::start(1);
    world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let before = world.pids();
    world.stop_manager();
    world.rewrite(|state| state["replicas"] = serde_json::json!([]));
    world.start_manager();
    world.wait("another one", |view| ready(view) == 1 && view.waiting_for.is_none());
    assert_ne!(world.pids(), before);
    assert!(!world::is_alive(before[0]));
    assert_eq!(world.executor.running(), 1);
    // The same where the file is damaged, and the service removed.
    world.stop_manager();
    std::fs::write(world.dir().join("test.json"), "{").unwrap();
    world.start_manager();
    world.runtime.block_on(world.manager.remove("test")).unwrap();
    assert_eq!(world.executor.running(), 0);
}

/// As after a kill between a new declaration and the replacement of what runs.
#[test]
fn a_rollout_that_the_manager_left_is_carried_on() {
    let mut world = World::start(2);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let before = world.pids();
    world.stop_manager();
    world.rewrite(|state| state["declared"]["env"] = serde_json::json!({"A": "1"}));
    world.start_manager();
    world.wait("replaced", |view| {
        let fresh = view.replicas.iter().all(|replica| replica.pid != Some(before[0]));
        fresh && ready(view) == 1 && view.to_restart == 0
    });
    assert_eq!(get(front, "/").0, 200);
}

#[test]
fn nothing_is_started_or_stopped_in_shadow_mode() {
    let mut world = World::start(3);
    let front = world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("ready", |view| ready(view) == 2);
    let before = world.pids();
    world.stop_manager();
    world.executor.shadow.store(true, Ordering::Relaxed);
    world.start_manager();
    // What was there is found and served.
    world.wait("found", |view| ready(view) == 2);
    assert_eq!(get(front, "/").0, 200);
    world.declare(r#", "min_replicas": 3, "max_replicas": 3, "env": {"A": "1"}"#);
    let says = |why: &Option<String>| why.as_ref().is_some_and(|why| why.contains("shadow mode"));
    world.wait("it says why", |view| says(&view.waiting_for));
    world.declare(r#", "min_replicas": 1, "max_replicas": 1"#);
    world.wait("taken", |view| view.wanted_replicas == 1);
    let restart = world.manager.restart("test");
    assert!(matches!(restart, Err(ServiceError::Shadow { .. })), "{restart:?}");
    let remove = world.runtime.block_on(world.manager.remove("test"));
    assert!(matches!(remove, Err(ServiceError::Shadow { .. })), "{remove:?}");
    // One that never ran can come and go.
    world.manager.declare(&declaration("other", 30_000, "")).unwrap();
    world::until("it says why", || says(&world.manager.get("other").unwrap().waiting_for));
    world.runtime.block_on(world.manager.remove("other")).unwrap();
    assert_eq!((world.pids(), world.executor.starts.load(Ordering::Relaxed)), (before, 2));
    world.executor.shadow.store(false, Ordering::Relaxed);
}
