//! How much of its GPU a service will need in the coming interval.
//!
//! The paper observes that the activity of a service is smooth in minutes and periodic in days. So
//! four simple forecasts are made for every interval: the last value, the same time of the past days,
//! and two mixtures. Each keeps its own recent errors. What is handed out is not a forecast plus a
//! margin, but a bound: the forecast plus that quantile of its past errors which the bound is meant to
//! hold with (`coverage`). The forecast whose bounds were best of late is the one that counts.
//!
//! Errors of yesterday need not be those of today, so the quantile in use is moved a little after each
//! interval: up after a miss, down after a hit, at a ratio that makes the long-run share of hits equal
//! to the coverage whatever the service does (adaptive conformal inference).
//!
//! Memory is bounded: a value for each interval of a few days, and a window of errors.

use std::collections::VecDeque;

use muxflow_types::{Micros, Percent};

const DAY: Micros = Micros::from_secs(86_400);
/// A day earlier counts this much less in the profile of the day.
const DAY_WEIGHT: f64 = 0.8;
/// The loss of a forecast is an average over about the last fifty intervals.
const LOSS_MEMORY: f64 = 0.98;
/// Errors are compared as shares of the square root of the forecast, because a service that does
/// more also varies more. The floor keeps an idle service from dividing by nothing.
const SCALE_FLOOR: f64 = 0.01;

/// How forecasts are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForecastParams {
    /// Length of the interval that one forecast is for; divides a day.
    pub interval: Micros,
    /// How many past days are kept.
    pub days: usize,
    /// How many past errors are kept.
    pub errors: usize,
    /// How much the quantile moves after each interval.
    pub adaptation: f64,
}

impl Default for ForecastParams {
    fn default() -> Self {
        ForecastParams { interval: Micros::from_secs(300), days: 7, errors: 288, adaptation: 0.01 }
    }
}

/// A forecast parameter that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} must be {bound}")]
pub struct ForecastParamError {
    /// Which one.
    pub field: &'static str,
    /// What is allowed.
    pub bound: &'static str,
}

impl ForecastParams {
    /// Refuses what cannot be kept in bounded memory or does not fit a day.
    pub fn check(self) -> Result<Self, ForecastParamError> {
        let us = self.interval.0;
        let rules = [
            (
                "interval_s",
                us >= 1_000_000 && DAY.0.is_multiple_of(us.max(1)),
                "whole seconds that divide a day, such as 300",
            ),
            ("days", (1..=28).contains(&self.days), "between 1 and 28"),
            ("errors", (20..=10_000).contains(&self.errors), "between 20 and 10000"),
            ("adaptation", (0.0..=0.2).contains(&self.adaptation), "between 0 and 0.2"),
        ];
        match rules.into_iter().find(|(_, good, _)| !good) {
            Some((field, _, bound)) => Err(ForecastParamError { field, bound }),
            None => Ok(self),
        }
    }

    fn slots_per_day(&self) -> usize {
        usize::try_from(DAY.0 / self.interval.0.max(1)).unwrap_or(1).max(1)
    }
}

/// What a forecast rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Past errors, at the stated coverage.
    Errors,
    /// Too few errors for that coverage: the most that was ever seen.
    Peak,
    /// Nothing was ever seen: everything.
    Nothing,
}

/// The activity that a service will need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// It stays at or below this, at the coverage asked for.
    pub activity: Percent,
    /// What that rests on.
    pub basis: Basis,
}

/// The last errors of one forecast, in the order they came and sorted.
#[derive(Debug, Clone, Default)]
struct Errors {
    arrived: VecDeque<f64>,
    sorted: Vec<f64>,
}

impl Errors {
    fn push(&mut self, error: f64, keep: usize) {
        while self.arrived.len() >= keep {
            let Some(oldest) = self.arrived.pop_front() else { break };
            let place = self.sorted.partition_point(|&e| e < oldest);
            self.sorted.remove(place);
        }
        self.arrived.push_back(error);
        let place = self.sorted.partition_point(|&e| e < error);
        self.sorted.insert(place, error);
    }

