//! Holds forced evictions back when too many would come at once.
//!
//! One GPU that is gone is news about that GPU. A tenth of all of them, within minutes, is more often
//! a definition that somebody deleted, agents that all fail alike, or a clock that jumped; and what a
//! wrong picture evicts does not come back when the picture is right again. Evictions that the plan
//! chooses are bounded by the planner; this bounds those that it is forced to.
//!
//! It outlives the terms of a leader. What replicas before this one have evicted is not known here, so
//! in its first minutes a process may evict only a few.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::decide::Action;

/// In which forced evictions are counted.
const WINDOW: Duration = Duration::from_secs(300);
/// So many are always allowed in it.
const ALWAYS: usize = 4;
/// And one of so many pods that run.
const ONE_OF: usize = 10;

/// Who was evicted lately by force.
#[derive(Debug)]
pub(crate) struct Brake {
    /// When this process began to count.
    began: Instant,
    /// By uid; one that is asked for again, because a budget said no, counts once.
    lately: BTreeMap<String, Instant>,
}

impl Brake {
    pub(crate) fn new(now: Instant) -> Self {
        Brake { began: now, lately: BTreeMap::new() }
    }

    /// Takes out of the actions what is too much now; so many were held back.
    pub(crate) fn hold(
        &mut self,
        actions: &mut Vec<Action>,
        running: usize,
        now: Instant,
    ) -> usize {
        self.lately.retain(|_, at| now.saturating_duration_since(*at) < WINDOW);
        let knows = now.saturating_duration_since(self.began) >= WINDOW;
        let allowed = if knows { ALWAYS.max(running / ONE_OF) } else { ALWAYS };
        let before = actions.len();
        actions.retain(|action| match action {
            Action::Evict { pod, forced: true, .. } if !self.lately.contains_key(&pod.uid) => {
                let room = self.lately.len() < allowed;
                if room {
                    self.lately.insert(pod.uid.clone(), now);
                }
                room
            }
            _ => true,
        });
        before - actions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::pods::PodName;

    fn evictions(names: std::ops::Range<usize>, forced: bool) -> Vec<Action> {
        let evict = |n: usize| {
            let name = format!("p{n}");
            let pod = PodName { namespace: "d".into(), uid: format!("u{n}"), name };
            Action::Evict { pod, reason: "GpuGone", note: String::new(), forced }
        };
        names.map(evict).collect()
    }

    #[test]
    fn a_wave_of_forced_evictions_is_held_back_and_goes_on_later() {
        let began = Instant::now();
        let (mut brake, start) = (Brake::new(began), began + WINDOW);
        let mut all = evictions(0..100, true);
        assert_eq!(brake.hold(&mut all, 100, start), 90);
        assert_eq!(all, evictions(0..10, true));
        // Asked for again, those count once, and the others stay held.
        let mut again = evictions(0..100, true);
        assert_eq!(brake.hold(&mut again, 100, start + WINDOW / 2), 90);
        assert_eq!(again, evictions(0..10, true));
        let mut later = evictions(10..100, true);
        assert_eq!(brake.hold(&mut later, 90, start + WINDOW), 81);
        assert_eq!(later, evictions(10..19, true));
    }

    #[test]
    fn a_few_and_chosen_ones_always_pass() {
        let mut brake = Brake::new(Instant::now());
        let mut few = evictions(0..4, true);
        assert_eq!(brake.hold(&mut few, 4, Instant::now()), 0);
        let mut chosen = evictions(0..50, false);
        assert_eq!(brake.hold(&mut chosen, 50, Instant::now()), 0);
    }

    #[test]
    fn a_process_that_has_just_begun_evicts_only_a_few() {
        let began = Instant::now();
        let mut brake = Brake::new(began);
        let mut first = evictions(0..100, true);
        assert_eq!(brake.hold(&mut first, 100, began), 100 - ALWAYS);
        let mut again = evictions(0..100, true);
        assert_eq!(brake.hold(&mut again, 100, began + WINDOW / 2), 100 - ALWAYS);
        assert_eq!(again, first);
        let mut later = evictions(0..100, true);
        assert_eq!(brake.hold(&mut later, 100, began + WINDOW), 90);
    }
}
