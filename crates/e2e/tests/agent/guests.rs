//! Guests: processes that somebody else starts, under the agent's gate. Here the test is the kubelet.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_abi::control::Gate;
use muxflow_agent::breaker::Ground;
use muxflow_agent::environment::{self, GpuSide, Restraint};
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_agent::gpu::{Event, Order};
use muxflow_agent::stop::StopLimits;
use muxflow_types::{Bytes, JobId, SmCount, SmShare};

use crate::world::{LONG, World, inside, variable};

const POD: &str = "11111111-0f2b-4c3d-9e8f-001122334455";

/// A guest that somebody gave ten minutes to save its state.
fn patient() -> GuestSpec {
    GuestSpec {
        job: JobId::new(POD).unwrap(),
        share: SmShare::new(SmCount(20), SmCount(40)).unwrap(),
        quota: Bytes(2 << 30),
        stop: StopLimits { checkpoint_ms: 600_000, ..StopLimits::default() },
    }
}

fn attach(world: &World) -> std::path::PathBuf {
    world.agent().handle().attach(&world.gpu, patient(), LONG).unwrap()
}

/// A process that holds memory, works, and heeds nobody.
struct Stubborn(Child);

impl Stubborn {
    fn start(world: &World, control: &Path) -> Self {
        let (none, pipe) = (BTreeMap::new(), world.mps_pipe());
        let side = GpuSide { uuid: &world.gpu, mps_pipe_dir: Some(&pipe), mps_log_dir: None };
        let restraint = Restraint {
            interposer: &variable("MUXFLOW_TEST_XCUDA"),
            control_dir: control,
            share: patient().share,
            driver_memory_limit: None,
            sm_partition: None,
        };
        let argv = world.argv("guest", 500, "8", 1_000);
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).args(["hold=256", "stubborn"]);
        command.envs(environment::offline(BTreeMap::new(), &none, side, &restraint));
        Stubborn(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Stubborn {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Waits for so many more kernels of the guest.
fn works(world: &World, more: u64) {
    let launches = |status: &muxflow_agent::gpu::GpuStatus| {
        status.offline.as_ref().map_or(0, |(_, counts)| counts.launches)
    };
    let before = launches(&world.agent().status(&world.gpu).unwrap());
    world.wait("the guest works", |status| launches(status) >= before + more);
}

fn gate(world: &World) -> Gate {
    world.agent().shared(&world.gpu).unwrap().job().unwrap().block.gate()
}

/// All contexts of the guest are gone, though its process lives.
fn has_let_go(world: &World) -> bool {
    let answers = world.agent().shared(&world.gpu).unwrap().job().unwrap().block.answers();
    gate(world) == Gate::Reset && (answers.live, answers.released) == (1, 1)
}

#[test]
fn a_guest_lets_go_of_memory_that_the_service_needs_whatever_its_grace_period() {
    inside("guests::inner_memory");
}

#[test]
#[ignore = "run inside an emulated node by a_guest_lets_go_of_memory_that_the_service_needs_whatever_its_grace_period"]
fn inner_memory() {
    let world = World::start("");
    world.wait("the GPU takes a job", |status| status.placeable);
    let control = attach(&world);
    let mut guest = Stubborn::start(&world, &control);
    works(&world, 50);
    // It leaves by itself, in its own time; then the service comes to need its memory.
    let slowly = muxflow_agent::gpu::StopReason::Health("the pod is deleted".into());
    let stop = Order::StopOffline { job: Some(JobId::new(POD).unwrap()), reason: slowly };
    world.agent().order(&world.gpu, stop).unwrap();
    world.until("it saves its state", || gate(&world) == Gate::Checkpoint);
    let (cause, ground) = ("GPU is Overlimit".to_owned(), Ground::Memory);
    world.agent().order(&world.gpu, Order::Evict { cause, ground }).unwrap();
    world.until("its contexts are gone", || has_let_go(&world));
    assert!(guest.is_alive(), "nobody but the kubelet ends its process");
    drop(guest);
    world.agent().order(&world.gpu, Order::Detach(JobId::new(POD).unwrap())).unwrap();
    world.wait("the GPU takes a job again", |status| status.placeable);
    world.end();
}

#[test]
fn a_guest_that_broke_the_gpu_is_named_and_does_not_get_back_on_it() {
    inside("guests::inner_fault");
}

#[test]
#[ignore = "run inside an emulated node by a_guest_that_broke_the_gpu_is_named_and_does_not_get_back_on_it"]
fn inner_fault() {
    let world = World::start("");
    world.wait("the GPU takes a job", |status| status.placeable);
    let control = attach(&world);
    let guest = Stubborn::start(&world, &control);
    works(&world, 50);
    world.fault(&["--pid", &guest.0.id().to_string(), "xid", "31"]);
    // The line that names the culprit may be read before or after MPS has shown the same error.
    let (mut named, mut answered, mut told) = (false, false, false);
    world.event("the guest is named, told to leave, and the error answered", |event| {
        match event {
            Event::GuestBlamed { job, pid, .. } => {
                assert_eq!((job.as_str(), *pid), (POD, guest.0.id()));
                named = true;
            }
            Event::GuestMustLeave { drained, .. } => told = *drained,
            Event::Fault { .. } => answered = true,
            _ => {}
        }
        named && answered && told
    });
    world.until("the gate refuses it", || gate(&world) == Gate::Reset);
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert_eq!(gate(&world), Gate::Reset, "whoever broke the GPU may use it again");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(guest);
    world.agent().order(&world.gpu, Order::Detach(JobId::new(POD).unwrap())).unwrap();
    world.end();
}

#[test]
fn a_guest_is_named_though_it_ended_with_its_error() {
    inside("guests::inner_late_fault");
}

#[test]
#[ignore = "run inside an emulated node by a_guest_is_named_though_it_ended_with_its_error"]
fn inner_late_fault() {
    let world = World::start("");
    world.wait("the GPU takes a job", |status| status.placeable);
    for taken_away in [false, true] {
        let control = attach(&world);
        let guest = Stubborn::start(&world, &control);
        works(&world, 50);
        let gone = guest.0.id();
        drop(guest);
        let detach = || world.agent().order(&world.gpu, Order::Detach(JobId::new(POD).unwrap()));
        if taken_away {
            detach().unwrap();
        }
        let pci = &world.agent().shared(&world.gpu).unwrap().facts.pci;
        let line = format!("[    1.0] NVRM: Xid (PCI:{pci}): 31, pid={gone}, name=worker, Ch 10\n");
        let log = variable("MUXFLOW_EMULATED_DIR").join("kernel.log");
        let mut log = std::fs::OpenOptions::new().append(true).open(log).unwrap();
        log.write_all(line.as_bytes()).unwrap();
        world.event("the guest that ended is named", |event| match event {
            Event::GuestBlamed { job, pid, .. } => {
                assert_eq!((job.as_str(), *pid), (POD, gone));
                true
            }
            _ => false,
        });
        if !taken_away {
            detach().unwrap();
        }
        world.wait("the GPU takes a job again", |status| status.placeable);
    }
    world.end();
}

#[test]
fn a_guest_outlives_an_agent_and_works_under_the_next() {
    inside("guests::inner_taken_over");
}

#[test]
#[ignore = "run inside an emulated node by a_guest_outlives_an_agent_and_works_under_the_next"]
fn inner_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start_in(dir.path(), "");
    world.wait("the GPU takes a job", |status| status.placeable);
    let control = attach(&world);
    let mut guest = Stubborn::start(&world, &control);
    works(&world, 50);
    world.agent.take().unwrap().shutdown();
    drop(world);
    let world = World::start_in(dir.path(), "");
    assert_eq!(attach(&world), control, "the control block that the guest has");
    works(&world, 50);
    assert!(guest.is_alive());
    drop(guest);
    world.agent().order(&world.gpu, Order::Detach(JobId::new(POD).unwrap())).unwrap();
    world.end();
}
