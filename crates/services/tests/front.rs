//! Services of real processes: a replica is killed and all are replaced, under load, and nobody notices.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "front/restarts.rs"]
mod restarts;
#[path = "front/rollouts.rs"]
mod rollouts;
#[path = "front/world.rs"]
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

/// As a client does that was stopped, or that lies: it asks and never reads.
#[test]
fn a_client_that_takes_nothing_of_its_answer_is_let_go() {
    let world = World::start(1);
    let front = world.declare(r#", "request_within_ms": 1000"#);
    world.wait("ready", |view| ready(view) == 1);
    let mut client = std::net::TcpStream::connect(front).unwrap();
    client.write_all(b"GET /many-chunks HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    world.wait("its answer is under way", |view| view.replicas[0].outstanding == 1);
    world.wait("it is let go", |view| view.replicas[0].outstanding == 0);
    // What lay in the buffers is there, and then the connection ends.
    client.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let (mut taken, mut buffer) = (0, vec![0; 1 << 16]);
    let end = loop {
        match client.read(&mut buffer) {
            Ok(0) => break Ok(()),
            Ok(count) => taken += count,
            Err(error) => break Err(error.kind()),
        }
    };
    assert!(matches!(end, Ok(()) | Err(std::io::ErrorKind::ConnectionReset)), "{end:?}");
    assert!(taken < world::MANY_CHUNKS << 19, "all of it came");
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
fn a_gpu_without_a_job_is_taken_first() {
    let world = World::start(3);
    world.executor.jobs.lock().unwrap().extend(["GPU-0".to_owned(), "GPU-2".to_owned()]);
    world.declare(r#", "min_replicas": 1, "max_replicas": 2"#);
    world.wait("ready", |view| ready(view) == 1);
    assert_eq!(world.view().replicas[0].gpu, "GPU-1");
    // Where every GPU has a job, one of them is taken all the same.
    world.declare(r#", "min_replicas": 2, "max_replicas": 2"#);
    world.wait("both are ready", |view| ready(view) == 2);
    assert_eq!(world.view().replicas[1].gpu, "GPU-0");
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
