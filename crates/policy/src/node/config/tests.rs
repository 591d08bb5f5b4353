//! The file that ships, and files that must be refused: each error names line, field and remedy.

use proptest::prelude::*;

use super::*;

fn refused(text: &str) -> String {
    NodeConfig::parse(text).unwrap_err().to_string()
}

#[test]
fn the_file_that_ships_is_the_default() {
    assert_eq!(NodeConfig::parse(DEFAULT_TEXT).unwrap(), NodeConfig::default());
    assert_eq!(NodeConfig::parse("").unwrap(), NodeConfig::default());
}

#[test]
fn every_field_of_the_file_that_ships_counts() {
    // Change each number in turn: a field that is read and dropped would change nothing.
    for (number, line) in DEFAULT_TEXT.lines().enumerate() {
        let code = line.split('#').next().unwrap_or_default();
        let Some((field, value)) = code.split_once(" = ") else { continue };
        let whole = !value.contains('.');
        let Ok(value) = value.trim().parse::<f64>() else { continue };
        let changed = [value * 1.01, value + 1.0, value - 1.0].map(|new| {
            let new = if whole { format!("{new:.0}") } else { format!("{new:?}") };
            let text: Vec<_> = DEFAULT_TEXT
                .lines()
                .enumerate()
                .map(|(i, l)| if i == number { format!("{field} = {new}") } else { l.to_owned() })
                .collect();
            NodeConfig::parse(&text.join("\n"))
        });
        let counts = |result: &Result<NodeConfig, ConfigError>| match result {
            Ok(config) => *config != NodeConfig::default(),
            Err(error) => error.to_string().contains(field.trim()),
        };
        assert!(changed.iter().any(counts), "line {}: {line}", number + 1);
    }
}

#[test]
fn crossed_thresholds_are_refused_by_name_and_line() {
    let text = "[gpu.T4]\n\n[gpu.T4.memory_pct]\nhealthy = 93\n";
    assert_eq!(
        refused(text),
        "line 4: gpu.T4.memory_pct.healthy: memory_pct.healthy is 93 and lies beyond memory_pct.unhealthy (91): memory_pct must rise from healthy to unhealthy"
    );
    let text = "[gpu.A10.sm_clock_mhz]\nunhealthy = 1300\n";
    assert!(
        refused(text).starts_with("line 1: gpu.A10.sm_clock_mhz.healthy: "),
        "{}",
        refused(text)
    );
}

