//! From profiles to numbers, with what is missing kept apart from what is zero.
//!
//! Each half of a pair is encoded on its own, so that models can compute what depends on one half
//! once. A feature that the training data never has is left out of the encoding. One that it has
//! only sometimes gets a second column that says whether it was there; its value column is then the
//! training mean (0 after standardising), never a raw zero.

use std::collections::BTreeSet;

use muxflow_types::{Bytes, Percent, ProfileRecord, WorkloadName};

use crate::sample::{Dataset, family_and_batch};

/// How many numbers a half may have.
pub const NUMERIC: usize = 8;
/// Their names, in order. The last one, the SM share, belongs to the online half only.
pub const NUMERIC_NAMES: [&str; NUMERIC] = [
    "gpu_util",
    "sm_activity",
    "sm_occupancy",
    "dram_activity",
    "log_solo_time",
    "log_memory",
    "log_batch",
    "log_sm_share",
];
/// The place of the logarithm of the solo time.
pub const SOLO_TIME: usize = 4;
const BATCH: usize = 6;

/// One half of a pair as raw numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Half {
    /// In the order of [`NUMERIC_NAMES`]; `None` is missing.
    pub numeric: [Option<f64>; NUMERIC],
    /// Who it is.
    pub workload: WorkloadName,
}

fn fraction(value: Option<Percent>) -> Option<f64> {
    value.map(Percent::fraction)
}

impl Half {
    /// Reads a profile; `share` is given for the online half only.
    pub fn new(profile: &ProfileRecord, share: Option<Percent>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "memory sizes are far below 2^53")]
        let log_memory = |memory: Bytes| (memory.0.max(1 << 20) as f64).ln();
        Half {
            numeric: [
                fraction(profile.gpu_util),
                fraction(profile.sm_activity),
                fraction(profile.sm_occupancy),
                fraction(profile.dram_activity),
                profile.solo_time.map(|time| time.as_secs_f64().max(1e-6).ln()),
                profile.memory.map(log_memory),
                family_and_batch(&profile.workload).1.map(f64::log2),
                fraction(share).map(|s| s.max(0.01).ln()),
            ],
            workload: profile.workload.clone(),
        }
    }

    /// The family by the name's convention.
    pub fn family(&self) -> &str {
        family_and_batch(&self.workload).0
    }
}

/// How one numeric feature is scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Column {
    /// Which of [`NUMERIC_NAMES`].
    pub source: usize,
    /// Training mean.
    pub mean: f64,
    /// Training standard deviation, never 0.
    pub deviation: f64,
    /// Whether a second column says if it was there.
    pub indicator: bool,
}

/// Turns one side's halves into rows of numbers; fitted on training data only.
#[derive(Debug, Clone, PartialEq)]
pub struct SideEncoder {
    /// The numeric columns in use.
    pub columns: Vec<Column>,
    /// Families with a column each; an unknown family has zeros in all of them.
    pub families: Vec<String>,
}

impl SideEncoder {
    /// Learns which features there are, and their scale.
    pub fn fit(halves: &[Half]) -> Self {
        let mut columns = Vec::new();
        for source in 0..NUMERIC {
            let present: Vec<f64> = halves.iter().filter_map(|h| h.numeric[source]).collect();
            if present.is_empty() {
                continue;
            }
            #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
            let count = present.len() as f64;
            let mean = present.iter().sum::<f64>() / count;
            let variance = present.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
            let indicator = present.len() < halves.len();
            if variance > 1e-12 || indicator {
                let deviation = variance.sqrt().max(1e-6);
                columns.push(Column { source, mean, deviation, indicator });
            }
        }
        let families: BTreeSet<&str> = halves.iter().map(Half::family).collect();
        // One family says nothing; more than this are names, not kinds.
        let families = if (2..=MAX_FAMILIES).contains(&families.len()) {
            families.into_iter().map(str::to_owned).collect()
        } else {
            Vec::new()
        };
        SideEncoder { columns, families }
    }

    /// How many numbers [`SideEncoder::encode`] writes.
    pub fn width(&self) -> usize {
        self.numeric_width() + self.families.len()
    }

    /// How many of them are not families.
    pub fn numeric_width(&self) -> usize {
        self.columns.iter().map(|c| 1 + usize::from(c.indicator)).sum()
    }

    /// Standardised numbers and their indicators only.
    pub fn encode_numeric(&self, half: &Half) -> Vec<f64> {
        let mut row = Vec::with_capacity(self.width());
        for column in &self.columns {
            let value = half.numeric[column.source];
            let scaled = value.map_or(0.0, |v| (v - column.mean) / column.deviation);
            // Far outside of what was seen, a model extrapolates; hold it near the edge.
            row.push(scaled.clamp(-OUTLIER, OUTLIER));
            if column.indicator {
                row.push(f64::from(u8::from(value.is_none())));
            }
        }
        row
    }

    /// Numbers, indicators, then one column per known family.
    pub fn encode(&self, half: &Half) -> Vec<f64> {
        let mut row = self.encode_numeric(half);
        let family = half.family();
        row.extend(self.families.iter().map(|known| f64::from(u8::from(known == family))));
        row
    }

    /// Raw numbers with NaN for missing and then families, for models that split on values.
    pub fn raw(&self, half: &Half, row: &mut Vec<f64>) {
        row.extend(self.columns.iter().map(|c| half.numeric[c.source].unwrap_or(f64::NAN)));
        let family = half.family();
        row.extend(self.families.iter().map(|known| f64::from(u8::from(known == family))));
    }

    /// The same encoder without the batch column: for kernels that know the workload anyway.
    #[must_use]
    pub fn without_batch(mut self) -> Self {
        if self.columns.len() > 1 {
            self.columns.retain(|column| column.source != BATCH);
        }
        self
    }
}

/// Standard deviations beyond which a feature counts as this far off.
const OUTLIER: f64 = 4.0;
/// More families than this are treated as names.
const MAX_FAMILIES: usize = 24;

/// The halves of all samples: online, then offline.
pub fn halves(data: &Dataset) -> (Vec<Half>, Vec<Half>) {
    data.samples
        .iter()
        .map(|s| (Half::new(&s.online, s.share), Half::new(&s.offline, None)))
        .unzip()
}
