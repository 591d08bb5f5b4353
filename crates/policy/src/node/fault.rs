//! What can go wrong on a GPU, and what is done about it, as one table.
//!
//! Under MPS a neighbour's fault is everybody's fault, so the order of the actions matters: stop the
//! offline work, repair the server, bring the service back, make sure that a new client can attach,
//! and only then think of the job. The table is data: a configuration may override any row.
//! XIDs and their meaning are in `docs/node-laws.md`.

use std::collections::BTreeMap;
use std::fmt;

use super::xid::RecoveryAction;

/// One kind of error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The job left on SIGINT that MuxFlow did not send.
    SignalInt,
    /// The job left on SIGTERM that MuxFlow did not send.
    SignalTerm,
    /// The job was killed, perhaps with work in flight.
    SignalKill,
    /// The job died of another signal, such as SIGSEGV.
    SignalOther,
    /// The job ended with an exit code other than zero.
    ExitCode,
    /// The driver reported an XID.
    Xid(u16),
    /// XID 154: the driver says which recovery is needed.
    Recovery(RecoveryAction),
    /// The MPS server is gone.
    MpsCrash,
    /// The MPS server is in its FAULT state and refuses clients.
    MpsFault,
    /// A new client cannot attach in time, whatever the control daemon says.
    MpsHang,
    /// The driver no longer finds the device.
    DeviceLost,
    /// A GPU process of a job runs without the interposer.
    UngatedProcess,
}

impl Fault {
    /// A process that ended by this signal.
    pub fn from_signal(signal: i32) -> Self {
        match signal {
            2 => Fault::SignalInt,
            9 => Fault::SignalKill,
            15 => Fault::SignalTerm,
            _ => Fault::SignalOther,
        }
    }

    /// An XID, with what the log line of XID 154 asks for.
    pub fn from_xid(xid: u16, recovery: Option<RecoveryAction>) -> Self {
        match xid {
            154 => Fault::Recovery(recovery.unwrap_or(RecoveryAction::Unknown)),
            other => Fault::Xid(other),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self {
            Fault::SignalInt => "signal.int",
            Fault::SignalTerm => "signal.term",
            Fault::SignalKill => "signal.kill",
            Fault::SignalOther => "signal.other",
            Fault::ExitCode => "exit.code",
            Fault::Xid(xid) => return write!(f, "xid.{xid}"),
            Fault::Recovery(action) => return write!(f, "recovery.{action}"),
            Fault::MpsCrash => "mps.crash",
            Fault::MpsFault => "mps.fault",
            Fault::MpsHang => "mps.hang",
            Fault::DeviceLost => "device.lost",
            Fault::UngatedProcess => "process.ungated",
        };
        f.write_str(word)
    }
}

/// The key of a row: one fault, or all XIDs without a row of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKey {
    /// This fault.
    Fault(Fault),
    /// Every XID that has no row.
    OtherXid,
}

impl fmt::Display for RowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowKey::Fault(fault) => fault.fmt(f),
            RowKey::OtherXid => f.write_str("xid.other"),
        }
    }
}

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Count it, nothing else: it follows from another error or harms nobody.
    Count,
    /// Stop the offline work of the GPU in the clean order, whoever caused the error.
    StopOffline,
    /// Remember the culprit as fail-prone, if it is known.
    MarkFailProne,
    /// No offline work until the GPU has returned; see the `await` actions.
    DisableGpu,
    /// Drain and restart the MPS server of the GPU.
    ResetMps,
    /// Restart the service, before anything else starts.
    RestartOnline,
    /// Check that a new client can attach; a failure is the fault `mps.hang`.
    Probe,
    /// Queue the job again, after its back-off.
    RestartJob,
    /// The GPU returns when a probe passes.
    AwaitProbe,
    /// The GPU returns when it has been reset and a probe passes.
    AwaitGpuReset,
    /// The GPU returns when the machine has been rebooted and a probe passes.
    AwaitNodeReboot,
}

impl Action {
    /// All of them.
    pub const ALL: [Action; 11] = [
        Action::Count,
        Action::StopOffline,
        Action::MarkFailProne,
        Action::DisableGpu,
        Action::ResetMps,
        Action::RestartOnline,
        Action::Probe,
        Action::RestartJob,
        Action::AwaitProbe,
        Action::AwaitGpuReset,
        Action::AwaitNodeReboot,
    ];

