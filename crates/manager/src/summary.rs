//! The whole at a glance: what sharing gains, from what was measured.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use muxflow_api::cluster::{PairingList, PairingView, Summary};
use muxflow_types::GpuId;

use crate::error::Result;
use crate::manager::Manager;

#[derive(Debug, Default, Clone, Copy)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
        }
    }

    fn value(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

/// Readings of a GPU without a job that say what it is like then.
const FEWEST_READINGS: u32 = 30;
/// So many of the newest starts of jobs make the figure of oversold GPUs.
const RUNS_LOOKED_AT: u64 = 2_000;

impl Manager {
    /// The whole at a glance.
    pub fn summary(&self) -> Result<Summary> {
        let gpus = self.node.look();
        let mut summary = Summary {
            gpus: gpus.len() as u64,
            gpus_shared: gpus.iter().filter(|gpu| gpu.offline.is_some()).count() as u64,
            evictions: self.evictions.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            ..Summary::default()
        };
        for gpu in &gpus {
            *summary.gpus_by_health.entry(gpu.health.as_str().to_owned()).or_default() += 1;
        }
        summary.jobs = self.reader().count_jobs()?.into_iter().collect();
        let [mut util, mut sm, mut sm_without] = [Mean::default(); 3];
        let mut util_without: BTreeMap<GpuId, Mean> = BTreeMap::new();
        let (mut first, mut last) = (u64::MAX, 0);
        self.history.each(|gpu, reading| {
            first = first.min(reading.at_us);
            last = last.max(reading.at_us);
            util.add(reading.gpu_util_pct);
            if !reading.offline {
                util_without.entry(gpu.clone()).or_default().add(reading.gpu_util_pct);
            }
            sm.add(reading.sm_activity_pct);
            sm_without.add(reading.online_sm_activity_pct);
        });
        summary.gpu_util_pct = util.value();
        // Each GPU counts once, however seldom it is without a job; some seconds say nothing of it.
        let mut without = Mean::default();
        let known = util_without.values().filter(|mean| mean.count >= FEWEST_READINGS);
        known.for_each(|mean| without.add(mean.value()));
        summary.gpu_util_without_pct = without.value();
        summary.sm_activity_pct = sm.value();
        summary.sm_activity_without_pct = sm_without.value();
        #[expect(clippy::cast_precision_loss, reason = "microseconds of some minutes")]
        let span = last.saturating_sub(first) as f64 / 1e6;
        summary.history_s = span;
        let (oversold, over_s) = self.oversold()?;
        summary.oversold_gpu = oversold;
        summary.oversold_over_s = over_s;
        Ok(summary)
    }

    /// Time that jobs beside services would have needed alone for what they did, divided by the time
    /// they took.
    fn oversold(&self) -> Result<(Option<f64>, f64)> {
        let now = crate::clock::now();
        let (mut alone_s, mut real_s) = (0.0, 0.0);
        // Alone on a GPU, or nobody has seen beside whom: nothing was oversold.
        for run in self.reader().paired_runs(RUNS_LOOKED_AT)? {
            let took = run.ended_at.unwrap_or(now).since(run.started_at).as_secs_f64();
            alone_s += run.seen * took;
            real_s += took;
        }
        Ok(((real_s > 0.0).then(|| alone_s / real_s), real_s))
    }

    /// Who shares which GPU.
    pub fn pairings(&self) -> Result<PairingList> {
        let mut items = Vec::new();
        for gpu in self.node.look() {
            let Some((id, _)) = &gpu.offline else { continue };
            let Some(row) = self.reader().job(id)? else { continue };
            items.push(PairingView {
                gpu: gpu.gpu.as_str().to_owned(),
                service: gpu.online.map(|online| online.service.as_str().to_owned()),
                job: id.as_str().to_owned(),
                share_pct: row
                    .share
                    .filter(|(_, total)| *total > 0)
                    .map(|(sms, total)| f64::from(sms) / f64::from(total) * 100.0),
                predicted_speed: row.predicted,
                seen_speed: row.seen,
                since_us: row.changed_at.0,
            });
        }
        Ok(PairingList { items })
    }
}
