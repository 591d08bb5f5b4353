//! Predicted speeds of all pairs, each predicted once.
//!
//! A speed depends on less than a weight: on what the service is and what it leaves, and on what the
//! job is; not on priorities, waiting times or who runs where. So speeds are kept by those alone, in
//! a table that outlives a plan: the next plan predicts only pairs that it has not seen.

use std::collections::BTreeMap;

use muxflow_types::{
    GpuId, GpuSnapshot, GpuType, JobId, JobSnapshot, OfflineInput, OnlineInput, PairSpeeds,
    Percent, ProfileRecord, SmShare, SpeedPredictor, WorkloadName,
};

use super::classes::{Classes, ProfileKey};

/// The online half of a GPU as predictors see it. An idle GPU is a service that does nothing, which
/// is known, and not a service of which nothing is known.
pub(super) fn online_input(gpu: &GpuSnapshot, share: SmShare) -> Option<OnlineInput> {
    let profile = match &gpu.online {
        Some(online) => online.profile.clone(),
        None => {
            let mut idle =
                ProfileRecord::unknown(WorkloadName::new("idle").ok()?, gpu.gpu_type.clone());
            idle.gpu_util = Some(Percent::ZERO);
            idle.sm_activity = Some(Percent::ZERO);
            idle.sm_occupancy = Some(Percent::ZERO);
            idle.dram_activity = Some(Percent::ZERO);
            idle
        }
    };
    Some(OnlineInput { profile, share })
}

/// The offline half on a GPU type; a job without a profile there is one of which nothing is known.
pub(super) fn offline_input(job: &JobSnapshot, gpu_type: &GpuType) -> OfflineInput {
    let profile = job
        .profiles
        .get(gpu_type)
        .cloned()
        .unwrap_or_else(|| ProfileRecord::unknown(job.workload.clone(), gpu_type.clone()));
    OfflineInput { profile }
}

type OnlineKey = (Option<GpuId>, GpuType, SmShare, Option<ProfileKey>);
type OfflineKey = (Option<JobId>, WorkloadName, Vec<(GpuType, ProfileKey)>);

/// Places in the table by key; places of keys that are no longer needed are given out again.
#[derive(Debug)]
struct Places<K> {
    of: BTreeMap<K, usize>,
    free: Vec<usize>,
    len: usize,
}

impl<K> Default for Places<K> {
    fn default() -> Self {
        Places { of: BTreeMap::new(), free: Vec::new(), len: 0 }
    }
}

impl<K: Ord + Clone> Places<K> {
    /// The place of each key, and whether it is new there. Keys not asked for are forgotten.
    fn renew(&mut self, keys: &[K]) -> Vec<(usize, bool)> {
        let mut old = std::mem::take(&mut self.of);
        let known: Vec<Option<usize>> = keys
            .iter()
            .map(|key| {
                let place = old.remove(key)?;
                self.of.insert(key.clone(), place);
                Some(place)
            })
            .collect();
        self.free.extend(old.into_values());
        // Low places first, so that a first filling is in order.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        let places = keys.iter().zip(known).map(|(key, place)| match place {
            Some(place) => (place, false),
            // A key may stand in the list several times; the first one makes it known.
            None => match self.of.get(key) {
                Some(&place) => (place, false),
                None => {
                    let place = self.free.pop().unwrap_or_else(|| {
                        self.len += 1;
                        self.len - 1
                    });
                    self.of.insert(key.clone(), place);
                    (place, true)
                }
            },
        });
        places.collect()
    }
}

/// The table: a row for each kind of online GPU, a column for each kind of job.
#[derive(Debug, Default)]
pub(super) struct SpeedTable {
    online: Places<OnlineKey>,
    offline: Places<OfflineKey>,
    stride: usize,
    data: Vec<f32>,
    /// Pairs predicted so far.
    pub(super) predicted: u64,
}

/// One row to be filled: which prepared half it is, and which columns.
#[derive(Clone, Copy)]
struct Work {
    block: usize,
    row: usize,
}

/// Pairs to be predicted together: rows of one GPU type, and some of the columns.
struct Block {
    online: Vec<OnlineInput>,
    offline: Vec<OfflineInput>,
    columns: Vec<usize>,
}

