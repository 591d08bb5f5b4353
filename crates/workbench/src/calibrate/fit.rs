//! Fits: what of each dataset is used to fit, what is held out, and the errors of both.

use std::collections::BTreeMap;

use muxflow_gpu_model::{ClientId, Gap, GpuProfile, Resident, Rng, Sharing, Tenant, averaged};

use super::data::{Mix, ShareCurve, SliceRow};
use super::search::{Range, minimise};

/// A workload of which only speeds are known: gap, SMs filled, issue, bandwidth, each 0 to 1.
pub(crate) type Latent = [f64; 4];

pub(crate) const START: Latent = [0.15, 0.7, 0.6, 0.4];
pub(crate) const RANGES: [Range; 4] = [
    Range { low: 0.0, high: 0.95 },
    Range { low: 0.03, high: 1.0 },
    Range { low: 0.05, high: 1.0 },
    Range { low: 0.0, high: 1.0 },
];
/// Where the search for SM power (W), clock exponent and bandwidth saturation begins. What a profile
/// held before is never read: the result is a function of the measurements alone.
pub(crate) const POWER_START: [f64; 3] = [320.0, 2.0, 0.45];
/// Where the search for cache and DRAM interference begins, on every type. The error has several
/// optima, nearly as good as each other, so this start is also what chooses among them.
pub(crate) const INTERFERENCE_START: [f64; 2] = [0.10, 0.25];
pub(crate) const INTERFERENCE_RANGES: [Range; 2] =
    [Range { low: 0.0, high: 1.0 }, Range { low: 0.0, high: 2.0 }];
/// Occupancy cannot be told from speeds; a typical value.
const OCCUPANCY: f64 = 0.4;
const PERIOD_US: f64 = 1000.0;

pub(crate) fn tenant(latent: &Latent, full_sms: f64, bandwidth_scale: f64, cap_sms: f64) -> Tenant {
    let [gap, fill, issue, bandwidth] = *latent;
    Tenant {
        kernel: Resident {
            client: ClientId(0),
            sm_cap: cap_sms,
            sm_fill: (fill * full_sms).max(0.5),
            occupancy: OCCUPANCY,
            issue,
            bandwidth: bandwidth * bandwidth_scale,
            // The sets say nothing of kernels.
            kernel_us: 0.0,
        },
        busy_us: PERIOD_US * (1.0 - gap),
        gap: Gap::Closed { gap_us: PERIOD_US * gap },
        gate: 1.0,
    }
}

pub(crate) fn solo(profile: &GpuProfile, t: Tenant) -> f64 {
    averaged(profile, &Sharing::Mps, &[t]).iterations_per_s[0]
}

pub(crate) fn set_interference(profile: &mut GpuProfile, x: &[f64]) {
    profile.contention.cache_interference = x[0];
    profile.contention.dram_interference = x[1];
}

/// Errors of one part of a dataset.
#[derive(Debug, Clone, Default)]
pub(crate) struct Errors {
    pub(crate) model: Vec<f64>,
    pub(crate) baseline: Vec<f64>,
}

/// What a share curve looks like under the model.
fn curve(profile: &GpuProfile, latent: &Latent, shares: &[f64]) -> Vec<f64> {
    let sms = f64::from(profile.sms);
    let at = |share: f64| solo(profile, tenant(latent, sms, 1.0, share * sms));
    let full = at(1.0);
    shares.iter().map(|&s| at(s) / full).collect()
}

fn fit_curve(profile: &GpuProfile, c: &ShareCurve) -> (Latent, f64) {
    let known: Vec<(f64, f64)> = [0, 3, 7].map(|i| c.points[i]).to_vec();
    let shares: Vec<f64> = known.iter().map(|p| p.0).collect();
    let starts = [[0.02, 1.0, 0.95, 0.2], [0.3, 0.6, 0.6, 0.3], [0.05, 0.9, 0.3, 0.9]];
    let mut best = (START, f64::INFINITY);
    for mut latent in starts {
        let cost = minimise(&mut latent, &RANGES, 14, |x| {
            let x: Latent = [x[0], x[1], x[2], x[3]];
            curve(profile, &x, &shares).iter().zip(&known).map(|(m, k)| (m - k.1).powi(2)).sum()
        });
        if cost < best.1 {
            best = (latent, cost);
        }
    }
    best
}

