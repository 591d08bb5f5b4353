//! What a submission asks for reaches its process, and what keeps it waiting can be read.

use std::fs;
use std::io::Write;

use muxflow_api::jobs::{JobDetail, JobState};

use crate::world::{World, inside, root, variable};

#[test]
fn what_a_submission_asks_for_reaches_its_process() {
    if root("limits on memory and processors") {
        inside("wants::inner_wants", "t4");
    }
}

/// Counts up, saves where it is when it is told by the signal that it chose, and goes on from there.
const COUNTS: &str = r#"
state="$MUXFLOW_CHECKPOINT_DIR/count"
count=$(cat "$state" 2>/dev/null || echo 0)
echo "run $MUXFLOW_RUN from $count"
trap 'echo "told by TERM"' TERM
trap 'echo $count > "$state"; echo "told by USR1"; exit 0' USR1
while :; do count=$((count + 1)); sleep 0.1; done
"#;

#[test]
#[ignore = "run inside an emulated node by what_a_submission_asks_for_reaches_its_process"]
fn inner_wants() {
    let world = World::start("[profiler]\nenabled = false\n");
    world.wait_healthy(1);
    limits(&world);
    late_blame(&world);
    let id = signal(&world);
    waits(&world, &id);
    world.end();
}

fn limits(world: &World) {
    let cpus = "grep ^Cpus_allowed_list /proc/self/status";
    let id = world.must(&["submit", "--cpus", "0", "--", "sh", "-c", cpus]).trim().to_owned();
    world.must(&["wait", &id]);
    assert_eq!(world.must(&["logs", &id]), "Cpus_allowed_list:\t0\n");
    // More than it asked for is more than it gets.
    let eats = "x=$(head -c 300M /dev/zero | tr '\\0' a); echo ${#x}";
    let submit = ["submit", "--host-memory", "48MiB", "--", "sh", "-c", eats];
    let id = world.must(&submit).trim().to_owned();
    let waited = world.muxflow(&["wait", &id]);
    assert!(!waited.status.success());
    let text = String::from_utf8_lossy(&waited.stdout).into_owned();
    assert!(text.contains("failed: out of host memory"), "{text}");
}

/// It says that all is well, and then the driver names it as the one that broke the GPU.
fn late_blame(world: &World) {
    let id = world.must(&["submit", "--", "sh", "-c", "echo $$"]).trim().to_owned();
    assert!(world.must(&["wait", &id]).contains("done: exit code 0"));
    let pid = world.must(&["logs", &id]).trim().to_owned();
    // As the driver writes it; the first emulated GPU has this address.
    let line =
        format!("[    1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid={pid}, name=sh, Ch 00000010\n");
    let log = variable("MUXFLOW_EMULATED_DIR").join("kernel.log");
    let mut log = fs::OpenOptions::new().append(true).open(log).unwrap();
    log.write_all(line.as_bytes()).unwrap();
    let failed = world.wait(&id, "it has failed", |job| job.state == JobState::Failed);
    assert_eq!(failed.reason, "exit code 0; it is to blame for xid.31");
    let waited = world.muxflow(&["wait", &id]);
    assert!(!waited.status.success(), "{waited:?}");
    world.wait_healthy(1);
}

/// A checkpoint by a signal of its own: it gets that one and no other, and goes on where it was.
fn signal(world: &World) -> String {
    let saved = world.base().join("saved");
    fs::create_dir(&saved).unwrap();
    let place = saved.display().to_string();
    let mut words = vec!["submit", "--checkpoint-dir", &place, "--checkpoint-signal", "USR1"];
    words.extend(["--checkpoint-within", "30", "--", "sh", "-c", COUNTS]);
    let id = world.must(&words).trim().to_owned();
    let said = |line: &str| world.must(&["logs", &id]).lines().any(|said| said == line);
    world.until("it counts", || said("run 1 from 0"));
    world.must(&["pause"]);
    world.wait(&id, "it has left", |job| job.state == JobState::Queued);
    let count: u64 = fs::read_to_string(saved.join("count")).unwrap().trim().parse().unwrap();
    world.must(&["resume"]);
    world.until("it goes on from there", || said(&format!("run 2 from {count}")));
    assert!(said("told by USR1") && !said("told by TERM"), "{}", world.must(&["logs", &id]));
    let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
    assert_eq!((detail.job.failures, detail.runs.len()), (0, 2), "{detail:#?}");
    id
}

/// Why each of them waits, by the command line; `holder` has the only GPU.
fn waits(world: &World, holder: &str) {
    let submit = |more: &[&str]| {
        let words = [&["submit"], more, &["--", "sleep", "1000"]].concat();
        world.must(&words).trim().to_owned()
    };
    let why = |id: &str| {
        let text = world.must(&["describe", id]);
        let line = text.lines().find_map(|line| line.strip_prefix("  waits "));
        line.map(|line| line.trim().to_owned()).unwrap_or(text)
    };
    let expect = |id: &str, words: &str| {
        let what = format!("{id} waits because {words}");
        world.until(&what, || why(id).contains(words));
        let listed = world.must(&["jobs"]);
        let row = listed.lines().find(|line| line.starts_with(&format!("{id} "))).unwrap();
        assert!(row.contains(words), "{listed}");
    };
    let (type_, memory, plain) =
        (submit(&["--gpu-type", "A100"]), submit(&["--memory", "1TiB"]), submit(&[]));
    expect(&type_, "no GPU is of a type that the job accepts");
    expect(&memory, "asks for 1024.0 GiB of memory, the largest quota on offer is");
    expect(&plain, "the only GPU that could hold it");
    world.must(&["pause"]);
    let late = submit(&["--array", "0-2"]);
    let (array, count) = late.split_once(' ').unwrap();
    assert_eq!(count, "(3 jobs)");
    world.wait(holder, "it has left", |job| job.state == JobState::Queued);
    for id in [&type_, &plain, holder, &format!("{array}.1")] {
        expect(id, "offline work is paused, until `muxflow resume`");
    }
    // An array is cancelled by its name, and whoever waits for it hears of each.
    assert_eq!(world.must(&["cancel", array]), format!("{array}: 3 jobs are cancelled\n"));
    let waited = world.muxflow(&["wait", array]);
    assert!(!waited.status.success());
    let text = String::from_utf8_lossy(&waited.stdout).into_owned();
    assert_eq!(text.matches(" cancelled: cancelled by ").count(), 3, "{text}");
    world.must(&["cancel", holder, &type_, &memory, &plain]);
}
