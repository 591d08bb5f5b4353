//! Some minutes of readings of each GPU, for charts and for the summary.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use muxflow_api::cluster::Reading;
use muxflow_types::GpuId;

/// Readings kept for each GPU.
#[derive(Debug)]
pub struct History {
    keep: usize,
    rings: Mutex<BTreeMap<GpuId, VecDeque<Reading>>>,
}

impl History {
    /// Keeps so many readings of each GPU.
    pub fn new(keep: usize) -> Self {
        History { keep: keep.max(1), rings: Mutex::new(BTreeMap::new()) }
    }

    fn rings(&self) -> std::sync::MutexGuard<'_, BTreeMap<GpuId, VecDeque<Reading>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reading.
    pub fn push(&self, gpu: &GpuId, reading: Reading) {
        let mut rings = self.rings();
        let ring = rings.entry(gpu.clone()).or_default();
        if ring.len() == self.keep {
            ring.pop_front();
        }
        ring.push_back(reading);
    }

    /// Readings of a GPU since a moment, oldest first.
    pub fn since(&self, gpu: &GpuId, at_us: u64) -> Vec<Reading> {
        let rings = self.rings();
        let ring = rings.get(gpu).into_iter().flatten();
        ring.filter(|reading| reading.at_us >= at_us).cloned().collect()
    }

    /// Does something with every reading of every GPU.
    pub fn each(&self, mut visit: impl FnMut(&GpuId, &Reading)) {
        for (gpu, ring) in self.rings().iter() {
            ring.iter().for_each(|reading| visit(gpu, reading));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first() {
        let history = History::new(3);
        let gpu = GpuId::new("GPU-1").unwrap();
        for at_us in 1..=5 {
            history.push(&gpu, Reading { at_us, ..Reading::default() });
        }
        let times: Vec<u64> = history.since(&gpu, 0).iter().map(|r| r.at_us).collect();
        assert_eq!(times, [3, 4, 5]);
        assert_eq!(history.since(&gpu, 5).len(), 1);
        assert!(history.since(&GpuId::new("GPU-2").unwrap(), 0).is_empty());
        let mut seen = 0;
        history.each(|_, _| seen += 1);
        assert_eq!(seen, 3);
    }
}
