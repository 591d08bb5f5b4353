//! Traces made from fitted distributions, so that nothing need be downloaded.
//!
//! Durations follow the quantiles of all 82,247 jobs of the public Philly trace, and arrivals its
//! hours of the day. Requests follow a daily curve like that of public serving traces: a deep night,
//! a plateau, a peak in the evening, with noise and short bursts.

use muxflow_gpu_model::Rng;

use super::jobs::JobRow;
use super::requests::RequestCurve;
use crate::error::SimError;
use crate::number::{float, index};

/// Quantiles of the durations of Philly jobs, in seconds.
const DURATIONS: [(f64, f64); 27] = [
    (0.0, 1.0),
    (0.02, 25.0),
    (0.05, 48.0),
    (0.1, 61.0),
    (0.15, 68.0),
    (0.2, 75.0),
    (0.25, 115.0),
    (0.3, 209.0),
    (0.35, 371.0),
    (0.4, 599.0),
    (0.45, 863.0),
    (0.5, 1144.0),
    (0.55, 1474.0),
    (0.6, 1821.0),
    (0.65, 2140.0),
    (0.7, 2549.0),
    (0.75, 2932.0),
    (0.8, 4244.0),
    (0.85, 5903.0),
    (0.9, 11_266.0),
    (0.93, 21_148.0),
    (0.95, 43_648.0),
    (0.97, 92_057.0),
    (0.98, 147_876.0),
    (0.99, 254_884.0),
    (0.995, 430_658.0),
    (1.0, 4_628_226.0),
];

/// Arrivals of Philly jobs by the hour of the day, against the mean.
const HOURS: [f64; 24] = [
    1.27, 0.98, 1.12, 1.1, 0.7, 1.15, 1.67, 2.09, 1.11, 1.01, 1.02, 0.87, 0.75, 0.7, 0.64, 0.65,
    0.88, 0.67, 0.8, 0.73, 1.02, 0.92, 1.13, 1.01,
];

/// What to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateJobs {
    /// How many jobs.
    pub jobs: usize,
    /// They arrive within so many hours.
    pub hours: f64,
    /// Longest duration; longer draws are cut to it.
    pub longest_s: f64,
    /// Mean duration to scale to, when given.
    pub mean_s: Option<f64>,
    /// Seed.
    pub seed: u64,
}

/// The workloads that jobs are given at random, as in the paper.
pub const TRAINING_MODELS: [&str; 4] =
    ["resnet50-train", "vgg16-train", "densenet201-train", "inceptionv3-train"];

/// Makes a Philly-like trace.
pub fn generate_jobs(g: &GenerateJobs) -> Result<Vec<JobRow>, SimError> {
    let setting = |field, value: String, reason| SimError::Setting { field, value, reason };
    if g.jobs == 0 || g.jobs > 10_000_000 {
        return Err(setting("jobs", g.jobs.to_string(), "write a number from 1 to 10000000"));
    }
    if !(g.hours.is_finite() && g.hours > 0.0 && g.hours <= 10_000.0) {
        return Err(setting("hours", g.hours.to_string(), "write a number above 0, at most 10000"));
    }
    if !(g.longest_s >= 1.0 && g.longest_s.is_finite()) {
        return Err(setting("longest", g.longest_s.to_string(), "write at least one second"));
    }
    let mut rng = Rng::fork(g.seed, 1);
    let mut times: Vec<f64> = Vec::with_capacity(g.jobs);
    while times.len() < g.jobs {
        let t = rng.uniform() * g.hours * 3600.0;
        let hour = index(t / 3600.0) % 24;
        if rng.uniform() * 2.1 < HOURS[hour] {
            times.push(t);
        }
    }
    times.sort_by(f64::total_cmp);
    let mut durations: Vec<f64> =
        (0..g.jobs).map(|_| duration(rng.uniform()).min(g.longest_s)).collect();
    if let Some(mean) = g.mean_s {
        scale_to_mean(&mut durations, mean, g.longest_s);
    }
    let mut models = Rng::fork(g.seed, 2);
    Ok(times
        .into_iter()
        .zip(durations)
        .enumerate()
        .map(|(i, (submit_s, duration_s))| JobRow {
            id: format!("job-{i:06}"),
            submit_s,
            duration_s,
            gpus: 1,
            workload: Some(TRAINING_MODELS[models.below(4)].to_owned()),
        })
        .collect())
}

/// Scales durations to a mean without passing the longest; the shape below it is kept.
pub fn scale_to_mean(durations: &mut [f64], mean: f64, longest_s: f64) {
    for _ in 0..40 {
        let now = crate::number::mean(durations);
        if now <= 0.0 || (now / mean - 1.0).abs() < 1e-3 {
            return;
        }
        let factor = mean / now;
        for d in durations.iter_mut() {
            *d = (*d * factor).clamp(1.0, longest_s);
        }
    }
}

