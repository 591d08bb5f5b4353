//! `muxflow plan` as a person types it: real files, real exit codes.

#![expect(clippy::unwrap_used, reason = "a test that cannot start the program has failed")]

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

fn muxflow(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_muxflow"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that stops early closes the pipe; that is its right.
    let written = child.stdin.take().unwrap().write_all(input.as_bytes());
    drop(written);
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn example() -> String {
    text(&muxflow(&["plan", "--example"], "").stdout).to_owned()
}

#[test]
fn the_example_is_planned() {
    let out = muxflow(&["plan", "-"], &example());
    let shown = text(&out.stdout);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(shown.contains("proven optimal"), "{shown}");
    assert!(shown.contains("huge-5") && shown.contains("20.0 GiB"), "{shown}");
    assert!(shown.contains("conservative rule"), "the source of the speeds is told: {shown}");
}

#[test]
fn the_same_snapshot_gives_the_same_json() {
    let first = muxflow(&["plan", "-", "--json"], &example());
    let second = muxflow(&["plan", "-", "--json", "--threads", "2"], &example());
    assert!(first.status.success());
    assert_eq!(first.stdout, second.stdout);
    let json: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["certified"], true);
    let placed = json["assignments"].as_array().unwrap().len();
    assert_eq!(placed + json["waiting"].as_array().unwrap().len(), 6);
}

#[test]
fn a_job_is_explained() {
    let out = muxflow(&["plan", "-", "--explain", "train-3"], &example());
    let shown = text(&out.stdout);
    assert!(shown.contains("train-3 starts on"), "{shown}");
    assert!(shown.contains("COULD BE ON") && shown.contains("not Healthy"), "{shown}");
    let out = muxflow(&["plan", "-", "--explain", "nobody"], &example());
    assert!(!out.status.success());
    assert!(text(&out.stderr).contains("no job `nobody`"));
}

#[test]
fn bad_input_is_named_with_its_place_and_remedy() {
    let broken = example().replacen("\"share_sms\": 28", "\"share_sms\": 280", 1);
    for (args, input, words) in [
        (&["plan", "/no/such/file"][..], "", "/no/such/file"),
        (&["plan", "-"], "{", "--example"),
        (&["plan", "-"], &broken, "gpus[0].share_sms"),
        (&["plan", "-", "--max-disruption", "140"], &example(), "between 0 and 100"),
        (&["plan", "-", "--restart-cost", "9000"], &example(), "restart_cost"),
        (&["plan"], "", "SNAPSHOT"),
    ] {
        let out = muxflow(args, input);
        let error = text(&out.stderr);
        assert!(!out.status.success(), "{args:?}");
        assert!(error.contains(words), "{args:?}: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}
