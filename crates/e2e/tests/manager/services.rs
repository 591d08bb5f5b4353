//! kill -9 of the manager with declared services: the replicas go on, and the next manager finds them
//! and opens the same port.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use muxflow_api::service::ServiceView;

use crate::world::{LONG, World, inside, variable};

#[test]
fn a_killed_manager_finds_its_services_and_opens_their_ports_again() {
    inside("services::inner_services", "t4x2");
}

fn declare(world: &World, name: &str, replicas: u32) -> ServiceView {
    let program = variable("MUXFLOW_TEST_BUILT").join("muxflow-example-inference");
    let declared = serde_json::json!({
        "name": name, "min_replicas": replicas, "max_replicas": replicas,
        "command": [program, "--network", "mobilenet-v2", "--batch", "1", "--rate", "0",
            "--seconds", "0", "--listen", "127.0.0.1:{port}"],
        "health": { "every_ms": 100 }, "env": { "TEST_SERVICE": mark(world, name) },
    });
    let path = world.base().join(format!("{name}.json"));
    fs::write(&path, declared.to_string()).unwrap();
    world.must(&["service", "declare", path.to_str().unwrap()]);
    look(world, name)
}

fn look(world: &World, name: &str) -> ServiceView {
    world.client.get(&format!("/v1/services/{name}")).unwrap()
}

fn pids(view: &ServiceView) -> Vec<u32> {
    let mut pids: Vec<u32> = view.replicas.iter().filter_map(|replica| replica.pid).collect();
    pids.sort_unstable();
    pids
}

fn all_ready(view: &ServiceView, count: usize) -> bool {
    let ready = view.replicas.iter().filter(|replica| replica.state == "ready").count();
    ready == count && view.replicas.len() == count
}

/// One request; whether it was answered well.
fn ask(address: &str) -> bool {
    let ask = || -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(LONG))?;
        stream.write_all(b"GET /infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200 "))
}

/// Processes that were started for this service.
fn running(world: &World, name: &str) -> usize {
    let mark = format!("TEST_SERVICE={}", mark(world, name));
    let has_mark = |entry: &fs::DirEntry| {
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())
    };
    fs::read_dir("/proc").unwrap().flatten().filter(has_mark).count()
}

fn mark(world: &World, name: &str) -> String {
    world.base().join(name).display().to_string()
}

#[test]
#[ignore = "run inside an emulated node by a_killed_manager_finds_its_services_and_opens_their_ports_again"]
fn inner_services() {
    let mut world = World::start("[profiler]\nenabled = false\n");
    world.wait_healthy(2);
    let view = declare(&world, "web", 2);
    world.until("both serve", || all_ready(&look(&world, "web"), 2));
    let (front, before) = (view.address, look(&world, "web"));
    assert!(ask(&front));
    world.kill();
    let gone = Instant::now();
    // Without a manager the replicas go on, and only the port that all share is closed.
    for replica in &before.replicas {
        assert!(ask(&replica.address), "{} does not answer", replica.name);
    }
    assert!(!ask(&front), "nobody listens there");
    world.up();
    world.until("the same port answers again", || ask(&front));
    let outage_ms = gone.elapsed().as_millis();
    println!("MEASURED port of a service closed by kill -9 of the manager: {outage_ms} ms");
    world.until("both are found", || all_ready(&look(&world, "web"), 2));
    let after = look(&world, "web");
    assert_eq!((pids(&after), &after.address), (pids(&before), &front), "nothing was restarted");
    world.must(&["service", "remove", "web"]);
    // Killed at any moment after it was declared: it is not forgotten, blocks nothing, and runs as
    // often as it should.
    let drawn = u64::from(std::time::UNIX_EPOCH.elapsed().unwrap().subsec_micros() % 200);
    for after_ms in [0, drawn] {
        println!("MEASURED killed {after_ms} ms after a declaration");
        let name = format!("soon-{after_ms}");
        let address = declare(&world, &name, 1).address;
        std::thread::sleep(Duration::from_millis(after_ms));
        world.kill();
        world.up();
        world.until("it serves", || all_ready(&look(&world, &name), 1) && ask(&address));
        assert_eq!(running(&world, &name), 1, "one replica and no more");
        world.must(&["service", "remove", &name]);
    }
    world.end();
}
