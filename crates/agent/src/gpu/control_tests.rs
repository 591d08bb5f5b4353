//! Tests of the fast loop: made-up samples in, a real control block out.

use super::*;
use crate::control_block::ControlBlock;
use crate::monitor::ActivitySource;
use muxflow_abi::control::Settings;
use muxflow_policy::node::builtin::laws_of;
use muxflow_types::{GpuType, JobId, MegaHertz, SmShare};
use proptest::prelude::*;

fn params() -> ControlParams {
    ControlParams {
        laws: laws_of(&GpuType::new("T4").unwrap()).unwrap(),
        health: HealthParams::default(),
        split: SplitParams::default(),
        forecast: ForecastParams::default(),
        share: ShareParams::default(),
        quota: QuotaParams::default(),
        slo: None,
        queue_for: Micros::from_millis(10),
        tick: Duration::from_millis(10),
        defences: Defences::default(),
    }
}

fn job(dir: &std::path::Path) -> ActiveJob {
    named_job(dir, "j")
}

fn named_job(dir: &std::path::Path, name: &str) -> ActiveJob {
    let block = ControlBlock::create(dir, &Settings::default(), 1 << 30, None).unwrap();
    let share = SmShare::new(SmCount(20), SmCount(40)).unwrap();
    ActiveJob::new(JobId::new(name).unwrap(), block, share, crate::stop::StopLimits::default())
}

struct World {
    now: Micros,
    laws: ControlLoop,
    seen: Published,
    job: ActiveJob,
    _dir: tempfile::TempDir,
}

impl World {
    fn new(params: ControlParams) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let now = Micros::from_secs(100);
        World {
            now,
            laws: ControlLoop::new(params, now),
            seen: Published {
                sample: None,
                count: 0,
                source: ActivitySource::Dcgm,
                failure: None,
                failures: 0,
                processes: None,
                recovery: None,
                took: Micros::ZERO,
            },
            job: job(&dir.path().join("job")),
            _dir: dir,
        }
    }

    /// One tick of 10 ms with a new sample of this activity, or none.
    fn tick(&mut self, activity: Option<f64>) -> Turn {
        self.tick_with(activity, Bytes::from_gib(2))
    }

    /// A tick without a job.
    fn idle_tick(&mut self, activity: f64) -> Turn {
        self.sample(Some(activity), Bytes::from_gib(2));
        self.laws.turn(self.now, &self.seen, None, None)
    }

    fn tick_with(&mut self, activity: Option<f64>, memory: Bytes) -> Turn {
        self.sample(activity, memory);
        self.laws.turn(self.now, &self.seen, None, Some(&self.job))
    }

    fn sample(&mut self, activity: Option<f64>, memory: Bytes) {
        self.now = self.now.saturating_add(Micros::from_millis(10));
        if let Some(activity) = activity {
            let mut sample = GpuSample::empty(self.now);
            sample.sm_activity = Percent::clamped(activity);
            sample.gpu_util = Percent::clamped(activity);
            sample.sm_clock = Some(MegaHertz(1590));
            sample.memory_used = Some(memory);
            sample.memory_total = Some(Bytes::from_gib(15));
            self.seen.sample = Some(sample);
            self.seen.count += 1;
        }
    }

    fn run(&mut self, ticks: usize, activity: Option<f64>) -> Turn {
        let mut last = self.tick(activity);
        for _ in 1..ticks {
            last = self.tick(activity);
        }
        last
    }

    fn open_at_some_time(&mut self, ticks: usize, activity: f64) -> bool {
        (0..ticks).fold(false, |open, _| {
            self.tick(Some(activity));
            open || self.job.block.gate() == Gate::Open
        })
    }
}

