//! What the health machine looks at, and the thresholds it holds each reading against.

use std::fmt;

use muxflow_types::{GpuSample, MegaHertz, Micros};

/// One thing that is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// Share of time with a kernel running, in per cent.
    GpuUtil,
    /// Share of SMs with work, in per cent.
    SmActivity,
    /// SM clock in MHz; low is bad.
    SmClock,
    /// Device memory in use, in per cent of the whole.
    Memory,
    /// Latency of the service, in per cent of its SLO.
    Latency,
}

impl Metric {
    /// All of them.
    pub const ALL: [Metric; 5] =
        [Metric::GpuUtil, Metric::SmActivity, Metric::SmClock, Metric::Memory, Metric::Latency];

    /// The word used in the configuration, in logs and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Metric::GpuUtil => "gpu_util_pct",
            Metric::SmActivity => "sm_activity_pct",
            Metric::SmClock => "sm_clock_mhz",
            Metric::Memory => "memory_pct",
            Metric::Latency => "latency_pct_of_slo",
        }
    }

    /// Whether small values are the bad ones.
    pub fn low_is_bad(self) -> bool {
        self == Metric::SmClock
    }

    /// Whether shutting the launch gate brings the metric back. Memory stays held by a job that
    /// does not run, so only an eviction helps there.
    pub fn gate_helps(self) -> bool {
        self != Metric::Memory
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How a reading stands against its thresholds, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// On the good side of the Healthy threshold.
    Fine,
    /// Between Healthy and Unhealthy: keeps what holds, allows nothing new.
    Between,
    /// Has reached the Unhealthy threshold.
    Unhealthy,
    /// Has passed the Overlimit threshold.
    Over,
}

/// The thresholds of one metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bands {
    metric: Metric,
    healthy: f64,
    unhealthy: f64,
    overlimit: f64,
}

/// Thresholds in the wrong order, or out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BandsError {
    /// Not a number that the metric can have.
    #[error("{metric}.{field} is {value}; it must be a number between 0 and {max}")]
    Range {
        /// Whose.
        metric: Metric,
        /// Which threshold.
        field: &'static str,
        /// What was given.
        value: f64,
        /// The largest that makes sense.
        max: f64,
    },
    /// The thresholds cross.
    #[error(
        "{metric}.{better} is {better_value} and lies beyond {metric}.{worse} ({worse_value}): {metric} must {} from {better} to {worse}",
        if metric.low_is_bad() { "fall" } else { "rise" }
    )]
    Order {
        /// Whose.
        metric: Metric,
        /// The threshold that should be met first.
        better: &'static str,
        /// Its value.
        better_value: f64,
        /// The threshold that should be met later.
        worse: &'static str,
        /// Its value.
        worse_value: f64,
    },
}

impl BandsError {
    /// The field to change.
    pub fn field(&self) -> &'static str {
        match self {
            BandsError::Range { field, .. } => field,
            BandsError::Order { better, .. } => better,
        }
    }
}

impl Bands {
    /// Checks that the thresholds lie in the order in which they are met, Healthy strictly first.
    pub fn new(
        metric: Metric,
        healthy: f64,
        unhealthy: f64,
        overlimit: f64,
    ) -> Result<Self, BandsError> {
        let max = match metric {
            Metric::GpuUtil | Metric::SmActivity | Metric::Memory => 100.0,
            Metric::SmClock => 10_000.0,
            Metric::Latency => 100_000.0,
        };
        for (field, value) in
            [("healthy", healthy), ("unhealthy", unhealthy), ("overlimit", overlimit)]
        {
            if !(0.0..=max).contains(&value) {
                return Err(BandsError::Range { metric, field, value, max });
            }
        }
        let before = |a: f64, b: f64| if metric.low_is_bad() { a > b } else { a < b };
        let order = |better, better_value, worse, worse_value| BandsError::Order {
            metric,
            better,
            better_value,
            worse,
            worse_value,
        };
        if !before(healthy, unhealthy) {
            return Err(order("healthy", healthy, "unhealthy", unhealthy));
        }
        if before(overlimit, unhealthy) {
            return Err(order("unhealthy", unhealthy, "overlimit", overlimit));
        }
        Ok(Bands { metric, healthy, unhealthy, overlimit })
    }

    /// Bands that ship with the program; a test holds them against [`Bands::new`].
    pub(crate) const fn built_in(
        metric: Metric,
        healthy: f64,
        unhealthy: f64,
        overlimit: f64,
    ) -> Self {
        Bands { metric, healthy, unhealthy, overlimit }
    }

    /// Whose thresholds these are.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// Healthy, Unhealthy and Overlimit.
    pub fn thresholds(&self) -> (f64, f64, f64) {
        (self.healthy, self.unhealthy, self.overlimit)
    }