fn duration(u: f64) -> f64 {
    let at = DURATIONS.iter().position(|(q, _)| *q >= u).unwrap_or(DURATIONS.len() - 1).max(1);
    let ((q0, d0), (q1, d1)) = (DURATIONS[at - 1], DURATIONS[at]);
    let part = (u - q0) / (q1 - q0);
    (d0.ln() + (d1.ln() - d0.ln()) * part).exp()
}

/// Makes a daily curve of one service between two rates, in steps of a minute, with noise and
/// bursts.
pub fn generate_requests(
    name: &str,
    low: f64,
    high: f64,
    days: u32,
    seed: u64,
) -> Result<RequestCurve, SimError> {
    if !(low >= 0.0 && high >= low && high.is_finite()) {
        return Err(SimError::Setting {
            field: "rates",
            value: format!("{low} to {high}"),
            reason: "the low rate must not be negative nor above the high one",
        });
    }
    let minutes = 1440 * days.clamp(1, 366) as usize;
    let mut rng = Rng::fork(seed, 3);
    let phase = rng.between(-1.0, 1.0);
    let mut rates = Vec::with_capacity(minutes);
    let mut drift = 0.0;
    let mut burst = 0usize;
    for minute in 0..minutes {
        let hour = (float(minute) / 60.0 + phase).rem_euclid(24.0);
        let base = low + (high / 1.15 - low).max(0.0) * daily(hour);
        drift = 0.97 * drift + 0.012 * rng.normal();
        if burst == 0 && rng.uniform() < 1.0 / 900.0 {
            burst = 2 + rng.below(5);
        }
        let surge = if burst > 0 {
            burst -= 1;
            1.6
        } else {
            1.0
        };
        let noisy = base * (1.0 + drift + 0.015 * rng.normal()) * surge;
        rates.push(noisy.clamp(low, high));
    }
    Ok(RequestCurve { name: name.to_owned(), step_s: 60.0, rates })
}

/// Shape of a day, 0 to 1: lowest at five in the morning, highest at nine in the evening.
fn daily(hour: f64) -> f64 {
    let wave = |peak: f64, width: f64| {
        let mut d = (hour - peak).abs();
        d = d.min(24.0 - d);
        (-(d / width).powi(2)).exp()
    };
    (0.62 * wave(13.0, 4.5) + 1.0 * wave(21.0, 3.2)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_jobs_look_like_philly() {
        let g = GenerateJobs { jobs: 20_000, hours: 240.0, longest_s: 5e6, mean_s: None, seed: 3 };
        let jobs = generate_jobs(&g).unwrap();
        let mut d: Vec<f64> = jobs.iter().map(|j| j.duration_s).collect();
        d.sort_by(f64::total_cmp);
        assert!((d[10_000] / 1144.0 - 1.0).abs() < 0.1, "median {}", d[10_000]);
        assert!((d[18_000] / 11_266.0 - 1.0).abs() < 0.15, "p90 {}", d[18_000]);
        assert!(jobs.windows(2).all(|w| w[0].submit_s <= w[1].submit_s));
        let at_seven = jobs.iter().filter(|j| index(j.submit_s / 3600.0) % 24 == 7).count();
        assert!(at_seven > 1500 && at_seven < 2000, "{at_seven}");
        assert_eq!(jobs, generate_jobs(&g).unwrap());
    }

    #[test]
    fn scaling_keeps_the_longest() {
        let g = GenerateJobs {
            jobs: 5_000,
            hours: 12.0,
            longest_s: 20_000.0,
            mean_s: Some(4_000.0),
            seed: 1,
        };
        let jobs = generate_jobs(&g).unwrap();
        let mean = jobs.iter().map(|j| j.duration_s).sum::<f64>() / 5_000.0;
        assert!((mean / 4_000.0 - 1.0).abs() < 0.01, "{mean}");
        assert!(jobs.iter().all(|j| j.duration_s <= 20_000.0));
    }

    #[test]
    fn a_day_has_a_night_and_an_evening() {
        let c = generate_requests("s", 20.0, 190.0, 1, 5).unwrap();
        assert_eq!(c.rates.len(), 1440);
        assert!(c.at(5.0 * 3600.0) < 60.0, "{}", c.at(5.0 * 3600.0));
        assert!(c.at(21.0 * 3600.0) > 140.0, "{}", c.at(21.0 * 3600.0));
        assert!(c.peak() <= 190.0);
        assert!(generate_requests("s", 5.0, 1.0, 1, 5).is_err());
    }
}
