//! What an operator may set about cluster planning.

use muxflow_types::{ClusterSnapshot, Micros, Percent};

use super::fit::Terms;
use crate::node::quota::QuotaParams;

/// The settings of the planner. The defaults are those of the paper where it states one.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters {
    /// Time between two plans (the paper: 15 minutes).
    pub interval: Micros,
    /// What a restart or a move costs a job: checkpoint, stop, image, start, warm-up.
    pub restart_cost: Micros,
    /// A move must gain this much beyond its cost, as a share of the present speed: predictions are
    /// off by about that much, and moving for noise is a loss.
    pub move_margin: Percent,
    /// A job that has waited this long in all counts `1 + aging_gain` times as much; each doubling
    /// of the wait doubles the gain, without end, so that no job starves.
    pub aging_step: Micros,
    /// See [`Parameters::aging_step`].
    pub aging_gain: f64,
    /// At most this share of the running jobs is moved, restarted or displaced in one plan.
    pub max_disruption: Percent,
    /// Pairs predicted below this speed are not worth their restart and are never made.
    pub min_speed: f32,
    /// How much memory may be lent, and what must stay free.
    pub quota: QuotaParams,
    /// Threads for predicting and matching.
    pub threads: usize,
    /// Whether equal GPUs and equal jobs are collapsed into classes. Exact either way; off, every
    /// pair is predicted and matched one by one, for measuring what the classes save.
    pub collapse: bool,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            interval: Micros::from_secs(15 * 60),
            restart_cost: Micros::from_secs(60),
            move_margin: Percent::new(5.0).unwrap_or(Percent::ZERO),
            aging_step: Micros::from_secs(15 * 60),
            aging_gain: 0.25,
            max_disruption: Percent::new(10.0).unwrap_or(Percent::FULL),
            min_speed: 0.02,
            quota: QuotaParams::default(),
            threads: 1,
            collapse: true,
        }
    }
}

/// A setting that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParameterError {
    /// Zero where something must pass.
    #[error("`{field}` must be above 0")]
    Zero {
        /// Which one.
        field: &'static str,
    },
    /// A restart that takes longer than the time until the next plan.
    #[error(
        "`restart_cost` ({restart_cost}) must be below `interval` ({interval}): a job would never run between two moves"
    )]
    RestartLongerThanInterval {
        /// As given.
        restart_cost: Micros,
        /// As given.
        interval: Micros,
    },
    /// Not a finite number in its range.
    #[error("`{field}` is {value}; write a number from {low} to {high}")]
    Range {
        /// Which one.
        field: &'static str,
        /// As given.
        value: f64,
        /// Smallest allowed.
        low: f64,
        /// Largest allowed.
        high: f64,
    },
}

impl Parameters {
    /// Refuses settings that contradict each other, by name.
    pub fn check(&self) -> Result<(), ParameterError> {
        for (field, value) in [("interval", self.interval), ("aging_step", self.aging_step)] {
            if value == Micros::ZERO {
                return Err(ParameterError::Zero { field });
            }
        }
        if self.threads == 0 {
            return Err(ParameterError::Zero { field: "threads" });
        }
        if self.restart_cost >= self.interval {
            return Err(ParameterError::RestartLongerThanInterval {
                restart_cost: self.restart_cost,
                interval: self.interval,
            });
        }
        for (field, value, high) in
            [("aging_gain", self.aging_gain, 100.0), ("min_speed", f64::from(self.min_speed), 1.0)]
        {
            if !(0.0..=high).contains(&value) {
                return Err(ParameterError::Range { field, value, low: 0.0, high });
            }
        }
        Ok(())
    }

    /// What fits depend on, at the moment of a snapshot.
    pub fn terms(&self, snapshot: &ClusterSnapshot) -> Terms {
        Terms { at: snapshot.at, quota: self.quota }
    }

    /// How much more a job counts after waiting so long: 1 at once, then growing by steps, without
    /// end. In steps, so that jobs that waited about equally long stay equal.
    pub fn aging(&self, waited: Micros) -> f64 {
        let level = (1 + waited.0 / self.aging_step.0.max(1)).ilog2();
        1.0 + self.aging_gain * (2f64.powi(i32::try_from(level).unwrap_or(i32::MAX)) - 1.0)
    }

    /// What a job loses by a restart, as a share of what it does in one interval, margin included.
    pub fn disruption_cost(&self) -> f64 {
        self.restart_cost.as_secs_f64() / self.interval.as_secs_f64() + self.move_margin.fraction()
    }

    /// How many running jobs one plan may move, restart or displace.
    pub fn disruption_limit(&self, running: usize) -> usize {
        if self.max_disruption == Percent::ZERO || running == 0 {
            return 0;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a count of jobs"
        )]
        let limit = (running as f64 * self.max_disruption.fraction()).floor() as usize;
        limit.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_consistent() {
        Parameters::default().check().unwrap();
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let p = Parameters { restart_cost: Micros::from_secs(3600), ..Parameters::default() };
        assert!(p.check().unwrap_err().to_string().contains("restart_cost"));
        let p = Parameters { aging_gain: f64::NAN, ..Parameters::default() };
        assert!(p.check().unwrap_err().to_string().contains("aging_gain"));
        let p = Parameters { threads: 0, ..Parameters::default() };
        assert!(p.check().unwrap_err().to_string().contains("threads"));
        let p = Parameters { aging_step: Micros::ZERO, ..Parameters::default() };
        assert!(p.check().unwrap_err().to_string().contains("aging_step"));
    }

    #[test]
    fn waiting_counts_more_and_more_without_end() {
        let p = Parameters::default();
        assert!((p.aging(Micros::ZERO) - 1.0).abs() < 1e-12);
        let mut last = 0.0;
        for minutes in [0, 15, 45, 105, 225, 1_000, 100_000] {
            let now = p.aging(Micros::from_secs(minutes * 60));
            assert!(now > last, "{minutes} min: {now} after {last}");
            last = now;
        }
        assert!(last > 1_000.0);
    }

    #[test]
    fn the_limit_lets_a_small_cluster_change_at_all() {
        let p = Parameters::default();
        assert_eq!(p.disruption_limit(0), 0);
        assert_eq!(p.disruption_limit(3), 1);
        assert_eq!(p.disruption_limit(100), 10);
        assert_eq!(Parameters { max_disruption: Percent::ZERO, ..p }.disruption_limit(100), 0);
    }
}
