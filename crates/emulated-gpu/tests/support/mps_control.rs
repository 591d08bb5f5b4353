//! Talking to the MPS control daemon, and clients that it serves.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::launcher::Running;

use crate::support::{built, client, on};

/// Sends one command; what was printed, and whether it went well.
pub(crate) fn control(node: &Running, command: &str) -> (bool, String) {
    let mut child = on(node, built().join("nvidia-cuda-mps-control"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    writeln!(input, "{command}").expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

pub(crate) fn daemon(node: &Running) {
    let status = on(node, built().join("nvidia-cuda-mps-control")).arg("-d").status();
    assert!(status.expect("it starts").success());
}

pub(crate) fn holder(node: &Running) -> Child {
    let mut child =
        on(node, client()).arg("hold").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = [0; 3];
    let stdout = child.stdout.as_mut().expect("a pipe");
    stdout.read_exact(&mut line).expect("it speaks");
    assert_eq!(&line, b"up\n");
    child
}

/// What the client says at its end: the error of the driver that it met.
pub(crate) fn failure(child: Child) -> String {
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(3));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub(crate) fn within(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A client with a context that waits for a line on its standard input, after pushing so much work.
pub(crate) fn pushed(command: &mut Command, kernels: &str) -> Child {
    let command = command.args(["push", kernels]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut line = [0; 7];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut line).expect("it speaks");
    assert_eq!(&line, b"pushed\n");
    child
}

/// Lets it go on; the error that it met at its end.
pub(crate) fn waited(mut child: Child) -> String {
    // One that was struck may be gone already.
    drop(writeln!(child.stdin.take().expect("a pipe"), "go"));
    let output = child.wait_with_output().expect("it ends");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
