//! Whether a GPU's status is worth a write.
//!
//! Twenty thousand GPUs that each say every few seconds that nothing has happened are most of what an
//! API server hears. So a status is written when something in it would change a decision, and else only
//! so often that nobody takes its agent for dead. Numbers that wander are compared in steps, and go up
//! by one step more than down: what hovers at an edge is told once.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use crate::resource::{GpuStatus, MEMORY_STEP};

/// No GPU is written more often than this, however often it changes.
pub(crate) const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// And not more often than this because of numbers.
const NUMBERS_EVERY: Duration = Duration::from_secs(10);
/// Change of the predicted SM activity that counts, in points.
const ACTIVITY_POINTS: f64 = 5.0;

/// How much it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    /// Nothing but the time, the sample, or small change.
    None,
    /// What is lent is another amount.
    Numbers,
    /// Who is there, or what may be done, is something else.
    Facts,
}

/// What a GPU last told, and when.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub(crate) status: GpuStatus,
    pub(crate) at: Instant,
}

/// Whether to write `now` after what was written before.
pub(crate) fn is_due(
    before: Option<&Written>,
    status: &GpuStatus,
    uuid: &str,
    every: Duration,
    now: Instant,
) -> bool {
    let Some(before) = before else { return true };
    let age = now.saturating_duration_since(before.at);
    age >= match news(&before.status, status) {
        News::Facts => AT_MOST_EVERY,
        News::Numbers => NUMBERS_EVERY.min(every),
        News::None => heartbeat(uuid, every),
    }
}

/// From half of the interval to all of it, by GPU: a whole fleet that was started at once does not
/// write at once for ever after.
fn heartbeat(uuid: &str, every: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    uuid.hash(&mut hasher);
    let part = u32::try_from(hasher.finish() % 1000).unwrap_or(0);
    every / 2 + every / 2 * part / 1000
}

fn news(before: &GpuStatus, now: &GpuStatus) -> News {
    // All that is no number that wanders, by making the others equal.
    let mut facts = now.clone();
    facts.observed_at = before.observed_at.clone();
    facts.sample = before.sample;
    facts.share_sms = before.share_sms;
    facts.quota_bytes = before.quota_bytes;
    if let (Some(own), Some(old)) = (&mut facts.online, &before.online) {
        own.predicted_sm_activity_pct = old.predicted_sm_activity_pct;
        own.memory_bytes = old.memory_bytes;
    }
    // To lend nothing at all, or something again, is a fact.
    let lends = |status: &GpuStatus| status.share_sms > 0 && status.quota_bytes > 0;
    if facts != *before || lends(before) != lends(now) {
        return News::Facts;
    }
    let lent = less_or_much_more(before.quota_bytes / MEMORY_STEP, now.quota_bytes / MEMORY_STEP);
    let share = less_or_much_more(before.share_sms.into(), now.share_sms.into());
    let online = match (&before.online, &now.online) {
        (Some(old), Some(new)) => {
            let activity = old.predicted_sm_activity_pct - new.predicted_sm_activity_pct;
            // What a service holds is turned round: more of it is less for others.
            less_or_much_more(
                new.memory_bytes.div_ceil(MEMORY_STEP),
                old.memory_bytes.div_ceil(MEMORY_STEP),
            ) || activity.abs() >= ACTIVITY_POINTS
        }
        _ => false,
    };
    if lent || share || online { News::Numbers } else { News::None }
}

/// A number of steps that has fallen, or risen by more than one.
fn less_or_much_more(before: u64, now: u64) -> bool {
    now < before || now > before + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::{OnlineStatus, SampleStatus, State};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    const EVERY: Duration = Duration::from_secs(120);

    fn status() -> GpuStatus {
        GpuStatus {
            state: State::Healthy,
            reason: None,
            observed_at: Time(jiff::Timestamp::UNIX_EPOCH),
            share_sms: 20,
            quota_bytes: 8 << 30,
            multi_user: true,
            online: Some(OnlineStatus {
                service: "s".into(),
                workload: "w".into(),
                predicted_sm_activity_pct: 40.0,
                memory_bytes: 4 << 30,
                critical: false,
                uid: None,
                in_mps: true,
            }),
            job: None,
            sample: None,
        }
    }

    fn after(change: impl Fn(&mut GpuStatus)) -> News {
        let mut changed = status();
        change(&mut changed);
        news(&status(), &changed)
    }

    #[test]
    fn time_samples_and_noise_are_no_news() {
        assert_eq!(after(|s| s.observed_at = Time(jiff::Timestamp::MAX)), News::None);
        assert_eq!(after(|s| s.sample = Some(SampleStatus::default())), News::None);
        assert_eq!(after(|s| s.quota_bytes += 300 << 20), News::None);
        assert_eq!(after(|s| s.share_sms = 21), News::None);
        let online =
            |change: fn(&mut OnlineStatus)| after(move |s| change(s.online.as_mut().unwrap()));
        assert_eq!(online(|o| o.predicted_sm_activity_pct = 44.0), News::None);
        assert_eq!(online(|o| o.memory_bytes -= 200 << 20), News::None);
    }

    #[test]
    fn what_would_change_a_decision_is_news() {
        assert_eq!(after(|s| s.share_sms = 19), News::Numbers);
        assert_eq!(after(|s| s.share_sms = 22), News::Numbers);
        assert_eq!(after(|s| s.quota_bytes -= 1), News::Numbers);
        assert_eq!(after(|s| s.quota_bytes += 512 << 20), News::Numbers);
        let online =
            |change: fn(&mut OnlineStatus)| after(move |s| change(s.online.as_mut().unwrap()));
        assert_eq!(online(|o| o.memory_bytes += 1), News::Numbers);
        assert_eq!(online(|o| o.predicted_sm_activity_pct = 45.0), News::Numbers);
        assert_eq!(online(|o| o.in_mps = false), News::Facts);
        assert_eq!(after(|s| s.state = State::Unhealthy), News::Facts);
        assert_eq!(after(|s| s.job = Some("d/p".into())), News::Facts);
        assert_eq!(after(|s| s.online = None), News::Facts);
        assert_eq!(after(|s| s.share_sms = 0), News::Facts);
        assert_eq!(after(|s| s.quota_bytes = 0), News::Facts);
    }

    #[test]
    fn facts_are_written_at_once_numbers_soon_and_the_rest_rarely() {
        let at = Instant::now();
        let written = Written { status: status(), at };
        let due = |status: &GpuStatus, later: Duration| {
            is_due(Some(&written), status, "GPU-a", EVERY, at + later)
        };
        assert!(is_due(None, &status(), "GPU-a", EVERY, at));
        assert!(!due(&status(), EVERY / 2 - AT_MOST_EVERY) && due(&status(), EVERY));
        let ill = GpuStatus { state: State::Overlimit, ..status() };
        assert!(!due(&ill, AT_MOST_EVERY / 2) && due(&ill, AT_MOST_EVERY));
        let less = GpuStatus { share_sms: 10, ..status() };
        assert!(!due(&less, AT_MOST_EVERY) && due(&less, NUMBERS_EVERY));
        let beats: std::collections::BTreeSet<Duration> =
            (0..100).map(|n| heartbeat(&format!("GPU-{n}"), EVERY)).collect();
        assert!(beats.len() > 50 && beats.iter().all(|b| (EVERY / 2..=EVERY).contains(b)));
    }
}
