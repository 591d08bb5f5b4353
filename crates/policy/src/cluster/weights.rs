//! What each pair is worth: speed on the reference type, weighed by priority and waiting time, with
//! what staying saves.

use std::collections::BTreeMap;

use muxflow_matching::Weights;
use muxflow_types::{GpuType, JobSnapshot, SpeedPredictor};

use super::classes::Classes;
use super::fit::refusal_if;
use super::parameters::Parameters;
use super::speeds::{SpeedTable, offline_input, online_input};

/// The worth of a pair that may not be.
const FORBIDDEN: f32 = f32::NEG_INFINITY;
/// The least worth of staying, so that a job predicted to stand still is not thrown out for nothing.
const LEAST: f32 = 1.0 / 1024.0 / 1024.0;

/// Speed alone on a GPU type against the reference type. Where it was not measured, the slowest type
/// that was, so that an unknown type never looks better than a known one.
pub(super) fn solo_speed(job: &JobSnapshot, gpu_type: &GpuType) -> f64 {
    match job.solo_speed.get(gpu_type) {
        Some(&speed) => speed,
        None => job.solo_speed.values().copied().min_by(f64::total_cmp).unwrap_or(1.0),
    }
}

/// What staying is worth to a class of running jobs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stay {
    /// Speed with the share that they were started with.
    pub(super) speed: f32,
    /// The same, weighed, without the bonus.
    pub(super) weight: f32,
    /// Whether a restart with the share now on offer may be considered.
    may_restart: bool,
}

/// Weights are rounded to a grid of 2^-24 (2^-23 from a quarter on, and coarser with size), so that
/// small ones do not force a finer grid on all others: the matching's steps follow the grid. Adding
/// this and taking it away does it.
const ROUNDER: f32 = 0.75;

/// The weights of all pairs of classes. A row is read many times in a matching, so they are made once
/// and kept.
#[derive(Debug)]
pub(super) struct PairWeights<'a> {
    classes: &'a Classes<'a>,
    speeds: &'a SpeedTable,
    /// Where each GPU class stands in the table.
    speed_row: Vec<usize>,
    /// Where each job class stands in the table.
    speed_column: Vec<usize>,
    /// The number of each GPU class's type.
    type_of_gpu: Vec<usize>,
    /// By type, what one unit of each job class's speed is worth.
    worth: Vec<Vec<f32>>,
    /// By GPU fit and job fit: whether a newcomer may be there.
    allowed: Vec<Vec<bool>>,
    /// The fit of each job class, close together.
    fit_of_job: Vec<usize>,
    /// For each job class, when it runs and may stay.
    stays: Vec<Option<Stay>>,
    /// All weights, row by row.
    matrix: Vec<f32>,
    min_speed: f32,
    /// What staying adds, as a share of the present weight.
    stay_bonus: f32,
    /// Whether jobs that may stay do, whatever else they could.
    hold: bool,
}

impl<'a> PairWeights<'a> {
    /// Readies the weights of all pairs of classes, in the room that an earlier plan left.
    pub(super) fn new(
        classes: &'a Classes<'a>,
        table: &'a mut SpeedTable,
        room: Vec<f32>,
        predictor: &dyn SpeedPredictor,
        parameters: &Parameters,
    ) -> Self {
        let (speed_row, speed_column) = table.renew(classes, predictor, parameters.threads);
        let (type_of_gpu, worth) = worth_by_type(classes);
        let mut weights = PairWeights {
            classes,
            speeds: table,
            speed_row,
            speed_column,
            type_of_gpu,
            worth,
            allowed: allowed(classes),
            fit_of_job: classes.jobs.iter().map(|j| j.fit).collect(),
            stays: Vec::with_capacity(classes.jobs.len()),
            matrix: Vec::new(),
            min_speed: parameters.min_speed,
            #[expect(clippy::cast_possible_truncation, reason = "a share of a weight")]
            stay_bonus: parameters.disruption_cost() as f32,
            hold: false,
        };
        for (j, class) in classes.jobs.iter().enumerate() {
            let stay = class.current.and_then(|g| weights.stay_of(predictor, g, j));
            weights.stays.push(stay);
        }
        weights.matrix = weights.newcomers(room, parameters.threads);
        weights.let_stay();
        weights
    }