#[test]
fn what_is_wrong_is_named_with_its_place_and_remedy() {
    for (text, parts) in [
        ("[memory]\nquota = 40", vec!["line 2", "unknown field `quota`", "quota_pct"]),
        ("[memory]\nquota_pct = 140", vec!["line 2", "memory.quota_pct", "between 0 and 100"]),
        ("[memory]\nquota_pct = \"much\"", vec!["line 2", "invalid type", "f64"]),
        ("[memory\nquota_pct = 4", vec!["line 1"]),
        ("[health]\nstale_after_ms = -1", vec!["line 2", "u64"]),
        ("[health]\nlost_after_ms = 1000", vec!["line 2", "health.lost_after_ms", "longer than"]),
        ("[health]\noverlimit_factor = nan", vec!["line 2", "health.overlimit_factor", "1.1"]),
        ("[share]\ncoverage_pct = 120", vec!["line 2", "share.coverage_pct", "99.9"]),
        ("[forecast]\ninterval_s = 7", vec!["line 2", "forecast.interval_s", "divide a day"]),
        ("[split]\nlook_every_ms = 400", vec!["line 2", "split.look_every_ms", "ten times"]),
        ("[retry]\njitter = 3", vec!["line 2", "retry.jitter", "0.9"]),
        (
            "[errors]\n\"xid.31\" = [\"pray\"]",
            vec!["line 2", "errors.xid.31", "`pray`", "restart-job"],
        ),
        ("[errors]\n\"xid.154\" = [\"count\"]", vec!["line 2", "xid.154", "recovery.gpu-reset"]),
        ("[errors]\n\"mps.hang\" = [\"disable-gpu\"]", vec!["line 2", "mps.hang", "await-probe"]),
        ("[gpu.L4]\n", vec!["line 1", "gpu.L4", "like", "T4 or A10"]),
        ("[gpu.L4]\nlike = \"K80\"", vec!["line 2", "gpu.L4.like", "`K80`", "T4 or A10"]),
        ("[gpu.L4]\nlike = \"A10\"", vec!["line 1", "gpu.L4.clock", "highest_mhz"]),
        ("[gpu.\"L 4\"]\n", vec!["line 1", "gpu.L 4", "not allowed"]),
        ("[gpu.T4.clock]\nlow_gain = 0.5", vec!["line 2", "gpu.T4.clock.low_gain", "5 times"]),
        ("[gpu.T4.clock]\nthreshold_mhz = 2000", vec!["line 2", "threshold_mhz", "1590 MHz"]),
        ("[gpu.T4.gate]\nshut_at = 0.1", vec!["line 2", "gpu.T4.gate.shut_at", "above set_point"]),
        ("[gpu.T4.gate]\nset_point = 0.9", vec!["line 2", "set_point", "Unhealthy from 88 %"]),
        (
            "[gpu.T4.gpu_util_pct]\njudged = true",
            vec!["line 1", "gpu_util_pct.healthy", "judged = false"],
        ),
        ("[memory]\nreserve_pct = 5\n[gpu.T4]", vec!["line 2", "memory.reserve_pct", "above 9"]),
        (
            "[gpu.A10.memory_pct]\nhealthy = 80\nunhealthy = 85",
            vec!["line 3", "gpu.A10.memory_pct.unhealthy", "above 15"],
        ),
        ("[service.\"a b\"]\n", vec!["line 1", "service.a b", "not allowed"]),
        ("[service.s]\nslo_ms = 0", vec!["line 2", "service.s.slo_ms", "above 0"]),
        ("[service.s]\ncoverage_pct = 10", vec!["line 2", "service.s.coverage_pct", "50"]),
        ("[gpu.T4]\nunknown = 1", vec!["line 2", "unknown field `unknown`"]),
    ] {
        let error = refused(text);
        for part in parts {
            assert!(error.contains(part), "{text:?} gave {error:?}, which lacks {part:?}");
        }
    }
}

#[test]
fn a_new_type_starts_from_another() {
    let text = "
[gpu.L4]
like = \"A10\"
[gpu.L4.clock]
threshold_mhz = 1500
highest_mhz = 2040
[gpu.L4.sm_clock_mhz]
healthy = 1300
unhealthy = 1100
overlimit = 900
[gpu.L4.gpu_util_pct]
healthy = 95
unhealthy = 100
overlimit = 100
[service.ranking]
coverage_pct = 99
slo_ms = 12.5
";
    let config = NodeConfig::parse(text).unwrap();
    let laws = &config.gpus[&GpuType::new("L4").unwrap()];
    assert_eq!(laws.clock.highest(), MegaHertz(2040));
    assert_eq!(laws.thresholds.highest_clock, MegaHertz(2040));
    assert_eq!(laws.thresholds.bands.len(), 5, "GPU utilisation is judged here");
    assert_eq!(config.gpus.len(), 3);
    let knobs = config.service(&ServiceId::new("ranking").unwrap());
    assert_eq!((knobs.share.coverage, knobs.slo), (0.99, Some(Micros(12_500))));
    let other = config.service(&ServiceId::new("other").unwrap());
    assert_eq!((other.share.coverage, other.slo), (0.95, None));
}

#[test]
fn a_check_of_the_default_quota_reaches_types_that_the_file_does_not_name() {
    let error = refused("[memory]\nreserve_pct = 5\n");
    assert!(error.contains("line 2") && error.contains("memory.reserve_pct"), "{error}");
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "(\\[[a-z.]{0,12}\\]\n)?([a-z_]{1,12} = [-0-9.ena\"\\[\\]]{0,8}\n){0,4}") {
        let _result = NodeConfig::parse(&text);
    }
}
