//! No user takes so much of the API that nothing is left for others.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use muxflow_api::cluster::{GpuList, HealthView};
use muxflow_api::jobs::{JobList, Submitted};
use muxflow_manager::client::{Client, Place};
use muxflow_manager::error::ManagerError;
use muxflow_manager::manager::Settings;
use serde_json::json;

use crate::world;

#[test]
fn a_page_ends_when_it_is_large() {
    let world = world(Settings::default());
    let big = json!({"command": ["/bin/true", "x".repeat(250_000)], "cwd": "/"});
    for _ in 0..20 {
        let _: Submitted = world.client.post("/v1/jobs", &big).unwrap();
    }
    let (mut sizes, mut ids, mut before) = (Vec::new(), Vec::new(), String::new());
    loop {
        let page: JobList = world.client.get(&format!("/v1/jobs?limit=500{before}")).unwrap();
        sizes.push(page.items.len());
        ids.extend(page.items.into_iter().map(|job| job.id));
        let Some(next) = page.next else { break };
        before = format!("&before={next}");
    }
    assert_eq!(sizes, [17, 3], "more than 4 MiB end a page");
    let all: Vec<String> = (1..=20).rev().map(|number| format!("job-{number}")).collect();
    assert_eq!(ids, all);
}

const LONG: Duration = Duration::from_secs(40);

/// Does something as another user, which needs root; a thread has a user of its own for the kernel.
fn as_user<T: Send + 'static>(uid: u32, body: impl FnOnce() -> T + Send + 'static) -> T {
    let body = move || {
        let keep = libc::c_long::from(-1);
        // SAFETY: numbers only, and the call changes this thread alone, which ends soon.
        let done =
            unsafe { libc::syscall(libc::SYS_setresuid, keep, libc::c_long::from(uid), keep) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        body()
    };
    std::thread::spawn(body).join().unwrap()
}

/// Asks over a connection that is then kept: what came up to the end of the answer or of the
/// connection.
fn ask(stream: &mut UnixStream) -> String {
    stream.set_read_timeout(Some(LONG)).unwrap();
    // One that is refused may be closed already; what it was told is there all the same.
    drop(stream.write_all(b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n"));
    let (mut said, mut piece) = (String::new(), [0; 4096]);
    while !said.ends_with('}') {
        match stream.read(&mut piece) {
            Ok(count) if count > 0 => said.push_str(std::str::from_utf8(&piece[..count]).unwrap()),
            _ => break,
        }
    }
    said
}

/// Connects until somebody is refused: those that were let in, and what the refused one was told.
fn connect_as(uid: u32, socket: PathBuf, most: usize) -> (Vec<UnixStream>, String) {
    as_user(uid, move || {
        let mut kept = Vec::new();
        for _ in 0..most {
            let mut stream = UnixStream::connect(&socket).unwrap();
            let said = ask(&mut stream);
            if !said.starts_with("HTTP/1.1 200 ") {
                return (kept, said);
            }
            kept.push(stream);
        }
        (kept, String::new())
    })
}

/// What the command line hears as another user. A slow one may find that the manager has hung up.
fn refused_as(uid: u32, socket: PathBuf) -> String {
    as_user(uid, move || {
        let client = Client::new(Place::Socket(socket)).unwrap();
        let deadline = Instant::now() + LONG;
        loop {
            match client.get::<HealthView>("/v1/health") {
                Err(ManagerError::Busy(why)) => return why,
                Err(ManagerError::Unreachable(_)) if Instant::now() < deadline => {}
                answer => panic!("{answer:?}"),
            }
        }
    })
}

#[test]
fn one_user_cannot_keep_everybody_out() {
    if muxflow_agent::sys::own_uid() != 0 {
        println!("SKIPPED: run the tests as root to see other users connect");
        return;
    }
    let world = world(Settings::default());
    let socket = world.server.as_ref().unwrap().socket().to_owned();
    for (path, mode) in [(world.dir.path(), 0o755), (&socket, 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (kept, said) = connect_as(4_000_001, socket.clone(), 400);
    assert!(said.starts_with("HTTP/1.1 429 "), "{} were let in: {said}", kept.len());
    assert!(said.contains("too many of your connections"), "{said}");
    let why = refused_as(4_000_001, socket.clone());
    assert!(why.contains("too many of your connections"), "{why}");
    let (others, _) = connect_as(4_000_002, socket.clone(), 1);
    assert_eq!(others.len(), 1, "another user gets in");
    let _: GpuList = world.client.get("/v1/gpus").unwrap();
    drop(kept);
    let deadline = Instant::now() + LONG;
    while connect_as(4_000_001, socket.clone(), 1).0.is_empty() {
        assert!(Instant::now() < deadline, "places are not given back");
        std::thread::sleep(Duration::from_millis(10));
    }
}
