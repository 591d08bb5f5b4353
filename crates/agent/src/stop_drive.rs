//! Carries out a stop on the control block of a job: the keeper does it, and the agent in its place
//! when the keeper was killed.

use std::time::{Duration, Instant};

use crate::control_block::ControlBlock;
use crate::error::AgentError;
use crate::launch::Launch;
use crate::mps::control::MpsControl;
use crate::stop::{Act, HASTENED_MS, Sight, Step, StepTaken, StopOrder};

/// A stop under way.
#[derive(Debug)]
pub(crate) struct StopDrive {
    order: StopOrder,
    began: Instant,
    block: Option<ControlBlock>,
    /// For how long MPS is asked to cut off clients.
    cut_limit: Duration,
    /// The program had ended by itself when it was to get its signal.
    ended_before: bool,
}

/// The control block of a job, when it has one that can be used.
pub(crate) fn block_of(launch: &Launch) -> Option<ControlBlock> {
    let opened = ControlBlock::open(launch.control_dir.as_deref()?);
    opened
        .inspect_err(|error| tracing::warn!(error = %error, "stopping without a control block"))
        .ok()
}

impl StopDrive {
    /// Begins: the work in flight is drained.
    pub(crate) fn begin(launch: &Launch) -> Self {
        let block = block_of(launch);
        let (order, first) = StopOrder::begin(launch.stop, 0);
        if let (Some(block), Act::SetGate(gate)) = (&block, first) {
            block.set_gate(gate);
        }
        let cut_limit = launch.stop.cut_limit();
        StopDrive { order, began: Instant::now(), block, cut_limit, ended_before: false }
    }

