//! A job is moved by checkpoint and restart when it would run faster elsewhere; what was seen of its
//! speed comes back into the store, and a model is trained on it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use muxflow_api::cluster::PlanRecord;
use muxflow_api::jobs::{JobDetail, JobState};
use muxflow_store::{Source, Store};
use muxflow_types::{GpuType, Micros, Percent, ProfileRecord, SpeedSample, WorkloadName};

use crate::world::{World, inside, worker};

/// Training gives way to all else: on a machine that others use too it takes as long as they do.
const TRAINED_WITHIN: Duration = Duration::from_secs(600);

#[test]
fn a_job_moves_with_its_checkpoint_and_what_was_seen_is_learnt() {
    inside("moves::inner_moves", "t4x3");
}

/// Counts up, saves where it is when told to leave, and goes on from there.
const SCRIPT: &str = r#"
state="$MUXFLOW_CHECKPOINT_DIR/count"
count=$(cat "$state" 2>/dev/null || echo 0)
echo "run $MUXFLOW_RUN from $count"
"$@" & worker=$!
trap 'echo $count > "$state"; kill $worker; wait $worker; exit 0' TERM
while :; do count=$((count + 1)); sleep 0.1; done
"#;

/// On a machine that has too much to do, a process is back from its pause ten milliseconds late and
/// more: with kernels as short as that a busy service would be an idle one, and there would be no
/// reason to move.
const KERNEL_US: u32 = 12_000;
const BUSY_US: u32 = 4_000;
const IDLE_US: u32 = 400_000;

/// A service on each GPU; the first is idle, the second is not.
fn services(dir: &Path) -> String {
    let mut text = String::new();
    for (gpu, pause_us) in [(0, IDLE_US), (1, BUSY_US)] {
        let argv = worker(dir, &format!("service-{gpu}"), KERNEL_US, 24, pause_us);
        text +=
            &format!("[[agent.online]]\nservice = 'web-{gpu}'\ngpu = '{gpu}'\nargv = {argv:?}\n");
    }
    text
}

/// Measured pairs that somebody put into the store before: the beginning of a model.
fn measured(state: &Path) -> usize {
    fs::create_dir_all(state).unwrap();
    let mut store = Store::open(&state.join("muxflow.db")).unwrap();
    let profile = |name: String, activity: f64| ProfileRecord {
        sm_activity: Percent::clamped(activity),
        ..ProfileRecord::unknown(WorkloadName::new(&name).unwrap(), GpuType::new("T4").unwrap())
    };
    let samples: Vec<SpeedSample> = (0..60_u32)
        .map(|index| {
            let (online, share) =
                (f64::from(index % 10) * 9.0, f64::from(index / 10) * 15.0 + 10.0);
            SpeedSample {
                online: profile(format!("service-{}", index % 10), online),
                offline: profile(format!("job-{}", index / 10), 60.0),
                share: Percent::clamped(share),
                speed: (share / 100.0 * (1.0 - online / 200.0)).clamp(0.05, 1.0),
                at: Micros::from_secs(u64::from(index) + 1),
            }
        })
        .collect();
    store.put_samples(&samples, "the test").unwrap();
    samples.len()
}

