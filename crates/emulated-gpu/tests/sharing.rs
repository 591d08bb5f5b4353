//! Memory and events that several processes share.

#[path = "support/device_memory.rs"]
mod device_memory;
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use device_memory::used_bytes;
use muxflow_emulated_gpu::launcher::Running;
use support::{client, compiled, node, on, output};

/// Pages of events that lie in the directory of the first GPU.
fn pages(node: &Running) -> usize {
    let files = std::fs::read_dir(node.node().gpu(0)).expect("its directory");
    let is_page = |name: std::ffi::OsString| name.as_encoded_bytes().starts_with(b"event");
    files.filter(|file| file.as_ref().is_ok_and(|file| is_page(file.file_name()))).count()
}

#[test]
fn memory_shared_by_descriptor_lives_until_the_last_lets_it_go() {
    let node = node("t4", 1.0);
    assert_eq!(output(on(&node, compiled("odd")).arg("descriptor")), "ok");
    assert_eq!(used_bytes(&node), 0);
}

#[test]
fn processes_share_memory_and_an_event() {
    let node = node("t4", 1.0);
    let mut lender = on(&node, compiled("odd"));
    lender.arg("lend").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut lender = lender.spawn().expect("it starts");
    let mut borrower = on(&node, compiled("odd"));
    borrower.arg("borrow").stdin(lender.stdout.take().expect("a pipe"));
    borrower.stdout(lender.stdin.take().expect("a pipe"));
    let mut borrower = borrower.spawn().expect("it starts");
    let lent = lender.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&lent.stderr).trim(), "ok");
    assert!(borrower.wait().expect("it ends").success());
    assert_eq!(used_bytes(&node), 0);
    assert_eq!(pages(&node), 0, "the event's page is gone");
}

/// A process that has recorded an event behind work without end, and one that waits for it.
fn recorder_and_waiter(node: &Running) -> (Child, Child) {
    let mut command = on(node, compiled("share"));
    let mut recorder = command.arg("record").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut handle = [0; 64];
    recorder.stdout.as_mut().expect("a pipe").read_exact(&mut handle).expect("a handle");
    let mut command = on(node, compiled("share"));
    command.arg("await").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut waiter = command.spawn().expect("it starts");
    waiter.stdin.take().expect("a pipe").write_all(&handle).expect("it reads");
    (recorder, waiter)
}

/// Nobody has waited for the process that died: its number is still taken.
#[test]
fn who_waits_for_the_event_of_a_process_that_dies_goes_on() {
    let node = node("t4", 1.0);
    let (mut recorder, mut waiter) = recorder_and_waiter(&node);
    let mut said = BufReader::new(waiter.stdout.take().expect("a pipe")).lines();
    assert_eq!(said.next().expect("a line").expect("text"), "waits");
    std::thread::sleep(Duration::from_millis(300));
    assert!(waiter.try_wait().expect("a status").is_none(), "it has something to wait for");
    assert_eq!(pages(&node), 1);
    recorder.kill().expect("it lives");
    let deadline = Instant::now() + Duration::from_secs(20);
    while waiter.try_wait().expect("a status").is_none() {
        if Instant::now() > deadline {
            waiter.kill().expect("it lives");
            panic!("it waits for one that is gone");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(said.next().expect("a line").expect("text"), "0 0");
    assert_eq!(pages(&node), 0, "nobody could clean up but the device");
    recorder.wait().expect("it ends");
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
}
