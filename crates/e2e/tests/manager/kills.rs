//! kill -9 of the manager at random moments during a busy run: no job is lost, none runs twice, none
//! is stuck. `cargo xtask soak` does it 200 times.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeBounds;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muxflow_api::jobs::{JobDetail, JobList, JobState, Submitted};
use muxflow_manager::client::{Client, Place};

use crate::world::{World, inside, variable};

/// What a job does: it holds a lock for as long as it lives, and writes down its starts and its end.
/// One that finds its end written down was stopped between writing and leaving.
const SCRIPT: &str = r#"
file="$DIR/$MUXFLOW_JOB"
exec 9>>"$file.lock"
flock -n 9 || { echo "overlap $MUXFLOW_RUN" >> "$file"; exit 0; }
if grep -q '^done' "$file" 2>/dev/null; then echo "again $MUXFLOW_RUN" >> "$file"; exit 0; fi
echo "start $MUXFLOW_RUN" >> "$file"
"$WORKER" 500 8 "$DIR/pause" - > /dev/null 2>&1 &
sleep 0.$((3 + MUXFLOW_ARRAY_INDEX % 6))
kill $! 2>/dev/null; wait $! 2>/dev/null
echo "done $MUXFLOW_RUN" >> "$file"
"#;

/// Submits all the time, whether a manager is there or not, and keeps what was acknowledged.
struct Submitter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<String>>,
}

impl Submitter {
    fn start(socket: &Path, dir: &Path, worker: &str) -> Self {
        let client = Client::new(Place::Socket(socket.to_owned())).unwrap();
        let job = serde_json::json!({
            "command": ["sh", "-c", SCRIPT], "cwd": "/",
            "env": { "DIR": dir, "WORKER": worker, "MUXFLOW_ARRAY_INDEX": "1" },
        });
        let stop = Arc::new(AtomicBool::new(false));
        let inside = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut acknowledged = Vec::new();
            while !inside.load(Ordering::Acquire) {
                // Right after a failure: the next one meets the manager as it comes up.
                let pause = match client.post::<Submitted>("/v1/jobs", &job) {
                    Ok(made) => {
                        acknowledged.push(made.id);
                        Duration::from_millis(1_000)
                    }
                    Err(_) => Duration::from_millis(10),
                };
                std::thread::sleep(pause);
            }
            acknowledged
        });
        Submitter { stop, thread }
    }

    fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap()
    }
}

/// Numbers that look random, from a seed that is told.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

#[test]
fn a_killed_manager_loses_no_job_and_runs_none_twice() {
    inside("kills::inner_kills", "t4x2");
}

#[test]
#[ignore = "run inside an emulated node by a_killed_manager_loses_no_job_and_runs_none_twice"]
fn inner_kills() {
    let set = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let kills = set("MUXFLOW_MANAGER_KILLS", 10);
    let seed = set("MUXFLOW_SEED", 88_172_645_463_325_252);
    let mut dice = Dice(seed);
    let mut world = World::start("[profiler]\nenabled = false\n");
    world.wait_healthy(1);
    let dir = world.base().join("jobs");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("pause"), "1000").unwrap();
    let worker = variable("MUXFLOW_TEST_WORKER").display().to_string();
    let mut submitted = 0;
    let batch = |world: &World, count: u64| {
        let array = format!("0-{}", count - 1);
        let dir = format!("DIR={}", dir.display());
        let worker = format!("WORKER={worker}");
        let words =
            ["submit", "--array", &array, "-e", &dir, "-e", &worker, "--", "sh", "-c", SCRIPT];
        world.must(&words);
        count
    };
    submitted += batch(&world, 20);
    let socket = world.run().join("manager.sock");
    let submitter = Submitter::start(&socket, &dir, &worker);
    let began = Instant::now();
    for kill in 0..kills {
        std::thread::sleep(Duration::from_millis(dice.roll(4_000)));
        world.kill();
        if dice.roll(3) == 0 {
            std::thread::sleep(Duration::from_millis(dice.roll(1_000)));
        }
        world.up();
        let open: JobList = world.client.get("/v1/jobs?state=open&limit=500").unwrap();
        if open.items.len() < 10 {
            submitted += batch(&world, 20);
        }
        if kill % 5 == 0 {
            let job = &open.items.first();
            if let Some(job) = job {
                world.must(&["cancel", &job.id]);
            }
        }
    }
    println!("MEASURED {kills} kills in {:.0} s, seed {seed}", began.elapsed().as_secs_f64());
    let acknowledged = submitter.stop();
    assert!(!acknowledged.is_empty(), "nobody was answered between the kills");
    // One that was taken in may not have been answered for.
    let least = usize::try_from(submitted).unwrap() + acknowledged.len();
    let all = settled(&world, least..);
    let lost: Vec<&String> = acknowledged.iter().filter(|id| !all.contains_key(*id)).collect();
    assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    println!("MEASURED {} submissions acknowledged between kills, none lost", acknowledged.len());
    check(&world, &dir, &all);
    world.end();
}

#[test]
fn a_manager_that_is_killed_while_it_measures_loses_no_job() {
    inside("kills::inner_measuring", "t4x2");
}