#[test]
#[ignore = "run inside an emulated node by a_job_moves_with_its_checkpoint_and_what_was_seen_is_learnt"]
fn inner_moves() {
    let dir = tempfile::tempdir().unwrap();
    let known = measured(&dir.path().join("state"));
    let settings = "[profiler]\nwindow_s = 2\nwait_s = 60\n\
        [scheduler]\ninterval_s = 4\nrestart_cost_s = 0\nmax_disruption_pct = 100.0\n\
        observe_every_s = 5\nretrain_every_s = 25\n";
    let text = format!("{settings}{}", services(dir.path()));
    let mut world = World::start_in(dir, &text);
    // The third GPU is for measuring only: without a measurement alone, no speed can be compared.
    let third = world.gpus()[2].id.clone();
    world.kill();
    let aside = format!("[profiler]\nset_aside = '{third}'");
    world.change(|config| config.replacen("[profiler]", &aside, 1));
    world.up();
    world.wait_healthy(3);
    let saved = world.base().join("saved");
    fs::create_dir(&saved).unwrap();
    let command = world.worker(2_000);
    let place = saved.display().to_string();
    let mut words = vec!["submit", "--checkpoint-dir", &place, "--checkpoint-within", "20", "--"];
    words.extend(["sh", "-c", SCRIPT, "job"]);
    words.extend(command.iter().map(String::as_str));
    let id = world.must(&words).trim().to_owned();
    let idle = world.gpus()[0].id.clone();
    let there = world.wait(&id, "it runs beside the idle service", |job| {
        job.state == JobState::Running
            && job.gpu.as_ref() == Some(&idle)
            && job.iterations_per_s.is_some()
    });
    let runs = there.run;

    // The tide turns.
    fs::write(world.base().join("service-0.pause"), BUSY_US.to_string()).unwrap();
    fs::write(world.base().join("service-1.pause"), IDLE_US.to_string()).unwrap();
    let moved = world.wait(&id, "it has moved", |job| {
        job.state == JobState::Running && job.gpu.as_ref().is_some_and(|gpu| *gpu != idle)
    });
    assert!(moved.run > runs && moved.failures == 0, "{moved:#?}");
    let count: u64 = fs::read_to_string(saved.join("count")).unwrap().trim().parse().unwrap();
    assert!(count > 0, "it saved where it was");
    let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
    println!("MEASURED moves: {:?}", detail.runs.iter().map(|r| &r.outcome).collect::<Vec<_>>());
    let goes_on = format!("run {} from {count}", moved.run);
    world.until(&goes_on, || world.must(&["logs", &id]).lines().any(|line| line == goes_on));

    // What is seen is kept, and learnt from.
    let store = || Store::open(&store_file(&world)).unwrap();
    let t4 = GpuType::new("T4").unwrap();
    world.until("its speed is written down", || {
        !store().samples(&t4, Source::Observed).unwrap().is_empty()
    });
    world.until_within(TRAINED_WITHIN, "a model is trained and in use", || {
        let plan: PlanRecord = world.client.get("/v1/plan/record").unwrap();
        plan.speeds.contains("T4 by ") && !plan.speeds.contains("conservative")
    });
    let model = store().model_in_use(&t4).unwrap().unwrap();
    let observed = store().samples(&t4, Source::Observed).unwrap();
    assert!(observed.iter().all(|sample| sample.online.workload.as_str().starts_with("web-")));
    println!("MEASURED model {} on {known} measured and {} seen", model.kind, observed.len());
    replayed(&mut world);
    world.must(&["cancel", &id]);
    world.wait(&id, "cancelled", |job| job.state.is_final());
    world.end();
}

/// The last plan of a manager that was killed is made again from its file, with the trained model that
/// is in it; so is the first one of the next manager.
fn replayed(world: &mut World) {
    world.kill();
    let file = world.base().join("state/last-plan.json");
    let record: PlanRecord = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(record.models.len(), 1, "the model is in the record: {}", record.speeds);
    let again = world.must(&["replay", file.to_str().unwrap()]);
    assert_eq!(again.trim_end(), record.plan.trim_end());
    // Another model would have led to something else: without it the plan is not the same.
    let without = world.base().join("without.json");
    let text = serde_json::to_vec(&PlanRecord { models: Default::default(), ..record.clone() });
    fs::write(&without, text.unwrap()).unwrap();
    let other = world.muxflow(&["replay", without.to_str().unwrap()]);
    let words = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && words.contains("not the one in the record"), "{words}");
    world.up();
    let newer = || {
        let plan: PlanRecord = world.client.get("/v1/plan/record").unwrap();
        plan.at_us > record.at_us && plan.speeds.contains("T4 by ")
    };
    world.until("the next manager has planned with the same model", newer);
    assert!(world.must(&["replay"]).contains("\"assignments\""));
}

fn store_file(world: &World) -> std::path::PathBuf {
    world.base().join("state/muxflow.db")
}
