//! The life of a job, as a table of what may follow what.
//!
//! ```text
//! submitted ─┬─► profiling ─┬──────────────► running ─┬─► done
//!            └─► queued ◄───┼─ checkpointing ◄────────┤   failed
//!                  └────────┴──────────► running      └─► cancelled
//! ```
//!
//! A job has a process only in `profiling`, `running` and `checkpointing`, and comes there only
//! from a state in which it has none, under a new run number: so there are never two copies. What
//! happened to an older run is not news.

use muxflow_api::jobs::JobState;

/// What somebody wants of a job beside running it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// Nothing.
    None,
    /// Its end.
    Cancel,
    /// Its end, because its deadline has passed.
    Expire,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// By itself, with success.
    Finished,
    /// It was told to leave, or whoever watched it died; its work is not done.
    Stopped,
    /// By itself, without success.
    Failed {
        /// It may be tried again.
        retry: bool,
    },
}

/// What happens to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happening {
    /// It is to be measured on an idle GPU: a new run.
    Profile,
    /// It needs no measuring, or cannot be measured.
    Admit,
    /// It is measured and goes on where it is.
    Keep,
    /// It is placed: a new run.
    Start,
    /// It must leave its GPU.
    AskStop,
    /// Its run never began.
    Refused,
    /// Its run ended.
    Ended(End),
    /// Its last run, which has ended, turns out to have broken something.
    Blamed {
        /// It may be tried again.
        retry: bool,
    },
    /// Somebody asks for its end.
    Cancel,
    /// Its deadline has passed.
    Expire,
}

/// The state that follows; none when this cannot happen to a job in that state.
pub fn next(state: JobState, wish: Wish, happening: Happening) -> Option<JobState> {
    use Happening as H;
    use JobState as S;
    match (state, happening) {
        // The only thing that comes after an end: it was not as good as it looked.
        (S::Done, H::Blamed { .. }) => Some(S::Failed),
        (S::Done | S::Failed | S::Cancelled, _) => None,

        (S::Submitted, H::Profile) => Some(S::Profiling),
        (S::Submitted, H::Admit) => Some(S::Queued),
        (S::Queued, H::Start) => Some(S::Running),
        (S::Queued, H::Blamed { retry }) => Some(after(End::Failed { retry }, wish)),
        (S::Submitted | S::Queued, H::Cancel) => Some(S::Cancelled),
        (S::Submitted | S::Queued, H::Expire) => Some(S::Failed),
        (S::Submitted | S::Queued, _) => None,

        (S::Profiling, H::Keep) => Some(S::Running),
        (S::Profiling | S::Running, H::AskStop) => Some(S::Checkpointing),
        (S::Profiling | S::Running | S::Checkpointing, H::Cancel | H::Expire) => {
            Some(S::Checkpointing)
        }
        (S::Profiling | S::Running | S::Checkpointing, H::Ended(end)) => Some(after(end, wish)),
        (S::Profiling | S::Running | S::Checkpointing, H::Refused) => {
            Some(after(End::Stopped, wish))
        }
        (S::Profiling | S::Running | S::Checkpointing, _) => None,
    }
}

/// Where a job goes whose run has ended. What is finished is done, whatever anybody wished.
fn after(end: End, wish: Wish) -> JobState {
    match (end, wish) {
        (End::Finished, _) => JobState::Done,
        (_, Wish::Cancel) => JobState::Cancelled,
        (_, Wish::Expire) => JobState::Failed,
        (End::Stopped | End::Failed { retry: true }, Wish::None) => JobState::Queued,
        (End::Failed { retry: false }, Wish::None) => JobState::Failed,
    }
}

/// Everything that can happen, for tests.
pub const ALL_HAPPENINGS: [Happening; 14] = [
    Happening::Profile,
    Happening::Admit,
    Happening::Keep,
    Happening::Start,
    Happening::AskStop,
    Happening::Refused,
    Happening::Ended(End::Finished),
    Happening::Ended(End::Stopped),
    Happening::Ended(End::Failed { retry: true }),
    Happening::Ended(End::Failed { retry: false }),
    Happening::Cancel,
    Happening::Expire,
    Happening::Blamed { retry: true },
    Happening::Blamed { retry: false },
];