    /// The word used in the configuration and in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Count => "count",
            Action::StopOffline => "stop-offline",
            Action::MarkFailProne => "mark-fail-prone",
            Action::DisableGpu => "disable-gpu",
            Action::ResetMps => "reset-mps",
            Action::RestartOnline => "restart-online",
            Action::Probe => "probe",
            Action::RestartJob => "restart-job",
            Action::AwaitProbe => "await-probe",
            Action::AwaitGpuReset => "await-gpu-reset",
            Action::AwaitNodeReboot => "await-node-reboot",
        }
    }

    /// Reads the word that [`Action::as_str`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.as_str() == text)
    }

    /// What must happen before the GPU returns, for the `await` actions.
    pub fn awaits(self) -> Option<ReturnNeed> {
        match self {
            Action::AwaitProbe => Some(ReturnNeed::Probe),
            Action::AwaitGpuReset => Some(ReturnNeed::GpuReset),
            Action::AwaitNodeReboot => Some(ReturnNeed::NodeReboot),
            _ => None,
        }
    }
}

/// What must happen before a disabled GPU returns, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReturnNeed {
    /// A client attaches.
    Probe,
    /// The GPU is reset, then a client attaches.
    GpuReset,
    /// The machine is rebooted, then a client attaches.
    NodeReboot,
}

/// A row that contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// No action at all.
    #[error("it lists no action; write [\"count\"] to only count the error")]
    Empty,
    /// The same action twice.
    #[error("it lists `{}` twice", .0.as_str())]
    Twice(Action),
    /// `count` means that nothing else is done.
    #[error(
        "it lists `count` beside other actions; every error is counted, `count` alone means that nothing else is done"
    )]
    CountAndMore,
    /// A GPU that is disabled without a way back, or a way back without being disabled.
    #[error(
        "`disable-gpu` and exactly one of `await-probe`, `await-gpu-reset`, `await-node-reboot` go together: a disabled GPU must know how it returns"
    )]
    DisabledWithoutReturn,
    /// A server that is reset under a running service.
    #[error("`reset-mps` takes the service's context away; list `restart-online` after it")]
    ResetWithoutOnline,
}

/// Checks one row.
pub fn check_row(actions: &[Action]) -> Result<(), RowError> {
    if actions.is_empty() {
        return Err(RowError::Empty);
    }
    let twice = actions.iter().enumerate().find(|(i, a)| actions[..*i].contains(a));
    if let Some((_, &action)) = twice {
        return Err(RowError::Twice(action));
    }
    if actions.contains(&Action::Count) && actions.len() > 1 {
        return Err(RowError::CountAndMore);
    }
    let awaits = actions.iter().filter(|a| a.awaits().is_some()).count();
    if awaits != usize::from(actions.contains(&Action::DisableGpu)) {
        return Err(RowError::DisabledWithoutReturn);
    }
    let place = |wanted: Action| actions.iter().position(|&a| a == wanted);
    match (place(Action::ResetMps), place(Action::RestartOnline)) {
        (Some(reset), online) if online.is_none_or(|online| online < reset) => {
            Err(RowError::ResetWithoutOnline)
        }
        _ => Ok(()),
    }
}

use Action::*;
use Fault::*;
use RecoveryAction as Recover;

const fn row(fault: Fault, actions: &'static [Action]) -> (RowKey, &'static [Action]) {
    (RowKey::Fault(fault), actions)
}

/// A fatal fault of one client ends all of them: everybody leaves, the server restarts, the service
/// is back first.
const REBUILD: &[Action] =
    &[StopOffline, DisableGpu, ResetMps, RestartOnline, AwaitProbe, RestartJob];
const REBUILD_BLAMING: &[Action] =
    &[StopOffline, MarkFailProne, DisableGpu, ResetMps, RestartOnline, AwaitProbe, RestartJob];
const UNTIL_RESET: &[Action] = &[StopOffline, DisableGpu, AwaitGpuReset, RestartJob];
const UNTIL_REBOOT: &[Action] = &[StopOffline, DisableGpu, AwaitNodeReboot, RestartJob];