#[test]
fn the_gate_opens_when_the_gpu_is_known_to_be_well_and_shuts_within_one_tick() {
    let mut world = World::new(params());
    world.run(50, Some(20.0));
    assert_eq!(world.laws.state(), HealthState::Init);
    assert_eq!(world.job.block.gate(), Gate::Closed, "closed until it is known to be well");
    assert!(world.open_at_some_time(400, 20.0));
    assert_eq!(world.laws.state(), HealthState::Healthy);
    // A burst: the very next tick after the sample closes the gate.
    world.tick(Some(99.0));
    assert_eq!(world.job.block.gate(), Gate::Closed);
    // It stays; the eviction follows after its confirmation, not before.
    let soon = world.run(10, Some(99.0));
    assert!(!soon.evict);
    let later = world.run(40, Some(99.0));
    assert!(later.evict, "evicted on Overlimit");
    assert_eq!(world.laws.state(), HealthState::Overlimit);
}

#[test]
fn an_eviction_for_memory_is_not_one_that_may_be_held_back() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    assert!(world.run(50, Some(99.0)).evict);
    assert_eq!(world.laws.eviction_ground(), Ground::Readings, "a shut gate helps");
    world.tick_with(Some(99.0), Bytes::from_gib(15));
    assert_eq!(world.laws.eviction_ground(), Ground::Memory, "a shut gate gives no memory back");
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    assert!(world.tick_with(Some(20.0), Bytes::from_gib(15)).evict, "not to be waited for");
    assert_eq!(world.laws.eviction_ground(), Ground::Memory);
}

#[test]
fn a_job_that_leaves_is_told_once_more_when_only_that_helps() {
    let world = World::new(params());
    let mut insisted = None;
    let mut asks =
        |ground, job| eviction::ask(ground, HealthState::Overlimit, job, &mut insisted).is_some();
    let job = Some(&world.job);
    assert!(asks(Ground::Readings, job) && !asks(Ground::Readings, job), "asked once");
    world.job.stopping.store(true, Ordering::Release);
    assert!(asks(Ground::Memory, job) && !asks(Ground::Memory, job), "and once more");
    assert!(!asks(Ground::Readings, job) && !asks(Ground::Memory, job));
    assert!(asks(Ground::Certain, job), "another reason");
    // One that an earlier agent left to its keeper: the slow loop knows whether there is one.
    assert!(!asks(Ground::Readings, None));
    assert!(asks(Ground::Memory, None) && !asks(Ground::Memory, None));
}

#[test]
fn a_new_job_finds_the_gate_as_a_new_job_should() {
    let mut world = World::new(params());
    for _ in 0..600 {
        assert_eq!(world.idle_tick(20.0).budget, LaunchBudget::CLOSED, "nobody is there");
    }
    assert_eq!(world.laws.state(), HealthState::Healthy);
    let first = world.run(10, Some(20.0));
    assert!(first.budget.fraction <= 0.06, "0.5 a second: {:?}", first.budget);
    assert!(world.run(300, Some(20.0)).budget.fraction > 0.9);
    // Another job in its place opens it from zero too.
    let dir = tempfile::tempdir().unwrap();
    world.job = named_job(&dir.path().join("job"), "k");
    let next = world.run(5, Some(20.0));
    assert!(next.budget.fraction <= 0.06, "{:?}", next.budget);
}

#[test]
fn samples_that_cannot_be_move_nothing() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    world.run(100, Some(74.0));
    let shared = |world: &World| (world.laws.newest, world.laws.online, world.laws.load);
    let before = (shared(&world), world.tick(None).budget.fraction);
    // Idle, it says, with more memory in use than there is.
    let mut fraction = before.1;
    for _ in 0..40 {
        let turn = world.tick_with(Some(0.0), Bytes::from_gib(20));
        assert!(turn.budget.fraction <= fraction, "a lie opened the gate");
        fraction = turn.budget.fraction;
    }
    assert_eq!(shared(&world), before.0, "a lie was believed");
    // Lies are silence: after half a second it begins to close, after one it is shut.
    for _ in 0..70 {
        world.tick_with(Some(0.0), Bytes::from_gib(20));
    }
    assert_eq!(world.job.block.gate(), Gate::Closed);
}

#[test]
fn only_a_turn_with_a_new_sample_tells_how_fast_one_is_acted_upon() {
    let mut world = World::new(params());
    assert_eq!(world.tick(None).new_sample, None);
    assert_eq!(world.tick(Some(20.0)).new_sample, Some(world.now));
    assert_eq!(world.tick(None).new_sample, None);
}