    /// The error that a new one stays below with probability `level`; `None` when there are too few
    /// to tell for the coverage. A level beyond what they can tell gives the largest.
    fn quantile(&self, level: f64, coverage: f64) -> Option<f64> {
        let count = self.sorted.len();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "1 to count + 1, at most 10001"
        )]
        let rank = |level: f64| (level * (count + 1) as f64).ceil().max(1.0) as usize;
        let largest = self.sorted.last().filter(|_| rank(coverage) <= count)?;
        Some(*self.sorted.get(rank(level) - 1).unwrap_or(largest))
    }
}

/// One way to forecast, with its record.
#[derive(Debug, Clone, Default)]
struct Expert {
    errors: Errors,
    loss: f64,
    losses: f64,
    /// Forecast and bound for the running interval.
    issued: Option<(f64, Option<f64>)>,
}

impl Expert {
    fn mean_loss(&self) -> f64 {
        if self.losses > 0.0 { self.loss / self.losses } else { f64::INFINITY }
    }
}

fn scale(forecast: f64) -> f64 {
    (forecast.max(0.0) + SCALE_FLOOR).sqrt()
}

#[derive(Debug, Clone, Copy, Default)]
struct Running {
    slot: u64,
    sum: f64,
    count: u32,
}

impl Running {
    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

/// The forecaster of one service on one GPU type.
#[derive(Debug, Clone)]
pub struct ActivityForecaster {
    params: ForecastParams,
    coverage: f64,
    /// Mean activity of each interval of the past days; negative where nothing was seen.
    history: Vec<f32>,
    running: Option<Running>,
    last: Option<(u64, f64)>,
    experts: [Expert; 4],
    /// The quantile in use; moves around the coverage.
    level: f64,
    /// The bound for the running interval.
    bound: Option<f64>,
    peak: Option<f64>,
}

impl ActivityForecaster {
    /// A forecaster that has seen nothing. The coverage is held between 0.5 and 0.999.
    pub fn new(params: ForecastParams, coverage: f64) -> Self {
        let coverage = if coverage.is_nan() { 0.999 } else { coverage.clamp(0.5, 0.999) };
        ActivityForecaster {
            params,
            coverage,
            history: vec![-1.0; params.slots_per_day() * params.days],
            running: None,
            last: None,
            experts: Default::default(),
            level: coverage,
            bound: None,
            peak: None,
        }
    }

    /// Takes the online activity of a moment. Moments before the running interval are ignored.
    pub fn observe(&mut self, at: Micros, activity: Percent) {
        let slot = self.advance(at);
        if let Some(running) = self.running.as_mut().filter(|running| running.slot == slot) {
            running.sum += activity.fraction();
            running.count += 1;
        }
    }

    /// Lets the time pass without a new value: ends the running interval when it is over. Not needed
    /// before [`ActivityForecaster::demand`], but it saves that a copy of everything.
    pub fn advance(&mut self, now: Micros) -> u64 {
        let slot = now.0 / self.params.interval.0.max(1);
        match self.running {
            Some(running) if slot <= running.slot => {}
            running => {
                if let Some(running) = running {
                    self.close(running, slot);
                }
                self.running = Some(Running { slot, ..Running::default() });
                self.issue(slot);
            }
        }
        slot
    }

    /// What the service needs in the interval that `now` lies in, or in a later one when nothing has
    /// been seen of it yet. Once the interval runs, what was seen of it counts too.
    pub fn demand(&self, now: Micros) -> Demand {
        let slot = now.0 / self.params.interval.0.max(1);
        let (bound, so_far, peak) = match self.running {
            Some(running) if running.slot == slot => (self.bound, running.mean(), self.peak),
            Some(running) => {
                let mut ahead = self.clone();
                ahead.close(running, slot);
                ahead.issue(slot);
                (ahead.bound, None, ahead.peak)
            }
            None => (None, None, None),
        };
        let peak = peak.into_iter().chain(so_far).reduce(f64::max);
        let (fraction, basis) = match (bound, peak) {
            (Some(bound), _) => (bound.max(so_far.unwrap_or(0.0)), Basis::Errors),
            (None, Some(peak)) => (peak, Basis::Peak),
            (None, None) => (1.0, Basis::Nothing),
        };
        Demand { activity: Percent::clamped(fraction * 100.0).unwrap_or(Percent::FULL), basis }
    }

