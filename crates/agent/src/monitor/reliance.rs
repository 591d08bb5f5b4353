//! When a source of readings is left for the next one, and when it is tried again.
//!
//! A host engine that is restarted breaks every connection to it, and a GPU may be one that it has no
//! values of. A source that has told nothing for a while is not waited for; it gets another chance
//! every few seconds.

use muxflow_types::Micros;

/// Silent for so long, it is given up.
const GIVE_UP_AFTER: Micros = Micros::from_secs(3);
/// And tried again so often.
const TRY_EVERY: Micros = Micros::from_secs(5);

/// Whether one source is relied upon.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reliance {
    silent_since: Option<Micros>,
    /// When it was last tried after it was given up.
    tried_at: Option<Micros>,
}

impl Reliance {
    /// The next source counts.
    pub(super) fn is_given_up(&self) -> bool {
        self.tried_at.is_some()
    }

    /// Whether to read it now.
    pub(super) fn wants_try(&self, now: Micros) -> bool {
        self.tried_at.is_none_or(|at| now.since(at) >= TRY_EVERY)
    }

    /// It was read, and told something or nothing.
    pub(super) fn tried(&mut self, now: Micros, told: bool) {
        if told {
            *self = Reliance::default();
            return;
        }
        let since = *self.silent_since.get_or_insert(now);
        if self.is_given_up() || now.since(since) >= GIVE_UP_AFTER {
            self.tried_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_falls_silent_is_left_and_comes_back() {
        let mut source = Reliance::default();
        let at = Micros::from_millis;
        source.tried(at(10), true);
        source.tried(at(20), false);
        assert!(!source.is_given_up() && source.wants_try(at(30)), "a moment is nothing");
        source.tried(at(2_000), true);
        source.tried(at(2_010), false);
        source.tried(at(5_000), false);
        assert!(!source.is_given_up(), "silence is counted from its beginning");
        source.tried(at(5_010), false);
        assert!(source.is_given_up());
        assert!(!source.wants_try(at(10_000)), "the next source is read meanwhile");
        assert!(source.wants_try(at(10_010)));
        source.tried(at(10_010), false);
        assert!(source.is_given_up() && !source.wants_try(at(10_020)));
        source.tried(at(15_010), true);
        assert!(!source.is_given_up() && source.wants_try(at(15_020)), "it is back");
    }
}
