//! `muxflow logs -f` over rotations and over a restart of the job: nothing is missing.

use std::fs;
use std::process::Stdio;

use muxflow_api::jobs::JobState;

use crate::world::{LONG, World, inside};

#[test]
fn output_is_followed_over_rotations_and_restarts() {
    inside("output::inner_output", "t4");
}

/// Numbered lines, more than one file holds; then it waits until they were rotated away, because what a
/// program writes in that very moment may be lost. So all but the last lines stay just under the limit,
/// and one single write goes over it: there is nothing to rotate before all of it is there. In its
/// second run it ends.
const CHATTY: &str = r#"
lines() { seq -f "run $MUXFLOW_RUN part $1 line %.0f" $2 $3; }
write() {
    lines $1 1 42000
    lines $1 42001 42150 | dd bs=64k iflag=fullblock status=none
    while [ "$(stat -L -c %s /proc/$$/fd/1)" -gt 100000 ]; do sleep 0.05; done
}
write a
write b
echo "end of run $MUXFLOW_RUN"
[ "$MUXFLOW_RUN" = 2 ] || exec sleep 1000
"#;

#[test]
#[ignore = "run inside an emulated node by output_is_followed_over_rotations_and_restarts"]
fn inner_output() {
    let world =
        World::start("[profiler]\nenabled = false\n[agent.logs]\nbytes = 1000000\nfiles = 2\n");
    world.wait_healthy(1);
    let id = world.must(&["submit", "--", "sh", "-c", CHATTY]).trim().to_owned();
    let path = world.base().join("followed");
    let mut follower = world
        .command(&["logs", "-f", &id])
        .stdout(fs::File::create(&path).unwrap())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let followed = || fs::read_to_string(&path).unwrap();
    world.until("the first run is through", || followed().ends_with("end of run 1\n"));
    world.must(&["pause"]);
    world.wait(&id, "it has left", |job| job.state == JobState::Queued);
    world.must(&["resume"]);
    let ended = world.wait(&id, "done", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run), (JobState::Done, 2), "{ended:#?}");
    let deadline = std::time::Instant::now() + LONG;
    let status = loop {
        if let Some(status) = follower.try_wait().unwrap() {
            break status;
        }
        assert!(std::time::Instant::now() < deadline, "the follower does not end");
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert!(status.success(), "{status}");
    let text = followed();
    let mut lines = text.lines();
    for run in 1..=2 {
        for part in ["a", "b"] {
            for line in 1..=42_150 {
                let expected = format!("run {run} part {part} line {line}");
                assert_eq!(lines.next(), Some(expected.as_str()));
            }
        }
        assert_eq!(lines.next(), Some(format!("end of run {run}").as_str()));
    }
    assert_eq!(lines.next(), None);
    // Who comes later is told what is no longer there, and gets the rest.
    let later = world.muxflow(&["logs", &id]);
    let (out, errors) = (String::from_utf8(later.stdout).unwrap(), later.stderr);
    assert!(text.ends_with(&out) && out.len() < text.len(), "{} of {}", out.len(), text.len());
    let missing = format!("{} bytes of output are no longer kept", text.len() - out.len());
    let errors = String::from_utf8_lossy(&errors).into_owned();
    assert!(errors.contains(&missing), "{errors}");
    world.end();
}
