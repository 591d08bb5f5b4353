//! Tests of the daemon's life with a script in place of the control program: real processes, a
//! fake protocol.

use super::*;
use crate::cgroup::{Cgroups, Limits};
use std::os::unix::fs::PermissionsExt;

/// A control program that, with `-f`, runs until it is told to quit, and answers otherwise.
const SCRIPT: &str = r#"#!/bin/sh
P=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = "-f" ]; then
  [ -e "$P/../broken" ] && { echo "no device" >&2; exit 1; }
  echo $$ > $P/pid
  echo "$@" > $P/flags
  [ -e "$P/../brief" ] && { sleep 0.1; exit 1; }
  while [ ! -e $P/quit ]; do sleep 0.02; done
  exit 0
fi
read line
[ -e $P/pid ] && kill -0 $(cat $P/pid) 2>/dev/null || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
case "$line" in
  get_server_list) cat $P/servers 2>/dev/null;;
  get_server_status*) cat $P/status;;
  get_client_list*) echo 41;;
  quit)
    : > $P/../asked
    [ -e "$P/../held" ] && sleep 60
    : > $P/quit;;
esac
exit 0
"#;

fn daemon(dir: &Path, name: &str) -> MpsDaemon {
    let program = dir.join("control");
    fs::write(&program, SCRIPT).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let spec = DaemonSpec {
        program,
        uuid: "GPU-1".into(),
        dir: dir.join("mps"),
        multi_user: false,
        limit: Duration::from_secs(3),
        offline_partition: None,
    };
    let groups = Cgroups::detect("muxflow-test");
    let name = format!("mps-{name}-{}", std::process::id());
    MpsDaemon::adopt(spec, groups.create(&name, &Limits::default()).unwrap()).unwrap()
}

#[test]
fn a_reset_waits_for_no_client_that_holds_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut held = daemon(dir.path(), "held");
    assert!(held.ensure().unwrap());
    let first = held.process().unwrap();
    // As with clients that were hit by a fault and stay: asked to quit, the daemon waits for them.
    fs::write(dir.path().join("mps/held"), "").unwrap();
    held.reset().unwrap();
    let second = held.process().unwrap();
    assert_ne!(first, second);
    assert!(!dir.path().join("mps/asked").exists(), "it was asked to quit");
    // One that is to end for good is asked, and not waited for beyond the limit.
    held.stop();
    assert!(dir.path().join("mps/asked").exists());
    assert!(!second.is_alive());
    held.group.remove().unwrap();
}

#[test]
fn it_is_started_watched_adopted_and_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = daemon(dir.path(), "life");
    assert_eq!(first.state(), MpsState::Down);
    assert!(first.ensure().unwrap());
    assert_eq!(first.state(), MpsState::Idle);
    let pid = first.process().unwrap();
    let pipe_dir = first.spec().pipe_dir();
    fs::write(pipe_dir.join("servers"), "40\n").unwrap();
    fs::write(pipe_dir.join("status"), "FAULT\n").unwrap();
    let faulty = MpsState::Serving { server: 40, status: ServerStatus::Fault, clients: vec![41] };
    assert_eq!(first.state(), faulty);

    // A second agent takes over what the first left.
    let mut second = daemon(dir.path(), "life");
    assert_eq!(second.process(), Some(pid), "the same daemon");
    assert!(second.ensure().unwrap());
    assert_eq!(second.started(), 0, "not started again");

    // Killed from outside, it comes back.
    sys::kill(pid.pid, libc::SIGKILL).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while first.process().is_some() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(first.state(), MpsState::Down);
    assert!(first.ensure().unwrap());
    assert_ne!(first.process(), Some(pid));
    first.stop();
    assert_eq!(first.state(), MpsState::Down);
    first.group.remove().unwrap();
}

#[test]
fn a_daemon_that_cannot_start_is_tried_again_with_growing_waits() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = daemon(dir.path(), "broken");
    fs::write(dir.path().join("mps/broken"), "").unwrap();
    let error = daemon.ensure().unwrap_err().to_string();
    assert!(error.contains("no device"), "{error}");
    assert!(!daemon.ensure().unwrap(), "waits before it tries again");
    assert_eq!(daemon.started(), 1);
    fs::remove_file(dir.path().join("mps/broken")).unwrap();
    daemon.reset().unwrap();
    assert!(daemon.process().is_some());
    daemon.stop();
    daemon.group.remove().unwrap();
}

#[test]
fn a_daemon_that_dies_soon_after_each_start_is_started_ever_more_seldom() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = daemon(dir.path(), "brief");
    fs::write(dir.path().join("mps/brief"), "").unwrap();
    let began = Instant::now();
    while daemon.started() < 4 && began.elapsed() < Duration::from_secs(60) {
        // Some starts are seen to fail, others answer and die after that.
        drop(daemon.ensure());
        std::thread::sleep(Duration::from_millis(20));
    }
    // At once, at once, and then after 0.5 and 1 s.
    assert_eq!(daemon.started(), 4);
    assert!(began.elapsed() >= Duration::from_millis(1_500), "{:?}", began.elapsed());
    daemon.stop();
    daemon.group.remove().unwrap();
}

#[test]
fn waits_grow_and_the_first_restart_is_at_once() {
    assert_eq!([0, 1, 2, 3].map(wait_after).map(|wait| wait.as_millis()), [0, 0, 500, 1_000]);
    assert_eq!(wait_after(u32::MAX), LONGEST_WAIT);
}

#[test]
fn a_daemon_of_other_settings_is_known_as_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = daemon(dir.path(), "settings");
    assert!(first.ensure().unwrap() && !first.is_outdated());
    let flags = || fs::read_to_string(dir.path().join("mps/pipe/flags")).unwrap();
    assert_eq!(flags().trim(), "-f");
    // The next agent wants a server for all users; the one that runs has services on it.
    let spec = DaemonSpec { multi_user: true, ..first.spec().clone() };
    let mut second = MpsDaemon::adopt(spec, first.group.clone()).unwrap();
    assert_eq!(second.process(), first.process());
    assert!(second.is_outdated() && !second.serves_all_users(), "it is what it was started as");
    second.reset().unwrap();
    assert!(!second.is_outdated() && second.serves_all_users());
    assert_eq!(flags().trim(), "-f -multiuser-server");
    second.stop();
    second.group.remove().unwrap();
}

#[test]
fn a_daemon_that_died_while_nobody_looked_is_known_and_what_it_left_goes_with_a_reset() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = daemon(dir.path(), "unseen");
    assert!(!first.died_unseen(), "there was none");
    assert!(first.ensure().unwrap());
    let (spec, group) = (first.spec().clone(), first.group.clone());
    let found = MpsDaemon::adopt(spec.clone(), group.clone()).unwrap();
    assert!(!found.died_unseen() && found.process().is_some());
    let pid = first.process().unwrap();
    sys::kill(pid.pid, libc::SIGKILL).unwrap();
    first.reap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while pid.is_alive() && Instant::now() < deadline {
        first.reap();
        std::thread::yield_now();
    }
    assert!(!first.died_unseen(), "this one started it itself");
    let mut found = MpsDaemon::adopt(spec, group).unwrap();
    assert!(found.died_unseen() && found.process().is_none());
    found.reset().unwrap();
    assert!(!found.died_unseen() && found.process().is_some());
    found.stop();
    found.group.remove().unwrap();
}
