//! A GPU that is disabled: what it waits for, over restarts of the agent too, and its return.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::{Fault, ReturnNeed};
use muxflow_policy::node::health::DisableReason;
use muxflow_policy::node::repair::{Repair, StillWaiting};
use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::Micros;
use serde::{Deserialize, Serialize};

use super::control::HealthOrder;
use super::supervisor::Supervisor;
use crate::launch;
use crate::marks::Mark;
use crate::monitor::{self, SensorFailure};
use crate::mps::probe::Attached;
use crate::process::{self, ProcessKey};
use crate::runner::Running;

/// A GPU that waits to be mended, remembered over a restart of the agent.
#[derive(Debug, Serialize, Deserialize)]
struct RememberedRepair {
    boot_id: String,
    need: String,
    /// What the driver asked for: that it no longer asks shows that it was done.
    #[serde(default)]
    asked: Option<String>,
    /// The device was gone: that it is back shows that it was reset.
    #[serde(default)]
    lost: bool,
}

fn need_word(need: ReturnNeed) -> &'static str {
    match need {
        ReturnNeed::Probe => "probe",
        ReturnNeed::GpuReset => "gpu-reset",
        ReturnNeed::NodeReboot => "node-reboot",
    }
}

fn need_of(word: &str) -> ReturnNeed {
    match word {
        "probe" => ReturnNeed::Probe,
        "gpu-reset" => ReturnNeed::GpuReset,
        _ => ReturnNeed::NodeReboot,
    }
}

/// When the next client tries to attach to a GPU that waits for one. A server that hangs is found by
/// a client that hangs with it, so each try may cost seconds, and each finding a new server.
#[derive(Debug, Default)]
pub(super) struct ReturnPace {
    failed: u32,
    not_before: Option<Instant>,
}

const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl ReturnPace {
    fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| now >= at)
    }

    fn failed(&mut self, now: Instant) {
        let pause = Duration::from_millis(250).saturating_mul(1 << self.failed.min(8));
        self.failed = self.failed.saturating_add(1);
        self.not_before = Some(now + pause.min(LONGEST_PAUSE));
    }
}

impl Supervisor {
    pub(super) fn wait_for(&mut self, need: ReturnNeed) {
        let now = monitor::now();
        match &mut self.repair {
            Some(repair) => repair.add(need, now),
            None => self.repair = Some(Repair::new(need, now)),
        }
        self.write_repair();
    }

    /// What the GPU waits for, for the next agent.
    pub(super) fn write_repair(&self) {
        let Some(repair) = self.repair else { return };
        let asked = self.evidence.recovery.filter(|asked| *asked != RecoveryAction::None);
        let remembered = RememberedRepair {
            boot_id: process::boot_id(),
            need: need_word(repair.need()).to_owned(),
            asked: asked.map(|asked| asked.as_str().to_owned()),
            lost: self.was_lost,
        };
        if let Err(error) = launch::write(&self.repair_file(), &remembered) {
            tracing::warn!(error = %error, "a restart of the agent will forget that this GPU is disabled");
        }
    }

    /// After a restart of the agent: a GPU that waits to be mended still waits, within one boot.
    pub(super) fn remember_repair(&mut self) {
        let path = self.repair_file();
        let Some(remembered) = read_repair(&path) else { return };
        if remembered.boot_id != process::boot_id() {
            drop(fs::remove_file(&path));
            return;
        }
        let need = need_of(&remembered.need);
        tracing::warn!(gpu = self.uuid(), need = remembered.need, "the GPU is still disabled");
        self.repair = Some(Repair::new(need, monitor::now()));
        let asked = |word: String| RecoveryAction::ALL.into_iter().find(|a| a.as_str() == word);
        self.evidence.recovery = remembered.asked.and_then(asked);
        self.was_lost = remembered.lost;
        drop(self.to_fast.send(HealthOrder::Disable(DisableReason::Operator)));
    }

    fn repair_file(&self) -> PathBuf {
        self.params.state_dir.join("repair.json")
    }

    /// What the driver has asked for since the look before, and nobody has answered: it asked while no
    /// agent ran, or its line in the kernel's log was lost.
    fn unanswered(&self, before: Option<RecoveryAction>) -> Option<RecoveryAction> {
        use RecoveryAction::{DrainAndReset, GpuReset, NodeReboot};
        let asked = self.evidence.recovery.filter(|asked| before == Some(*asked))?;
        let known = matches!(asked, GpuReset | DrainAndReset | NodeReboot);
        // What is answered with less than waiting for it would be answered again and again.
        let row = self.params.errors.respond(Fault::Recovery(asked));
        let waits = row.iter().any(|action| action.awaits().is_some());
        let heeds = self.repair.is_none() && self.params.defences.error_response;
        (known && waits && heeds).then_some(asked)
    }

    /// The service that runs now, as a process.
    fn serves_as(&self) -> Option<ProcessKey> {
        let online = self.online.as_ref()?;
        online.running.as_ref().map(Running::main)
    }

