//! A disk that is full when a job ends: nothing is half written, nothing is forgotten.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use muxflow_agent::launch::Run;
use muxflow_agent::sys;
use muxflow_api::jobs::{JobDetail, JobList, JobState};

use crate::world::{World, inside, root};

#[test]
fn a_job_that_ends_on_a_full_disk_is_done_once_there_is_room() {
    if root("a full disk") {
        inside("disk::inner_disk", "t4");
    }
}

/// A small file system of its own.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Self {
        fs::create_dir_all(&at).unwrap();
        let words = ["-t", "tmpfs", "-o", "size=8m", "tmpfs"];
        let done = Command::new("mount").args(words).arg(&at).output().unwrap();
        assert!(done.status.success(), "a tmpfs is needed for a full disk: {done:?}");
        Small(at)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("--lazy").arg(&self.0).status());
    }
}

/// Takes all the room that is left.
fn fill(path: &Path) {
    let mut file = fs::File::create(path).unwrap();
    for size in [64 << 10, 4 << 10, 1] {
        let block = vec![7_u8; size];
        while file.write_all(&block).is_ok() {}
    }
}

fn run_file(state: &Path, id: &str) -> PathBuf {
    state.join(format!("agent/workloads/offline-{id}/run.json"))
}

/// A job works before its start is on the disk: one that cannot be written down is undone.
fn is_written_down(state: &Path, id: &str) -> bool {
    run_file(state, id).exists()
}

/// The process that waits for a job, though that has ended.
fn keeper_of(state: &Path, id: &str) -> Option<u32> {
    let run: Run = muxflow_agent::launch::read(&run_file(state, id)).ok().flatten()?;
    (run.keeper.is_alive() && !run.main.is_alive()).then_some(run.keeper.pid)
}

/// A process that stands still, until this is dropped.
struct Held(u32);

impl Held {
    fn hold(pid: u32) -> Self {
        sys::kill(pid, libc::SIGSTOP).unwrap();
        Held(pid)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(sys::kill(self.0, libc::SIGCONT));
    }
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_ends_on_a_full_disk_is_done_once_there_is_room"]
fn inner_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Small::mount(dir.path().join("state"));
    let mut world = World::start_in(dir, "[profiler]\nenabled = false\n");
    world.wait_healthy(1);
    let (flag, starts) = (world.base().join("go"), world.base().join("starts"));
    let script = format!(
        "echo start >> {}; while [ ! -e {} ]; do sleep 0.1; done; true",
        starts.display(),
        flag.display()
    );
    let id = world.must(&["submit", "--retries", "3", "--", "sh", "-c", &script]).trim().to_owned();
    world.wait(&id, "runs", |job| job.state == JobState::Running);
    world.until("it has started", || starts.exists() && is_written_down(&disk.0, &id));

    let filler = disk.0.join("filler");
    fill(&filler);
    let refused = world.muxflow(&["submit", "--array", "0-9998", "--", "true"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("disk is full"), "{text}");
    fill(&filler.with_extension("more"));
    fs::write(&flag, "").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    // Nobody may say that it failed, or start it anew.
    let meanwhile = world.job(&id);
    assert!(matches!(meanwhile.state, JobState::Running | JobState::Done), "{meanwhile:#?}");
    assert_eq!(meanwhile.run, 1);

    fs::remove_file(filler.with_extension("more")).unwrap();
    fs::remove_file(&filler).unwrap();
    let ended = world.wait(&id, "done", |job| job.state.is_final());
    let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
    let seen = (ended.state, ended.exit_code, ended.run);
    assert_eq!(seen, (JobState::Done, Some(0), 1), "{detail:#?}\n{}", world.log());
    assert_eq!(detail.runs.len(), 1, "{detail:#?}");
    assert_eq!(fs::read_to_string(&starts).unwrap(), "start\n", "it was started once");
    let all: JobList = world.client.get("/v1/jobs?limit=500").unwrap();
    assert_eq!(all.items.len(), 1, "the refused ones left nothing");
    assert_eq!(world.must(&["submit", "--", "true"]).trim(), "job-2", "there is room again");
    world.must(&["wait", "2"]);

    // Told to leave while the disk is full, it leaves; the next one finds how the job ended.
    fs::remove_file(&flag).unwrap();
    let id = world.must(&["submit", "--", "sh", "-c", &script]).trim().to_owned();
    world.wait(&id, "runs", |job| job.state == JobState::Running);
    let twice = || fs::read_to_string(&starts).unwrap().lines().count() == 2;
    world.until("it has started", || twice() && is_written_down(&disk.0, &id));
    fill(&filler);
    fs::write(&flag, "").unwrap();
    world.until("it has ended", || keeper_of(&disk.0, &id).is_some());
    let took = world.leave();
    println!("MEASURED leaving on a full disk: {} ms", took.as_millis());
    assert!(took < Duration::from_secs(60), "{took:?}");
    // The keeper alone knows; held, it says so only after the next manager has asked everybody.
    let keeper = Held::hold(keeper_of(&disk.0, &id).expect("its keeper waits for room"));
    fs::remove_file(&filler).unwrap();
    world.up();
    let meanwhile = world.job(&id);
    assert!(!meanwhile.state.is_final() && meanwhile.run == 1, "{meanwhile:#?}");
    drop(keeper);
    let ended = world.wait(&id, "done", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run), (JobState::Done, 1), "{ended:#?}\n{}", world.log());
    assert_eq!(fs::read_to_string(&starts).unwrap().lines().count(), 2, "it was started once");
    world.end();
    drop(disk);
}