#[test]
fn silence_of_the_sensors_closes_the_gate_and_then_evicts() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    world.run(150, None);
    assert_eq!(world.job.block.gate(), Gate::Closed, "1.5 s without a sample");
    assert_ne!(world.laws.state(), HealthState::Overlimit);
    let last = world.run(1100, None);
    assert!(last.evict, "12 s without a sample");
}

#[test]
fn a_job_that_is_being_stopped_is_left_to_its_keeper() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    world.job.stopping.store(true, Ordering::Release);
    world.job.block.set_gate(Gate::Checkpoint);
    world.run(100, Some(20.0));
    assert_eq!(world.job.block.gate(), Gate::Checkpoint);
}

#[test]
fn a_lost_or_disabled_device_closes_the_gate_at_once_and_comes_back_through_init() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    world.seen.failure = Some((world.now, SensorFailure::DeviceLost));
    let turn = world.tick(None);
    assert!(turn.device_lost);
    assert_eq!(world.job.block.gate(), Gate::Closed);
    let disable = HealthOrder::Disable(DisableReason::Fault(Fault::DeviceLost));
    assert!(world.laws.order(world.now, disable).is_some());
    assert!(world.tick(None).evict);
    world.seen.failure = None;
    world.laws.order(world.now, HealthOrder::Enable);
    assert_eq!(world.laws.state(), HealthState::Init);
    assert!(world.open_at_some_time(800, 20.0), "and it opens again, nothing restarted");
}

#[test]
fn looks_at_the_service_alone_are_short() {
    let mut world = World::new(params());
    assert!(world.open_at_some_time(500, 20.0));
    let mut closed_share = |launches_per_tick: u64| {
        let own = crate::process::ProcessKey::own();
        let start_ticks = u32::try_from(own.start_ticks & u64::from(u32::MAX)).unwrap();
        let owner = muxflow_abi::control::Owner { pid: own.pid, start_ticks };
        let part = world.job.block.job_unchecked();
        let slot = part.claim(owner, 0).unwrap();
        part.slot(slot).unwrap().ns_per_launch.store(500_000, Ordering::Relaxed);
        let mut closed = 0;
        for _ in 0..6_000 {
            if world.job.block.gate() == Gate::Open {
                let part = world.job.block.job_unchecked();
                part.slot(slot).unwrap().launches.fetch_add(launches_per_tick, Ordering::Relaxed);
            }
            world.tick(Some(20.0));
            closed += usize::from(world.job.block.gate() == Gate::Closed);
        }
        f64::from(u32::try_from(closed).unwrap()) / 6_000.0
    };
    assert_eq!(closed_share(0), 0.0, "a job that launches nothing is not looked at");
    let share = closed_share(10);
    assert!(share > 0.0 && share < 0.06, "{share} of one minute");
}

#[test]
fn switched_off_defences_do_not_defend() {
    let defences = Defences { gate: false, eviction: false, ..Defences::default() };
    let mut world = World::new(ControlParams { defences, ..params() });
    let turn = world.run(200, Some(99.0));
    assert_eq!(world.job.block.gate(), Gate::Open);
    assert_eq!(world.job.block.limits().rate_milli_per_s, u64::MAX);
    assert!(!turn.evict);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn an_open_gate_means_a_fresh_sample_and_a_state_that_allows_it(
        seen in proptest::collection::vec(proptest::option::weighted(0.8, 0.0f64..100.0), 300..900),
    ) {
        let mut world = World::new(params());
        for activity in seen {
            world.tick(activity);
            if world.job.block.gate() == Gate::Open {
                prop_assert!(world.laws.state().allows_running());
                let age = world.now.since(world.seen.sample.unwrap().at);
                prop_assert!(age <= Micros::from_secs(2), "{age}");
                prop_assert!(world.seen.sample.unwrap().sm_activity.unwrap().value() <= 96.0);
            }
        }
    }
}
