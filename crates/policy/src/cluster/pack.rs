//! Several jobs on one GPU: which sets of jobs, when a set is worth something else than the sum of
//! its members. With one online and two offline workloads on a GPU this is three-dimensional
//! matching, which is NP-hard, so no certificate comes with the answer.
//!
//! The heuristic: exact matchings in rounds, each adding at most one job to each GPU where that
//! raises the total, then local improvement (exchange two jobs, move one, rebuild one GPU's set from
//! its own jobs and those that wait) until nothing helps or the effort is spent; the same once more
//! from an empty start, and the better of the two. How far it is from the best on small cases is
//! measured against [`exhaustive`], in the tests and by `muxflow paper`.

use std::collections::BTreeMap;

use muxflow_matching::{self as matching, Options, Weights};

/// What sets of jobs are worth. GPUs and jobs come as kinds: equal kinds are worth the same.
pub trait SetValue: Sync {
    /// The worth of a GPU of this kind with these jobs, in any order; `None` where they may not be
    /// together. Nothing on a GPU is worth 0.
    fn value(&self, gpu_kind: usize, job_kinds: &[usize]) -> Option<f64>;
}

/// Who is to be packed where.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    /// The kind of each GPU.
    pub gpu_kinds: &'a [usize],
    /// The kind of each job.
    pub job_kinds: &'a [usize],
    /// At most so many jobs on one GPU.
    pub most: usize,
    /// For each GPU the jobs that stay there whatever else comes; may be empty altogether.
    pub held: &'a [Vec<usize>],
    /// What sets are worth.
    pub values: &'a dyn SetValue,
}

impl std::fmt::Debug for Problem<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Problem({} GPUs, {} jobs)", self.gpu_kinds.len(), self.job_kinds.len())
    }
}

/// A packing: for each GPU its jobs, held ones first.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Packing {
    /// Jobs by GPU.
    pub sets: Vec<Vec<usize>>,
    /// What it is worth.
    pub total: f64,
}

impl Problem<'_> {
    fn held(&self, gpu: usize) -> &[usize] {
        self.held.get(gpu).map_or(&[], Vec::as_slice)
    }

    fn value(&self, gpu: usize, jobs: &[usize]) -> Option<f64> {
        if jobs.is_empty() {
            return Some(0.0);
        }
        let mut kinds: Vec<usize> = jobs.iter().map(|&j| self.job_kinds[j]).collect();
        kinds.sort_unstable();
        self.values.value(self.gpu_kinds[gpu], &kinds)
    }

    /// What a packing is worth; a set that may not be counts as nothing.
    pub fn worth(&self, sets: &[Vec<usize>]) -> f64 {
        sets.iter().enumerate().filter_map(|(g, set)| self.value(g, set)).sum()
    }

    fn start(&self) -> Vec<Vec<usize>> {
        (0..self.gpu_kinds.len()).map(|g| self.held(g).to_vec()).collect()
    }

    fn free_jobs(&self, sets: &[Vec<usize>]) -> Vec<usize> {
        let mut placed = vec![false; self.job_kinds.len()];
        for &j in sets.iter().flatten() {
            placed[j] = true;
        }
        (0..placed.len()).filter(|&j| !placed[j]).collect()
    }
}

/// What one more job adds, by groups of equal GPUs and equal jobs.
struct Gains {
    cols: usize,
    data: Vec<f32>,
}

impl Weights for Gains {
    type Scalar = f32;

    fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn fill(&self, row: usize, first_col: usize, out: &mut [f32]) {
        let from = row * self.cols + first_col;
        out.copy_from_slice(&self.data[from..from + out.len()]);
    }
}

/// The heuristic: local improvement from two starts, matching rounds and nothing but the held jobs;
/// the better end counts. `effort` bounds how many changes are weighed from each.
pub fn solve(problem: &Problem<'_>, effort: usize) -> Result<Packing, matching::MatchError> {
    let matched = improve(problem, rounds(problem)?, effort);
    let grown = improve(problem, Packing { sets: problem.start(), total: 0.0 }, effort);
    Ok(if grown.total > matched.total { grown } else { matched })
}

/// Exact matchings in rounds, each adding at most one job to a GPU.
pub fn rounds(problem: &Problem<'_>) -> Result<Packing, matching::MatchError> {
    let mut sets = problem.start();
    for _ in 0..problem.most {
        if !one_round(problem, &mut sets)? {
            break;
        }
    }
    let total = problem.worth(&sets);
    Ok(Packing { sets, total })
}

