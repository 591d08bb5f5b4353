//! Metrics in Prometheus' text format: one table of names, and what fills it.
//!
//! Per GPU and per workload, also under MPS, where the driver's own tools show only the server: the
//! figures of jobs come from the interposer's counts.

use std::fmt::Write as _;

use muxflow_types::HealthState;

use crate::gpu::GpuShared;
use crate::monitor;
use crate::process;

/// One metric: name, kind and what it says.
pub type Described = (&'static str, &'static str, &'static str);

/// Every metric of the agent. `docs/agent.md` repeats it; a test holds the two together.
pub const METRICS: &[Described] = &[
    ("muxflow_gpu_health", "gauge", "1 for the state of health that the GPU is in."),
    ("muxflow_gpu_health_transitions_total", "counter", "Changes of health by where they led to."),
    ("muxflow_gpu_placeable", "gauge", "1 when a new job may be placed."),
    ("muxflow_gpu_sm_activity_ratio", "gauge", "SM activity of the whole GPU."),
    ("muxflow_gpu_memory_used_bytes", "gauge", "Device memory in use by everybody."),
    ("muxflow_gpu_sm_clock_mhz", "gauge", "SM clock."),
    ("muxflow_gpu_power_watts", "gauge", "Power drawn."),
    ("muxflow_gpu_load", "gauge", "SM activity times clock factor, as the launch gate sees it."),
    ("muxflow_gpu_launch_budget_ratio", "gauge", "Share of time that offline launches may use."),
    ("muxflow_gpu_share_offered_ratio", "gauge", "Share of SMs that a job would get now."),
    ("muxflow_gpu_quota_offered_bytes", "gauge", "Memory that a job would get now."),
    ("muxflow_online_sm_activity_ratio", "gauge", "The service's part of SM activity."),
    ("muxflow_online_sm_activity_error_ratio", "gauge", "How far off that part may be."),
    ("muxflow_online_restarts_total", "counter", "Restarts of the service."),
    ("muxflow_sensor_source", "gauge", "1 for the source of SM activity in use."),
    ("muxflow_sensor_age_seconds", "gauge", "Age of the slowest counter."),
    ("muxflow_sensor_samples_total", "counter", "Samples read."),
    ("muxflow_sensor_failures_total", "counter", "Reads that failed."),
    ("muxflow_sensor_glitches_total", "counter", "Impossible samples that were dropped."),
    ("muxflow_sensor_blocked_seconds", "gauge", "How long the driver call under way has taken."),
    ("muxflow_reaction_seconds", "gauge", "From sample to control block, last and longest."),
    ("muxflow_job_launches_total", "counter", "Kernels that the job started."),
    ("muxflow_job_in_flight", "gauge", "Kernels of the job in flight."),
    ("muxflow_job_delayed_seconds_total", "counter", "Time that the job's launches waited."),
    ("muxflow_job_memory_bytes", "gauge", "Device memory charged to the job."),
    ("muxflow_job_refused_total", "counter", "Requests for memory that were refused."),
    ("muxflow_stops_total", "counter", "Stops of offline work by reason."),
    ("muxflow_evictions_held_total", "counter", "Evictions held back by the circuit breaker."),
    ("muxflow_faults_total", "counter", "Errors by kind."),
    ("muxflow_mps_starts_total", "counter", "Times that the MPS daemon was started."),
    ("muxflow_attach_seconds", "gauge", "How long the last attach probe took; -1 when it failed."),
    ("muxflow_agent_cpu_seconds_total", "counter", "Processor time of the agent."),
    ("muxflow_agent_memory_bytes", "gauge", "Resident memory of the agent."),
];

/// Text under way: samples of one metric must stand together.
#[derive(Debug, Default)]
struct Page {
    samples: Vec<(&'static str, String)>,
}

impl Page {
    fn add(&mut self, name: &'static str, labels: &[(&str, &str)], value: f64) {
        let mut line = String::from(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            line.push(if index == 0 { '{' } else { ',' });
            let _written = write!(line, "{label}=\"{text}\"");
        }
        if !labels.is_empty() {
            line.push('}');
        }
        let _written = write!(line, " {value}");
        self.samples.push((name, line));
    }

    fn render(&self) -> String {
        let mut text = String::new();
        for (name, kind, help) in METRICS {
            let mut lines = self.samples.iter().filter(|(n, _)| n == name).peekable();
            if lines.peek().is_some() {
                let _written = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
                for (_, line) in lines {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }
}

#[expect(clippy::cast_precision_loss, reason = "counters beyond 2^53 are not reached")]
fn number(value: u64) -> f64 {
    value as f64
}

/// The page for these GPUs.
pub fn render<'a>(gpus: impl IntoIterator<Item = &'a GpuShared>) -> String {
    let mut page = Page::default();
    for gpu in gpus {
        add_gpu(&mut page, gpu);
    }
    add_self(&mut page);
    page.render()
}

fn add_gpu(page: &mut Page, gpu: &GpuShared) {
    let status = gpu.status().clone();
    let seen = gpu.monitor.published();
    let uuid = status.uuid.as_str();
    let on = [("gpu", uuid), ("type", gpu.facts.gpu_type.as_str())];
    for state in HealthState::ALL {
        let labels = [("gpu", uuid), ("state", state.as_str())];
        page.add("muxflow_gpu_health", &labels, f64::from(u8::from(state == status.health)));
        let count = status.transitions.get(&state).copied().unwrap_or(0);
        page.add("muxflow_gpu_health_transitions_total", &labels, number(count));
    }
    page.add("muxflow_gpu_placeable", &on, f64::from(u8::from(status.placeable)));
    if let Some(sample) = seen.sample {
        let values = [
            ("muxflow_gpu_sm_activity_ratio", sample.sm_activity.map(|p| p.fraction())),
            ("muxflow_gpu_memory_used_bytes", sample.memory_used.map(|b| number(b.0))),
            ("muxflow_gpu_sm_clock_mhz", sample.sm_clock.map(|c| f64::from(c.0))),
            ("muxflow_gpu_power_watts", sample.power.map(|w| w.value())),
        ];
        for (name, value) in values.into_iter().filter_map(|(n, v)| Some((n, v?))) {
            page.add(name, &on, value);
        }
    }
    if let Some(load) = status.load {
        page.add("muxflow_gpu_load", &on, load);
    }
    page.add("muxflow_gpu_launch_budget_ratio", &on, status.budget);
    let share = status.share.map_or(0.0, |share| share.percent().fraction());
    page.add("muxflow_gpu_share_offered_ratio", &on, share);
    page.add("muxflow_gpu_quota_offered_bytes", &on, number(status.quota.0));
    if let Some((service, _)) = &status.online {
        let labels = [("gpu", uuid), ("service", service.as_str())];
        if let Some((activity, error_points)) = status.online_activity {
            page.add("muxflow_online_sm_activity_ratio", &labels, activity.fraction());
            page.add("muxflow_online_sm_activity_error_ratio", &labels, error_points / 100.0);
        }
    }
    page.add("muxflow_online_restarts_total", &on, number(status.online_restarts));
    let source = [("gpu", uuid), ("source", status.source.as_str())];
    page.add("muxflow_sensor_source", &source, 1.0);
    page.add("muxflow_sensor_age_seconds", &on, status.counter_age.as_secs_f64());
    page.add("muxflow_sensor_samples_total", &on, number(seen.count));
    page.add("muxflow_sensor_failures_total", &on, number(seen.failures));
    page.add("muxflow_sensor_glitches_total", &on, number(status.glitches));
    let blocked = gpu.monitor.blocked_for(monitor::now());
    let blocked = blocked.map_or(0.0, |time| time.as_secs_f64());
    page.add("muxflow_sensor_blocked_seconds", &on, blocked);
    for (which, time) in [("last", status.reaction), ("max", status.reaction_max)] {
        let labels = [("gpu", uuid), ("which", which)];
        page.add("muxflow_reaction_seconds", &labels, time.as_secs_f64());
    }
    add_job(page, uuid, &status);
    page.add("muxflow_evictions_held_total", &on, number(status.held));
    for (reason, count) in &status.stops {
        page.add("muxflow_stops_total", &[("gpu", uuid), ("reason", reason)], number(*count));
    }
    for (fault, count) in &status.faults {
        page.add("muxflow_faults_total", &[("gpu", uuid), ("fault", fault)], number(*count));
    }
    page.add("muxflow_mps_starts_total", &on, number(status.mps_starts));
    if let Some((attached, took)) = status.attach {
        page.add("muxflow_attach_seconds", &on, if attached { took.as_secs_f64() } else { -1.0 });
    }
}

fn add_job(page: &mut Page, uuid: &str, status: &crate::gpu::GpuStatus) {
    let Some((job, counts)) = &status.offline else { return };
    let labels = [("gpu", uuid), ("job", job.as_str())];
    page.add("muxflow_job_launches_total", &labels, number(counts.launches));
    page.add("muxflow_job_in_flight", &labels, number(counts.in_flight));
    page.add("muxflow_job_delayed_seconds_total", &labels, number(counts.delayed_ns) / 1e9);
    page.add("muxflow_job_memory_bytes", &labels, number(counts.charged_bytes));
    page.add("muxflow_job_refused_total", &labels, number(counts.refused));
}

fn add_self(page: &mut Page) {
    // SAFETY: asks for constants of the system.
    let (ticks_per_s, page_bytes) =
        unsafe { (libc::sysconf(libc::_SC_CLK_TCK), libc::sysconf(libc::_SC_PAGESIZE)) };
    if let (Ok(stat), Ok(ticks_per_s)) =
        (process::stat(std::process::id()), u32::try_from(ticks_per_s))
    {
        let seconds = number(stat.cpu_ticks) / f64::from(ticks_per_s.max(1));
        page.add("muxflow_agent_cpu_seconds_total", &[], seconds);
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok());
    if let (Some(pages), Ok(page_bytes)) = (pages, u64::try_from(page_bytes)) {
        page.add("muxflow_agent_memory_bytes", &[], number(pages.saturating_mul(page_bytes)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_one_metric_stand_together_and_labels_are_escaped() {
        let mut page = Page::default();
        page.add("muxflow_gpu_load", &[("gpu", "a\"b\\c")], 0.5);
        page.add("muxflow_gpu_placeable", &[("gpu", "a")], 1.0);
        page.add("muxflow_gpu_load", &[("gpu", "d")], 2.0);
        let text = page.render();
        assert!(text.contains(
            "muxflow_gpu_load{gpu=\"a\\\"b\\\\c\"} 0.5\nmuxflow_gpu_load{gpu=\"d\"} 2\n"
        ));
        assert_eq!(text.matches("# TYPE muxflow_gpu_load gauge").count(), 1);
    }

    #[test]
    fn the_table_is_sound_and_documented() {
        let docs =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/agent.md"));
        let docs = docs.unwrap();
        for (index, (name, kind, help)) in METRICS.iter().enumerate() {
            assert!(["gauge", "counter"].contains(kind));
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
            assert!(!METRICS[..index].iter().any(|(other, ..)| other == name));
            assert!(
                docs.contains(&format!("| `{name}` | {help} |")),
                "docs/agent.md lacks {name}: {help}"
            );
        }
    }

    #[test]
    fn the_agents_own_cost_is_told() {
        let text = render([]);
        assert!(text.contains("muxflow_agent_cpu_seconds_total "));
        assert!(text.contains("muxflow_agent_memory_bytes "));
    }
}