impl SpeedTable {
    /// Makes the table hold all pairs of these classes, predicting what it does not hold yet.
    /// Returns the row of each GPU class and the column of each job class.
    pub(super) fn renew(
        &mut self,
        classes: &Classes<'_>,
        predictor: &dyn SpeedPredictor,
        threads: usize,
    ) -> (Vec<usize>, Vec<usize>) {
        let online_keys: Vec<OnlineKey> = (0..classes.gpus.len())
            .map(|c| online_key(classes.gpu(c), classes.collapsed))
            .collect();
        let offline_keys: Vec<OfflineKey> = (0..classes.jobs.len())
            .map(|c| offline_key(classes.job(c), classes.collapsed))
            .collect();
        let rows = self.online.renew(&online_keys);
        let columns = self.offline.renew(&offline_keys);
        self.resize();
        let (blocks, work) = self.missing(classes, &rows, &columns);
        for block in &blocks {
            self.predicted += block.online.len() as u64 * block.offline.len() as u64;
        }
        let prepared: Vec<_> =
            blocks.iter().map(|b| predictor.prepare(&b.online, &b.offline)).collect();
        self.fill(&blocks, &prepared, &work, threads);
        (rows.into_iter().map(|r| r.0).collect(), columns.into_iter().map(|c| c.0).collect())
    }

    /// The speeds of one row, by column.
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.stride..(row + 1) * self.stride]
    }

    /// Grows the table; a wider table moves its rows.
    fn resize(&mut self) {
        if self.offline.len > self.stride {
            let stride = self.offline.len;
            let mut data = vec![0.0; self.online.len * stride];
            if self.stride > 0 {
                for (new, old) in data.chunks_mut(stride).zip(self.data.chunks(self.stride)) {
                    new[..self.stride].copy_from_slice(old);
                }
            }
            (self.data, self.stride) = (data, stride);
        }
        self.data.resize(self.online.len * self.stride, 0.0);
    }

    /// What is not yet in the table: for each GPU type the new rows with all columns, and the old
    /// rows with the new columns.
    fn missing(
        &self,
        classes: &Classes<'_>,
        rows: &[(usize, bool)],
        columns: &[(usize, bool)],
    ) -> (Vec<Block>, Vec<Vec<Work>>) {
        let mut numbers: BTreeMap<(&GpuType, bool), usize> = BTreeMap::new();
        let mut blocks: Vec<Block> = Vec::new();
        let mut work = vec![Vec::new(); self.online.len];
        let mut distinct = vec![false; self.offline.len];
        let all: Vec<usize> = (0..columns.len())
            .filter(|&c| !std::mem::replace(&mut distinct[columns[c].0], true))
            .collect();
        for (class, &(place, new)) in rows.iter().enumerate() {
            if !work[place].is_empty() {
                continue;
            }
            let gpu = classes.gpu(class);
            let Some(online) = online_input(gpu, gpu.share) else { continue };
            let number = *numbers.entry((&gpu.gpu_type, new)).or_insert(blocks.len());
            if number == blocks.len() {
                let wanted: Vec<usize> =
                    all.iter().copied().filter(|&c| new || columns[c].1).collect();
                blocks.push(Block {
                    online: Vec::new(),
                    offline: wanted
                        .iter()
                        .map(|&c| offline_input(classes.job(c), &gpu.gpu_type))
                        .collect(),
                    columns: wanted.iter().map(|&c| columns[c].0).collect(),
                });
            }
            let block = &mut blocks[number];
            if block.columns.is_empty() {
                continue;
            }
            work[place].push(Work { block: number, row: block.online.len() });
            block.online.push(online);
        }
        (blocks, work)
    }

    fn fill(
        &mut self,
        blocks: &[Block],
        prepared: &[Box<dyn PairSpeeds + '_>],
        work: &[Vec<Work>],
        threads: usize,
    ) {
        if self.stride == 0 {
            return;
        }
        let stride = self.stride;
        let part = work.len().div_ceil(threads.max(1)).max(1);
        let fill_part = |data: &mut [f32], work: &[Vec<Work>]| {
            let mut buffer = Vec::new();
            for (row, items) in data.chunks_mut(stride).zip(work) {
                for item in items {
                    let columns = &blocks[item.block].columns;
                    buffer.resize(columns.len(), 0.0);
                    prepared[item.block].fill(item.row, 0, &mut buffer);
                    for (&column, &speed) in columns.iter().zip(&buffer) {
                        row[column] = speed;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            let mut parts = self.data.chunks_mut(part * stride).zip(work.chunks(part)).peekable();
            while let Some((data, work)) = parts.next() {
                // The last part is done here, so that one thread means no other thread.
                if parts.peek().is_some() {
                    scope.spawn(move || fill_part(data, work));
                } else {
                    fill_part(data, work);
                }
            }
        });
    }
}

fn online_key(gpu: &GpuSnapshot, collapsed: bool) -> OnlineKey {
    let profile = gpu.online.as_ref().map(|o| ProfileKey::new(&o.profile));
    ((!collapsed).then(|| gpu.gpu.clone()), gpu.gpu_type.clone(), gpu.share, profile)
}

fn offline_key(job: &JobSnapshot, collapsed: bool) -> OfflineKey {
    let profiles = job.profiles.iter().map(|(t, p)| (t.clone(), ProfileKey::new(p))).collect();
    ((!collapsed).then(|| job.job.clone()), job.workload.clone(), profiles)
}