    /// The service waits for what the job holds: it gets hardly any time to save its state.
    pub(crate) fn hasten(&mut self) {
        self.order.hasten(HASTENED_MS);
        self.cut_limit = self.cut_limit.min(Duration::from_millis(HASTENED_MS));
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// What it went through so far. To save its state is a step of a program that was told to.
    pub(crate) fn taken(&self) -> Vec<StepTaken> {
        let took = |taken: &&StepTaken| !self.ended_before || taken.step != Step::Checkpoint;
        self.order.taken().iter().filter(took).copied().collect()
    }

    /// Looks, and does what is next; `members` lists the processes of the job, and `signal` sends the
    /// main process the signal it is to save its state at, and says whether that still lives: MPS is
    /// asked before, which may take long, and a program that finishes meanwhile is done. True when
    /// nothing is left to do but to kill the group.
    pub(crate) fn turn(
        &mut self,
        launch: &Launch,
        main_alive: bool,
        members: impl Fn() -> Vec<u32>,
        signal: impl Fn(i32) -> bool,
    ) -> bool {
        // The agent may be gone: the job must not take its silence for a reason to stop early.
        if let Some(block) = &self.block {
            block.beat();
        }
        let answers = self.block.as_ref().map(ControlBlock::answers);
        let sight = Sight {
            main_alive,
            live: answers.map_or(0, |a| a.live),
            drained: answers.map_or(0, |a| a.drained),
            released: answers.map_or(0, |a| a.released),
        };
        let acts = self.order.advance(self.elapsed_ms(), sight);
        let acted = !acts.is_empty();
        for act in acts {
            match act {
                Act::SetGate(gate) => {
                    if let Some(block) = &self.block {
                        block.set_gate(gate);
                    }
                }
                Act::SignalProgram => {
                    self.cut_strangers_off(launch, &members());
                    self.ended_before = !signal(launch.stop.signal);
                }
                Act::TerminateClients => {
                    let lagging = self.block.as_ref().map(ControlBlock::lagging);
                    terminate_clients(launch, &lagging.unwrap_or_default(), self.cut_limit);
                }
                Act::KillGroup => {
                    self.cut_strangers_off(launch, &members());
                    return true;
                }
            }
        }
        if acted {
            self.order.done(self.elapsed_ms());
        }
        false
    }

    fn registered(&self) -> Vec<u32> {
        self.block.as_ref().map(ControlBlock::registered).unwrap_or_default()
    }

    /// A process without the interposer cannot be drained: a signal would meet its work in flight.
    /// MPS is asked only where the job has a process that is not registered.
    fn cut_strangers_off(&self, launch: &Launch, members: &[u32]) {
        let registered = self.registered();
        let strangers: Vec<u32> =
            members.iter().copied().filter(|pid| !registered.contains(pid)).collect();
        if !strangers.is_empty() {
            terminate_clients(launch, &strangers, self.cut_limit);
        }
    }
}

/// MPS may take this part of the whole time for each answer.
const TRIES: u32 = 4;
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Has MPS cut off those of the processes that are its clients. It is asked again until it has done so
/// or the time for that is over: on a busy machine one answer may well be late, and the signal that
/// follows must not meet work in flight. Where there is no daemon there is nobody to ask.
fn terminate_clients(launch: &Launch, processes: &[u32], limit: Duration) {
    let Some((program, pipe_dir)) = &launch.mps else { return };
    let control = MpsControl::new(program.clone(), pipe_dir.clone(), limit / TRIES);
    let began = Instant::now();
    loop {
        match control.terminate_clients(processes) {
            Ok(cut) => return tracing::info!(workload = launch.name, cut, "clients terminated"),
            Err(error) if began.elapsed() >= limit || is_without_daemon(&error) => {
                tracing::warn!(workload = launch.name, error = %error, "cannot terminate clients");
                return;
            }
            Err(_) => std::thread::sleep(AGAIN_AFTER),
        }
    }
}

/// The words of the control program where nobody listens.
fn is_without_daemon(error: &AgentError) -> bool {
    matches!(error, AgentError::Mps { reason, .. } if reason.contains("Cannot find MPS control daemon"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::{Cgroups, Limits};
    use crate::launch::Kind;
    use crate::logs::LogLimits;
    use crate::process::ProcessKey;
    use crate::stop::StopLimits;
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    /// MPS has a client that is of the job and never registered, and one that is not of the job. The
    /// first question to it fails.
    #[test]
    fn a_process_without_the_interposer_is_cut_off_before_its_signal() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("control");
        let script = "#!/bin/sh\nread line\ncd $CUDA_MPS_PIPE_DIRECTORY\n[ -e tried ] || { touch tried; exit 1; }\necho \"$line\" >> $CUDA_MPS_PIPE_DIRECTORY/asked\ncase \"$line\" in get_server_list) echo 10;; get_client_list*) echo 21; echo 22;; esac\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let launch = Launch {
            name: "job".into(),
            kind: Kind::Offline,
            gpu: "GPU-1".into(),
            argv: vec!["true".into()],
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            group: Cgroups::none().create("job", &Limits::default()).unwrap(),
            logs: LogLimits::default(),
            control_dir: None,
            mps: Some((program, dir.path().to_owned())),
            stop: StopLimits {
                checkpoint_ms: 60_000,
                terminate_ms: 60_000,
                ..StopLimits::default()
            },
            online_grace_ms: 0,
            agent: ProcessKey::own(),
            fingerprint: 0,
            outside_mps: false,
        };
        let asked = || std::fs::read_to_string(dir.path().join("asked")).unwrap_or_default();
        let mut drive = StopDrive::begin(&launch);
        let signalled = std::cell::Cell::new(false);
        let signal = |_: i32| {
            assert!(asked().ends_with("terminate_client 10 22\n"), "too early: {}", asked());
            signalled.set(true);
            true
        };
        assert!(!drive.turn(&launch, true, || vec![1, 22], signal), "it may save its state");
        assert!(signalled.get());
        assert!(!asked().contains("10 21"), "somebody else's: {}", asked());
        // It is gone, a child of it is not.
        assert!(drive.turn(&launch, false, || vec![21], |_| true));
        assert!(drive.taken().iter().any(|taken| taken.step == Step::Checkpoint), "it was told");
        assert!(asked().ends_with("terminate_client 10 21\n"), "before the kill: {}", asked());
        // A job without such a process costs no question.
        let before = asked();
        let mut drive = StopDrive::begin(&launch);
        assert!(!drive.turn(&launch, true, Vec::new, |_| false));
        assert_eq!(asked(), before);
        // One that had ended when it was to be told has saved nothing: it was done.
        assert!(drive.turn(&launch, false, Vec::new, |_| false));
        assert!(drive.taken().iter().all(|taken| taken.step != Step::Checkpoint));
    }
}
