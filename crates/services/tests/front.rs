//! Services of real processes: a replica is killed and all are replaced, under load, and nobody notices.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::io::{Read, Write};
use std::sync::atomic::Ordering;

use muxflow_api::service::ServiceView;
use muxflow_services::ServiceError;
use world::{Load, World, declaration, get, request};

/// The process of a replica: `GET /` answers after a moment with its pid, `POST /` too, `/healthz` is
/// fine, `/big` is larger than the front keeps, `/broken` breaks off. SIGTERM ends it once it is idle.
#[test]
#[ignore = "the process of a replica, started by the other tests"]
fn replica_server() {
    world::serve();
}

fn ready(view: &ServiceView) -> usize {
    view.replicas.iter().filter(|replica| replica.state == "ready").count()
}

#[test]
fn a_killed_replica_costs_no_request() {
    let world = World::start(3);
    let front = world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("two are ready", |view| ready(view) == 2);
    let load = Load::start(front, 4, "GET /");
    for _ in 0..3 {
        load.wait_for(60);
        let view = world.view();
        let victim = view.replicas.iter().find(|replica| replica.state == "ready").unwrap();
        let pid = victim.pid.unwrap();
        world::kill(pid);
        // Not "fewer are ready": a quick machine has another one up before anybody looks.
        world.wait("another one is there", |view| {
            ready(view) == 2 && view.replicas.iter().all(|replica| replica.pid != Some(pid))
        });
    }
    let (done, failed) = load.stop();
    let view = world.view();
    println!("{done} requests, {failed} failed, {} made again", view.retried_total);
    assert_eq!(failed, 0, "of {done}");
    assert!(view.retried_total > 0, "or the kills were not seen at all");
    assert_eq!(view.failed_total, 0);
}

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
        world.wait("it began", |view| view.to_restart > 0);
        world.wait("it is over", |view| view.to_restart == 0 && ready(view) == replicas);
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
    world.manager.declare(&declaration("test", 300, sick)).unwrap();
    world.wait("it began", |view| view.replicas.len() == 3);
    world.wait("it is over", |view| view.to_restart == 0 && view.replicas.len() == 2);
    let view = world.view();
    assert_eq!(pids(&view), before, "{view:#?}");
    let why = view.waiting_for.unwrap();
    assert!(why.contains("test-2 was not ready within 0.3 s"), "{why}");
    load.wait_for(40);
    assert_eq!(load.stop().1, 0, "nobody noticed");
    // The next declaration is carried out as any other.
    world.declare(r#", "min_replicas": 2, "max_replicas": 2, "env": {"A": "1"}"#);
    world.wait("replaced", |view| {
        let fresh = pids(view).iter().all(|pid| !before.contains(pid));
        fresh && ready(view) == 2 && view.to_restart == 0 && view.waiting_for.is_none()
    });
}

#[test]
fn requests_that_change_something_are_not_made_twice() {
    let world = World::start(1);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    let (status, _) = request(front, "POST /broken", "x");
    assert_eq!(status, 502);
    world.wait("ready again", |view| ready(view) == 1);
    let (status, body) = request(front, "POST /count", "abc");
    assert_eq!((status, body.as_str()), (200, "abc 1"));
    let big = "y".repeat(3 << 20);
    let (status, body) = request(front, "POST /length", &big);
    assert_eq!((status, body), (200, big.len().to_string()));
}

