//! How a run ended, and whose doing that was: from what the node saw to what it means for the job.

use muxflow_agent::gpu::StopReason;
use muxflow_agent::launch::Exit;
use muxflow_policy::retry::RetryParams;
use muxflow_store::jobs::JobRow;
use muxflow_types::Micros;

use crate::lifecycle::End;

/// What a job may still do after a run that did not end well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Fail once more.
    pub may_retry: bool,
    /// Be ended from outside once more without that being its failure.
    pub may_be_hit: bool,
}

impl Patience {
    /// What a job has left that may fail so often.
    pub fn of(row: &JobRow, retries: u32, retry: &RetryParams, now: Micros) -> Self {
        let held = now.since(row.changed_at);
        let may_be_hit = setbacks(row.setbacks, held, retry) < retry.fail_prone_from;
        Patience { may_retry: row.failures < retries, may_be_hit }
    }
}

/// Setbacks in a row that still count: a run that went well for long makes them forgotten.
pub fn setbacks(counted: u32, held: Micros, retry: &RetryParams) -> u32 {
    if held >= retry.forget_after { 0 } else { counted }
}

/// What the node says of the end of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Why<'a> {
    /// Why it was stopped, when it was.
    pub reason: Option<&'a StopReason>,
    /// It is to blame for the error that it was stopped for.
    pub blamed: bool,
    /// It was to blame so often of late that it counts as fail-prone.
    pub fail_prone: bool,
}

/// Whose doing the end of a run was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// The job's own, or nobody knows.
    Own,
    /// The manager asked for it, and has written down why.
    Asked,
    /// An error on the GPU or a signal from outside: the job waits before it comes back.
    Setback,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// In the words of the life cycle.
    pub end: End,
    /// For people.
    pub words: String,
    /// Whose doing it was.
    pub doing: Doing,
}

/// The end of a process, for people.
pub fn words_of(exit: &Exit) -> String {
    match (exit.code, exit.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "nobody saw how it ended".to_owned(),
    }
}

/// Signals by which people and machines end the processes of others.
fn is_from_outside(signal: Option<i32>) -> bool {
    matches!(signal, Some(libc::SIGINT | libc::SIGTERM | libc::SIGKILL))
}

