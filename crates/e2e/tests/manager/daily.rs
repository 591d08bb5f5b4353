//! A day with `muxflow up`, in a minute.

use std::time::{Duration, Instant};

use muxflow_api::cluster::{PairingList, Summary};
use muxflow_api::jobs::JobState;

use crate::world::{LONG, World, inside};

#[test]
fn jobs_are_submitted_measured_run_paused_and_cancelled() {
    inside("daily::inner_daily", "t4x2");
}

#[test]
#[ignore = "run inside an emulated node by jobs_are_submitted_measured_run_paused_and_cancelled"]
fn inner_daily() {
    let world = World::start("[profiler]\nwindow_s = 2\nlimit_s = 30\n");
    world.wait_healthy(2);
    // A short job, its output and its end.
    let id = world.must(&[
        "submit",
        "--name",
        "hello",
        "-e",
        "WHO=world",
        "--",
        "sh",
        "-c",
        "echo hello $WHO; echo as $(id -u) run $MUXFLOW_RUN; sleep 1; echo bye",
    ]);
    let id = id.trim();
    let followed = world.must(&["logs", "-f", id]);
    let uid = muxflow_agent::sys::own_uid();
    assert_eq!(followed, format!("hello world\nas {uid} run 1\nbye\n"));
    assert!(world.must(&["wait", id]).contains("done"));
    // One that fails says so.
    let bad = world.must(&["submit", "--", "sh", "-c", "exit 7"]);
    let waited = world.muxflow(&["wait", bad.trim()]);
    assert!(!waited.status.success());
    assert!(String::from_utf8_lossy(&waited.stdout).contains("exit code 7"));
    // So does one whose program is not there; it is not tried for ever.
    let typo = world.must(&["submit", "--", "/usr/bin/pyhton", "train.py"]);
    let waited = world.muxflow(&["wait", typo.trim()]);
    assert!(!waited.status.success());
    let text = String::from_utf8_lossy(&waited.stdout).into_owned();
    assert!(
        text.contains("could not be started: ") && text.contains("`/usr/bin/pyhton`"),
        "{text}"
    );
    assert_eq!(world.job(typo.trim()).run, 1);
    // Two GPUs are not to be had.
    let two = world.muxflow(&["submit", "--gpus", "2", "--", "true"]);
    let words = String::from_utf8_lossy(&two.stderr).into_owned();
    assert!(!two.status.success() && words.contains("one job per GPU"), "{words}");

    // A real job: measured on an idle GPU, then it goes on there, at a speed that is seen.
    let mut words = vec!["submit", "--checkpoint-signal", "TERM", "--"];
    let worker = world.worker(2_000);
    words.extend(worker.iter().map(String::as_str));
    let long = world.must(&words);
    let long = long.trim();
    let measured = world.wait(long, "measured", |job| job.state == JobState::Running);
    assert!(measured.reason.contains("per iteration alone"), "{measured:#?}");
    let seen = world.wait(long, "its speed is seen", |job| job.seen_speed.is_some());
    println!("MEASURED speed of a job alone against its profile: {:.3}", seen.seen_speed.unwrap());
    let text = world.must(&["describe", long]);
    assert!(text.contains("on GPU") && text.contains("iterations per second"), "{text}");
    let pairings: PairingList = world.client.get("/v1/pairings").unwrap();
    assert!(pairings.items.iter().any(|pairing| pairing.job == long), "{pairings:#?}");
    // The same command again is not measured again.
    let again = world.must(&words);
    let again = again.trim();
    let second = world.wait(again, "runs", |job| job.state == JobState::Running);
    assert!(second.predicted_speed.is_some(), "planned, not measured: {second:#?}");

    // Pause drains everything; resume brings it back.
    assert!(world.must(&["pause"]).contains("paused"));
    for id in [long, again] {
        world.wait(id, "queued", |job| job.state == JobState::Queued);
    }
    world.must(&["resume"]);
    let back = world.wait(long, "again", |job| job.run > 1 && job.state == JobState::Running);
    assert_eq!(back.failures, 0);
    world.must(&["cancel", long, again]);
    for id in [long, again] {
        let ended = world.wait(id, "cancelled", |job| job.state.is_final());
        assert_eq!(ended.state, JobState::Cancelled);
    }
    let jobs = world.must(&["jobs"]);
    assert!(jobs.contains("hello") && jobs.contains("cancelled"), "{jobs}");
    assert!(world.must(&["replay"]).contains("\"assignments\""));
    let summary: Summary = world.client.get("/v1/summary").unwrap();
    assert!(summary.sm_activity_pct.is_some() && summary.oversold_gpu.is_some(), "{summary:#?}");
    one_manager_only(&world);
    world.end();
}

fn one_manager_only(world: &World) {
    let config = world.base().join("up.toml");
    let began = Instant::now();
    let other = world.muxflow(&["up", "--config", config.to_str().unwrap()]);
    let words = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && words.contains("another manager"), "{words}");
    assert!(began.elapsed() < LONG.max(Duration::from_secs(1)));
}
