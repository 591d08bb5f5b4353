//! The order in which offline work is stopped, as a machine that is told what it sees and says what
//! to do next.
//!
//! A client killed with work in flight can fail every other client of its MPS server, so a signal is
//! the last thing that happens and not the first:
//!
//! | step | gate | ends when | limit |
//! | --- | --- | --- | --- |
//! | Drain | `Drain` | nothing is in flight | `drain_ms` |
//! | Checkpoint | `Checkpoint`, and the stop signal to the program | the program has ended | `checkpoint_ms` |
//! | Release | `Reset` | every context is gone | `release_ms` |
//! | Terminate | `Reset`, and `terminate_client` for what is left | nothing is registered | `terminate_ms` |
//! | Kill | | SIGKILL to the whole group | |
//!
//! Work that does not end within Drain would meet the stop signal: `terminate_client` cuts it off first,
//! and the program saves what it has on the host.
//!
//! A job without a registered process holds nothing on the GPU: Drain, Release and Terminate end at
//! once. Whoever drives the machine must see that the group is empty at the end.

use std::time::Duration;

use muxflow_abi::control::Gate;
use serde::{Deserialize, Serialize};

/// What is left of the checkpoint window of a job whose memory the service waits for, from when the
/// program was asked to save its state.
pub const HASTENED_MS: u64 = 500;

/// How long each step may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StopLimits {
    /// For work in flight to end.
    pub drain_ms: u64,
    /// For the program to save its state and leave; 0 gives it none.
    pub checkpoint_ms: u64,
    /// For the contexts to go.
    pub release_ms: u64,
    /// For MPS to cut the clients off.
    pub terminate_ms: u64,
    /// The signal that asks the program to save its state and leave.
    pub signal: i32,
}

impl Default for StopLimits {
    fn default() -> Self {
        StopLimits {
            drain_ms: 2_000,
            checkpoint_ms: 10_000,
            release_ms: 2_000,
            terminate_ms: 2_000,
            signal: libc::SIGTERM,
        }
    }
}

impl StopLimits {
    /// How long a stop takes when every step runs out, and MPS answers neither before the signal nor
    /// before the kill.
    pub fn whole(&self) -> Duration {
        let steps = [self.drain_ms, self.checkpoint_ms, self.release_ms, self.terminate_ms];
        let steps = Duration::from_millis(steps.into_iter().fold(0, u64::saturating_add));
        // Work and strangers are cut off before the signal, and what is left of both before the kill.
        steps.saturating_add(self.cut_limit().saturating_mul(4))
    }

    /// How long MPS may take to cut off what cannot be drained, before a signal is sent all the same.
    pub fn cut_limit(&self) -> Duration {
        Duration::from_millis(self.terminate_ms.max(2_000))
    }
}

/// Where a stop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Waiting for the work in flight.
    Drain,
    /// The program saves its state.
    Checkpoint,
    /// The contexts go.
    Release,
    /// MPS cuts off what is left.
    Terminate,
    /// Everything left is killed.
    Kill,
}

impl Step {
    /// The word used in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Drain => "drain",
            Step::Checkpoint => "checkpoint",
            Step::Release => "release",
            Step::Terminate => "terminate",
            Step::Kill => "kill",
        }
    }
}

/// What is seen of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    /// The main process runs.
    pub main_alive: bool,
    /// Processes registered in the control block that live.
    pub live: usize,
    /// Of these, drained by the last command.
    pub drained: usize,
    /// Of these, released by the last command.
    pub released: usize,
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Set the gate.
    SetGate(Gate),
    /// Send the program its stop signal.
    SignalProgram,
    /// Have MPS cut off the clients that have not done what the gate asks.
    TerminateClients,
    /// Kill the whole group; the stop is over then.
    KillGroup,
}

/// One step of a stop that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTaken {
    /// Which.
    pub step: Step,
    /// How long it took.
    pub took_ms: u64,
    /// It ended because its time was over.
    pub timed_out: bool,
}

/// The machine.
#[derive(Debug, Clone)]
pub struct StopOrder {
    limits: StopLimits,
    step: Step,
    since_ms: u64,
    taken: Vec<StepTaken>,
}

