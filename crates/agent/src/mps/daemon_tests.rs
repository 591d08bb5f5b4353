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
  while [ ! -e $P/quit ]; do sleep 0.02; done
  exit 0
fi
read line
[ -e $P/pid ] && kill -0 $(cat $P/pid) 2>/dev/null || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
case "$line" in
  get_server_list) cat $P/servers 2>/dev/null;;
  get_server_status*) cat $P/status;;
  get_client_list*) echo 41;;
  quit) : > $P/quit;;
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