#[cfg(test)]
mod tests {
    use super::*;
    use Happening as H;
    use JobState as S;

    const WISHES: [Wish; 3] = [Wish::None, Wish::Cancel, Wish::Expire];

    fn all() -> impl Iterator<Item = (JobState, Wish, Happening)> {
        S::ALL.into_iter().flat_map(|state| {
            WISHES.into_iter().flat_map(move |wish| {
                ALL_HAPPENINGS.into_iter().map(move |happening| (state, wish, happening))
            })
        })
    }

    /// Every state with every happening, without a wish, as a person would write it down.
    #[test]
    fn the_whole_table() {
        let cell = |state, happening| match next(state, Wish::None, happening) {
            Some(state) => state.as_str(),
            None => "-",
        };
        let row = |state: JobState| {
            let cells: Vec<&str> = ALL_HAPPENINGS.into_iter().map(|h| cell(state, h)).collect();
            format!("{state}: {}", cells.join(" "))
        };
        let table: Vec<String> = S::ALL.into_iter().map(row).collect();
        assert_eq!(
            table,
            [
                "submitted: profiling queued - - - - - - - - cancelled failed - -",
                "profiling: - - running - checkpointing queued done queued queued failed checkpointing checkpointing - -",
                "queued: - - - running - - - - - - cancelled failed queued failed",
                "running: - - - - checkpointing queued done queued queued failed checkpointing checkpointing - -",
                "checkpointing: - - - - - queued done queued queued failed checkpointing checkpointing - -",
                "done: - - - - - - - - - - - - failed failed",
                "failed: - - - - - - - - - - - - - -",
                "cancelled: - - - - - - - - - - - - - -",
            ]
        );
    }

    #[test]
    fn a_wish_decides_where_an_unfinished_run_leads() {
        for state in [S::Profiling, S::Running, S::Checkpointing] {
            for end in [End::Stopped, End::Failed { retry: true }, End::Failed { retry: false }] {
                assert_eq!(next(state, Wish::Cancel, H::Ended(end)), Some(S::Cancelled));
                assert_eq!(next(state, Wish::Expire, H::Ended(end)), Some(S::Failed));
            }
            for wish in WISHES {
                assert_eq!(next(state, wish, H::Ended(End::Finished)), Some(S::Done));
            }
        }
    }

    #[test]
    fn a_new_run_begins_only_where_there_is_no_process() {
        for (state, wish, happening) in all() {
            if matches!(happening, H::Profile | H::Start) && next(state, wish, happening).is_some()
            {
                assert!(!state.holds_gpu(), "{state} {happening:?}");
            }
            let after = next(state, wish, happening);
            if after.is_some_and(JobState::holds_gpu) && !state.holds_gpu() {
                assert!(matches!(happening, H::Profile | H::Start), "{state} {happening:?}");
            }
            let blamed = state == S::Done && matches!(happening, H::Blamed { .. });
            assert!(after.is_none() || !state.is_final() || blamed, "{state} is the end");
        }
    }

    #[test]
    fn nobody_is_stuck() {
        for state in S::ALL.into_iter().filter(|state| !state.is_final()) {
            assert!(next(state, Wish::None, H::Cancel).is_some(), "{state} cannot be cancelled");
            let ways = ALL_HAPPENINGS.into_iter().filter_map(|h| next(state, Wish::None, h));
            let mut seen: Vec<JobState> = ways.collect();
            for _ in 0..S::ALL.len() {
                let more: Vec<JobState> = seen
                    .iter()
                    .flat_map(|s| {
                        ALL_HAPPENINGS.into_iter().filter_map(|h| next(*s, Wish::None, h))
                    })
                    .collect();
                seen.extend(more);
                seen.sort_unstable();
                seen.dedup();
            }
            for end in [S::Done, S::Failed, S::Cancelled] {
                assert!(seen.contains(&end), "{state} never becomes {end}");
            }
        }
    }
}
