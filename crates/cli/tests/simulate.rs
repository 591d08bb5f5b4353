//! `muxflow simulate` and `muxflow trace` as a person types them: real files, real exit codes.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use std::path::Path;
use std::process::{Command, Output};

fn muxflow(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_muxflow")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn path(p: &Path) -> &str {
    p.to_str().unwrap()
}

#[test]
fn policies_stand_side_by_side_and_every_report_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (html, csv, jobs) =
        (dir.path().join("r.html"), dir.path().join("r.csv"), dir.path().join("j.csv"));
    let json = dir.path().join("r.json");
    let common = ["simulate", "--gpus", "30", "--jobs", "60", "--predictor", "rule"];
    let args: Vec<&str> = common
        .iter()
        .copied()
        .chain(["--compare", "online-only,time-sharing,muxflow", "--html", path(&html)])
        .chain(["--csv", path(&csv), "--jobs-csv", path(&jobs), "--json", path(&json)])
        .collect();
    let out = muxflow(&args);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let shown = text(&out.stdout);
    for word in ["online-only", "time-sharing", "muxflow", "oversold", "conservative rule"] {
        assert!(shown.contains(word), "{shown}");
    }
    assert!(std::fs::read_to_string(&html).unwrap().contains("</html>"));
    assert_eq!(std::fs::read_to_string(&jobs).unwrap().lines().count(), 1 + 3 * 60);
    assert!(std::fs::read_to_string(&csv).unwrap().lines().count() > 3 * 1000);
    let first = std::fs::read(&json).unwrap();
    let parsed: serde_json::Value = serde_json::from_slice(&first).unwrap();
    assert_eq!(parsed["runs"].as_array().unwrap().len(), 3);
    let out = muxflow(&args);
    assert!(out.status.success());
    assert_eq!(std::fs::read(&json).unwrap(), first, "the same seed must give the same bytes");
}

#[test]
fn a_generated_trace_is_inspected_and_simulated() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t.csv");
    let out = muxflow(&["trace", "generate", "--jobs", "80", "-o", path(&trace)]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let out = muxflow(&["trace", "inspect", path(&trace)]);
    assert!(text(&out.stdout).contains("own trace, 80 jobs"), "{}", text(&out.stdout));
    let out = muxflow(&[
        "simulate",
        "--gpus",
        "20",
        "--trace",
        path(&trace),
        "--policy",
        "muxflow-m",
        "--predictor",
        "rule",
        "--arrive-within",
        "2",
        "--json",
        "-",
    ]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let parsed: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(parsed["runs"][0]["summary"]["unfinished"], 0);
    let curve = muxflow(&["trace", "generate", "--requests", "20-190"]);
    assert_eq!(text(&curve.stdout).lines().count(), 1441);
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("bad.csv");
    std::fs::write(&trace, "job_id,submit_s,duration_s\na,1,5\nb,2,-5\n").unwrap();
    let cases: [(&[&str], &[&str]); 6] = [
        (&["simulate", "--trace", path(&trace)], &["bad.csv", "line 3", "negative"]),
        (&["trace", "inspect", path(&trace)], &["bad.csv", "line 3"]),
        (&["simulate", "--policy", "magic"], &["magic", "muxflow-s-m"]),
        (&["simulate", "--gpus", "0"], &["gpus"]),
        (&["simulate", "--gpu-type", "H9000", "--gpus", "4"], &["T4"]),
        (&["trace", "generate", "--requests", "many"], &["many", "20-190"]),
    ];
    for (args, words) in cases {
        let out = muxflow(args);
        assert!(!out.status.success(), "{args:?}");
        for w in words {
            assert!(text(&out.stderr).contains(w), "{args:?}: {}", text(&out.stderr));
        }
    }
}
