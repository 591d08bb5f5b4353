//! The configuration of the node laws: text in, checked parameters or an error out that names the line,
//! the field and the remedy.
//!
//! `config/node.toml` holds every field with its default and a comment. What a file leaves out keeps
//! its default. A GPU type without built-in parameters starts from one that has them (`like`) and must
//! state its own clocks.

mod place;
mod raw;

use std::collections::BTreeMap;

use muxflow_types::{GpuType, MegaHertz, Micros, Percent, ServiceId};

use self::raw::{RawBands, RawConfig, RawGate, RawGpu, RawService};
use super::builtin::{self, BUILT_IN_TYPES, GpuLaws};
use super::fault::{Action, ResponseTable, RowKey};
use super::forecast::ForecastParams;
use super::gate::GateParams;
use super::health::{Bands, HealthParams, Metric, Thresholds};
use super::load::{ClockLaw, ClockLawError};
use super::quota::QuotaParams;
use super::share::ShareParams;
use super::split::SplitParams;
use crate::retry::RetryParams;

/// The defaults as a commented file: what `muxflow config print` shows.
pub const DEFAULT_TEXT: &str = include_str!("../../../../../config/node.toml");

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not TOML, an unknown field, or a value of the wrong kind.
    #[error("line {line}: {message}")]
    Text {
        /// Where.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A value that makes no sense, alone or beside others.
    #[error("line {line}: {field}: {message}")]
    Value {
        /// Where.
        line: usize,
        /// The full name of the field.
        field: String,
        /// What is wrong, and what would be right.
        message: String,
    },
}

/// What may differ from service to service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServiceKnobs {
    /// See [`ShareParams`].
    pub share: ShareParams,
    /// What its latency is held against.
    pub slo: Option<Micros>,
}

/// Everything that the laws of a node need.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeConfig {
    /// Memory that is lent.
    pub quota: QuotaParams,
    /// Times of the health machine.
    pub health: HealthParams,
    /// SMs that are lent, for services without knobs of their own.
    pub share: ShareParams,
    /// Forecasts of activity.
    pub forecast: ForecastParams,
    /// Telling the service's activity from the whole.
    pub split: SplitParams,
    /// Waits of failing jobs.
    pub retry: RetryParams,
    /// What follows from an error.
    pub errors: ResponseTable,
    /// What depends on the GPU type.
    pub gpus: BTreeMap<GpuType, GpuLaws>,
    /// What depends on the service.
    pub services: BTreeMap<ServiceId, ServiceKnobs>,
}

impl Default for NodeConfig {
    fn default() -> Self {
        let types = BUILT_IN_TYPES.iter().filter_map(|name| GpuType::new(name).ok());
        NodeConfig {
            quota: QuotaParams::default(),
            health: HealthParams::default(),
            share: ShareParams::default(),
            forecast: ForecastParams::default(),
            split: SplitParams::default(),
            retry: RetryParams::default(),
            errors: ResponseTable::default(),
            gpus: types.filter_map(|t| builtin::laws_of(&t).map(|laws| (t, laws))).collect(),
            services: BTreeMap::new(),
        }
    }
}

impl NodeConfig {
    /// Reads and checks a file.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let raw: RawConfig = toml::from_str(text).map_err(|error| ConfigError::Text {
            line: error.span().map_or(1, |span| place::line_at(text, span.start)),
            message: error.message().trim().to_owned(),
        })?;
        Checker { text }.config(raw)
    }

    /// The knobs of a service: its own, or those for all.
    pub fn service(&self, service: &ServiceId) -> ServiceKnobs {
        let common = ServiceKnobs { share: self.share, slo: None };
        self.services.get(service).copied().unwrap_or(common)
    }
}

/// Sets fields that were written.
macro_rules! take {
    ($target:expr, $($to:ident = $from:expr;)*) => {
        $(if let Some(value) = $from { $target.$to = value; })*
    };
}

struct Checker<'a> {
    text: &'a str,
}