/// As above, but each job is another program and is measured first, and all of them may retry, save
/// their state and have a deadline. The manager is killed while one of them is measured.
#[test]
#[ignore = "run inside an emulated node by a_manager_that_is_killed_while_it_measures_loses_no_job"]
fn inner_measuring() {
    let mut dice = Dice(88_172_645_463_325_252);
    let mut world = World::start("[profiler]\nwindow_s = 1\nlimit_s = 20\nwait_s = 600\n");
    world.wait_healthy(2);
    let dir = world.base().join("jobs");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("pause"), "1000").unwrap();
    let (place, worker) = (dir.display(), variable("MUXFLOW_TEST_WORKER"));
    let (place, worker) = (format!("DIR={place}"), format!("WORKER={}", worker.display()));
    let script = SCRIPT.replace("sleep 0.", "sleep 2.");
    let submit = |world: &World, program: &str, more: &[&str], script: &str| {
        let program = format!("PROGRAM={program}");
        let set = ["-e", &place, "-e", &worker, "-e", &program, "-e", "MUXFLOW_ARRAY_INDEX=1"];
        let words = [&["submit"], more, &set, &["--", "sh", "-c", script]].concat();
        world.must(&words).trim().to_owned()
    };
    let wishes = ["--retries", "2", "--deadline", "1h"];
    let saves = ["--checkpoint-signal", "TERM", "--checkpoint-within", "5"];
    let mut submitted = 0;
    for _ in 0..6 {
        submitted += 1;
        submit(&world, &submitted.to_string(), &[&wishes[..], &saves].concat(), &script);
    }
    let late = submit(&world, "late", &["--deadline", "4"], "sleep 1000");
    let measured = |world: &World| {
        let list: JobList = world.client.get("/v1/jobs?state=profiling").unwrap();
        list.items.iter().any(|job| dir.join(&job.id).exists())
    };
    for _ in 0..4 {
        if !world.client.get::<JobList>("/v1/jobs?state=submitted").unwrap().items.is_empty() {
            world.until("one is measured", || measured(&world));
        }
        std::thread::sleep(Duration::from_millis(dice.roll(1_000)));
        world.kill();
        world.up();
        submitted += 1;
        submit(&world, &submitted.to_string(), &wishes, &script);
    }
    let mut all = settled(&world, submitted + 1..=submitted + 1);
    assert_eq!(all.remove(&late), Some(JobState::Failed));
    assert_eq!(world.job(&late).reason.split(" (").next(), Some("its deadline has passed"));
    check(&world, &dir, &all);
    assert!(all.values().all(|state| *state == JobState::Done), "{all:?}");
    let measured = |id: &String| {
        let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
        detail.runs.iter().any(|run| run.purpose == "profile")
    };
    let count = all.keys().filter(|id| measured(id)).count();
    assert!(count > 4, "{count} jobs were measured");
    println!("MEASURED {count} of {} jobs were started to be measured", all.len());
    world.end();
}

/// All jobs, once each has ended.
fn settled(world: &World, submitted: impl RangeBounds<usize>) -> BTreeMap<String, JobState> {
    let deadline = Instant::now() + Duration::from_secs(240);
    loop {
        let mut all = BTreeMap::new();
        let mut before = String::new();
        loop {
            let page: JobList = world.client.get(&format!("/v1/jobs?limit=500{before}")).unwrap();
            all.extend(page.items.into_iter().map(|job| (job.id, job.state)));
            match page.next {
                Some(next) => before = format!("&before={next}"),
                None => break,
            }
        }
        assert!(submitted.contains(&all.len()), "jobs were lost: {} are there", all.len());
        if all.values().all(|state| state.is_final()) {
            return all;
        }
        let open: Vec<_> = all.iter().filter(|(_, state)| !state.is_final()).collect();
        assert!(Instant::now() < deadline, "stuck: {open:?}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn check(world: &World, dir: &Path, all: &BTreeMap<String, JobState>) {
    let (mut done, mut cancelled, mut starts, mut again) = (0, 0, 0, 0);
    for (id, state) in all {
        let text = fs::read_to_string(dir.join(id)).unwrap_or_default();
        assert!(!text.contains("overlap"), "{id}: two copies at once:\n{text}");
        let count = |word: &str| text.lines().filter(|line| line.starts_with(word)).count();
        starts += count("start");
        let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
        match state {
            JobState::Done => {
                done += 1;
                assert_eq!(count("done"), 1, "{id} is done:\n{text}\n{detail:#?}");
            }
            JobState::Cancelled => cancelled += 1,
            other => panic!("{id} is {other}: {detail:#?}"),
        }
        again += count("again");
        // Nothing starts after a run that was seen to finish.
        let finished = detail.runs.iter().position(|run| run.outcome == "exit code 0");
        if let Some(at) = finished {
            assert_eq!(at + 1, detail.runs.len(), "{id} ran after it was done: {detail:#?}");
        }
        let numbers: Vec<u64> = detail.runs.iter().map(|run| run.run).collect();
        let expected: Vec<u64> = (1..=detail.job.run).collect();
        let kept = expected.len().saturating_sub(100);
        assert_eq!(numbers, expected[kept..], "{id}: every start has its number");
    }
    println!(
        "MEASURED {done} jobs done, {cancelled} cancelled, {starts} starts, {again} stopped between their last line and their end, no overlap"
    );
}