/// The table. `docs/node-laws.md` says why each row is as it is.
const TABLE: &[(RowKey, &[Action])] = &[
    // The interposer freezes the launches and releases the context; the probe makes sure.
    row(SignalInt, &[Probe, RestartJob]),
    row(SignalTerm, &[Probe, RestartJob]),
    // Work in flight may have been cut off, and that can wedge MPS for every later client.
    row(SignalKill, &[Probe, RestartJob]),
    row(SignalOther, &[Probe, RestartJob]),
    row(ExitCode, &[RestartJob]),
    row(Xid(13), REBUILD_BLAMING),
    row(Xid(31), REBUILD_BLAMING),
    row(Xid(43), &[Count]),
    row(Xid(45), &[Probe]),
    row(Xid(48), UNTIL_RESET),
    row(Xid(63), &[Count]),
    row(Xid(64), UNTIL_RESET),
    row(Xid(74), UNTIL_RESET),
    // Off the bus: one that is back has been reset.
    row(Xid(79), UNTIL_RESET),
    // Contained by the hardware, but MPS clients share what it is contained to.
    row(Xid(94), REBUILD),
    row(Xid(95), UNTIL_RESET),
    row(Xid(119), UNTIL_RESET),
    row(Xid(120), UNTIL_RESET),
    (RowKey::OtherXid, &[StopOffline, Probe, RestartJob]),
    row(Recovery(Recover::None), &[Count]),
    row(Recovery(Recover::DrainP2p), &[StopOffline, RestartJob]),
    row(Recovery(Recover::DrainAndReset), UNTIL_RESET),
    row(Recovery(Recover::GpuReset), UNTIL_RESET),
    row(Recovery(Recover::NodeReboot), UNTIL_REBOOT),
    row(Recovery(Recover::Unknown), UNTIL_REBOOT),
    row(MpsCrash, REBUILD),
    row(MpsFault, REBUILD_BLAMING),
    row(MpsHang, REBUILD),
    row(DeviceLost, UNTIL_RESET),
    row(UngatedProcess, &[StopOffline, MarkFailProne]),
];

impl RowKey {
    /// Reads a key as it is written in the configuration: those of the table, and `xid.NUMBER`.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some((key, _)) = TABLE.iter().find(|(key, _)| key.to_string() == text) {
            return Some(*key);
        }
        let number = text.strip_prefix("xid.")?;
        let xid = number.parse::<u16>().ok().filter(|xid| xid.to_string() == number)?;
        // XID 154 is answered by what it asks for: `recovery.*`.
        (xid != 154).then_some(RowKey::Fault(Xid(xid)))
    }
}

/// The response to every fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseTable {
    rows: BTreeMap<RowKey, Vec<Action>>,
}

impl Default for ResponseTable {
    fn default() -> Self {
        ResponseTable { rows: TABLE.iter().map(|(key, row)| (*key, row.to_vec())).collect() }
    }
}

impl ResponseTable {
    /// Replaces one row, or gives an XID a row of its own.
    pub fn set(&mut self, key: RowKey, actions: Vec<Action>) -> Result<(), RowError> {
        check_row(&actions)?;
        self.rows.insert(key, actions);
        Ok(())
    }

    /// What to do, in this order. Never empty: a fault without a row is treated as an unknown XID.
    pub fn respond(&self, fault: Fault) -> &[Action] {
        let key = RowKey::Fault(fault);
        self.rows.get(&key).or_else(|| self.rows.get(&RowKey::OtherXid)).map_or(&[], Vec::as_slice)
    }

