//! What is done about an error: the rows of `policy`'s table, carried out in their order.

use std::path::Path;

use muxflow_policy::node::fault::{Action, Fault, ReturnNeed};
use muxflow_policy::node::health::DisableReason;
use muxflow_policy::node::repair::Repair;
use serde::{Deserialize, Serialize};

use super::control::HealthOrder;
use super::serving::ServerSeen;
use super::supervisor::Supervisor;
use super::{Event, FaultSeen, StopReason};
use crate::launch;
use crate::monitor;
use crate::mps::probe::Attached;
use crate::process;

/// A GPU that waits to be mended, remembered over a restart of the agent.
#[derive(Debug, Serialize, Deserialize)]
struct RememberedRepair {
    boot_id: String,
    need: String,
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

impl Supervisor {
    /// Answers one error. Errors from before the last repair were mended by it: they are counted.
    pub(super) fn answer(&mut self, seen: FaultSeen) {
        let name = seen.fault.to_string();
        *self.shared.status().faults.entry(name.clone()).or_default() += 1;
        let row = self.params.errors.respond(seen.fault).to_vec();
        let mended = row.contains(&Action::ResetMps) && seen.at <= self.mended_at;
        // Before anything is stopped: whose the processes are is known now. Also when it was mended
        // already, for MPS shows the same error without a culprit.
        self.blame_for(seen);
        if mended || row == [Action::Count] || !self.params.defences.error_response {
            tracing::info!(gpu = self.uuid(), fault = name, mended, "error counted");
            return;
        }
        let words: Vec<&str> = row.iter().map(|action| action.as_str()).collect();
        tracing::warn!(gpu = self.uuid(), fault = name, pid = seen.pid, actions = ?words, "error");
        let began = monitor::now();
        // It may be back before anybody looks again.
        self.was_lost |= matches!(seen.fault, Fault::DeviceLost | Fault::Xid(79));
        if let Fault::Recovery(action) = seen.fault
            && self.shared.monitor.published().recovery.is_some()
        {
            (self.evidence.recovery, self.asked_at) = (Some(action), began);
        }
        for action in &row {
            self.act(*action, seen);
        }
        let took = monitor::now().since(began);
        if row.contains(&Action::ResetMps) {
            self.mended_at = monitor::now();
        }
        if row.contains(&Action::DisableGpu) {
            self.alert(format!("{name}: GPU {} disabled; done: {}", self.uuid(), words.join(", ")));
        }
        self.tell(Event::Fault { seen, actions: row, took });
    }

    fn act(&mut self, action: Action, seen: FaultSeen) {
        match action {
            // A job's end was told with `requeue` when it was stopped.
            // Blame was found before the first action.
            Action::Count | Action::RestartJob | Action::MarkFailProne => {}
            Action::StopOffline => {
                let reason = StopReason::Fault(seen.fault);
                self.stop_offline_and_wait(reason, self.params.fault_stop);
            }
            Action::DisableGpu => {
                let reason = DisableReason::Fault(seen.fault);
                drop(self.to_fast.send(HealthOrder::Disable(reason)));
            }
            Action::ResetMps => {
                // The server goes with its daemon: that is no crash of its own.
                self.mps = ServerSeen::default();
                let reset = self.daemon.as_mut().map(|daemon| daemon.reset());
                if let Some(Err(error)) = reset {
                    self.alert(format!("MPS cannot be restarted: {error}"));
                }
                if let Some(daemon) = &self.daemon {
                    self.shared.status().mps_starts = daemon.started();
                }
            }
            Action::RestartOnline => self.bring_online_back(),
            Action::Probe => {
                if self.probe() == Attached::Hung && seen.fault != Fault::MpsHang {
                    let at = monitor::now();
                    self.answer(FaultSeen { at, fault: Fault::MpsHang, pid: None });
                }
            }
            Action::AwaitProbe | Action::AwaitGpuReset | Action::AwaitNodeReboot => {
                if let Some(need) = action.awaits() {
                    self.wait_for(need);
                }
            }
        }
    }

    /// Blames the culprit of an error, where that is what the error is answered with.
    pub(super) fn blame_for(&self, seen: FaultSeen) {
        let blames = self.params.errors.respond(seen.fault).contains(&Action::MarkFailProne);
        if blames && self.params.defences.error_response {
            self.blame(seen);
        }
    }

    /// The job is to blame when the driver names one of its processes; it may have been stopped a
    /// moment ago.
    fn blame(&self, seen: FaultSeen) {
        let Some(pid) = seen.pid else { return };
        let running = self.offline.as_ref().filter(|o| o.running.processes().contains(&pid));
        let job = running.map(|o| o.job.clone()).or_else(|| self.last_stopped_of(seen.pid));
        if let Some(job) = job {
            self.node.blame.add(&job);
        }
    }

    fn last_stopped_of(&self, pid: Option<u32>) -> Option<muxflow_types::JobId> {
        let (job, pids) = self.last_stopped.as_ref()?;
        pids.contains(&pid?).then(|| job.clone())
    }

    fn wait_for(&mut self, need: ReturnNeed) {
        let now = monitor::now();
        match &mut self.repair {
            Some(repair) => repair.add(need, now),
            None => self.repair = Some(Repair::new(need, now)),
        }
        let need = self.repair.map_or(need, |repair| repair.need());
        let remembered =
            RememberedRepair { boot_id: process::boot_id(), need: need_word(need).to_owned() };
        if let Err(error) = launch::write(&self.repair_file(), &remembered) {
            tracing::warn!(error = %error, "a restart of the agent will forget that this GPU is disabled");
        }
    }

    /// After a restart of the agent: a GPU that waits to be mended still waits, within one boot.
    pub(super) fn remember_repair(&mut self) {
        let path = self.repair_file();
        let Some(remembered) = read_repair(&path) else { return };
        if remembered.boot_id != process::boot_id() {
            drop(std::fs::remove_file(&path));
            return;
        }
        let need = need_of(&remembered.need);
        tracing::warn!(gpu = self.uuid(), need = remembered.need, "the GPU is still disabled");
        self.repair = Some(Repair::new(need, monitor::now()));
        drop(self.to_fast.send(HealthOrder::Disable(DisableReason::Operator)));
    }
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
}