/// One matching; whether it placed a job.
fn one_round(problem: &Problem<'_>, sets: &mut [Vec<usize>]) -> Result<bool, matching::MatchError> {
    let mut gpu_groups: BTreeMap<(usize, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for (g, set) in sets.iter().enumerate().filter(|(_, set)| set.len() < problem.most) {
        let mut kinds: Vec<usize> = set.iter().map(|&j| problem.job_kinds[j]).collect();
        kinds.sort_unstable();
        gpu_groups.entry((problem.gpu_kinds[g], kinds)).or_default().push(g);
    }
    let mut job_groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for j in problem.free_jobs(sets) {
        job_groups.entry(problem.job_kinds[j]).or_default().push(j);
    }
    if gpu_groups.is_empty() || job_groups.is_empty() {
        return Ok(false);
    }
    let mut data = Vec::with_capacity(gpu_groups.len() * job_groups.len());
    for (gpu_kind, kinds) in gpu_groups.keys() {
        let before =
            if kinds.is_empty() { Some(0.0) } else { problem.values.value(*gpu_kind, kinds) };
        for kind in job_groups.keys() {
            let mut with = kinds.clone();
            with.insert(with.partition_point(|k| k < kind), *kind);
            let after = problem.values.value(*gpu_kind, &with);
            let gain = after.map_or(f64::NEG_INFINITY, |after| after - before.unwrap_or(0.0));
            #[expect(clippy::cast_possible_truncation, reason = "a gain of moderate size")]
            data.push(if gain > 0.0 { gain as f32 } else { f32::NEG_INFINITY });
        }
    }
    let gains = Gains { cols: job_groups.len(), data };
    let count = |members: &Vec<usize>| u32::try_from(members.len()).unwrap_or(u32::MAX);
    let rows: Vec<u32> = gpu_groups.values().map(count).collect();
    let cols: Vec<u32> = job_groups.values().map(count).collect();
    let options = Options { optional: true, ..Options::default() };
    let flow = matching::solve_classes(&gains, &rows, &cols, options)?;
    let mut gpus: Vec<_> = gpu_groups.into_values().map(Vec::into_iter).collect();
    let mut jobs: Vec<_> = job_groups.into_values().map(Vec::into_iter).collect();
    let mut placed = false;
    for share in &flow.shares {
        for _ in 0..share.count {
            let pair = (gpus[share.row as usize].next(), jobs[share.col as usize].next());
            if let (Some(g), Some(j)) = pair {
                sets[g].push(j);
                placed = true;
            }
        }
    }
    Ok(placed)
}

/// Local improvement of a packing, held jobs left alone. `effort` bounds how many changes are
/// weighed, so that the time is bounded whatever the size.
pub fn improve(problem: &Problem<'_>, mut packing: Packing, effort: usize) -> Packing {
    let mut left = effort;
    let mut waiting = problem.free_jobs(&packing.sets);
    loop {
        let mut better = false;
        for g in 0..packing.sets.len() {
            better |= rebuild(problem, &mut packing.sets, g, &mut waiting, &mut left);
            better |= exchange(problem, &mut packing.sets, g, &mut left);
        }
        if !better || left == 0 {
            break;
        }
    }
    packing.total = problem.worth(&packing.sets);
    packing
}

/// The least gain that counts: rounding must not make the search walk in circles.
const LEAST_GAIN: f64 = 1e-9;

/// Gives this GPU the best set that its own jobs and those that wait can make, if it is better than
/// the set it has. Whom it drops waits, and another GPU may want it.
fn rebuild(
    problem: &Problem<'_>,
    sets: &mut [Vec<usize>],
    g: usize,
    waiting: &mut Vec<usize>,
    left: &mut usize,
) -> bool {
    let held = problem.held(g).len();
    let room = problem.most.saturating_sub(held);
    // Of each kind that waits, as many as there is room for.
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    let mut pool: Vec<usize> = sets[g][held..].to_vec();
    for &j in waiting.iter() {
        let count = counts.entry(problem.job_kinds[j]).or_default();
        if *count < room {
            *count += 1;
            pool.push(j);
        }
    }
    let Some(now) = problem.value(g, &sets[g]) else { return false };
    let mut best = (now + LEAST_GAIN, None);
    let mut trial = sets[g][..held].to_vec();
    best_set(problem, g, &pool, &mut trial, left, &mut best);
    let Some(chosen) = best.1 else { return false };
    let old = std::mem::replace(&mut sets[g], chosen);
    waiting.retain(|j| !sets[g].contains(j));
    waiting.extend(old.into_iter().filter(|j| !sets[g].contains(j)));
    waiting.sort_unstable();
    true
}

/// The best set that grows from `trial` with jobs of `pool`.
fn best_set(
    problem: &Problem<'_>,
    g: usize,
    pool: &[usize],
    trial: &mut Vec<usize>,
    left: &mut usize,
    best: &mut (f64, Option<Vec<usize>>),
) {
    if let Some(value) = problem.value(g, trial)
        && value > best.0
    {
        *best = (value, Some(trial.clone()));
    }
    if trial.len() >= problem.most {
        return;
    }
    for (i, &job) in pool.iter().enumerate() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        trial.push(job);
        best_set(problem, g, &pool[i + 1..], trial, left, best);
        trial.pop();
    }
}

