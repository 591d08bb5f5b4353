//! The API over its real sockets, with a fake node behind it.

#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "api/limits.rs"]
mod limits;
mod support;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_api::cluster::{GpuHistory, GpuList, HealthView, PauseView, PlanView, Summary};
use muxflow_api::events::EventList;
use muxflow_api::jobs::{Cancelled, JobDetail, JobList, JobState, JobView, LogPiece, Submitted};
use muxflow_manager::Manager;
use muxflow_manager::client::{Client, Place};
use muxflow_manager::http::server::{Extras, Listen, SILENCE, Server};
use muxflow_manager::manager::{Settings, Wake};
use muxflow_manager::user::{Caller, Tokens};
use muxflow_store::events::NewEvent;
use serde_json::{Value, json};
use support::{FakeNode, gpu};

struct World {
    dir: tempfile::TempDir,
    server: Option<Server>,
    manager: Arc<Manager>,
    client: Client,
    _wakes: std::sync::mpsc::Receiver<Wake>,
}

fn world(settings: Settings) -> World {
    world_with(settings, SILENCE)
}

fn world_with(settings: Settings, silence: Duration) -> World {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, Some("web")), gpu(1, None)]);
    let (manager, wakes) = Manager::open(&dir.path().join("state.db"), node, settings).unwrap();
    let mut tokens = Tokens::default();
    tokens.insert("right".into(), Caller::of_uid(0, None));
    tokens.insert("other".into(), Caller::of_uid(4_000_001, None));
    let listen = Listen {
        socket: dir.path().join("run/manager.sock"),
        socket_mode: 0o600,
        tcp: Some(("127.0.0.1:0".into(), tokens)),
        silence,
    };
    let page = axum::Router::new().route("/", axum::routing::get(|| async { "a page" }));
    let extras = Extras { pages: page, ..Extras::default() };
    let server = Server::start(Arc::clone(&manager), &listen, extras).unwrap();
    let client = Client::new(Place::Socket(server.socket().to_owned())).unwrap();
    World { dir, server: Some(server), manager, client, _wakes: wakes }
}

fn job() -> Value {
    json!({"command": ["/bin/true"], "cwd": "/", "name": "first"})
}

#[test]
fn jobs_are_taken_in_listed_and_cancelled() {
    let world = world(Settings { jobs_per_user: Some(8), ..Settings::default() });
    let client = &world.client;
    let made: Submitted = client.post("/v1/jobs", &job()).unwrap();
    assert_eq!((made.id.as_str(), made.jobs.len()), ("job-1", 1));
    let array = json!({"command": ["/bin/true"], "cwd": "/", "array": {"first": 3, "last": 6}});
    let made: Submitted = client.post("/v1/jobs", &array).unwrap();
    assert_eq!(made.id, "job-2");
    assert_eq!(made.jobs, ["job-2.3", "job-2.4", "job-2.5", "job-2.6"]);

    let page: JobList = client.get("/v1/jobs?limit=3").unwrap();
    let ids = |page: &JobList| page.items.iter().map(|job| job.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&page), ["job-2.6", "job-2.5", "job-2.4"]);
    let next = page.next.unwrap();
    let page: JobList = client.get(&format!("/v1/jobs?limit=3&before={next}")).unwrap();
    assert_eq!((ids(&page), page.next), (vec!["job-2.3".into(), "job-1".into()], None));
    let mine: JobList = client.get("/v1/jobs?user=me&state=open").unwrap();
    assert_eq!(mine.items.len(), 5);
    let none: JobList = client.get("/v1/jobs?state=done,failed").unwrap();
    assert!(none.items.is_empty());

    let over = client.post::<Submitted>("/v1/jobs", &array).unwrap_err().to_string();
    assert!(over.contains("has 5 jobs") && over.contains("may have 8"), "{over}");
    let page: JobList = client.get("/v1/jobs").unwrap();
    assert_eq!(page.items.len(), 5, "all or nothing");

    let gone: Cancelled = client.delete("/v1/jobs/job-2").unwrap();
    assert_eq!(gone.jobs.len(), 4);
    let one: JobView = client.get("/v1/jobs/job-2.4?wait_ms=20000").unwrap();
    assert_eq!(one.state, JobState::Cancelled);
    assert!(one.reason.contains("cancelled by"), "{}", one.reason);
    let again: Cancelled = client.delete("/v1/jobs/job-2.4").unwrap();
    assert!(again.jobs.is_empty());
    let detail: JobDetail = client.get("/v1/jobs/job-1/detail").unwrap();
    assert_eq!((detail.job.state, detail.runs.len()), (JobState::Submitted, 0));
    let waited: JobView = client.get("/v1/jobs/job-1?wait_ms=50").unwrap();
    assert_eq!(waited.state, JobState::Submitted);
}