    /// Ends an interval: scores the forecasts that were made for it and remembers it.
    fn close(&mut self, running: Running, next_slot: u64) {
        let Some(seen) = running.mean() else {
            return self.remember(running.slot, -1.0, next_slot);
        };
        for expert in &mut self.experts {
            let Some((forecast, bound)) = expert.issued.take() else { continue };
            expert.errors.push((seen - forecast) / scale(forecast), self.params.errors);
            let Some(bound) = bound else { continue };
            // Pinball loss: least in the mean when the bound is the quantile.
            let over = seen - bound;
            let loss = if over > 0.0 { self.coverage * over } else { (self.coverage - 1.0) * over };
            expert.loss = expert.loss * LOSS_MEMORY + loss;
            expert.losses = expert.losses * LOSS_MEMORY + 1.0;
        }
        if let Some(bound) = self.bound.take() {
            let missed = if seen > bound { 1.0 } else { 0.0 };
            self.level += self.params.adaptation * (missed - (1.0 - self.coverage));
            self.level = self.level.clamp(0.0, 1.0);
        }
        self.peak = Some(self.peak.map_or(seen, |peak| peak.max(seen)));
        self.last = Some((running.slot, seen));
        self.remember(running.slot, seen, next_slot);
    }

    fn remember(&mut self, slot: u64, seen: f64, next_slot: u64) {
        let length = self.history.len() as u64;
        // Intervals that were skipped must not keep values of another week.
        let skipped_from = next_slot.saturating_sub(length).max(slot + 1);
        for skipped in skipped_from..next_slot {
            *self.place(skipped) = -1.0;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a share needs no more than 24 bits")]
        let seen = seen as f32;
        *self.place(slot) = seen;
    }

    fn place(&mut self, slot: u64) -> &mut f32 {
        let length = self.history.len() as u64;
        &mut self.history[usize::try_from(slot % length).unwrap_or(0)]
    }

    /// The usual activity at this time of day, smoothed over its neighbours.
    fn usual(&self, slot: u64) -> Option<f64> {
        let length = self.history.len() as u64;
        let per_day = self.params.slots_per_day() as u64;
        let (mut sum, mut weights) = (0.0, 0.0);
        let mut day_weight = 1.0;
        for day in 1..=self.params.days as u64 {
            for (offset, weight) in [(0, 1.0), (1, 2.0), (2, 1.0)] {
                // One before, the same, one after; the oldest neighbour has just been overwritten.
                let back = day * per_day + 1 - offset;
                let Some(then) = slot.checked_sub(back).filter(|_| back <= length) else {
                    continue;
                };
                let value = f64::from(self.history[usize::try_from(then % length).unwrap_or(0)]);
                if value >= 0.0 {
                    sum += day_weight * weight * value;
                    weights += day_weight * weight;
                }
            }
            day_weight *= DAY_WEIGHT;
        }
        (weights > 0.0).then(|| sum / weights)
    }

    /// Makes all forecasts for an interval, and the bound that counts.
    fn issue(&mut self, slot: u64) {
        let last = self.last.filter(|&(at, _)| at + 1 == slot).map(|(_, seen)| seen);
        let usual = self.usual(slot);
        let moved = |share: f64| {
            let before = self.usual(slot.checked_sub(1)?)?;
            Some((usual? + share * (last? - before)).clamp(0.0, 1.0))
        };
        let forecasts = [last, usual, moved(1.0), moved(0.5)];
        let (level, coverage) = (self.level, self.coverage);
        let mut best: Option<(f64, f64)> = None;
        for (expert, forecast) in self.experts.iter_mut().zip(forecasts) {
            expert.issued = forecast.map(|forecast| {
                let bound =
                    expert.errors.quantile(level, coverage).map(|e| forecast + e * scale(forecast));
                (forecast, bound.map(|b| b.clamp(0.0, 1.0)))
            });
            if let Some((_, Some(bound))) = expert.issued {
                let loss = expert.mean_loss();
                if best.is_none_or(|(least, _)| loss < least) {
                    best = Some((loss, bound));
                }
            }
        }
        self.bound = best.map(|(_, bound)| bound);
    }
}

#[cfg(test)]
#[path = "forecast_tests.rs"]
mod tests;