/// Exchanges a job of this GPU with one of a later GPU, or moves one between the two, where that is
/// better.
fn exchange(problem: &Problem<'_>, sets: &mut [Vec<usize>], g: usize, left: &mut usize) -> bool {
    let mut better = false;
    for h in g + 1..sets.len() {
        while let Some((x, y)) = better_pair(problem, sets, g, h, left) {
            sets[g] = x;
            sets[h] = y;
            better = true;
        }
    }
    better
}

/// What two GPUs hold after the first exchange or move that is better, if there is one.
fn better_pair(
    problem: &Problem<'_>,
    sets: &[Vec<usize>],
    g: usize,
    h: usize,
    left: &mut usize,
) -> Option<(Vec<usize>, Vec<usize>)> {
    let slots = |gpu: usize| -> Vec<Option<usize>> {
        let mut slots: Vec<Option<usize>> =
            (problem.held(gpu).len()..sets[gpu].len()).map(Some).collect();
        if sets[gpu].len() < problem.most {
            slots.push(None);
        }
        slots
    };
    let before = problem.value(g, &sets[g])? + problem.value(h, &sets[h])?;
    for a in slots(g) {
        for b in slots(h) {
            if a.is_none() && b.is_none() {
                continue;
            }
            *left = left.checked_sub(1)?;
            let (x, y) = exchanged(&sets[g], &sets[h], a, b);
            let after = problem.value(g, &x).zip(problem.value(h, &y));
            if after.is_some_and(|(r, s)| r + s > before + LEAST_GAIN) {
                return Some((x, y));
            }
        }
    }
    None
}

fn exchanged(
    one: &[usize],
    other: &[usize],
    a: Option<usize>,
    b: Option<usize>,
) -> (Vec<usize>, Vec<usize>) {
    let (mut x, mut y) = (one.to_vec(), other.to_vec());
    match (a, b) {
        (Some(a), Some(b)) => std::mem::swap(&mut x[a], &mut y[b]),
        (Some(a), None) => y.push(x.remove(a)),
        (None, Some(b)) => x.push(y.remove(b)),
        (None, None) => {}
    }
    (x, y)
}

/// The best packing, by trying all: for measuring the heuristic on small cases. The time grows with
/// (GPUs + 1) to the power of jobs.
pub fn exhaustive(problem: &Problem<'_>) -> Packing {
    let free = problem.free_jobs(&problem.start());
    let mut best = Packing { sets: problem.start(), total: f64::NEG_INFINITY };
    let mut sets = problem.start();
    try_all(problem, &free, &mut sets, &mut best);
    best
}

fn try_all(problem: &Problem<'_>, free: &[usize], sets: &mut [Vec<usize>], best: &mut Packing) {
    let Some((&job, rest)) = free.split_first() else {
        let values = sets.iter().enumerate().map(|(g, set)| problem.value(g, set));
        let total = values.sum::<Option<f64>>().unwrap_or(f64::NEG_INFINITY);
        if total > best.total {
            *best = Packing { sets: sets.to_vec(), total };
        }
        return;
    };
    try_all(problem, rest, sets, best);
    for g in 0..sets.len() {
        if sets[g].len() < problem.most {
            sets[g].push(job);
            try_all(problem, rest, sets, best);
            sets[g].pop();
        }
    }
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