/// Few jobs can take much room, too.
#[test]
fn what_is_submitted_takes_only_so_much_room() {
    let world = world(Settings { queue_bytes_per_user: Some(1 << 20), ..Settings::default() });
    let big = json!({"command": ["/bin/true", "x".repeat(250_000)], "cwd": "/"});
    let mut refused = None;
    for _ in 0..8 {
        if let Err(error) = world.client.post::<Submitted>("/v1/jobs", &big) {
            refused = Some(error.to_string());
            break;
        }
    }
    let refused = refused.unwrap();
    assert!(refused.contains("1048576 are allowed") && refused.contains("a file"), "{refused}");
    let page: JobList = world.client.get("/v1/jobs").unwrap();
    assert_eq!(page.items.len(), 4);
    let _: Submitted = world.client.post("/v1/jobs", &job()).unwrap();
    let _: Cancelled = world.client.delete("/v1/jobs/job-1").unwrap();
    let _: Submitted = world.client.post("/v1/jobs", &big).unwrap();
}

#[test]
fn others_do_not_see_what_is_in_an_environment() {
    let world = world(Settings::default());
    let mut secret = job();
    secret["env"] = json!({"TOKEN": "4711"});
    let made: Submitted = world.client.post("/v1/jobs", &secret).unwrap();
    let address = world.server.as_ref().unwrap().address().unwrap().to_string();
    let other = Client::new(Place::Tcp { address, token: "other".into() }).unwrap();
    let seen = |client: &Client| -> Vec<String> {
        let list: JobList = client.get("/v1/jobs").unwrap();
        let one: JobView = client.get(&format!("/v1/jobs/{}", made.id)).unwrap();
        let detail: JobDetail = client.get(&format!("/v1/jobs/{}/detail", made.id)).unwrap();
        let all = list.items.into_iter().chain([one, detail.job]);
        all.map(|job| job.submit.env["TOKEN"].clone()).collect()
    };
    assert_eq!(seen(&world.client), ["4711"; 3]);
    assert_eq!(seen(&other), ["(hidden)"; 3]);
}

#[test]
fn bad_input_is_refused_with_the_field_and_the_remedy() {
    let world = world(Settings::default());
    let refused =
        |body: Value| world.client.post::<Submitted>("/v1/jobs", &body).unwrap_err().to_string();
    let two = refused(json!({"command": ["x"], "cwd": "/", "gpus": 2}));
    assert!(two.contains("one job per GPU"), "{two}");
    assert!(refused(json!({"command": ["x"], "cwd": "here"})).contains("absolute"));
    assert!(refused(json!({"command": [], "cwd": "/"})).contains("command"));
    assert!(refused(json!({"command": ["x"], "cwd": "/", "gpu": 1})).contains("gpu"));
    assert!(refused(json!({"command": "x", "cwd": "/"})).contains("command"));
    assert!(refused(json!([])).contains("cwd") || refused(json!([])).contains("struct"));
    for (path, words) in [
        ("/v1/jobs/nothing", "no job `nothing`"),
        ("/v1/jobs/%20", "no job"),
        ("/v1/jobs?limit=0", "1 to 500"),
        ("/v1/jobs?limit=x", "limit"),
        ("/v1/jobs?state=well", "submitted"),
        ("/v1/jobs?user=nobody-of-that-name", "no user"),
        ("/v1/jobs?unknown=1", "unknown"),
        ("/v1/jobs/job-1?wait_ms=999999", "20000"),
        ("/v1/jobs/job-1/logs?limit=3", "4 to 1048576"),
        ("/v1/gpus/7", "no GPU `7`"),
        ("/v1/plan/record", "no plan"),
        ("/v1/nothing", "openapi.json"),
        ("/v1/events?limit=9999", "1 to 1000"),
    ] {
        let error = world.client.get::<Value>(path).unwrap_err().to_string();
        assert!(error.contains(words), "{path}: {error}");
    }
    // More words than a query of the store has places, and each of them stands for several.
    let often = format!("/v1/jobs?state={}", "open,done,".repeat(6_000));
    assert!(world.client.get::<JobList>(&often).unwrap().items.is_empty());
    let error = world.client.delete::<Value>("/v1/summary").unwrap_err().to_string();
    assert!(error.contains("no such method"), "{error}");
}