    /// How a reading stands, and the threshold that says so. As in the paper: Unhealthy when it is
    /// reached, Overlimit when it is passed.
    pub fn judge(&self, value: f64) -> (Level, f64) {
        let sign = if self.metric.low_is_bad() { -1.0 } else { 1.0 };
        let value = value * sign;
        if value > self.overlimit * sign {
            (Level::Over, self.overlimit)
        } else if value >= self.unhealthy * sign {
            (Level::Unhealthy, self.unhealthy)
        } else if value >= self.healthy * sign {
            (Level::Between, self.healthy)
        } else {
            (Level::Fine, self.healthy)
        }
    }
}

/// All thresholds of a GPU type.
#[derive(Debug, Clone, PartialEq)]
pub struct Thresholds {
    /// The bands of the metrics that are judged, at most one for each; a metric without bands is
    /// not judged and may be missing.
    pub bands: Vec<Bands>,
    /// The highest SM clock of the type: a reading well above it is a glitch.
    pub highest_clock: MegaHertz,
    /// The clock is judged only at this GPU utilisation or SM activity and above: an idle GPU
    /// lowers its clock to save power, and that is no distress.
    pub clock_counts_from_pct: f64,
}

/// One judged reading.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finding {
    /// What was read.
    pub metric: Metric,
    /// Its value, in the unit of the metric.
    pub value: f64,
    /// The threshold that decided.
    pub threshold: f64,
    /// How it stands.
    pub level: Level,
}

/// What a sample says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judgement {
    /// The worst reading; `None` when nothing could be judged.
    pub worst: Option<Finding>,
    /// A judged metric that the sample lacks. Bad news is believed all the same, good news is not.
    pub missing: Option<Metric>,
}

/// Why a sample is impossible, whatever the GPU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Glitch {
    /// More memory in use than there is.
    MemoryBeyondTotal,
    /// A clock that the GPU type cannot reach.
    ClockBeyondHighest,
    /// Counters refreshed after the sample was taken, or a sample from the future.
    TimeBeyondNow,
}

impl Thresholds {
    /// The value of a metric in a sample, if it is there and counts.
    fn read(&self, sample: &GpuSample, metric: Metric, slo: Option<Micros>) -> Reading {
        let present = |value: Option<f64>| value.map_or(Reading::Missing, Reading::Value);
        match metric {
            Metric::GpuUtil => present(sample.gpu_util.map(|p| p.value())),
            Metric::SmActivity => present(sample.sm_activity.map(|p| p.value())),
            Metric::Memory => present(sample.memory_share().map(|p| p.value())),
            Metric::SmClock => {
                let busy = [sample.gpu_util, sample.sm_activity];
                let mut known = busy.iter().flatten().peekable();
                if known.peek().is_some() && known.all(|b| b.value() < self.clock_counts_from_pct) {
                    return Reading::DoesNotCount;
                }
                present(sample.sm_clock.map(|c| f64::from(c.0)))
            }
            // An idle service has no latency; a service without an SLO has nothing to hold it to.
            Metric::Latency => match (sample.online_latency, slo.filter(|slo| slo.0 > 0)) {
                (Some(latency), Some(slo)) => {
                    Reading::Value(latency.as_secs_f64() / slo.as_secs_f64() * 100.0)
                }
                _ => Reading::DoesNotCount,
            },
        }
    }

    /// Holds every judged metric of a sample against its bands.
    pub fn judge(&self, sample: &GpuSample, slo: Option<Micros>) -> Judgement {
        let mut judgement = Judgement { worst: None, missing: None };
        for bands in &self.bands {
            let metric = bands.metric();
            match self.read(sample, metric, slo) {
                Reading::DoesNotCount => {}
                Reading::Missing => judgement.missing = judgement.missing.or(Some(metric)),
                Reading::Value(value) => {
                    let (level, threshold) = bands.judge(value);
                    // Memory first among equals: it cannot wait for the gate.
                    let worse = judgement.worst.is_none_or(|w: Finding| {
                        level > w.level || (level == w.level && !metric.gate_helps())
                    });
                    if worse {
                        judgement.worst = Some(Finding { metric, value, threshold, level });
                    }
                }
            }
        }
        judgement
    }

    /// A value that no GPU of the type can have means that the sensor erred, not that the GPU is in
    /// distress: such a sample is dropped whole and counts as missing.
    pub fn glitch(&self, sample: &GpuSample, now: Micros) -> Option<Glitch> {
        if sample.at > now || sample.refreshed_at > sample.at {
            return Some(Glitch::TimeBeyondNow);
        }
        if sample.memory_used.zip(sample.memory_total).is_some_and(|(used, total)| used > total) {
            return Some(Glitch::MemoryBeyondTotal);
        }
        // Boost steps overshoot the nominal highest clock by a few per cent; not by ten.
        let ceiling = self.highest_clock.0.saturating_add(self.highest_clock.0 / 10);
        if sample.sm_clock.is_some_and(|clock| clock.0 > ceiling) {
            return Some(Glitch::ClockBeyondHighest);
        }
        None
    }
}

enum Reading {
    Value(f64),
    Missing,
    DoesNotCount,
}
