//! A service for tests: this program itself, as a server that answers at once, or only when it may.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muxflow_api::service::ServiceView;

use crate::world::{LONG, World};

/// While this file is there, requests are not answered.
pub(crate) fn held(world: &World) -> PathBuf {
    world.base().join("held")
}

/// Holds answers back from now on.
pub(crate) fn hold(world: &World) {
    fs::write(held(world), "").unwrap();
}

/// Lets them go.
pub(crate) fn release(world: &World) {
    fs::remove_file(held(world)).unwrap();
}

/// Declares the service `web` with one replica, and waits until it serves; the address of its front.
pub(crate) fn declare(world: &World, slo_ms: u32) -> String {
    let program = std::env::current_exe().unwrap();
    let declared = serde_json::json!({
        "name": "web", "min_replicas": 1, "max_replicas": 1, "slo_ms": slo_ms,
        "command": [program, "--exact", "replica::server", "--ignored", "--nocapture"],
        "health": { "every_ms": 200 }, "env": { "TEST_HELD": held(world) },
    });
    let path = world.base().join("web.json");
    fs::write(&path, declared.to_string()).unwrap();
    world.must(&["service", "declare", path.to_str().unwrap()]);
    let serves = || look(world).replicas.iter().any(|replica| replica.state == "ready");
    world.until("the replica serves", serves);
    look(world).address
}

pub(crate) fn look(world: &World) -> ServiceView {
    world.client.get("/v1/services/web").unwrap()
}

/// One request; the status of the answer.
pub(crate) fn ask(address: &str) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LONG))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
    status.ok_or_else(|| std::io::Error::other(format!("no answer: {answer}")))
}

#[test]
#[ignore = "a replica of the service of other tests"]
fn server() {
    let port: u16 = std::env::var("PORT").unwrap().parse().unwrap();
    let held = PathBuf::from(std::env::var_os("TEST_HELD").unwrap());
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    for stream in listener.incoming().flatten() {
        let held = held.clone();
        std::thread::spawn(move || drop(answer(stream, &held)));
    }
}

fn answer(mut stream: TcpStream, held: &Path) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut first = String::new();
        if reader.read_line(&mut first)? == 0 {
            return Ok(());
        }
        let mut line = String::new();
        while reader.read_line(&mut line)? > 0 && !line.trim().is_empty() {
            line.clear();
        }
        while !first.contains("/healthz") && held.exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?;
    }
}