#[test]
fn the_cluster_is_told() {
    let world = world(Settings::default());
    let client = &world.client;
    let health: HealthView = client.get("/v1/health").unwrap();
    assert_eq!((health.status.as_str(), health.paused), ("ok", false));
    assert_eq!(health.user, Caller::of_uid(muxflow_agent::sys::own_uid(), None).name);
    let gpus: GpuList = client.get("/v1/gpus").unwrap();
    assert_eq!(gpus.items.len(), 2);
    assert_eq!(gpus.items[0].online.as_ref().unwrap().service, "web");
    let history: GpuHistory = client.get("/v1/gpus/0/history?span_s=60").unwrap();
    assert!(history.points.is_empty());
    let summary: Summary = client.get("/v1/summary").unwrap();
    assert_eq!((summary.gpus, summary.gpus_by_health["Healthy"]), (2, 2));
    let plan: PlanView = client.get("/v1/plan").unwrap();
    assert!(!plan.made);
    let paused: PauseView = client.post("/v1/pause", &json!({})).unwrap();
    assert!(paused.paused && client.get::<HealthView>("/v1/health").unwrap().paused);
    let resumed: PauseView = client.post("/v1/resume", &json!({})).unwrap();
    assert!(!resumed.paused);
    let events: EventList = client.get("/v1/events?kind=operator").unwrap();
    let texts: Vec<&str> = events.items.iter().map(|event| event.text.as_str()).collect();
    assert!(texts[0].starts_with("paused by") && texts[1].starts_with("resumed by"), "{texts:?}");
    let description: Value = client.get("/v1/openapi.json").unwrap();
    assert!(description["openapi"].as_str().unwrap().starts_with("3.1"));
    for path in ["/v1/jobs", "/v1/jobs/{id}/logs", "/v1/events/stream", "/v1/summary"] {
        assert!(description["paths"][path].is_object(), "{path} is not described");
    }
    for (path, method) in [
        ("/v1/jobs", "post"),
        ("/v1/jobs/{id}", "delete"),
        ("/v1/pause", "post"),
        ("/v1/resume", "post"),
    ] {
        let full = &description["paths"][path][method]["responses"]["507"];
        assert!(full.is_object(), "a full disk is not described: {method} {path}");
    }
}

#[test]
fn output_is_read_in_pieces_and_waited_for() {
    let world = world(Settings::default());
    let made: Submitted = world.client.post("/v1/jobs", &job()).unwrap();
    let file: PathBuf = world.dir.path().join(format!("{}.stdout", made.id));
    std::fs::write(&file, "one\n").unwrap();
    let piece: LogPiece = world.client.get("/v1/jobs/job-1/logs").unwrap();
    assert_eq!((piece.text.as_str(), piece.end), ("one\n", false));
    let next = piece.next_offset;
    let writer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut file = std::fs::OpenOptions::new().append(true).open(file).unwrap();
        file.write_all(b"two\n").unwrap();
    });
    let path = format!("/v1/jobs/job-1/logs?offset={next}&wait_ms=20000");
    let piece: LogPiece = world.client.get(&path).unwrap();
    assert_eq!(piece.text, "two\n");
    writer.join().unwrap();
    let _: Cancelled = world.client.delete("/v1/jobs/job-1").unwrap();
    let piece: LogPiece =
        world.client.get("/v1/jobs/job-1/logs?stream=stderr&wait_ms=20000").unwrap();
    assert!(piece.end && piece.text.is_empty());
}

