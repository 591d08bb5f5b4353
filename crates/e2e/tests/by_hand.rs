//! `muxflow run`: a job with no manager, from the shell.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use muxflow_e2e::{Outcome, build, client, stub_driver};

/// The program, built by this test: it is not this package's own.
fn muxflow() -> PathBuf {
    build::products().join("muxflow")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(muxflow());
    command
        .env("LD_LIBRARY_PATH", stub_driver())
        .env("MUXFLOW_XCUDA", build::xcuda())
        .env("STUB_KERNEL_US", "300")
        .arg("run")
        .args(arguments);
    command
}

fn run(arguments: &[&str]) -> Outcome {
    command(arguments).output().expect("it runs").into()
}

#[test]
fn a_job_by_hand_is_held_and_accounted_for() {
    let program = client("client", &[]);
    let program = program.to_str().expect("a path");
    let outcome = run(&[
        "--memory",
        "1MiB",
        "--",
        program,
        "init",
        "alloc:0x80000",
        "alloc:0x90000",
        "launch:100",
        "exit:3",
    ]);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("alloc 0\nalloc 2\nlaunch 0"), "{}", outcome.stdout);
    let report = outcome.stderr.lines().last().unwrap_or_default();
    for part in ["100 launches", "512.0 KiB of 1.0 MiB", "1 requests refused"] {
        assert!(report.contains(part), "{part}: {report}");
    }

    let child = command(&["--memory", "1MiB", "--", program, "handler", "init", "loop", "exit:5"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    std::thread::sleep(Duration::from_millis(500));
    let pid = i32::try_from(child.id()).expect("an id");
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let outcome: Outcome = child.wait_with_output().expect("it ends").into();
    assert_eq!(outcome.status.code(), Some(5), "{}", outcome.stderr);

    let outcome = run(&["--memory", "1MiB", "--", program, "init", "kill:15"]);
    assert_eq!(outcome.status.code(), Some(128 + 15));
    assert_eq!(outcome.status.signal(), None);
}

#[test]
fn it_explains_itself_and_refuses_what_would_run_free() {
    let outcome = run(&["--explain"]);
    assert!(outcome.status.success());
    for part in ["cuLaunchKernelEx_ptsz", "libcuda.so.1 (LD_LIBRARY_PATH, found)", "720 in all"] {
        assert!(outcome.stdout.contains(part), "{part}: {}", outcome.stdout);
    }
    let program = client("client", &["-static"]);
    let outcome = run(&["--memory", "1MiB", "--", program.to_str().expect("a path"), "ready"]);
    assert_eq!(outcome.status.code(), Some(1));
    assert!(outcome.stderr.contains("statically linked"), "{}", outcome.stderr);
    let outcome = run(&["--memory", "lots", "--", "true"]);
    assert!(outcome.stderr.contains("--memory"), "{}", outcome.stderr);
}