impl StopOrder {
    /// A stop that begins now, and its first act.
    pub fn begin(limits: StopLimits, now_ms: u64) -> (Self, Act) {
        let order = StopOrder { limits, step: Step::Drain, since_ms: now_ms, taken: Vec::new() };
        (order, Act::SetGate(Gate::Drain))
    }

    /// Leaves the program no longer than this to save its state, from when it was asked to.
    pub fn hasten(&mut self, checkpoint_ms: u64) {
        self.limits.checkpoint_ms = self.limits.checkpoint_ms.min(checkpoint_ms);
    }

    /// What was asked for has been done: the time of the step counts from here on, not what it took
    /// to cut off clients before the program was asked to save its state.
    pub fn done(&mut self, now_ms: u64) {
        self.since_ms = self.since_ms.max(now_ms);
    }

    /// Where it is.
    pub fn step(&self) -> Step {
        self.step
    }

    /// What it went through so far.
    pub fn taken(&self) -> &[StepTaken] {
        &self.taken
    }

    fn limit_ms(&self) -> u64 {
        match self.step {
            Step::Drain => self.limits.drain_ms,
            Step::Checkpoint => self.limits.checkpoint_ms,
            Step::Release => self.limits.release_ms,
            Step::Terminate => self.limits.terminate_ms,
            Step::Kill => 0,
        }
    }

    fn is_over(&self, sight: Sight) -> bool {
        match self.step {
            Step::Drain => sight.drained >= sight.live,
            Step::Checkpoint => !sight.main_alive,
            Step::Release => sight.released >= sight.live,
            Step::Terminate => sight.live == 0,
            Step::Kill => false,
        }
    }

    /// Looks, and says what to do now. Call it again and again until it says
    /// [`Act::KillGroup`]; it goes through as many steps as are over.
    pub fn advance(&mut self, now_ms: u64, sight: Sight) -> Vec<Act> {
        let mut acts = Vec::new();
        while self.step != Step::Kill {
            let took_ms = now_ms.saturating_sub(self.since_ms);
            let over = self.is_over(sight);
            let timed_out = !over && took_ms >= self.limit_ms();
            if !over && !timed_out {
                break;
            }
            self.taken.push(StepTaken { step: self.step, took_ms, timed_out });
            self.since_ms = now_ms;
            self.step = self.next(sight);
            match self.step {
                Step::Checkpoint => {
                    if timed_out {
                        // The signal must not meet work in flight.
                        acts.push(Act::TerminateClients);
                    }
                    acts.extend([Act::SetGate(Gate::Checkpoint), Act::SignalProgram]);
                    // The program must have had a chance to see the signal.
                    break;
                }
                Step::Release => acts.push(Act::SetGate(Gate::Reset)),
                Step::Terminate => acts.push(Act::TerminateClients),
                Step::Kill => acts.push(Act::KillGroup),
                Step::Drain => {}
            }
            if self.step == Step::Release && sight.live > 0 {
                // What it saw answered another command.
                break;
            }
        }
        acts
    }

