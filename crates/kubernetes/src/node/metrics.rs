//! Metrics that carry the name of an online pod, so that an autoscaler can use them. Those of the GPUs
//! themselves are the agent's.

use std::fmt::Write as _;

use super::executor::Executor;
use super::report::Services;

/// One metric: name and what it says.
const METRICS: [(&str, &str); 2] = [
    (
        "muxflow_service_sm_activity_ratio",
        "The online pod's own part of SM activity, offline work not counted.",
    ),
    ("muxflow_service_sm_demand_ratio", "SM activity that the online pod is expected to need."),
];

/// The page.
pub(crate) fn render(executor: &dyn Executor, services: &Services) -> String {
    let services = services.read().clone();
    let mut text = String::new();
    for (index, (name, help)) in METRICS.iter().enumerate() {
        let _written = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (gpu, service) in &services {
            let Some(reading) = executor.read(gpu) else { continue };
            let value =
                if index == 0 { reading.online_activity_pct } else { Some(reading.demand_pct) };
            let Some(value) = value else { continue };
            let _written = writeln!(
                text,
                "{name}{{namespace=\"{}\",pod=\"{}\",service=\"{}\",gpu=\"{gpu}\"}} {}",
                service.namespace,
                service.pod,
                label(&service.service),
                value / 100.0
            );
        }
    }
    text
}

/// A value of a label as Prometheus reads it: whatever somebody calls a service, it ends no line.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_ends_neither_its_quotes_nor_its_line() {
        assert_eq!(label("shop/web"), "shop/web");
        assert_eq!(label("a\"b\nc\\d"), r#"a\"b\nc\\d"#);
    }
}
