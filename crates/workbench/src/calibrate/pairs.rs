//! Fits pairs of training jobs: latents of each job type, and the interference between two.

use muxflow_gpu_model::{GpuProfile, Rng, Sharing, averaged};

use super::data::TrainingPair;
use super::fit::{
    Errors, INTERFERENCE_RANGES, INTERFERENCE_START, Latent, RANGES, START, set_interference, solo,
    tenant,
};
use super::search::{mean_abs, minimise};

fn pair_speeds(profile: &GpuProfile, sharing: &Sharing, a: &Latent, b: &Latent) -> [f64; 2] {
    let sms = f64::from(profile.sms);
    let t = [a, b].map(|l| tenant(l, sms, 1.0, sms));
    let both = averaged(profile, sharing, &t);
    [0, 1].map(|i| both.iterations_per_s[i] / solo(profile, t[i]))
}

/// 70 % of the pairs to fit, 30 % to predict.
fn split(pairs: &[TrainingPair]) -> [Vec<TrainingPair>; 2] {
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    Rng::new(6).shuffle(&mut order);
    let (train, test) = order.split_at(pairs.len() * 7 / 10);
    [train, test].map(|part| part.iter().map(|&i| pairs[i]).collect())
}

/// Gavel: latents of 26 job types and the two interference parameters from 70 % of the pairs; the
/// others are predicted. Returns the better of space and time sharing on the fitted part.
pub(crate) fn gavel(
    profile: &mut GpuProfile,
    jobs: usize,
    pairs: &[TrainingPair],
) -> (Sharing, [Errors; 2]) {
    let [train, test] = split(pairs);
    let [mps, slices] = [Sharing::Mps, Sharing::TimeSlice]
        .map(|sharing| Fit::search(profile, sharing, jobs, &train, None));
    let fit = if mps.cost(&train, None) <= slices.cost(&train, None) { mps } else { slices };
    *profile = fit.profile.clone();
    let n = train.iter().map(|_| 2.0).sum::<f64>();
    let mean = train.iter().flat_map(|p| p.speeds).sum::<f64>() / n;
    let parts = [train, test].map(|part| {
        let baseline = part.iter().flat_map(|p| p.speeds).map(|truth| mean - truth).collect();
        Errors { model: fit.errors(&part), baseline }
    });
    (fit.sharing, parts)
}

/// What holding one parameter at a value does to the error when all others are fitted again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) cache: f64,
    pub(crate) dram: f64,
    /// Mean absolute error of the fitted and of the held-out pairs.
    pub(crate) errors: [f64; 2],
}

/// How flat the error is along cache interference, under MPS.
pub(crate) fn flatness(
    profile: &GpuProfile,
    jobs: usize,
    pairs: &[TrainingPair],
    values: &[f64],
) -> Vec<Held> {
    let [train, test] = split(pairs);
    let at = |&cache: &f64| {
        let fit = Fit::search(profile, Sharing::Mps, jobs, &train, Some(cache));
        Held {
            cache,
            dram: fit.profile.contention.dram_interference,
            errors: [&train, &test].map(|part| mean_abs(&fit.errors(part))),
        }
    };
    values.iter().map(at).collect()
}

struct Fit {
    profile: GpuProfile,
    sharing: Sharing,
    latents: Vec<Latent>,
}

impl Fit {
    /// Latents and interference in turn, four times each. With `cache`, that stays where it is.
    fn search(
        profile: &GpuProfile,
        sharing: Sharing,
        jobs: usize,
        train: &[TrainingPair],
        cache: Option<f64>,
    ) -> Fit {
        let mut fit = Fit { profile: profile.clone(), sharing, latents: vec![START; jobs] };
        let mut x = INTERFERENCE_START;
        let mut ranges = INTERFERENCE_RANGES;
        if let Some(cache) = cache {
            x[0] = cache;
            ranges[0].low = cache;
            ranges[0].high = cache;
        }
        set_interference(&mut fit.profile, &x);
        for _ in 0..4 {
            for job in 0..jobs {
                let mut own = fit.latents[job];
                minimise(&mut own, &RANGES, 6, |x| {
                    fit.latents[job] = [x[0], x[1], x[2], x[3]];
                    fit.cost(train, Some(job))
                });
                fit.latents[job] = own;
            }
            minimise(&mut x, &ranges, 4, |x| {
                set_interference(&mut fit.profile, x);
                fit.cost(train, None)
            });
            set_interference(&mut fit.profile, &x);
        }
        fit
    }

    /// Sum of squared errors over the pairs, or over those with one job.
    fn cost(&self, pairs: &[TrainingPair], only: Option<usize>) -> f64 {
        let squared = |p: &TrainingPair| -> f64 {
            let said = self.speeds(p);
            (0..2).map(|i| (said[i] - p.speeds[i]).powi(2)).sum()
        };
        pairs.iter().filter(|p| only.is_none_or(|j| p.jobs.contains(&j))).map(squared).sum()
    }

    fn speeds(&self, p: &TrainingPair) -> [f64; 2] {
        let [a, b] = p.jobs.map(|j| &self.latents[j]);
        pair_speeds(&self.profile, &self.sharing, a, b)
    }

    fn errors(&self, pairs: &[TrainingPair]) -> Vec<f64> {
        let of = |p: &TrainingPair| {
            let said = self.speeds(p);
            [said[0] - p.speeds[0], said[1] - p.speeds[1]]
        };
        pairs.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs of five made-up jobs on a V100 with an interference of our choice.
    fn measured(jobs: usize) -> Vec<TrainingPair> {
        let mut truth = GpuProfile::built_in("V100").unwrap();
        set_interference(&mut truth, &[0.3, 0.8]);
        let mut rng = Rng::new(3);
        let latents: Vec<Latent> = (0..jobs)
            .map(|_| [0.3, 0.97, 0.95, 1.0].map(|top| top * rng.uniform().max(0.1)))
            .collect();
        let pair = |a: usize, b: usize| TrainingPair {
            jobs: [a, b],
            speeds: pair_speeds(&truth, &Sharing::Mps, &latents[a], &latents[b]),
        };
        (0..jobs).flat_map(|a| (a..jobs).map(move |b| (a, b))).map(|(a, b)| pair(a, b)).collect()
    }

    #[test]
    fn what_the_profile_held_before_does_not_matter() {
        let pairs = measured(5);
        let from = |cache: f64, dram: f64| {
            let mut profile = GpuProfile::built_in("V100").unwrap();
            set_interference(&mut profile, &[cache, dram]);
            let (sharing, errors) = gavel(&mut profile, 5, &pairs);
            (sharing, errors[0].model.clone(), errors[1].model.clone(), profile)
        };
        let result = from(0.22, 0.61);
        assert_eq!(result, from(0.9, 0.0));
        // And it is a fit: what made the pairs is found to a few hundredths of speed.
        assert_eq!(result.0, Sharing::Mps);
        assert!(mean_abs(&result.1) < 0.03, "{}", mean_abs(&result.1));
    }
}
