//! Whose an error was: the job whose process the driver names.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::{Action, Fault};
use muxflow_types::JobId;

use super::guest::Guest;
use super::supervisor::{Offline, Supervisor};
use super::{Event, FaultSeen};

/// What errors have said of a job in this run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Suspicion {
    /// Nothing.
    #[default]
    None,
    /// An XID that somebody caused named nobody: it may have been this one.
    Unnamed,
    /// The one that was named is somebody else.
    SomebodyElse,
    /// It was this one.
    Named,
}

impl Suspicion {
    /// After an error that named this one, somebody else or nobody.
    fn and(self, named: Option<bool>) -> Self {
        match (self, named) {
            (Suspicion::Named, _) | (_, Some(true)) => Suspicion::Named,
            (_, Some(false)) => Suspicion::SomebodyElse,
            (Suspicion::None, None) => Suspicion::Unnamed,
            (before, None) => before,
        }
    }

    /// Whether the job must wait before it runs again. Where nobody is named the service must not
    /// be struck again and again: the job is the one that can wait. One that has finished strikes
    /// nobody any more.
    pub(super) fn blames(self, finished: bool) -> bool {
        match self {
            Suspicion::Named => true,
            Suspicion::Unnamed => !finished,
            Suspicion::None | Suspicion::SomebodyElse => false,
        }
    }
}

/// Processes that a job has or had a moment ago. An error often ends the process that caused it, and is
/// told of after that.
#[derive(Debug, Default)]
pub(super) struct Recent(BTreeMap<u32, Instant>);

/// Ids are given out again, but not that soon.
const REMEMBERED: Duration = Duration::from_secs(60);

impl Recent {
    /// These are there now.
    pub(super) fn see(&mut self, pids: Vec<u32>, now: Instant) {
        self.0.extend(pids.into_iter().map(|pid| (pid, now)));
        self.0.retain(|_, seen| now.saturating_duration_since(*seen) < REMEMBERED);
    }

    pub(super) fn contains(&self, pid: u32) -> bool {
        self.0.contains_key(&pid)
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.keys().copied()
    }
}

/// The job that was stopped last or ended by itself, for blame that comes after.
#[derive(Debug)]
pub(super) struct Stopped {
    pub(super) job: JobId,
    pub(super) run: u64,
    /// The processes it had.
    pub(super) pids: Vec<u32>,
    pub(super) is_guest: bool,
    /// When.
    at: Instant,
}

impl Stopped {
    pub(super) fn of(offline: &Offline, mut pids: Vec<u32>) -> Self {
        pids.extend(offline.recent.pids());
        let run = offline.running.launch.run_number();
        Stopped { job: offline.job.clone(), run, pids, is_guest: false, at: Instant::now() }
    }

    pub(super) fn guest(guest: &Guest) -> Self {
        Stopped {
            job: guest.job.clone(),
            run: 0,
            pids: guest.recent.pids().collect(),
            is_guest: true,
            at: Instant::now(),
        }
    }
}

/// The log names no process as process 0.
fn named(seen: &FaultSeen) -> Option<u32> {
    seen.pid.filter(|pid| *pid != 0)
}

impl Supervisor {
    fn blames(&self, seen: &FaultSeen) -> bool {
        let row = self.params.errors.respond(seen.fault);
        row.contains(&Action::MarkFailProne) && self.params.defences.error_response
    }

    /// Blames the culprit of an error, where that is what the error is answered with. The job may
    /// have been stopped a moment ago. An XID that names nobody makes the job a suspect, unless it
    /// was answered already; that of MPS alone does not, for it also follows when a service is killed.
    pub(super) fn blame_for(&mut self, seen: FaultSeen, answered: bool) {
        if !self.blames(&seen) {
            return;
        }
        let pid = named(&seen);
        if pid.is_none() && (answered || !matches!(seen.fault, Fault::Xid(_))) {
            return;
        }
        let is_its =
            |o: &Offline, pid: u32| o.running.processes().contains(&pid) || o.recent.contains(pid);
        let mut culprit = None;
        if let Some(offline) = &mut self.offline {
            let its = pid.map(|pid| is_its(offline, pid));
            offline.suspicion = offline.suspicion.and(its);
            culprit = (its == Some(true)).then(|| offline.job.clone());
        }
        let culprit = culprit.or_else(|| self.guest_of(pid?));
        let gone = pid.filter(|_| culprit.is_none()).and_then(|pid| self.last_stopped_of(pid));
        let was_guest = gone.is_some_and(|stopped| stopped.is_guest);
        let late = gone.filter(|stopped| !stopped.is_guest).map(|s| (s.job.clone(), s.run));
        let Some(job) = culprit.or_else(|| gone.map(|s| s.job.clone())) else { return };
        self.node.blame.add(&job);
        match (late, &mut self.offline) {
            // It is on its way out: its end will tell.
            (Some((job, _)), Some(offline)) if offline.job == job => {
                offline.suspicion = Suspicion::Named;
            }
            (Some((job, run)), _) => self.tell(Event::JobBlamed { job, run, fault: seen.fault }),
            (None, _) => {}
        }
        let is_guest = was_guest || self.guest.as_ref().is_some_and(|guest| guest.job == job);
        if let Some(pid) = pid.filter(|_| is_guest) {
            self.tell(Event::GuestBlamed { job, fault: seen.fault, pid });
        }
    }

    /// The job has ended: errors that wait to be answered may name it. MPS shows an error without a
    /// culprit, and may be the first to do so.
    pub(super) fn blame_late(&mut self, offline: &mut Offline) {
        let (errors, defences) = (&self.params.errors, self.params.defences);
        for seen in self.inbox.faults() {
            let row = errors.respond(seen.fault);
            let blames = row.contains(&Action::MarkFailProne) && defences.error_response;
            let Some(pid) = named(seen).filter(|_| blames) else { continue };
            let its = |s: &Stopped| s.job == offline.job && s.pids.contains(&pid);
            let its = self.last_stopped.as_ref().is_some_and(its);
            offline.suspicion = offline.suspicion.and(Some(its));
            if its {
                self.node.blame.add(&offline.job);
                // Blamed once.
                seen.pid = None;
            }
        }
    }

    fn last_stopped_of(&self, pid: u32) -> Option<&Stopped> {
        let its = |s: &&Stopped| s.at.elapsed() < REMEMBERED && s.pids.contains(&pid);
        self.last_stopped.as_ref().filter(its)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_remembered_for_a_while_after_their_end() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        recent.see(vec![7, 8], start);
        recent.see(vec![8], start + REMEMBERED / 2);
        assert!(recent.contains(7) && recent.contains(8) && !recent.contains(9));
        recent.see(vec![], start + REMEMBERED);
        assert_eq!(recent.pids().collect::<Vec<_>>(), [8]);
        recent.see(vec![], start + REMEMBERED * 2);
        assert_eq!(recent.pids().count(), 0);
    }

    #[test]
    fn a_job_is_suspected_until_somebody_else_is_named() {
        let (nobody, other, itself) = (None, Some(false), Some(true));
        for (news, blamed) in [
            (vec![], false),
            (vec![nobody], true),
            (vec![nobody, nobody], true),
            (vec![nobody, other], false),
            (vec![other, nobody], false),
            (vec![nobody, itself], true),
            (vec![other, itself, nobody, other], true),
        ] {
            let all = news.iter().fold(Suspicion::None, |before, named| before.and(*named));
            assert_eq!(all.blames(false), blamed, "{news:?}");
            assert_eq!(all.blames(true), news.contains(&itself), "its work is done: {news:?}");
        }
    }
}