    /// The room of the weights, for the next plan: to get and give back so many pages takes as long
    /// as to fill them.
    pub(super) fn into_room(self) -> Vec<f32> {
        self.matrix
    }

    /// The weights of all pairs as if nobody ran yet.
    fn newcomers(&self, room: Vec<f32>, threads: usize) -> Vec<f32> {
        let (rows, columns) = (self.classes.gpus.len(), self.classes.jobs.len());
        let mut matrix = sized(room, rows * columns);
        if matrix.is_empty() {
            return matrix;
        }
        let straight = self.speed_column.iter().enumerate().all(|(at, &column)| at == column);
        let part = rows.div_ceil(threads.max(1)).max(1);
        let fill_part = |first: usize, lines: &mut [f32]| {
            let mut gathered = Vec::new();
            for (row, line) in (first..).zip(lines.chunks_mut(columns)) {
                let speeds = self.speeds.row(self.speed_row[row]);
                let speeds = if straight {
                    &speeds[..columns]
                } else {
                    gathered.clear();
                    gathered.extend(self.speed_column.iter().map(|&column| speeds[column]));
                    &gathered
                };
                self.fill_newcomers(row, speeds, line);
            }
        };
        std::thread::scope(|scope| {
            let mut parts = matrix.chunks_mut(part * columns).enumerate().peekable();
            while let Some((number, lines)) = parts.next() {
                // The last part is done here, so that one thread means no other thread.
                if parts.peek().is_some() {
                    scope.spawn(move || fill_part(number * part, lines));
                } else {
                    fill_part(number * part, lines);
                }
            }
        });
        matrix
    }

    fn fill_newcomers(&self, row: usize, speeds: &[f32], line: &mut [f32]) {
        let worth = &self.worth[self.type_of_gpu[row]];
        let allowed = &self.allowed[self.classes.gpus[row].fit];
        for ((w, &speed), worth) in line.iter_mut().zip(speeds).zip(worth) {
            let weight = (speed * worth + ROUNDER) - ROUNDER;
            *w = if speed >= self.min_speed { weight.max(LEAST) } else { FORBIDDEN };
        }
        if allowed.iter().any(|may| !may) {
            for (w, &fit) in line.iter_mut().zip(&self.fit_of_job) {
                if !allowed[fit] {
                    *w = FORBIDDEN;
                }
            }
        }
    }

    /// Writes what staying is worth over the weights of those who may.
    fn let_stay(&mut self) {
        let columns = self.classes.jobs.len();
        for job in 0..columns {
            let (Some(stay), Some(gpu)) = (self.stays[job], self.classes.jobs[job].current) else {
                continue;
            };
            let kept = (self.kept(stay) + ROUNDER) - ROUNDER;
            let restarted = if stay.may_restart { self.restarted(gpu, job) } else { FORBIDDEN };
            self.matrix[gpu * columns + job] = kept.max(LEAST).max(restarted);
        }
    }

    /// The weight of a resident that starts anew with the share on offer.
    fn restarted(&self, gpu: usize, job: usize) -> f32 {
        let (speed, weight) = self.newcomer(gpu, job);
        let may = self.allowed[self.classes.gpus[gpu].fit][self.fit_of_job[job]];
        if may && speed >= self.min_speed {
            ((weight + ROUNDER) - ROUNDER).max(LEAST)
        } else {
            FORBIDDEN
        }
    }

    /// What staying is worth, if the job may stay at all.
    fn stay_of(&self, predictor: &dyn SpeedPredictor, g: usize, j: usize) -> Option<Stay> {
        let (gpu, job, terms) = (self.classes.gpu(g), self.classes.job(j), &self.classes.terms);
        if refusal_if(terms, gpu, job, true).is_some() {
            return None;
        }
        let share = job.running_share.unwrap_or(gpu.share);
        let speed = if share == gpu.share {
            self.newcomer(g, j).0
        } else {
            let online = online_input(gpu, share)?;
            predictor.predict(&online, &offline_input(job, &gpu.gpu_type)).speed
        };
        let may_restart = !job.pinned
            && job.running_share.is_some_and(|s| s != gpu.share)
            && refusal_if(terms, gpu, job, false).is_none();
        let weight = speed * self.worth[self.type_of_gpu[g]][j];
        Some(Stay { speed, weight, may_restart })
    }

