//! The API against its own description: schemathesis makes requests from it, and no answer may be a
//! failure of the server or take for ever.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use muxflow_api::cluster::HealthView;
use muxflow_e2e::build::target;

use crate::world::{LONG, TOKEN, World, inside, variable};

/// Pinned: another version makes other requests.
const PACKAGES: [&str; 2] = ["schemathesis==4.32.5", "hypothesis==6.170.15"];

/// Says that something could not be had; with CI=true that is a failure.
fn skip(why: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "schemathesis: {why}");
    println!("SKIPPED schemathesis: {why}");
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// The program, installed once under the target directory.
fn install() -> Result<(), String> {
    let root = target().join("schemathesis");
    std::fs::create_dir_all(&root).map_err(|e| e.to_string())?;
    let lock = File::create(root.join("lock")).map_err(|e| e.to_string())?;
    lock.lock().map_err(|e| e.to_string())?;
    let (venv, marker) = (root.join("venv"), root.join("installed"));
    let wanted = PACKAGES.join("\n");
    if !std::fs::read_to_string(&marker).is_ok_and(|have| have == wanted) {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        run(pip.args(["install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES))?;
        std::fs::write(&marker, wanted).map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[test]
fn the_api_stands_requests_made_from_its_description() {
    match install() {
        Ok(()) => inside("fuzz::inner_fuzz", "t4"),
        Err(why) => skip(&why),
    }
}

/// The head of the answer to one request for the stream of events, and what came of its body first.
fn stream(address: &str, request: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    // The body of a stream that has something to tell begins at once; others end.
    let is_over = |answer: &[u8]| {
        let text = String::from_utf8_lossy(answer);
        text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            !head.contains("text/event-stream") || !head.contains(" 200 ") || body.len() > 20
        })
    };
    while !is_over(&answer) {
        match stream.read(&mut buffer).unwrap() {
            0 => break,
            count => answer.extend_from_slice(&buffer[..count]),
        }
    }
    let text = String::from_utf8_lossy(&answer).into_owned();
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    (status, text)
}

/// The stream of events against anything: every query with every header, method and token.
fn streams(address: &str) {
    let queries: [(&str, bool); 10] = [
        ("?after=0", true),
        ("?after=1", true),
        ("?after=%30", true),
        ("?after=-1", false),
        ("?after=18446744073709551616", false),
        ("?after=x%00", false),
        ("?after=1e3", false),
        ("?after=0&after=1", false),
        ("?before=1", false),
        ("?after=%ff%fe", false),
    ];
    let headers: [&[u8]; 6] = [
        b"",
        b"Last-Event-ID: 0\r\n",
        b"Last-Event-ID: 99999999999999999999\r\n",
        b"Last-Event-ID: \xff\xfe\r\n",
        b"Last-Event-ID: -1\r\nLast-Event-ID: x\r\n",
        b"Accept: application/json\r\nRange: bytes=5-1\r\n",
    ];
    let mut asked = 0;
    for (query, good) in queries {
        for header in headers {
            for (method, token) in
                [("GET", TOKEN), ("GET", "nobody"), ("POST", TOKEN), ("DELETE", TOKEN)]
            {
                let line = format!("{method} /v1/events/stream{query} HTTP/1.1\r\nHost: x\r\n");
                let end = format!("Authorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n");
                let request = [line.as_bytes(), header, end.as_bytes()].concat();
                let (status, text) = stream(address, &request);
                let expected = match (method, token == TOKEN, good) {
                    ("GET", true, true) => 200..=200,
                    _ => 400..=499,
                };
                let shown = String::from_utf8_lossy(&request).into_owned();
                assert!(expected.contains(&status), "{shown}: {text}");
                asked += 1;
            }
        }
    }
    println!("MEASURED the stream of events: {asked} requests, every one answered as described");
}

#[test]
#[ignore = "run inside an emulated node by the_api_stands_requests_made_from_its_description"]
fn inner_fuzz() {
    let program = target().join("schemathesis/venv/bin/schemathesis");
    // In shadow mode, so that nothing of what is made up is ever started.
    let world = World::start("shadow = true\njobs_per_user = 200\n[profiler]\nenabled = false\n");
    let address = world.address();
    let output = Command::new(program)
        .args(["run", "--header"])
        .arg(format!("Authorization: Bearer {TOKEN}"))
        .args([
            "--checks",
            "not_a_server_error,status_code_conformance,response_schema_conformance",
        ])
        // It never ends, which schemathesis cannot wait for: `streams` below asks it.
        .args(["--exclude-path", "/v1/events/stream"])
        .args([
            "--max-examples",
            "25",
            "--request-timeout",
            "30",
            "--seed",
            "7",
            "--no-color",
            "--no-shrink",
        ])
        .args(["--phases", "examples,coverage,fuzzing"])
        .arg(format!("http://{address}/v1/openapi.json"))
        .current_dir(world.base())
        .env("HOME", world.base())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}\n{}", world.log());
    let line = text.lines().find(|line| line.contains(" generated, ")).unwrap_or_default();
    println!("MEASURED schemathesis: {}", line.trim());
    let cases = line.split_ascii_whitespace().find_map(|word| word.parse::<u32>().ok());
    assert!(cases.is_some_and(|cases| cases >= 100), "hardly anything was tried: {text}");
    streams(&address);
    // It still answers.
    let health: HealthView = world.client.get("/v1/health").unwrap();
    assert_eq!(health.status, "ok");
    assert!(variable("MUXFLOW_TEST_BUILT").exists());
    world.end();
}
