//! The port between the scheduler and whatever predicts speeds.
//!
//! It lies here, and not in `predictor`, so that `policy` can be built and tested against any
//! predictor, the simulator's labelled oracle included, without knowing one.

use crate::profile::ProfileRecord;
use crate::unit::SmShare;

/// The online half of a pair: who is there, and what it leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineInput {
    /// The service alone on this GPU type.
    pub profile: ProfileRecord,
    /// The SMs offered to offline work beside it.
    pub share: SmShare,
}

/// The offline half of a pair.
#[derive(Debug, Clone, PartialEq)]
pub struct OfflineInput {
    /// The job alone on the same GPU type as the online half.
    pub profile: ProfileRecord,
}

/// Where a prediction comes from, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Provenance {
    /// A trained model that has seen both workloads.
    Seen,
    /// A trained model that has not seen one of the two.
    Unseen,
    /// The conservative rule, because the GPU type or the workload has no data.
    Rule,
    /// The truth, in a simulation that is labelled so.
    Oracle,
}

/// Speed of the offline job when sharing, divided by its speed alone on the same GPU type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeedPrediction {
    /// 0 (stopped) to 1 (as fast as alone).
    pub speed: f32,
    /// One standard deviation of what the prediction may be off by.
    pub uncertainty: f32,
    /// Where it comes from.
    pub provenance: Provenance,
}

/// Predicts how fast an offline job runs beside an online service.
pub trait SpeedPredictor: Sync {
    /// One pair, with its uncertainty.
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction;

    /// Readies all pairs of two lists of one GPU type, so that what depends on one half alone is
    /// computed once.
    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a>;
}

/// The speeds of all pairs of two lists, computed on demand.
pub trait PairSpeeds: Sync {
    /// Writes the speeds of online `row` with offline `first_column`, `first_column + 1`, … into
    /// `out`. Every value is finite and between 0 and 1.
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]);
}
