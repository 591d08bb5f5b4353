//! `muxflow config` as a person types it.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use std::process::{Command, Output};

fn muxflow(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_muxflow")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn what_is_printed_can_be_checked() {
    let printed = muxflow(&["config", "print"]);
    assert!(printed.status.success());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("node.toml");
    std::fs::write(&file, &printed.stdout).unwrap();
    let checked = muxflow(&["config", "check", file.to_str().unwrap()]);
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    assert!(text(&checked.stdout).contains("GPU types A10, T4"), "{}", text(&checked.stdout));
}

#[test]
fn a_bad_file_is_refused_with_file_line_field_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "[gpu.T4.sm_activity_pct]\nhealthy = 90\n").unwrap();
    let checked = muxflow(&["config", "check", file.to_str().unwrap()]);
    assert!(!checked.status.success());
    let error = text(&checked.stderr);
    for part in ["bad.toml", "line 2", "gpu.T4.sm_activity_pct.healthy", "must rise"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(checked.stdout.is_empty());
}

#[test]
fn a_missing_file_says_how_to_make_one() {
    let checked = muxflow(&["config", "check", "no/such/file.toml"]);
    assert!(!checked.status.success());
    let error = text(&checked.stderr);
    assert!(error.contains("no/such/file.toml") && error.contains("config print"), "{error}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in [["config", "print"].as_slice(), ["doctor"].as_slice()] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = Command::new(env!("CARGO_BIN_EXE_muxflow"))
            .args(args)
            .stdout(writer)
            .stderr(std::process::Stdio::piped())
            .output()
            .unwrap();
        assert!(!text(&ended.stderr).contains("panicked"), "{args:?}: {}", text(&ended.stderr));
    }
}
