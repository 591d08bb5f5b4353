//! What an agent finds when it starts: workloads of an earlier one, and GPUs that it cannot use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

use crate::blame::Blame;
use crate::error::{AgentError, Result};
use crate::errors::{self, Watcher};
use crate::gpu::supervisor::NodeShared;
use crate::gpu::{Event, StopReason};
use crate::launch::{Exit, Kind, Launch};
use crate::monitor::nvml;
use crate::runner::{Found, Runner, Running};

type Tell = Sender<(String, Event)>;

/// What an earlier agent left, by GPU; ended workloads are told at once.
pub(crate) fn recovered(
    runner: &Runner,
    node: &NodeShared,
) -> Result<BTreeMap<String, Vec<Running>>> {
    let (found, troubles) = runner.recover()?;
    for trouble in troubles {
        tracing::error!(error = %trouble, "a workload of an earlier agent cannot be understood");
    }
    let mut by_gpu: BTreeMap<String, Vec<Running>> = BTreeMap::new();
    for one in found {
        match one {
            Found::Running(running) => {
                by_gpu.entry(running.launch.gpu.clone()).or_default().push(*running);
            }
            Found::Ended { launch, exit } => {
                drop(runner.settle(launch.kind, &launch.name));
                tell_ended(&node.tell, &node.blame, &launch, exit);
            }
        }
    }
    Ok(by_gpu)
}

fn tell_ended(tell: &Tell, blame: &Blame, launch: &Launch, exit: Exit) {
    // Whoever would have removed its control block was not there when it ended.
    if let Some(dir) = &launch.control_dir {
        drop(std::fs::remove_dir_all(dir));
    }
    let event = match launch.kind {
        Kind::Online => muxflow_types::ServiceId::new(&launch.name)
            .map(|service| Event::OnlineEnded { service, exit }),
        Kind::Offline => {
            // An end that nobody caused is the job's own.
            let unseen = exit.code.is_none() && exit.signal.is_none();
            let stopped = exit.stop.is_some() || unseen;
            muxflow_types::JobId::new(&launch.name).map(|job| Event::JobEnded {
                fail_prone: blame.is_fail_prone(&job),
                job,
                reason: stopped.then_some(StopReason::Shutdown),
                requeue: !exit.is_finished(),
                exit,
                blamed: false,
            })
        }
    };
    if let Ok(event) = event {
        drop(tell.send((launch.gpu.clone(), event)));
    }
}

/// Sees workloads off whose GPU cannot be used: their keepers stop jobs, and somebody waits to hear of
/// their end. Services go on, and the next agent finds them.
pub(crate) fn see_off(node: &NodeShared, left: Vec<Running>) -> Result<Option<Watcher>> {
    for running in &left {
        let (gpu, name) = (&running.launch.gpu, &running.launch.name);
        tracing::error!(gpu, workload = name, "runs on a GPU that cannot be used");
    }
    let mut jobs: Vec<Running> =
        left.into_iter().filter(|running| running.launch.kind == Kind::Offline).collect();
    if jobs.is_empty() {
        return Ok(None);
    }
    let (tell, blame, runner) =
        (node.tell.clone(), Arc::clone(&node.blame), Arc::clone(&node.runner));
    let watcher = errors::spawn("leftover", move |stop| {
        while !stop.load(Ordering::Acquire) && !jobs.is_empty() {
            jobs.retain_mut(|job| match job.poll_exit() {
                Ok(Some(exit)) => {
                    drop(runner.settle(Kind::Offline, &job.launch.name));
                    tell_ended(&tell, &blame, &job.launch, exit);
                    false
                }
                _ => true,
            });
            std::thread::sleep(Duration::from_millis(50));
        }
    })?;
    Ok(Some(watcher))
}

/// A GPU that is there and cannot be used: lost, or of a type without laws.
#[derive(Debug)]
pub(crate) struct Absent {
    /// Its number, as NVML counts.
    pub(crate) number: usize,
    /// Why.
    pub(crate) error: AgentError,
}

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} cannot be used: {}", self.number, self.error)
    }
}

/// How often a GPU that was lost is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Tells of the GPUs that cannot be used, and of those that can be read again. NVML counts devices
/// once, so it takes a new agent to use one; services and MPS go on meanwhile.
pub(crate) fn watch_absent(nvml: &Arc<Nvml>, tell: &Tell, absent: &[Absent]) -> Result<Watcher> {
    for one in absent {
        tracing::error!("{one}");
        drop(tell.send((one.number.to_string(), Event::Alert(one.to_string()))));
    }
    let is_lost = |one: &&Absent| matches!(one.error, AgentError::Nvml { .. });
    let mut lost: Vec<u32> =
        absent.iter().filter(is_lost).filter_map(|one| u32::try_from(one.number).ok()).collect();
    let (nvml, tell) = (Arc::clone(nvml), tell.clone());
    errors::spawn("absent-gpus", move |stop| {
        let mut next = Instant::now() + LOOK_EVERY;
        while !stop.load(Ordering::Acquire) && !lost.is_empty() {
            std::thread::sleep(Duration::from_millis(100));
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + LOOK_EVERY;
            lost.retain(|number| {
                let back = nvml::facts(&nvml, *number).is_ok();
                if back {
                    let text = format!(
                        "GPU {number} can be read again: restart the agent to use it; services and MPS go on"
                    );
                    tracing::warn!("{text}");
                    drop(tell.send((number.to_string(), Event::Alert(text))));
                }
                !back
            });
        }
    })
}
