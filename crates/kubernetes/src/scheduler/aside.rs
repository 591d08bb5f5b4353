//! Pods whose binding was refused for a reason of their own: a claim that cannot be allocated, a binding
//! that somebody who checks requests does not let pass.
//!
//! The plan knows nothing of such reasons and would give the pod the same GPU in every cycle, while
//! everybody behind it waits. So it is left out for a while, and for twice as long each time that it is
//! refused again. Nothing here must survive: another replica finds out by trying.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A pod that was refused for the first time is left out for this long.
const FIRST: Duration = Duration::from_secs(1);
/// And never for longer than this.
const LONGEST: Duration = Duration::from_secs(300);

/// Who is left out.
#[derive(Debug, Default)]
pub(crate) struct Aside(BTreeMap<String, Refused>);

#[derive(Debug)]
struct Refused {
    note: String,
    until: Instant,
    wait: Duration,
}

impl Aside {
    /// The pod of this uid was refused.
    pub(crate) fn put(&mut self, uid: String, note: String, now: Instant) {
        let wait = self.0.get(&uid).map_or(FIRST, |before| (before.wait * 2).min(LONGEST));
        self.0.insert(uid, Refused { note, until: now + wait, wait });
    }

    /// Who is left out now, by uid, and why.
    pub(crate) fn now(&self, now: Instant) -> BTreeMap<String, String> {
        let waits = self.0.iter().filter(|(_, refused)| now < refused.until);
        waits.map(|(uid, refused)| (uid.clone(), refused.note.clone())).collect()
    }

    /// Forgets pods that no longer wait.
    pub(crate) fn forget_all_but(&mut self, waiting: &BTreeSet<&str>) {
        self.0.retain(|uid, _| waiting.contains(uid.as_str()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_again_is_left_out_for_longer_and_not_for_ever() {
        let (mut aside, mut now) = (Aside::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..12 {
            aside.put("u".into(), "its claim".into(), now);
            let began = now;
            while aside.now(now).contains_key("u") {
                now += Duration::from_millis(500);
            }
            waits.push((now - began).as_secs());
        }
        assert_eq!(waits[..4], [1, 2, 4, 8]);
        assert_eq!(waits[11], LONGEST.as_secs());
        assert!(!aside.is_empty(), "remembered for the next time");
        aside.forget_all_but(&BTreeSet::from(["v"]));
        assert!(aside.is_empty());
    }
}