impl Checker<'_> {
    fn error(&self, path: &[&str], message: impl ToString) -> ConfigError {
        ConfigError::Value {
            line: place::line_of(self.text, path),
            field: path.join("."),
            message: message.to_string(),
        }
    }

    fn percent(&self, path: &[&str], value: Option<f64>) -> Result<Option<Percent>, ConfigError> {
        value.map(|v| Percent::new(v).map_err(|e| self.error(path, e))).transpose()
    }

    fn config(&self, raw: RawConfig) -> Result<NodeConfig, ConfigError> {
        let mut config = NodeConfig::default();
        take!(config.quota,
            quota = self.percent(&["memory", "quota_pct"], raw.memory.quota_pct)?;
            reserve = self.percent(&["memory", "reserve_pct"], raw.memory.reserve_pct)?;
        );
        let health = raw.health;
        take!(config.health,
            stale_after = health.stale_after_ms.map(Micros::from_millis);
            lost_after = health.lost_after_ms.map(Micros::from_millis);
            confirm_after = health.confirm_after_ms.map(Micros::from_millis);
            recover_after = health.recover_after_ms.map(Micros::from_millis);
            overlimit_base = health.overlimit_base_s.map(Micros::from_secs);
            overlimit_factor = health.overlimit_factor;
            overlimit_cap = health.overlimit_cap_s.map(Micros::from_secs);
            overlimit_window = health.overlimit_window_s.map(Micros::from_secs);
        );
        config.health.check().map_err(|e| self.error(&["health", e.field], e))?;
        take!(config.share,
            coverage = raw.share.coverage_pct.map(|v| v / 100.0);
            allowed_slowdown = raw.share.allowed_slowdown_pct.map(|v| v / 100.0);
            max_share = self.percent(&["share", "max_share_pct"], raw.share.max_share_pct)?;
            min_share = self.percent(&["share", "min_share_pct"], raw.share.min_share_pct)?;
        );
        config.share.check().map_err(|e| self.error(&["share", e.field], e))?;
        take!(config.forecast,
            interval = raw.forecast.interval_s.map(Micros::from_secs);
            days = raw.forecast.days;
            errors = raw.forecast.errors;
            adaptation = raw.forecast.adaptation;
        );
        config.forecast.check().map_err(|e| self.error(&["forecast", e.field], e))?;
        take!(config.split,
            look_every = raw.split.look_every_ms.map(Micros::from_millis);
            look_for = raw.split.look_for_ms.map(Micros::from_millis);
            pair_within = raw.split.pair_within_ms.map(Micros::from_millis);
            forget_after = raw.split.forget_after_ms.map(Micros::from_millis);
            weight = raw.split.weight;
        );
        config.split.check().map_err(|e| self.error(&["split", e.field], e))?;
        take!(config.retry,
            base = raw.retry.base_s.map(Micros::from_secs);
            factor = raw.retry.factor;
            cap = raw.retry.cap_s.map(Micros::from_secs);
            jitter = raw.retry.jitter;
            forget_after = raw.retry.forget_after_s.map(Micros::from_secs);
            fail_prone_from = raw.retry.fail_prone_from;
        );
        config.retry.check().map_err(|e| self.error(&["retry", e.field], e))?;
        for (key, words) in raw.errors {
            self.row(&mut config.errors, &key, &words)?;
        }
        for (name, gpu) in raw.gpu {
            let (gpu_type, laws) = self.gpu(&name, gpu)?;
            config.gpus.insert(gpu_type, laws);
        }
        self.reserve(&config, raw.memory.reserve_pct.is_some())?;
        for (name, service) in raw.service {
            let id = ServiceId::new(&name).map_err(|e| self.error(&["service", &name], e))?;
            config.services.insert(id, self.service(&name, &service, config.share)?);
        }
        Ok(config)
    }

    fn row(
        &self,
        table: &mut ResponseTable,
        key: &str,
        words: &[String],
    ) -> Result<(), ConfigError> {
        let fail = |message: String| self.error(&["errors", key], message);
        let row = RowKey::parse(key).ok_or_else(|| {
            let known: Vec<_> = table.rows().map(|(key, _)| key.to_string()).collect();
            fail(format!(
                "not an error that is known; use xid.NUMBER or one of {}",
                known.join(", ")
            ))
        })?;
        let mut actions = Vec::new();
        for word in words {
            actions.push(Action::parse(word).ok_or_else(|| {
                let known = Action::ALL.map(Action::as_str).join(", ");
                fail(format!("`{word}` is not an action; use {known}"))
            })?);
        }
        table.set(row, actions).map_err(|e| fail(e.to_string()))
    }

    fn service(
        &self,
        name: &str,
        raw: &RawService,
        share: ShareParams,
    ) -> Result<ServiceKnobs, ConfigError> {
        let mut knobs = ServiceKnobs { share, slo: None };
        take!(knobs.share,
            coverage = raw.coverage_pct.map(|v| v / 100.0);
            allowed_slowdown = raw.allowed_slowdown_pct.map(|v| v / 100.0);
        );
        knobs.share.check().map_err(|e| self.error(&["service", name, e.field], e))?;
        if let Some(slo_ms) = raw.slo_ms {
            let slo = Micros::from_secs_f64(slo_ms / 1e3).ok().filter(|slo| slo.0 > 0);
            let fail = || {
                let message = format!("{slo_ms} is not a latency; give milliseconds above 0");
                self.error(&["service", name, "slo_ms"], message)
            };
            knobs.slo = Some(slo.ok_or_else(fail)?);
        }
        Ok(knobs)
    }

    fn gpu(&self, name: &str, raw: RawGpu) -> Result<(GpuType, GpuLaws), ConfigError> {
        let gpu_type = GpuType::new(name).map_err(|e| self.error(&["gpu", name], e))?;
        let base = self.base(name, &gpu_type, &raw)?;
        let (threshold, highest, gains) =
            (base.clock.threshold(), base.clock.highest(), base.clock.gains());
        let clock = raw.clock.unwrap_or_default();
        let clock = ClockLaw::new(
            clock.threshold_mhz.map_or(threshold, MegaHertz),
            clock.highest_mhz.map_or(highest, MegaHertz),
            clock.low_gain.unwrap_or(gains.0),
            clock.high_gain.unwrap_or(gains.1),
        );
        let clock = clock.map_err(|e| {
            let field = match e {
                ClockLawError::Threshold { .. } => "threshold_mhz",
                ClockLawError::HighGain { .. } => "high_gain",
                ClockLawError::LowGain { .. } => "low_gain",
            };
            self.error(&["gpu", name, "clock", field], e)
        })?;
        let gate = self.gate(name, &raw.gate.unwrap_or_default(), base.gate)?;
        let counts_from = ["gpu", name, "clock_counts_from_pct"];
        let counts_from = self.percent(&counts_from, raw.clock_counts_from_pct)?;
        let mut bands = Vec::new();
        let written = [
            (Metric::GpuUtil, raw.gpu_util_pct),
            (Metric::SmActivity, raw.sm_activity_pct),
            (Metric::SmClock, raw.sm_clock_mhz),
            (Metric::Memory, raw.memory_pct),
            (Metric::Latency, raw.latency_pct_of_slo),
        ];
        for (metric, raw) in written {
            let usual = base.thresholds.bands.iter().find(|b| b.metric() == metric);
            bands.extend(self.bands(name, metric, raw.unwrap_or_default(), usual)?);
        }
        let thresholds = Thresholds {
            bands,
            highest_clock: clock.highest(),
            clock_counts_from_pct: counts_from
                .map_or(base.thresholds.clock_counts_from_pct, Percent::value),
        };
        let laws = GpuLaws { clock, gate, thresholds };
        self.agreement(name, &laws)?;
        Ok((gpu_type, laws))
    }

    /// What a type starts from; one that is not built in must say whose, and state its clocks.
    fn base(&self, name: &str, gpu_type: &GpuType, raw: &RawGpu) -> Result<GpuLaws, ConfigError> {
        let built_in = || BUILT_IN_TYPES.join(" or ");
        if let Some(like) = &raw.like {
            let laws = GpuType::new(like).ok().and_then(|t| builtin::laws_of(&t));
            let laws = laws.ok_or_else(|| {
                let message = format!("`{like}` has no built-in parameters; use {}", built_in());
                self.error(&["gpu", name, "like"], message)
            })?;
            let clocks = raw.clock.as_ref();
            let states_clocks =
                clocks.is_some_and(|c| c.threshold_mhz.is_some() && c.highest_mhz.is_some());
            if !states_clocks && builtin::laws_of(gpu_type).is_none() {
                let message = format!(
                    "{name} cannot have the clocks of {like}; state clock.threshold_mhz and clock.highest_mhz"
                );
                return Err(self.error(&["gpu", name, "clock"], message));
            }
            if raw.sm_clock_mhz.is_none() && builtin::laws_of(gpu_type).is_none() {
                let message =
                    format!("{name} cannot have the clock thresholds of {like}; state this table");
                return Err(self.error(&["gpu", name, "sm_clock_mhz"], message));
            }
            return Ok(laws);
        }
        builtin::laws_of(gpu_type).ok_or_else(|| {
            let message = format!(
                "nothing is built in for {name}; add like = \"…\" with {} and state what differs",
                built_in()
            );
            self.error(&["gpu", name], message)
        })
    }

    fn gate(
        &self,
        name: &str,
        raw: &RawGate,
        mut gate: GateParams,
    ) -> Result<GateParams, ConfigError> {
        take!(gate,
            set_point = raw.set_point;
            proportional = raw.proportional;
            integral_per_s = raw.integral_per_s;
            derivative_s = raw.derivative_s;
            open_rate_per_s = raw.open_rate_per_s;
            shut_at = raw.shut_at;
            closed_below = raw.closed_below;
            stale_after = raw.stale_after_ms.map(Micros::from_millis);
            close_over = raw.close_over_ms.map(Micros::from_millis);
            max_in_flight = raw.max_in_flight;
            queue_for = raw.queue_for_ms.map(Micros::from_millis);
        );
        gate.check().map_err(|e| self.error(&["gpu", name, "gate", e.field], e))
    }

    fn bands(
        &self,
        name: &str,
        metric: Metric,
        raw: RawBands,
        usual: Option<&Bands>,
    ) -> Result<Option<Bands>, ConfigError> {
        let given = [raw.healthy, raw.unhealthy, raw.overlimit];
        let judged = raw.judged.unwrap_or(usual.is_some() || given.iter().any(Option::is_some));
        if !judged {
            return Ok(None);
        }
        let mut values = [0.0; 3];
        let usual = usual.map(Bands::thresholds).map(|(h, u, o)| [h, u, o]);
        for (i, field) in ["healthy", "unhealthy", "overlimit"].into_iter().enumerate() {
            values[i] = given[i].or(usual.map(|usual| usual[i])).ok_or_else(|| {
                let message = "missing; state healthy, unhealthy and overlimit, or judged = false";
                self.error(&["gpu", name, metric.as_str(), field], message)
            })?;
        }
        let bands = Bands::new(metric, values[0], values[1], values[2]);
        bands.map(Some).map_err(|e| self.error(&["gpu", name, metric.as_str(), e.field()], e))
    }

    /// Laws that are each sound but would work against each other.
    fn agreement(&self, name: &str, laws: &GpuLaws) -> Result<(), ConfigError> {
        let bands = &laws.thresholds.bands;
        if bands.iter().all(|b| b.metric() == Metric::Latency) {
            let message =
                "no metric of the GPU is judged; judge at least sm_activity_pct or memory_pct";
            return Err(self.error(&["gpu", name], message));
        }
        let held = laws.gate.set_point / laws.clock.factor(laws.clock.highest()) * 100.0;
        if let Some(limit) = unhealthy_from(laws, Metric::SmActivity).filter(|&limit| held >= limit)
        {
            let message = format!(
                "at the highest clock the gate would hold SM activity at {held:.0} %, which is Unhealthy from {limit} % on: lower set_point or raise sm_activity_pct.unhealthy"
            );
            return Err(self.error(&["gpu", name, "gate", "set_point"], message));
        }
        Ok(())
    }

    /// A job that fills its quota must not make its GPU Unhealthy by that, on no type.
    fn reserve(&self, config: &NodeConfig, reserve_is_written: bool) -> Result<(), ConfigError> {
        let filled = config.quota.reserve.complement().value();
        for (gpu_type, laws) in &config.gpus {
            let limit = unhealthy_from(laws, Metric::Memory);
            let Some(limit) = limit.filter(|&limit| filled >= limit) else { continue };
            let message = format!(
                "on {gpu_type}, a job that fills its quota may bring memory to {filled} %, which is Unhealthy from {limit} % on: reserve_pct must be above {}",
                100.0 - limit
            );
            let bands = ["gpu", gpu_type.as_str(), "memory_pct", "unhealthy"];
            let path: &[&str] =
                if reserve_is_written { &["memory", "reserve_pct"] } else { &bands };
            return Err(self.error(path, message));
        }
        Ok(())
    }
}

fn unhealthy_from(laws: &GpuLaws, metric: Metric) -> Option<f64> {
    let bands = laws.thresholds.bands.iter().find(|b| b.metric() == metric);
    bands.map(|b| b.thresholds().1)
}

#[cfg(test)]
mod tests;
