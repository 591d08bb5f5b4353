//! What pods were told, so that nothing is told twice.
//!
//! Reasons hold counts: of GPUs that are not Healthy, of nodes with too little of something. In a large
//! cluster some count changes all the time, and thousands of pods may wait for the same reason. So a
//! pod is told at once when its reason is another one, and now and then when only a number is.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

/// A number is brought up to date after this long at the earliest; for each pod up to as much later
/// again, so that they do not all come at once.
const NUMBERS_AFTER: Duration = Duration::from_secs(300);

/// What each pod was last told, by uid. Lost on a restart; then the pod's own condition says what it
/// was told.
#[derive(Debug)]
pub(crate) struct Told {
    notes: BTreeMap<String, (String, Instant)>,
    /// What is read from a condition counts as told then.
    since: Instant,
}

impl Default for Told {
    fn default() -> Self {
        Told { notes: BTreeMap::new(), since: Instant::now() }
    }
}

impl Told {
    /// Whether a pod should be told this; `condition` is what it says on the pod itself.
    pub(crate) fn is_news(
        &self,
        uid: &str,
        note: &str,
        condition: Option<&str>,
        now: Instant,
    ) -> bool {
        let (before, at) = match (self.notes.get(uid), condition) {
            (Some((before, at)), _) => (before.as_str(), *at),
            (None, Some(before)) => (before, self.since),
            (None, None) => return true,
        };
        if before == note {
            return false;
        }
        gist(before).ne(gist(note)) || now.saturating_duration_since(at) >= patience(uid)
    }

    pub(crate) fn was_told(&mut self, uid: String, note: String, now: Instant) {
        self.notes.insert(uid, (note, now));
    }

    pub(crate) fn forget_all_but(&mut self, living: &BTreeSet<&str>) {
        self.notes.retain(|uid, _| living.contains(uid.as_str()));
    }
}

/// A note without its numbers.
fn gist(note: &str) -> impl Iterator<Item = char> {
    note.chars().filter(|c| !c.is_ascii_digit() && *c != '.')
}

fn patience(uid: &str) -> Duration {
    let mut hasher = DefaultHasher::new();
    uid.hash(&mut hasher);
    let part = u32::try_from(hasher.finish() % 1000).unwrap_or(0);
    NUMBERS_AFTER + NUMBERS_AFTER * part / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_told_of_a_new_reason_at_once_and_of_a_new_number_later() {
        let (mut told, now) = (Told::default(), Instant::now());
        let note = |n: u32| format!("none of the {n} GPUs of its type is Healthy");
        assert!(told.is_news("u", &note(7), None, now));
        told.was_told("u".into(), note(7), now);
        assert!(!told.is_news("u", &note(7), None, now + NUMBERS_AFTER * 9), "nothing new");
        assert!(!told.is_news("u", &note(8), None, now + NUMBERS_AFTER / 2), "only a number");
        assert!(told.is_news("u", &note(8), None, now + NUMBERS_AFTER * 2));
        assert!(told.is_news("u", "the cluster has no GPU", None, now));
        told.forget_all_but(&BTreeSet::new());
        assert!(told.is_news("u", &note(7), None, now), "another pod");
    }

    #[test]
    fn after_a_restart_the_condition_says_what_was_told() {
        let (told, now) = (Told::default(), Instant::now());
        assert!(!told.is_news("u", "of 12 nodes: 3 cordoned", Some("of 9 nodes: 2 cordoned"), now));
        assert!(told.is_news("u", "of 12 nodes: 3 cordoned", Some("no GPU"), now));
    }

    #[test]
    fn pods_are_brought_up_to_date_one_after_the_other() {
        let times: BTreeSet<Duration> = (0..100).map(|n| patience(&format!("u{n}"))).collect();
        assert!(times.len() > 50, "{times:?}");
        assert!(times.iter().all(|t| (NUMBERS_AFTER..NUMBERS_AFTER * 2).contains(t)));
    }
}
