//! How a disabled GPU returns.
//!
//! A GPU is disabled for a reason that says what must happen before it may serve again. Several
//! reasons may come together; the strongest holds. Nothing returns on a promise: whatever else was
//! done, a client must have attached afterwards, and the driver must not be asking for more.

use muxflow_types::Micros;

use super::fault::ReturnNeed;
use super::xid::RecoveryAction;

/// What has been seen of the repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evidence {
    /// When a client last attached within its time limit.
    pub probe_passed_at: Option<Micros>,
    /// When the GPU was last reset.
    pub gpu_reset_at: Option<Micros>,
    /// When the machine was last booted.
    pub booted_at: Option<Micros>,
    /// What the driver asks for now, where it says.
    pub recovery: Option<RecoveryAction>,
}

/// What a disabled GPU waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repair {
    need: ReturnNeed,
    since: Micros,
}

/// Why a disabled GPU does not return yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StillWaiting {
    /// The machine has not been rebooted since.
    NodeReboot,
    /// The GPU has not been reset since.
    GpuReset,
    /// The driver asks for a recovery.
    Driver(RecoveryAction),
    /// No client has attached since.
    Probe,
}

impl Repair {
    /// A GPU that was disabled at this time and needs this.
    pub fn new(need: ReturnNeed, since: Micros) -> Self {
        Repair { need, since }
    }

    /// What it needs.
    pub fn need(&self) -> ReturnNeed {
        self.need
    }

    /// A further fault: the stronger need holds, and what was done before it no longer counts.
    pub fn add(&mut self, need: ReturnNeed, now: Micros) {
        self.need = self.need.max(need);
        self.since = self.since.max(now);
    }

    /// Whether the GPU may return, and if not, what for it waits. A reboot resets the GPU too.
    pub fn done(&self, evidence: &Evidence) -> Result<(), StillWaiting> {
        let after = |time: Option<Micros>| time.filter(|&t| t > self.since);
        let booted = after(evidence.booted_at);
        let reset = after(evidence.gpu_reset_at).max(booted);
        let repaired = match self.need {
            ReturnNeed::NodeReboot => booted.ok_or(StillWaiting::NodeReboot)?,
            ReturnNeed::GpuReset => reset.ok_or(StillWaiting::GpuReset)?,
            ReturnNeed::Probe => self.since,
        };
        match evidence.recovery {
            None | Some(RecoveryAction::None | RecoveryAction::DrainP2p) => {}
            Some(asked) => return Err(StillWaiting::Driver(asked)),
        }
        match evidence.probe_passed_at {
            Some(passed) if passed > repaired => Ok(()),
            _ => Err(StillWaiting::Probe),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Evidence =
        Evidence { probe_passed_at: None, gpu_reset_at: None, booted_at: None, recovery: None };

    #[test]
    fn a_probe_must_pass_after_the_repair() {
        let repair = Repair::new(ReturnNeed::GpuReset, Micros(100));
        let with = |reset, probe| Evidence {
            gpu_reset_at: Some(Micros(reset)),
            probe_passed_at: Some(Micros(probe)),
            ..NOTHING
        };
        assert_eq!(repair.done(&NOTHING), Err(StillWaiting::GpuReset));
        assert_eq!(repair.done(&with(90, 200)), Err(StillWaiting::GpuReset), "an old reset");
        assert_eq!(repair.done(&with(150, 140)), Err(StillWaiting::Probe), "probed before it");
        assert_eq!(repair.done(&with(150, 160)), Ok(()));
    }

    #[test]
    fn a_reboot_counts_as_a_reset_and_not_the_other_way_round() {
        let booted = Evidence {
            booted_at: Some(Micros(150)),
            probe_passed_at: Some(Micros(160)),
            ..NOTHING
        };
        assert_eq!(Repair::new(ReturnNeed::GpuReset, Micros(100)).done(&booted), Ok(()));
        let reset = Evidence { gpu_reset_at: Some(Micros(150)), booted_at: None, ..booted };
        let repair = Repair::new(ReturnNeed::NodeReboot, Micros(100));
        assert_eq!(repair.done(&reset), Err(StillWaiting::NodeReboot));
    }

    #[test]
    fn the_driver_has_the_last_word() {
        let repair = Repair::new(ReturnNeed::Probe, Micros(100));
        let asking = |action| Evidence {
            probe_passed_at: Some(Micros(160)),
            recovery: Some(action),
            ..NOTHING
        };
        for action in RecoveryAction::ALL {
            let may = matches!(action, RecoveryAction::None | RecoveryAction::DrainP2p);
            assert_eq!(repair.done(&asking(action)).is_ok(), may, "{action}");
        }
    }

    #[test]
    fn the_strongest_of_several_faults_holds() {
        let mut repair = Repair::new(ReturnNeed::NodeReboot, Micros(100));
        repair.add(ReturnNeed::Probe, Micros(200));
        assert_eq!(repair.need(), ReturnNeed::NodeReboot);
        let early = Evidence {
            booted_at: Some(Micros(150)),
            probe_passed_at: Some(Micros(300)),
            ..NOTHING
        };
        assert_eq!(repair.done(&early), Err(StillWaiting::NodeReboot), "it failed again after");
    }
}