    /// Makes staying worth more.
    pub(super) fn raise_stay_bonus(&mut self, factor: f32) {
        self.stay_bonus = (self.stay_bonus * factor).max(0.01);
        self.let_stay();
    }

    /// Takes jobs that may stay, and their GPUs, out of the matching: they stay.
    pub(super) fn hold_residents(&mut self) {
        self.hold = true;
    }

    /// The class of the GPU on which a job class is held, if it is.
    pub(super) fn held(&self, job: usize) -> Option<usize> {
        (self.hold && self.stays[job].is_some()).then(|| self.classes.jobs[job].current).flatten()
    }

    /// What staying is worth to a job class; `None` when it does not run or may not stay.
    pub(super) fn stay(&self, job: usize) -> Option<Stay> {
        self.stays[job]
    }

    /// The predicted speed of a newcomer and its weight.
    pub(super) fn newcomer(&self, gpu: usize, job: usize) -> (f32, f32) {
        let speed = self.speeds.row(self.speed_row[gpu])[self.speed_column[job]];
        (speed, speed * self.worth[self.type_of_gpu[gpu]][job])
    }

    /// Whether a resident gains more by a restart with the share on offer than it costs.
    pub(super) fn restart_pays(&self, gpu: usize, job: usize) -> bool {
        match self.stays[job] {
            Some(stay) if stay.may_restart && !self.hold => {
                self.newcomer(gpu, job).1 > self.kept(stay)
            }
            _ => false,
        }
    }

    /// What staying is worth with its bonus.
    fn kept(&self, stay: Stay) -> f32 {
        (stay.weight * (1.0 + self.stay_bonus)).max(LEAST)
    }
}

impl Weights for PairWeights<'_> {
    type Scalar = f32;

    fn rows(&self) -> usize {
        self.classes.gpus.len()
    }

    fn cols(&self) -> usize {
        self.classes.jobs.len()
    }

    fn fill(&self, row: usize, first_col: usize, out: &mut [f32]) {
        let from = row * self.classes.jobs.len() + first_col;
        out.copy_from_slice(&self.matrix[from..from + out.len()]);
    }

    fn row(&self, row: usize) -> Option<&[f32]> {
        let columns = self.classes.jobs.len();
        Some(&self.matrix[row * columns..(row + 1) * columns])
    }
}

/// So many numbers, whatever they are. Room that is too small, or much too large, is given back.
fn sized(mut room: Vec<f32>, len: usize) -> Vec<f32> {
    if room.capacity() < len || room.capacity() / 2 > len {
        drop(room);
        return vec![0.0; len];
    }
    room.resize(len, 0.0);
    room
}

/// By GPU fit and job fit: whether a newcomer may be there.
fn allowed(classes: &Classes<'_>) -> Vec<Vec<bool>> {
    let snapshot = classes.snapshot;
    let row = |gpu: usize| {
        let gpu = &snapshot.gpus[gpu];
        let may =
            |job: usize| refusal_if(&classes.terms, gpu, &snapshot.jobs[job], false).is_none();
        classes.job_fits.iter().map(|j| may(j.example)).collect()
    };
    classes.gpu_fits.iter().map(|g| row(g.example)).collect()
}

/// The number of each GPU class's type and, by type, what a unit of each job class's speed is worth.
fn worth_by_type(classes: &Classes<'_>) -> (Vec<usize>, Vec<Vec<f32>>) {
    let mut numbers: BTreeMap<&GpuType, usize> = BTreeMap::new();
    let mut worth = Vec::new();
    let mut type_of_gpu = Vec::with_capacity(classes.gpus.len());
    for class in 0..classes.gpus.len() {
        let gpu_type = &classes.gpu(class).gpu_type;
        let number = *numbers.entry(gpu_type).or_insert(worth.len());
        if number == worth.len() {
            let unit = |j: usize| classes.jobs[j].worth * solo_speed(classes.job(j), gpu_type);
            #[expect(clippy::cast_possible_truncation, reason = "a weight of moderate size")]
            worth.push((0..classes.jobs.len()).map(|j| unit(j) as f32).collect());
        }
        type_of_gpu.push(number);
    }
    (type_of_gpu, worth)
}
