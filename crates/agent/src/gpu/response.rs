//! What is done about an error: the rows of `policy`'s table, carried out in their order.

use muxflow_policy::node::fault::{Action, Fault};
use muxflow_policy::node::health::DisableReason;
use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::Micros;

use super::control::HealthOrder;
use super::serving::ServerSeen;
use super::supervisor::Supervisor;
use super::{Event, FaultSeen, StopReason};
use crate::monitor;
use crate::mps::probe::Attached;

/// After these the driver asks for a reset; it gets this long to say so.
const ASKS_FOR_RESET: [Fault; 2] = [Fault::Xid(48), Fault::Xid(95)];
const ASKS_WITHIN: Micros = Micros::from_secs(2);

impl Supervisor {
    /// Answers one error. Errors from before the last repair were mended by it: they are counted.
    pub(super) fn answer(&mut self, seen: FaultSeen) {
        let name = seen.fault.to_string();
        *self.shared.status().faults.entry(name.clone()).or_default() += 1;
        let row = self.params.errors.respond(seen.fault).to_vec();
        let mended = row.contains(&Action::ResetMps) && seen.at <= self.mended_at;
        // Before anything is stopped: whose the processes are is known now. Also when it was mended
        // already, for MPS shows the same error without a culprit.
        self.blame_for(seen, mended);
        if mended || row == [Action::Count] || !self.params.defences.error_response {
            tracing::info!(gpu = self.uuid(), fault = name, mended, "error counted");
            return;
        }
        let words: Vec<&str> = row.iter().map(|action| action.as_str()).collect();
        tracing::warn!(gpu = self.uuid(), fault = name, pid = seen.pid, actions = ?words, "error");
        let began = monitor::now();
        // It may be back before anybody looks again.
        if matches!(seen.fault, Fault::DeviceLost | Fault::Xid(79)) {
            (self.was_lost, self.lost_at) = (true, began);
        }
        if let Fault::Recovery(action) = seen.fault
            && self.shared.monitor.published().recovery.is_some()
        {
            (self.evidence.recovery, self.asked_at) = (Some(action), began);
        }
        if ASKS_FOR_RESET.contains(&seen.fault)
            && self.shared.monitor.published().recovery.is_some()
        {
            // The GPU may be reset before anybody has read what the driver asks for.
            let asked = RecoveryAction::GpuReset;
            (self.evidence.recovery, self.asked_at) =
                (Some(asked), began.saturating_add(ASKS_WITHIN));
        }
        // Where contexts are lost, the service waits for the job to be gone; elsewhere it goes on,
        // and the job has all of its time.
        let in_haste = row.contains(&Action::ResetMps) || self.was_lost;
        // Looked at before anything is stopped.
        let alone = self.offline.is_none() && self.guest.is_none();
        for action in &row {
            self.act(*action, seen, in_haste, alone);
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

    fn act(&mut self, action: Action, seen: FaultSeen, in_haste: bool, alone: bool) {
        match action {
            // A job's end was told with `requeue` when it was stopped.
            // Blame was found before the first action.
            Action::Count | Action::RestartJob | Action::MarkFailProne => {}
            Action::StopOffline => {
                let reason = StopReason::Fault(seen.fault);
                if in_haste {
                    self.stop_offline_and_wait(reason, self.params.fault_stop);
                } else {
                    self.stop_guest(None, &reason);
                    self.begin_stop(reason);
                }
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
            Action::RestartOnline => self.bring_online_back(alone),
            // A client that attached since has shown what this one would show.
            Action::Probe if seen.at < self.probe_began => {}
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
}