/// How a run ended. `blamed`: the node holds the job to blame for the error that it was stopped for.
pub fn ending_of(
    exit: &Exit,
    reason: Option<&StopReason>,
    blamed: bool,
    patience: Patience,
) -> Ending {
    let natural = words_of(exit);
    let ending = |end, words, doing| Ending { end, words, doing };
    let asked = reason.filter(|reason| !matches!(reason, StopReason::Shutdown));
    let failed = End::Failed { retry: patience.may_retry };
    if exit.code == Some(0) && exit.is_by_itself() {
        if !blamed {
            return ending(End::Finished, natural, Doing::Own);
        }
        // Whatever it says itself: nobody knows what it computed.
        let fault = match asked {
            Some(StopReason::Fault(fault)) => fault.to_string(),
            _ => "an error on the GPU".to_owned(),
        };
        return ending(failed, format!("{natural}; it is to blame for {fault}"), Doing::Own);
    }
    // The kernel may have killed a child that the program did without, or one that was told to leave.
    if exit.out_of_memory && exit.code != Some(0) && exit.stop.is_none() && asked.is_none() {
        return ending(failed, format!("out of host memory ({natural})"), Doing::Own);
    }
    match (asked, exit.stop) {
        (Some(reason @ StopReason::Fault(_)), _) if blamed => {
            ending(failed, format!("stopped: {reason}, for which it is to blame"), Doing::Own)
        }
        // Blame may come later than this: it waits in any case.
        (Some(reason @ StopReason::Fault(_)), _) => {
            ending(End::Stopped, format!("stopped: {reason}"), Doing::Setback)
        }
        (Some(reason @ StopReason::Asked), _) => {
            ending(End::Stopped, format!("stopped: {reason}"), Doing::Asked)
        }
        (Some(reason), _) => ending(End::Stopped, format!("stopped: {reason}"), Doing::Own),
        (None, Some(_)) => ending(End::Stopped, "stopped: the manager left".to_owned(), Doing::Own),
        (None, None) if exit.code.is_none() && exit.signal.is_none() => {
            ending(End::Stopped, natural, Doing::Own)
        }
        // Somebody else's doing; a program that always ends so fails in the end.
        (None, None) if is_from_outside(exit.signal) && patience.may_be_hit => {
            ending(End::Stopped, natural, Doing::Setback)
        }
        (None, None) => ending(failed, natural, Doing::Own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_agent::launch::StopCause;
    use muxflow_agent::stop::{Step, StepTaken};
    use muxflow_policy::node::fault::Fault;

    const ALL: Patience = Patience { may_retry: true, may_be_hit: true };

    fn exit(code: Option<i32>, signal: Option<i32>, stop: Option<StopCause>) -> Exit {
        Exit { code, signal, stop, ..Exit::unknown() }
    }

    #[test]
    fn ends_are_told_apart() {
        let end = |exit: &Exit, reason: Option<StopReason>| {
            ending_of(exit, reason.as_ref(), false, ALL).end
        };
        let asked = Some(StopCause::Asked);
        let retry = End::Failed { retry: true };
        assert_eq!(end(&exit(Some(0), None, None), None), End::Finished);
        assert_eq!(end(&exit(Some(1), None, None), None), retry);
        assert_eq!(end(&exit(None, Some(11), None), None), retry);
        assert_eq!(end(&exit(None, None, None), None), End::Stopped, "nobody saw it");
        assert_eq!(end(&exit(None, Some(15), asked), Some(StopReason::Asked)), End::Stopped);
        assert_eq!(end(&exit(Some(1), None, None), Some(StopReason::Shutdown)), retry);
        let gone = Some(StopCause::AgentGone);
        assert_eq!(end(&exit(None, Some(15), gone), Some(StopReason::Shutdown)), End::Stopped);
        // Told to leave and left with 0: it has saved its state, it is not done.
        let step = |step| StepTaken { step, took_ms: 1, timed_out: false };
        let mut saved = exit(Some(0), None, asked);
        saved.steps = vec![step(Step::Drain), step(Step::Checkpoint), step(Step::Release)];
        assert_eq!(end(&saved, Some(StopReason::Asked)), End::Stopped);
        // Gone before it was told: it is done.
        saved.steps = vec![step(Step::Drain), step(Step::Release)];
        assert_eq!(end(&saved, Some(StopReason::Asked)), End::Finished);
        let oom = |exit: Exit| Exit { out_of_memory: true, ..exit };
        assert_eq!(end(&oom(exit(None, Some(9), None)), None), retry);
        assert_eq!(end(&oom(exit(None, Some(9), None)), Some(StopReason::Shutdown)), retry);
        // A child was killed, and the program did without it; or it was told to leave meanwhile.
        assert_eq!(end(&oom(exit(Some(0), None, None)), None), End::Finished);
        let health = Some(StopReason::Health("GPU is Overlimit".into()));
        assert_eq!(end(&oom(exit(None, Some(9), asked)), health.clone()), End::Stopped);
        assert_eq!(end(&oom(exit(Some(1), None, asked)), None), End::Stopped);
        let ended = ending_of(&oom(exit(Some(1), None, None)), None, false, ALL);
        assert_eq!(ended.words, "out of host memory (exit code 1)");
        let once = Patience { may_retry: false, ..ALL };
        let ended = ending_of(&exit(Some(1), None, None), None, false, once);
        assert_eq!(ended.end, End::Failed { retry: false });
    }

    /// Whoever is to blame for an error has failed; whoever is not, and whoever was ended from
    /// outside, comes back, and waits for it.
    #[test]
    fn blame_is_a_failure_and_a_blow_from_outside_is_a_setback() {
        let fault = Some(StopReason::Fault(Fault::Xid(31)));
        let killed = exit(None, Some(9), Some(StopCause::Asked));
        let of = |blamed, patience| {
            let Ending { end, doing, .. } = ending_of(&killed, fault.as_ref(), blamed, patience);
            (end, doing)
        };
        let once = Patience { may_retry: false, ..ALL };
        assert_eq!(of(true, once), (End::Failed { retry: false }, Doing::Own));
        assert_eq!(of(true, ALL), (End::Failed { retry: true }, Doing::Own));
        assert_eq!(of(false, once), (End::Stopped, Doing::Setback));
        // What the program says of itself is no better.
        let done = exit(Some(0), None, None);
        assert_eq!(ending_of(&done, fault.as_ref(), false, once).end, End::Finished);
        for reason in [None, fault.as_ref()] {
            let ended = ending_of(&done, reason, true, once);
            assert_eq!(ended.end, End::Failed { retry: false });
            assert!(ended.words.starts_with("exit code 0; it is to blame for "), "{ended:?}");
        }
        for signal in [2, 9, 15] {
            let hit = exit(None, Some(signal), None);
            let ended = ending_of(&hit, None, false, once);
            assert_eq!((ended.end, ended.doing), (End::Stopped, Doing::Setback), "{signal}");
            let enough = Patience { may_be_hit: false, may_retry: false };
            let ended = ending_of(&hit, None, false, enough);
            assert_eq!(ended.end, End::Failed { retry: false }, "not for ever: {signal}");
        }
        assert_eq!(
            ending_of(&exit(None, Some(11), None), None, false, once).end,
            End::Failed { retry: false }
        );
    }
}