    fn next(&self, sight: Sight) -> Step {
        match self.step {
            Step::Drain if self.limits.checkpoint_ms > 0 && sight.main_alive => Step::Checkpoint,
            Step::Drain | Step::Checkpoint => Step::Release,
            Step::Release if sight.live > sight.released => Step::Terminate,
            Step::Release | Step::Terminate | Step::Kill => Step::Kill,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: StopLimits = StopLimits {
        drain_ms: 20,
        checkpoint_ms: 100,
        release_ms: 20,
        terminate_ms: 20,
        signal: libc::SIGTERM,
    };

    fn sight(main_alive: bool, live: usize, drained: usize, released: usize) -> Sight {
        Sight { main_alive, live, drained, released }
    }

    #[test]
    fn a_willing_job_leaves_without_being_cut_off() {
        let (mut order, first) = StopOrder::begin(LIMITS, 0);
        assert_eq!(first, Act::SetGate(Gate::Drain));
        assert_eq!(order.advance(5, sight(true, 1, 0, 0)), []);
        let acts = order.advance(6, sight(true, 1, 1, 0));
        assert_eq!(acts, [Act::SetGate(Gate::Checkpoint), Act::SignalProgram]);
        assert_eq!(order.advance(50, sight(true, 1, 0, 0)), []);
        let acts = order.advance(60, sight(false, 0, 0, 0));
        assert_eq!(acts, [Act::SetGate(Gate::Reset), Act::KillGroup]);
        assert!(order.taken().iter().all(|step| !step.timed_out));
    }

    #[test]
    fn a_stubborn_job_goes_through_every_step() {
        let (mut order, _) = StopOrder::begin(LIMITS, 0);
        let stubborn = sight(true, 1, 0, 0);
        let acts = order.advance(20, stubborn);
        let asked = [Act::SetGate(Gate::Checkpoint), Act::SignalProgram];
        assert_eq!(acts, [&[Act::TerminateClients], &asked[..]].concat(), "no work in flight");
        assert_eq!(order.advance(119, stubborn), []);
        assert_eq!(order.advance(120, stubborn), [Act::SetGate(Gate::Reset)]);
        assert_eq!(order.advance(140, stubborn), [Act::TerminateClients]);
        assert_eq!(order.advance(160, stubborn), [Act::KillGroup]);
        let steps: Vec<_> = order.taken().iter().map(|s| (s.step, s.timed_out)).collect();
        use Step::*;
        assert_eq!(steps, [(Drain, true), (Checkpoint, true), (Release, true), (Terminate, true)]);
    }

    #[test]
    fn a_job_that_holds_nothing_gets_its_signal_at_once() {
        let (mut order, _) = StopOrder::begin(LIMITS, 0);
        let acts = order.advance(0, sight(true, 0, 0, 0));
        assert_eq!(acts, [Act::SetGate(Gate::Checkpoint), Act::SignalProgram]);
        let none = StopLimits { checkpoint_ms: 0, ..LIMITS };
        let (mut order, _) = StopOrder::begin(none, 0);
        let acts = order.advance(0, sight(true, 0, 0, 0));
        assert_eq!(acts, [Act::SetGate(Gate::Reset), Act::KillGroup]);
    }

    #[test]
    fn one_that_is_hastened_does_not_get_to_save_anything() {
        let (mut order, _) = StopOrder::begin(LIMITS, 0);
        order.hasten(0);
        assert_eq!(order.advance(5, sight(true, 1, 1, 0)), [Act::SetGate(Gate::Reset)]);
        let (mut order, _) = StopOrder::begin(LIMITS, 0);
        assert_eq!(order.advance(5, sight(true, 1, 1, 0)).len(), 2, "it saves its state");
        order.hasten(30);
        order.hasten(1_000_000);
        assert_eq!(order.advance(34, sight(true, 1, 1, 0)), []);
        assert_eq!(order.advance(35, sight(true, 1, 1, 0)), [Act::SetGate(Gate::Reset)]);
    }

    proptest! {
        #[test]
        fn every_stop_ends_in_order_and_in_bounded_time(
            seen in proptest::collection::vec((any::<bool>(), 0usize..3, 0usize..3, 0usize..3), 0..400),
        ) {
            let (mut order, _) = StopOrder::begin(LIMITS, 0);
            let mut acts = Vec::new();
            let mut last = Step::Drain;
            for now_ms in 0..400u64 {
                let at = usize::try_from(now_ms).unwrap();
                let (main, live, drained, released) = *seen.get(at).unwrap_or(&(true, 1, 0, 0));
                let now = order.advance(now_ms, sight(main, live, drained, released));
                if let Some(at) = now.iter().position(|act| *act == Act::SignalProgram) {
                    let cut = now[..at].contains(&Act::TerminateClients);
                    prop_assert_eq!(cut, drained < live, "a signal meets no work in flight");
                }
                acts.extend(now);
                prop_assert!(order.step() >= last, "a step was taken back");
                last = order.step();
            }
            prop_assert_eq!(acts.last(), Some(&Act::KillGroup));
            prop_assert_eq!(acts.iter().filter(|act| **act == Act::KillGroup).count(), 1);
            let kill = order.taken().iter().map(|step| step.took_ms).sum::<u64>();
            prop_assert!(kill <= 160, "took {kill} ms");
        }
    }
}
