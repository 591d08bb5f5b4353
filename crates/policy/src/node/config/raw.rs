//! The configuration as it is written: every field may be left out, no field may be unknown.

use std::collections::BTreeMap;

use serde::Deserialize;

macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $(pub(super) $field: Option<$type>,)*
        }
    };
}

table!(RawMemory { quota_pct: f64, reserve_pct: f64 });

table!(RawHealth {
    stale_after_ms: u64,
    lost_after_ms: u64,
    confirm_after_ms: u64,
    recover_after_ms: u64,
    overlimit_base_s: u64,
    overlimit_factor: f64,
    overlimit_cap_s: u64,
    overlimit_window_s: u64,
});

table!(RawShare {
    coverage_pct: f64,
    allowed_slowdown_pct: f64,
    max_share_pct: f64,
    min_share_pct: f64,
});

table!(RawForecast { interval_s: u64, days: usize, errors: usize, adaptation: f64 });

table!(RawSplit {
    look_every_ms: u64,
    look_for_ms: u64,
    pair_within_ms: u64,
    forget_after_ms: u64,
    weight: f64,
});

table!(RawRetry {
    base_s: u64,
    factor: f64,
    cap_s: u64,
    jitter: f64,
    forget_after_s: u64,
    fail_prone_from: u32,
});

table!(RawClock { threshold_mhz: u32, highest_mhz: u32, low_gain: f64, high_gain: f64 });

table!(RawGate {
    set_point: f64,
    proportional: f64,
    integral_per_s: f64,
    derivative_s: f64,
    open_rate_per_s: f64,
    shut_at: f64,
    closed_below: f64,
    stale_after_ms: u64,
    close_over_ms: u64,
    max_in_flight: u32,
    queue_for_ms: u64,
});

table!(RawBands { judged: bool, healthy: f64, unhealthy: f64, overlimit: f64 });

table!(RawGpu {
    like: String,
    clock_counts_from_pct: f64,
    clock: RawClock,
    gate: RawGate,
    gpu_util_pct: RawBands,
    sm_activity_pct: RawBands,
    sm_clock_mhz: RawBands,
    memory_pct: RawBands,
    latency_pct_of_slo: RawBands,
});

table!(RawService { coverage_pct: f64, allowed_slowdown_pct: f64, slo_ms: f64 });

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) memory: RawMemory,
    pub(super) health: RawHealth,
    pub(super) share: RawShare,
    pub(super) forecast: RawForecast,
    pub(super) split: RawSplit,
    pub(super) retry: RawRetry,
    pub(super) errors: BTreeMap<String, Vec<String>>,
    pub(super) gpu: BTreeMap<String, RawGpu>,
    pub(super) service: BTreeMap<String, RawService>,
}