#[test]
fn a_client_that_sends_too_slowly_is_let_go() {
    let world = World::start(1);
    let front = world.declare(r#", "request_within_ms": 500"#);
    world.wait("ready", |view| ready(view) == 1);
    let mut client = std::net::TcpStream::connect(front).unwrap();
    client.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
    client.write_all(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(world.view().failed_total, 0, "it is not the service that failed");
}

#[test]
fn another_limit_for_requests_holds_from_the_next_one_on() {
    let world = World::start(1);
    let front = world.declare(r#", "request_within_ms": 3600000"#);
    world.wait("ready", |view| ready(view) == 1);
    world.declare(r#", "request_within_ms": 50"#);
    world.wait("taken", |view| view.declared.request_within_ms == 50);
    assert_eq!(get(front, "/hang").0, 504);
}

#[test]
fn large_answers_count_as_small_ones_do() {
    let world = World::start(1);
    let front = world.declare("");
    world.wait("ready", |view| ready(view) == 1);
    for path in ["/big", "/chunks"] {
        world.wait("a quiet window", |view| view.replicas[0].latency.rate_per_s == 0.0);
        let (status, body) = get(front, path);
        assert_eq!(status, 200);
        assert!(body.len() >= 3 << 20, "{path}: {}", body.len());
        world.wait("counted once", |view| view.replicas[0].latency.rate_per_s > 0.0);
        let latency = world.view().replicas[0].latency;
        assert!((latency.rate_per_s * latency.window_s - 1.0).abs() < 1e-6, "{path}: {latency:?}");
        world.wait("nothing is left under way", |view| view.replicas[0].outstanding == 0);
    }
}

#[test]
fn load_brings_more_replicas_and_slow_answers_reach_the_executor() {
    let world = World::start(3);
    let front = world.declare(r#", "max_replicas": 3, "load_per_replica": 1, "slo_ms": 1"#);
    world.wait("ready", |view| ready(view) == 1);
    let load = Load::start(front, 6, "GET /");
    world.wait("three", |view| view.wanted_replicas == 3 && ready(view) == 3);
    load.wait_for(200);
    // Declared again under load it keeps what the load needs.
    world.declare(r#", "max_replicas": 3, "load_per_replica": 1.1, "slo_ms": 1"#);
    world.wait("taken", |view| view.declared.load_per_replica > 1.0);
    assert_eq!(world.view().wanted_replicas, 3);
    let told = || world.executor.told.lock().unwrap().clone();
    world.wait("told", |_| told().values().any(|standing| standing.latency.is_some()));
    let (_, failed) = load.stop();
    assert_eq!(failed, 0);
    let told = told();
    let standing = told.values().find(|standing| standing.latency.is_some()).unwrap();
    assert!(standing.latency.unwrap().0 >= 4_000, "a request takes 5 ms: {told:?}");
    assert_eq!((standing.slo.unwrap().0, standing.critical), (1_000, false));
    world.declare(r#", "max_replicas": 3, "critical": true"#);
    let critical = || world.executor.told.lock().unwrap().values().all(|s| s.critical);
    world.wait("that it is critical is told", |_| critical());
}

#[test]
fn a_service_that_stands_still_reaches_the_executor() {
    let world = World::start(1);
    let front = world.declare(r#", "slo_ms": 100, "request_within_ms": 1500"#);
    world.wait("ready", |view| ready(view) == 1);
    let told = || world.executor.told.lock().unwrap().values().next().copied().unwrap();
    // Nobody gets an answer, neither now nor at the end of the time for one.
    let load = Load::start(front, 2, "GET /hang");
    let late = |at_least_us: u64| told().latency.is_some_and(|latency| latency.0 >= at_least_us);
    world::until("told while they hang", || late(100_000));
    load.wait_for(2);
    world::until("told after the time was over", || late(1_400_000));
    let (done, failed) = load.stop();
    assert_eq!(done, failed);
    assert!(world.view().replicas[0].latency.p99_ms.unwrap() > 1_400.0);
    // Clients that give up before count too.
    world::until("forgotten", || told().latency.is_none());
    for _ in 0..3 {
        world::give_up(front, "GET /hang", std::time::Duration::from_millis(300));
    }
    world::until("told again", || late(290_000));
}

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
    // Declared again it replaces the replica that it had, as it was started by another declaration.
    assert!(world::is_alive(pid));
    world.manager.declare(&declaration("asked", 30_000, "")).unwrap();
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
fn a_removed_service_leaves_nothing() {
    let world = World::start(2);
    let front = world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("ready", |view| ready(view) == 2);
    let pids: Vec<u32> = world.view().replicas.iter().filter_map(|r| r.pid).collect();
    world.runtime.block_on(world.manager.remove("test")).unwrap();
    assert!(std::net::TcpStream::connect(front).is_err(), "the front is closed");
    assert!(pids.iter().all(|pid| !world::is_alive(*pid)));
    assert!(matches!(world.manager.get("test"), Err(ServiceError::Unknown { .. })));
    assert_eq!(world.executor.starts.load(Ordering::Relaxed), 2);
    assert_eq!(std::fs::read_dir(world.dir()).unwrap().count(), 0, "forgotten");
}

#[test]
fn declared_by_many_at_once_it_is_one_service() {
    let world = World::start(4);
    for round in 0..5 {
        let name = format!("round-{round}");
        let declared = declaration(&name, 30_000, "");
        let together = std::sync::Barrier::new(8);
        let one = || {
            together.wait();
            world.manager.declare(&declared).unwrap()
        };
        let fronts: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(fronts.iter().all(|front| *front == fronts[0]), "{fronts:?}");
        world::until("ready", || ready(&world.manager.get(&name).unwrap()) == 1);
        world.runtime.block_on(world.manager.remove(&name)).unwrap();
        assert_eq!(world.executor.running(), 0, "none was left without a service");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let world = World::start(1);
    let front = world.declare("");
    let text = format!(r#"{{"name": "other", "command": ["x"], "port": {}}}"#, front.port());
    let error = world.manager.declare(&serde_json::from_str(&text).unwrap()).unwrap_err();
    assert!(error.to_string().contains("cannot listen on"), "{error}");
    world.wait("ready", |view| ready(view) == 1);
    let text = r#"{"name": "second", "command": ["x"], "gpu_type": "H100"}"#;
    world.manager.declare(&serde_json::from_str(text).unwrap()).unwrap();
    let says = || world.manager.get("second").unwrap().waiting_for;
    world::until("it says why it waits", || says().is_some());
    assert_eq!(says().unwrap(), "this machine has no H100");
    let error = world.manager.restart("nobody").unwrap_err().to_string();
    assert!(error.contains("second, test"), "{error}");
}