    /// Every row, for tables and documentation.
    pub fn rows(&self) -> impl Iterator<Item = (RowKey, &[Action])> {
        self.rows.iter().map(|(key, actions)| (*key, actions.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every fault that can be built; a new variant does not compile until it is listed here.
    fn every_fault() -> Vec<Fault> {
        let listed = |fault: Fault| match fault {
            SignalInt | SignalTerm | SignalKill | SignalOther | ExitCode | MpsCrash | MpsFault
            | MpsHang | DeviceLost | UngatedProcess | Xid(_) | Recovery(_) => fault,
        };
        [
            SignalInt,
            SignalTerm,
            SignalKill,
            SignalOther,
            ExitCode,
            MpsCrash,
            MpsFault,
            MpsHang,
            DeviceLost,
            UngatedProcess,
        ]
        .into_iter()
        .chain((0..=u16::MAX).map(|xid| Fault::from_xid(xid, None)))
        .chain(RecoveryAction::ALL.map(|action| Fault::from_xid(154, Some(action))))
        .chain((-1..=70).map(Fault::from_signal))
        .map(listed)
        .collect()
    }

    #[test]
    fn the_table_is_total_and_sound() {
        let table = ResponseTable::default();
        for fault in every_fault() {
            let actions = table.respond(fault);
            assert_eq!(check_row(actions), Ok(()), "{fault}");
            let has_row = table.rows.contains_key(&RowKey::Fault(fault));
            assert!(has_row || matches!(fault, Xid(_)), "{fault} needs a row of its own");
        }
        assert_eq!(TABLE.len(), table.rows.len(), "a key is listed twice");
        assert_eq!(table.respond(Xid(154)), table.respond(Xid(999)));
    }

    #[test]
    fn what_is_fatal_to_all_clients_brings_the_service_back_before_the_job() {
        let table = ResponseTable::default();
        for fault in [Xid(13), Xid(31), Xid(94), MpsCrash, MpsFault, MpsHang] {
            let actions = table.respond(fault);
            let place = |wanted| actions.iter().position(|&a| a == wanted).unwrap();
            assert!(place(StopOffline) < place(ResetMps), "{fault}");
            assert!(place(ResetMps) < place(RestartOnline), "{fault}");
            assert!(place(RestartOnline) < place(RestartJob), "{fault}");
        }
        for fault in [Recovery(Recover::NodeReboot), Recovery(Recover::Unknown)] {
            assert!(table.respond(fault).contains(&AwaitNodeReboot), "{fault}");
        }
        let reset = [Xid(79), DeviceLost, Xid(95), Xid(64), Xid(119), Xid(120)];
        for fault in reset.into_iter().chain([Recovery(Recover::GpuReset)]) {
            assert!(table.respond(fault).contains(&AwaitGpuReset), "{fault}");
        }
        for fault in [Xid(43), Xid(63), Recovery(Recover::None)] {
            assert_eq!(table.respond(fault), [Count], "{fault}");
        }
    }

    #[test]
    fn keys_and_actions_come_back_from_their_words() {
        for (key, _) in TABLE {
            assert_eq!(RowKey::parse(&key.to_string()), Some(*key));
        }
        for action in Action::ALL {
            assert_eq!(Action::parse(action.as_str()), Some(action));
        }
        assert_eq!(RowKey::parse("xid.109"), Some(RowKey::Fault(Xid(109))));
        for bad in ["xid.154", "xid.", "xid.+5", "xid.013", "xid.99999", "mps", "", "signal.9"] {
            assert_eq!(RowKey::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn rows_that_contradict_themselves_are_refused() {
        let mut table = ResponseTable::default();
        let key = RowKey::Fault(Xid(31));
        let mut set = |actions: &[Action]| table.set(key, actions.to_vec());
        assert_eq!(set(&[]), Err(RowError::Empty));
        assert_eq!(set(&[Probe, Probe]), Err(RowError::Twice(Probe)));
        assert_eq!(set(&[Count, Probe]), Err(RowError::CountAndMore));
        assert_eq!(set(&[DisableGpu]), Err(RowError::DisabledWithoutReturn));
        assert_eq!(set(&[AwaitProbe]), Err(RowError::DisabledWithoutReturn));
        assert_eq!(
            set(&[DisableGpu, AwaitProbe, AwaitGpuReset]),
            Err(RowError::DisabledWithoutReturn)
        );
        assert_eq!(set(&[ResetMps]), Err(RowError::ResetWithoutOnline));
        assert_eq!(set(&[RestartOnline, ResetMps]), Err(RowError::ResetWithoutOnline));
        assert_eq!(set(&[Count]), Ok(()));
        assert_eq!(table.respond(Xid(31)), [Count]);
        assert_eq!(table.set(RowKey::Fault(Xid(109)), vec![Probe]), Ok(()));
        assert_eq!(table.respond(Xid(109)), [Probe]);
        assert_eq!(table.respond(Xid(110)), [StopOffline, Probe, RestartJob]);
    }
}