/// MuxServe: fits power and saturation on even-numbered curves; in every curve, levels 30, 60 and
/// 100 % fix the workload, the other five are predicted.
pub(crate) fn muxserve(profile: &mut GpuProfile, curves: &[ShareCurve]) -> [Errors; 2] {
    let train: Vec<&ShareCurve> = curves.iter().step_by(2).step_by(8).collect();
    let mut x = POWER_START;
    let ranges = [
        Range { low: 250.0, high: 900.0 },
        Range { low: 1.2, high: 3.0 },
        Range { low: 0.1, high: 0.9 },
    ];
    let set = |p: &mut GpuProfile, x: &[f64]| {
        p.power.sm_w = x[0];
        p.power.exponent = x[1];
        p.contention.bandwidth_saturation_share = x[2];
    };
    let mut trial = profile.clone();
    minimise(&mut x, &ranges, 7, |x| {
        set(&mut trial, x);
        train
            .iter()
            .map(|c| predicted_errors(&trial, c).iter().map(|e| e.powi(2)).sum::<f64>())
            .sum()
    });
    set(profile, &x);
    let mut out = [Errors::default(), Errors::default()];
    for (i, c) in curves.iter().enumerate() {
        let part = &mut out[i % 2];
        part.model.extend(predicted_errors(profile, c));
        // Straight lines between the three known levels.
        for &j in &PREDICTED {
            let (share, truth) = c.points[j];
            let (a, b) =
                if j < 3 { (c.points[0], c.points[3]) } else { (c.points[3], c.points[7]) };
            let line = a.1 + (b.1 - a.1) * (share - a.0) / (b.0 - a.0);
            part.baseline.push(line - truth);
        }
    }
    out
}

const PREDICTED: [usize; 5] = [1, 2, 4, 5, 6];

fn predicted_errors(profile: &GpuProfile, c: &ShareCurve) -> Vec<f64> {
    let (latent, _) = fit_curve(profile, c);
    let shares: Vec<f64> = PREDICTED.iter().map(|&i| c.points[i].0).collect();
    let said = curve(profile, &latent, &shares);
    said.iter().zip(PREDICTED).map(|(s, i)| s - c.points[i].1).collect()
}

const FULL_SLICES: f64 = 98.0;

/// An A100 cut to so many GPCs.
fn slice(profile: &GpuProfile, gpcs: u32) -> (GpuProfile, f64) {
    let mut p = profile.clone();
    p.sms = 14 * gpcs;
    p.power.sm_w *= f64::from(p.sms) / f64::from(profile.sms);
    let memory_slices = match gpcs {
        1 => 1.0,
        2 => 2.0,
        3 | 4 => 4.0,
        _ => 8.0,
    };
    (p, 8.0 / memory_slices)
}

fn on_slice(profile: &GpuProfile, latent: &Latent, gpcs: u32, processes: u32) -> f64 {
    let (p, scale) = slice(profile, gpcs);
    let t = tenant(latent, FULL_SLICES, scale, f64::from(p.sms));
    let tenants: Vec<Tenant> = (0..processes).map(|_| t).collect();
    averaged(&p, &Sharing::Mps, &tenants).iterations_per_s[0]
}

fn fit_slices(profile: &GpuProfile, rows: &[SliceRow]) -> Latent {
    let single: Vec<&SliceRow> = rows.iter().filter(|r| r.processes == 1).collect();
    let most = single.iter().map(|r| r.throughput).fold(0.0, f64::max);
    let mut latent = START;
    minimise(&mut latent, &RANGES, 16, |x| {
        let x: Latent = [x[0], x[1], x[2], x[3]];
        let said: Vec<f64> = single.iter().map(|r| on_slice(profile, &x, r.gpcs, 1)).collect();
        let top = said.iter().copied().fold(0.0, f64::max);
        said.iter().zip(&single).map(|(s, r)| (s / top - r.throughput / most).powi(2)).sum()
    });
    latent
}

fn slice_errors(profile: &GpuProfile, rows: &[SliceRow], latent: &Latent) -> Errors {
    let mut out = Errors::default();
    for r in rows.iter().filter(|r| r.processes > 1) {
        let Some(one) = rows.iter().find(|o| o.processes == 1 && o.gpcs == r.gpcs) else {
            continue;
        };
        let truth = r.throughput / one.throughput;
        let said =
            on_slice(profile, latent, r.gpcs, r.processes) / on_slice(profile, latent, r.gpcs, 1);
        out.model.push(said - truth);
        // An equal part each.
        out.baseline.push(1.0 / f64::from(r.processes) - truth);
    }
    out
}

