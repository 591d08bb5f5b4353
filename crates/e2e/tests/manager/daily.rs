//! A day with `muxflow up`, in a minute.

use std::time::{Duration, Instant};

use muxflow_api::cluster::{PairingList, Summary};
use muxflow_api::jobs::JobState;
use muxflow_store::Store;
use muxflow_types::{GpuType, WorkloadName};

use crate::world::{LONG, World, inside};

#[test]
fn jobs_are_submitted_measured_run_paused_and_cancelled() {
    inside("daily::inner_daily", "t4x2");
}

#[test]
#[ignore = "run inside an emulated node by jobs_are_submitted_measured_run_paused_and_cancelled"]
fn inner_daily() {
    let mut world = World::start("[profiler]\nwindow_s = 2\nlimit_s = 30\n");
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
    // A number is enough.
    assert!(world.must(&["describe", "1"]).starts_with("job-1 hello\n"));
    let ended = end_from_outside(&world);
    arrays(&world);
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
    has_a_whole_profile(&world, &measured.workload);
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
        let text = world.must(&["describe", id]);
        assert!(text.contains("  waits      offline work is paused"), "{text}");
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
    assert!(summary.sm_activity_pct.is_some() && summary.oversold_gpu.is_none(), "{summary:#?}");
    assert!(world.must(&["wait", &ended]).contains("done"), "ended from outside, it came back");
    assert_eq!((world.job(&ended).run, world.job(&ended).failures), (2, 0));
    one_manager_only(&world);
    set_aside(&mut world);
    world.end();
}

/// What was measured with real sensors is all in the store.
fn has_a_whole_profile(world: &World, workload: &str) {
    let store = Store::open_read_only(&world.base().join("state/muxflow.db")).unwrap();
    let workload = WorkloadName::new(workload).unwrap();
    let profile = store.profile(&workload, &GpuType::new("T4").unwrap()).unwrap().unwrap();
    assert!(profile.solo_time.is_some(), "{profile:?}");
    assert!(profile.sm_activity.is_some_and(|pct| pct.value() > 0.0), "{profile:?}");
    assert!(profile.memory.is_some_and(|bytes| bytes.0 > 0), "{profile:?}");
}

fn one_manager_only(world: &World) {
    let config = world.base().join("up.toml");
    let began = Instant::now();
    let other = world.muxflow(&["up", "--config", config.to_str().unwrap()]);
    let words = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && words.contains("another manager"), "{words}");
    assert!(began.elapsed() < LONG.max(Duration::from_secs(1)));
}

/// A GPU is set aside by its number; one that is not there is refused, with those that are.
fn set_aside(world: &mut World) {
    world.leave();
    world.change(|text| text.replace("[profiler]", "[profiler]\nset_aside = 'GPU-nowhere'"));
    let config = world.base().join("up.toml");
    let up = world.muxflow(&["up", "--config", config.to_str().unwrap()]);
    let words = String::from_utf8_lossy(&up.stderr).into_owned();
    let names =
        words.contains("profiler.set_aside: there is no GPU `GPU-nowhere` here; there are ");
    assert!(!up.status.success() && names, "{words}");
    world.change(|text| text.replace("GPU-nowhere", "1"));
    world.up();
}

/// Somebody ends the process of a job: it is queued again, also where it may not fail once.
fn end_from_outside(world: &World) -> String {
    let pid = world.base().join("pid");
    let script = format!("[ $MUXFLOW_RUN = 2 ] || {{ echo $$ > {0}; sleep 100; }}", pid.display());
    let id = world.must(&["submit", "--", "sh", "-c", &script]).trim().to_owned();
    let read = || std::fs::read_to_string(&pid).ok()?.trim().parse::<u32>().ok();
    world.until("it runs", || read().is_some());
    muxflow_agent::sys::kill(read().unwrap(), 15).unwrap();
    let text = || world.must(&["describe", &id]);
    world.until("it waits", || text().contains("ended by signal 15; may start again in"));
    id
}

/// An array by the name that `submit` prints, and each of its jobs by its own.
fn arrays(world: &World) {
    let job = ["--", "sh", "-c", "echo number $MUXFLOW_ARRAY_INDEX"];
    let submit = |range: &str| world.must(&[&["submit", "--array", range], &job[..]].concat());
    let made = submit("3-4");
    let (array, count) = made.trim().split_once(' ').unwrap();
    assert_eq!(count, "(2 jobs)");
    let waited = world.must(&["wait", array]);
    let ends: Vec<String> = [3, 4].map(|n| format!("{array}.{n} done: exit code 0")).to_vec();
    assert_eq!(waited.lines().collect::<Vec<_>>(), ends);
    assert_eq!(world.must(&["logs", &format!("{array}.4")]), "number 4\n");
    let listed = world.must(&["jobs", "--array", array]);
    assert_eq!(listed.matches(array).count(), 2, "{listed}");
    let whole = world.muxflow(&["describe", array]);
    let words = String::from_utf8_lossy(&whole.stderr).into_owned();
    assert!(!whole.status.success() && words.contains("is an array of jobs"), "{words}");
    let one = submit("5-5");
    assert!(one.trim().ends_with(".5"), "{one}");
    assert!(world.must(&["wait", one.trim()]).contains("done"));
    assert_eq!(world.must(&["logs", one.trim()]), "number 5\n");
}
