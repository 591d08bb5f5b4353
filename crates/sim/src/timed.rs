//! A predictor that counts the time spent in it, so that predicting and matching are told apart.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use muxflow_types::{OfflineInput, OnlineInput, PairSpeeds, SpeedPrediction, SpeedPredictor};

/// The predictor behind it, with a stop watch.
pub(crate) struct Timed<'p> {
    inner: &'p dyn SpeedPredictor,
    nanos: AtomicU64,
}

impl<'p> Timed<'p> {
    pub(crate) fn new(inner: &'p dyn SpeedPredictor) -> Self {
        Timed { inner, nanos: AtomicU64::new(0) }
    }

    /// Seconds spent predicting.
    pub(crate) fn spent_s(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of one plan")]
        let nanos = self.nanos.load(Ordering::Relaxed) as f64;
        nanos / 1e9
    }

    fn add(&self, since: Instant) {
        let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl SpeedPredictor for Timed<'_> {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        let begun = Instant::now();
        let said = self.inner.predict(online, offline);
        self.add(begun);
        said
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        let begun = Instant::now();
        let inner = self.inner.prepare(online, offline);
        self.add(begun);
        Box::new(TimedPairs { watch: self, inner })
    }
}

struct TimedPairs<'a, 'p> {
    watch: &'a Timed<'p>,
    inner: Box<dyn PairSpeeds + 'a>,
}

impl PairSpeeds for TimedPairs<'_, '_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        let begun = Instant::now();
        self.inner.fill(row, first_column, out);
        self.watch.add(begun);
    }
}