/// ParvaGPU: one process on five slice sizes fixes a model; two to five processes are predicted.
/// Interference is fitted on every other model; the rest is held out.
pub(crate) fn parvagpu(
    profile: &mut GpuProfile,
    rows: &BTreeMap<(String, u32), Vec<SliceRow>>,
) -> [Errors; 2] {
    let models: Vec<&String> = {
        let mut names: Vec<&String> = rows.keys().map(|k| &k.0).collect();
        names.dedup();
        names
    };
    let is_train =
        |model: &String| models.iter().position(|m| *m == model).is_some_and(|i| i % 2 == 0);
    let fitted: Vec<(&(String, u32), &Vec<SliceRow>, Latent)> =
        rows.iter().map(|(k, r)| (k, r, fit_slices(profile, r))).collect();
    let mut x = INTERFERENCE_START;
    let mut trial = profile.clone();
    minimise(&mut x, &INTERFERENCE_RANGES, 10, |x| {
        set_interference(&mut trial, x);
        fitted
            .iter()
            .filter(|(k, _, _)| is_train(&k.0))
            .flat_map(|(_, r, l)| slice_errors(&trial, r, l).model)
            .map(|e| e * e)
            .sum()
    });
    set_interference(profile, &x);
    let mut out = [Errors::default(), Errors::default()];
    for (k, r, l) in &fitted {
        let e = slice_errors(profile, r, l);
        let part = &mut out[usize::from(!is_train(&k.0))];
        part.model.extend(e.model);
        part.baseline.extend(e.baseline);
    }
    out
}

const LEVELS: [f64; 3] = [1.0, 0.5, 0.14];

fn mix_speeds(profile: &GpuProfile, latents: &[Latent], mix: &Mix) -> Vec<[f64; 3]> {
    let sms = f64::from(profile.sms);
    let mut out = vec![[0.0; 3]; mix.classes.len()];
    for (l, level) in LEVELS.iter().enumerate() {
        let tenants: Vec<Tenant> =
            mix.classes.iter().map(|&c| tenant(&latents[c], sms, 1.0, level * sms)).collect();
        let avg = averaged(profile, &Sharing::Mps, &tenants);
        for (o, per_s) in out.iter_mut().zip(&avg.iterations_per_s) {
            o[l] = *per_s;
        }
    }
    for o in &mut out {
        let top = o[0].max(o[1]).max(o[2]);
        *o = o.map(|v| v / top);
    }
    out
}

fn mix_errors(profile: &GpuProfile, latents: &[Latent], mix: &Mix) -> Vec<f64> {
    let said = mix_speeds(profile, latents, mix);
    said.iter()
        .zip(&mix.speeds)
        .flat_map(|(s, t)| [s[0] - t[0], s[1] - t[1], s[2] - t[2]])
        .collect()
}

fn mig_error(profile: &GpuProfile, latent: &Latent, curve: &[f64; 3]) -> f64 {
    let said = [7, 4, 3].map(|g| on_slice(profile, latent, g, 1));
    // The published columns are seconds per iteration or speeds, each divided by its own maximum:
    // they grow as the slice shrinks, so they are times.
    let times = said.map(|s| 1.0 / s);
    let top = times[0].max(times[1]).max(times[2]);
    (0..3).map(|i| (times[i] / top - curve[i]).powi(2)).sum()
}

/// MISO: 33 classes of jobs, each with one set of latents, fitted on 140 mixes and their MIG curves;
/// 400 other mixes are predicted.
pub(crate) fn miso(profile: &GpuProfile, curves: &[[f64; 3]], mixes: &[Mix]) -> [Errors; 2] {
    let mut order: Vec<usize> = (0..mixes.len()).collect();
    Rng::new(5).shuffle(&mut order);
    let train: Vec<&Mix> = order[..140].iter().map(|&i| &mixes[i]).collect();
    let test: Vec<&Mix> = order[140..540].iter().map(|&i| &mixes[i]).collect();
    let mut latents = vec![START; curves.len()];
    for _ in 0..4 {
        for class in 0..curves.len() {
            let with: Vec<&&Mix> =
                train.iter().filter(|m| m.classes.contains(&class)).take(14).collect();
            let mut own = latents[class];
            let mut trial = latents.clone();
            minimise(&mut own, &RANGES, 5, |x| {
                trial[class] = [x[0], x[1], x[2], x[3]];
                let mixed: f64 =
                    with.iter().flat_map(|m| mix_errors(profile, &trial, m)).map(|e| e * e).sum();
                mixed + mig_error(profile, &trial[class], &curves[class])
            });
            latents[class] = own;
        }
    }
    let mut mean = [[0.0; 2]; 3];
    for m in &train {
        for s in &m.speeds {
            for l in 0..3 {
                mean[l][0] += s[l];
                mean[l][1] += 1.0;
            }
        }
    }
    [train, test].map(|part| {
        let mut out = Errors::default();
        for m in part {
            out.model.extend(mix_errors(profile, &latents, m));
            for s in &m.speeds {
                for l in 0..3 {
                    out.baseline.push(mean[l][0] / mean[l][1] - s[l]);
                }
            }
        }
        out
    })
}