fn ask(address: std::net::SocketAddr, request: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn tcp_needs_a_token_and_the_socket_its_mode() {
    let world = world(Settings::default());
    let server = world.server.as_ref().unwrap();
    let address = server.address().unwrap();
    let get = |path: &str, headers: &str| {
        ask(
            address,
            &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"),
        )
    };
    assert!(get("/v1/health", "").starts_with("HTTP/1.1 401"));
    assert!(get("/v1/health", "Authorization: Bearer wrong\r\n").starts_with("HTTP/1.1 401"));
    let good = get("/v1/health", "Authorization: Bearer right\r\n");
    assert!(good.starts_with("HTTP/1.1 200") && good.contains("\"user\":\"root\""), "{good}");
    assert!(get("/v1/health", "Cookie: a=b; muxflow-token=right\r\n").starts_with("HTTP/1.1 200"));
    assert!(get("/v1/openapi.json", "").starts_with("HTTP/1.1 401"));
    assert!(get("/", "").ends_with("a page"), "pages need no token");
    let mode = std::fs::metadata(server.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let client =
        Client::new(Place::Tcp { address: address.to_string(), token: "right".into() }).unwrap();
    assert_eq!(client.get::<GpuList>("/v1/gpus").unwrap().items.len(), 2);
    let socket = server.socket().to_owned();
    let taken = Listen { socket, socket_mode: 0o600, tcp: None, silence: SILENCE };
    let error = Server::start(Arc::clone(&world.manager), &taken, Extras::default()).unwrap_err();
    assert!(error.to_string().contains("another manager"), "{error}");
}

/// What the server says to a client that sends this and nothing more, until it hangs up.
fn answer_until_hung_up(mut stream: impl Read + Write, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    let mut all = String::new();
    // The socket's own limit ends this if the server never does.
    stream.read_to_string(&mut all).expect("the server hangs up");
    all
}

#[test]
fn a_client_that_does_not_say_what_it_wants_loses_its_place() {
    // Long enough for a busy machine to take in what is sent at once.
    let silence = Duration::from_secs(3);
    let world = world_with(Settings::default(), silence);
    let server = world.server.as_ref().unwrap();
    let patience = Some(Duration::from_secs(60));
    let head = "GET /v1/gpus HTTP/1.1\r\nhost: x\r\n";
    let whole = format!("{head}\r\n");
    let post = "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer right\r\n";
    let post = format!("{post}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{");
    let cases = [
        ("", ""),
        (head, ""),
        // Answered, and then silent: a connection that is kept for the next request.
        (whole.as_str(), "HTTP/1.1 "),
        // Head without the body that it promises.
        (post.as_str(), "HTTP/1.1 400"),
    ];
    let right = |got: &str, (text, answer): (&str, &str)| {
        assert!(got.starts_with(answer) && got.is_empty() == answer.is_empty(), "{text}: {got}");
    };
    std::thread::scope(|threads| {
        for case in cases {
            threads.spawn(move || {
                let local = UnixStream::connect(server.socket()).unwrap();
                local.set_read_timeout(patience).unwrap();
                right(&answer_until_hung_up(local, case.0), case);
            });
            threads.spawn(move || {
                let far = std::net::TcpStream::connect(server.address().unwrap()).unwrap();
                far.set_read_timeout(patience).unwrap();
                right(&answer_until_hung_up(far, case.0), case);
            });
        }
    });

    // A client that waits for what happens has said what it wants: it may be silent.
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(patience).unwrap();
    stream.write_all(b"GET /v1/events/stream?after=0 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    std::thread::sleep(silence * 2);
    let _: PauseView = world.client.post("/v1/pause", &json!({})).unwrap();
    let (mut all, mut piece) = (String::new(), [0; 4096]);
    while !all.contains("paused") {
        let length = stream.read(&mut piece).unwrap();
        assert!(length > 0, "the stream ended: {all}");
        all.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
}

#[test]
fn events_are_streamed_from_any_number_and_end_with_the_server() {
    let mut world = world(Settings::default());
    let _: PauseView = world.client.post("/v1/pause", &json!({})).unwrap();
    let mut stream = UnixStream::connect(world.server.as_ref().unwrap().socket()).unwrap();
    stream.write_all(b"GET /v1/events/stream?after=0 HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    let mut read_until = |text: &mut String, words: &str| {
        while !text.contains(words) {
            let count = stream.read(&mut buffer).unwrap();
            assert!(count > 0, "ended before `{words}`: {text}");
            text.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    };
    read_until(&mut text, "paused by");
    assert!(text.contains("text/event-stream") && text.contains("id: 1"), "{text}");
    let _: PauseView = world.client.post("/v1/resume", &json!({})).unwrap();
    read_until(&mut text, "resumed by");
    drop(world.server.take());
    let mut rest = Vec::new();
    drop(stream.read_to_end(&mut rest));
}

/// Numbers are given under the lock of the store; whoever listens hears them in that order, and one
/// that comes late is not lost.
#[test]
fn no_event_is_lost_where_many_write() {
    let world = world(Settings::default());
    let manager = &world.manager;
    let event = |text: String| NewEvent {
        at: muxflow_manager::clock::now(),
        kind: "alert",
        gpu: None,
        job: None,
        service: None,
        text,
    };
    let mut heard = manager.bus.listen();
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let event = &event;
            scope.spawn(move || {
                for number in 0..100 {
                    manager.tell(event(format!("{writer} {number}")));
                }
            });
        }
    });
    let told: Vec<u64> = std::iter::from_fn(|| heard.try_recv().ok()).map(|e| e.seq).collect();
    assert_eq!(told, (1..=400).collect::<Vec<u64>>());

    let mut stream = UnixStream::connect(world.server.as_ref().unwrap().socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"GET /v1/events/stream?after=400 HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut read_until = |text: &mut String, words: &str| {
        while !text.contains(words) {
            assert!(Instant::now() < deadline, "never `{words}`: {text}");
            let count = stream.read(&mut buffer).unwrap();
            assert!(count > 0, "ended before `{words}`: {text}");
            text.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    };
    manager.tell(event("it listens".into()));
    read_until(&mut text, "it listens");
    let (_, written) = manager
        .store()
        .change(|change| {
            for text in ["first", "second"] {
                change.tell(event(text.into()));
            }
            Ok(())
        })
        .unwrap();
    for (seq, event) in written.into_iter().rev() {
        manager.bus.tell(muxflow_manager::bus::view(seq, event));
    }
    read_until(&mut text, "second");
    assert!(text.contains("first"), "{text}");
    manager.tell(event("the last".into()));
    read_until(&mut text, "the last");
    for words in ["first", "second", "the last"] {
        assert_eq!(text.matches(&format!("\"{words}\"")).count(), 1, "once each: {text}");
    }
}

/// All jobs of an array at once, and each of them by its own name.
#[test]
fn an_array_is_told_from_a_job() {
    let world = world(Settings::default());
    let array = json!({"command": ["/bin/true"], "cwd": "/", "array": {"first": 5, "last": 6}});
    let _: Submitted = world.client.post("/v1/jobs", &array).unwrap();
    for path in ["/v1/jobs/job-1", "/v1/jobs/job-1/detail", "/v1/jobs/job-1/logs"] {
        let error = world.client.get::<Value>(path).unwrap_err().to_string();
        assert!(error.contains("job-1 is an array") && error.contains("job-1.6"), "{error}");
    }
    let before = world.manager.reader().last_event().unwrap();
    let gone: Cancelled = world.client.delete("/v1/jobs/job-1").unwrap();
    assert_eq!(gone.jobs.len(), 2);
    let events = world.manager.reader().events(before, Some("job"), 10).unwrap();
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(events[0].at, events[1].at, "both in one write");
}

#[test]
fn a_full_disk_refuses_and_keeps_what_was_there() {
    let world = world(Settings::default());
    let _: Submitted = world.client.post("/v1/jobs", &job()).unwrap();
    world.manager.store().limit_pages(1).unwrap();
    let mut big = job();
    big["env"] = json!({"PADDING": "x".repeat(100_000)});
    let error = world.client.post::<Submitted>("/v1/jobs", &big).unwrap_err().to_string();
    assert!(error.contains("disk is full") && error.contains("nothing was changed"), "{error}");
    let page: JobList = world.client.get("/v1/jobs").unwrap();
    assert_eq!(page.items.len(), 1);
}