    /// A reset ends all contexts. A service that did not end with its own would never serve again.
    fn renew_service(&mut self, need: ReturnNeed) {
        let held = self.served_before.take();
        if need != ReturnNeed::Probe && held.is_some() && held == self.serves_as() {
            tracing::warn!(
                gpu = self.uuid(),
                "the service still has a context from before the reset"
            );
            self.bring_online_back(false);
        }
    }

    /// Takes note of what shows that the GPU was reset.
    fn look_for_reset(&mut self) {
        let published = self.shared.monitor.published();
        let failure = published.failure.as_ref().map(|(_, why)| why);
        let lost = failure == Some(&SensorFailure::DeviceLost);
        // What was read before it was lost says nothing.
        let later = published.sample.is_some_and(|sample| sample.at > self.lost_at);
        let is_back = failure.is_none() && later;
        let asked = |what| !matches!(what, None | Some(RecoveryAction::None));
        // Only what was read after the driver had asked says that it no longer does.
        let read_at = published.processes.as_ref().map_or(Micros::ZERO, |(at, _)| *at);
        let recovery = published.recovery.filter(|_| read_at > self.asked_at);
        let no_more = asked(self.evidence.recovery) && !asked(recovery);
        if (self.was_lost && is_back) || (no_more && recovery.is_some()) {
            // A device that was gone and is back has been reset, and so has one whose driver asked
            // for it and no longer does.
            self.evidence.gpu_reset_at = Some(monitor::now());
        }
        let before = (self.evidence.recovery, self.was_lost);
        if recovery.is_some() {
            self.evidence.recovery = recovery;
        }
        if let Some(asked) = self.unanswered(before.0) {
            self.see(Fault::Recovery(asked), None);
        }
        self.was_lost = lost || (self.was_lost && !is_back);
        // That it no longer asks, or is back, is found again by the next agent.
        let waits = asked(self.evidence.recovery) || self.was_lost;
        if waits && before != (self.evidence.recovery, self.was_lost) {
            self.write_repair();
        }
        if Mark::GpuWasReset(self.uuid()).take(&self.node.state_dir) {
            tracing::info!(gpu = self.uuid(), "somebody says that the GPU was reset");
            self.evidence.gpu_reset_at = Some(monitor::now());
        }
    }

    /// A disabled GPU returns when what it waits for has happened.
    pub(super) fn watch_return(&mut self) {
        self.look_for_reset();
        let Some(repair) = self.repair else {
            self.pace = ReturnPace::default();
            self.served_before = None;
            return;
        };
        if repair.done(&self.evidence) == Err(StillWaiting::GpuReset) {
            self.served_before = self.serves_as();
        }
        if self.was_lost {
            return;
        }
        let only_probe_missing = repair.done(&self.evidence) == Err(StillWaiting::Probe);
        if only_probe_missing && self.pace.is_due(Instant::now()) {
            self.start_mps();
            let attached = self.probe();
            if !matches!(attached, Attached::Yes { .. }) {
                self.pace.failed(Instant::now());
            }
            if attached == Attached::Hung {
                // The server that was to mend it hangs as well.
                return self.see(Fault::MpsHang, None);
            }
        }
        if repair.done(&self.evidence).is_ok() {
            self.repair = None;
            drop(fs::remove_file(self.repair_file()));
            tracing::info!(gpu = self.uuid(), "the GPU has returned");
            self.renew_service(repair.need());
            drop(self.to_fast.send(HealthOrder::Enable));
        }
    }
}

/// What a GPU waits for whose state is kept in this directory, within this boot; for `doctor`.
pub(crate) fn disabled_for(state_dir: &Path) -> Option<String> {
    let remembered = read_repair(&state_dir.join("repair.json"))?;
    let here = remembered.boot_id == process::boot_id();
    here.then(|| match need_of(&remembered.need) {
        ReturnNeed::Probe => "a client to attach".to_owned(),
        ReturnNeed::GpuReset => "a reset of the GPU".to_owned(),
        ReturnNeed::NodeReboot => "a reboot of the machine".to_owned(),
    })
}

fn read_repair(path: &Path) -> Option<RememberedRepair> {
    launch::read(path)
        .inspect_err(|error| tracing::warn!(error = %error, "cannot tell what a GPU waits for"))
        .ok()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_come_back_from_their_words_and_unknown_ones_are_the_strongest() {
        for need in [ReturnNeed::Probe, ReturnNeed::GpuReset, ReturnNeed::NodeReboot] {
            assert_eq!(need_of(need_word(need)), need);
        }
        assert_eq!(need_of("?"), ReturnNeed::NodeReboot);
    }

    #[test]
    fn clients_that_fail_to_attach_come_at_growing_intervals() {
        let (mut pace, mut now) = (ReturnPace::default(), Instant::now());
        let began = now;
        assert!(pace.is_due(now), "the first comes at once");
        for _ in 0..12 {
            pace.failed(now);
            assert!(!pace.is_due(now));
            now = pace.not_before.unwrap();
            assert!(pace.is_due(now));
        }
        let whole = now - began;
        assert!(whole > Duration::from_secs(120) && whole < Duration::from_secs(240), "{whole:?}");
    }
}
