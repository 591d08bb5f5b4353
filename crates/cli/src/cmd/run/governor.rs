//! The gate's law for one job: sample, step, write. Without a load limit the gate is simply open.

use anyhow::{Context as _, bail};
use muxflow_abi::control::{Gate, Limits};
use muxflow_agent::control_block::ControlBlock;
use muxflow_agent::monitor::nvml::{self, NvmlSensor};
use muxflow_agent::monitor::{self, Sensor};
use muxflow_policy::node::builtin;
use muxflow_policy::node::gate::{GateParams, LaunchGate, LoadReading};
use muxflow_policy::node::load::{ClockLaw, GpuLoad};
use muxflow_policy::node::rate::LaunchLimits;
use muxflow_types::{GpuSample, MegaHertz, Micros};

/// How often the counters are read; they refresh more slowly than that.
const SAMPLE_EVERY: Micros = Micros::from_millis(50);

/// Holds one job back by the load of one GPU.
pub(super) struct Governor {
    law: Option<Law>,
    in_flight: u64,
    peak_bytes: u64,
}

struct Law {
    gate: LaunchGate,
    clock: ClockLaw,
    sensor: NvmlSensor,
    sampled_at: Option<Micros>,
    reading: Option<LoadReading>,
}

impl Governor {
    pub(super) fn new(
        load_limit: Option<f64>,
        gpu: Option<&str>,
        in_flight: u64,
    ) -> anyhow::Result<Self> {
        let law = load_limit.map(|limit| Law::new(limit, gpu, in_flight)).transpose()?;
        Ok(Self { law, in_flight, peak_bytes: 0 })
    }

    /// The most that the job was seen to hold.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// One turn of the loop.
    pub(super) fn step(&mut self, block: &ControlBlock) {
        let counts = block.counts();
        let peaks: u64 = {
            let mut sum = 0_u64;
            block.job().each(|c| sum = sum.max(c.peak_bytes));
            sum
        };
        self.peak_bytes = self.peak_bytes.max(counts.charged_bytes).max(peaks);
        let Some(law) = &mut self.law else {
            block.set_limits(&Limits { in_flight: self.in_flight, ..Limits::OPEN });
            block.set_gate(Gate::Open);
            return;
        };
        let limits = law.step(counts.ns_per_launch);
        if limits.closed {
            block.set_gate(Gate::Closed);
        } else {
            block.set_limits(&Limits {
                rate_milli_per_s: limits.rate_milli_per_s,
                burst: limits.burst,
                in_flight: limits.in_flight,
            });
            block.set_gate(Gate::Open);
        }
    }
}

impl Law {
    fn new(set_point: f64, gpu: Option<&str>, in_flight: u64) -> anyhow::Result<Self> {
        let params = GateParams {
            set_point,
            shut_at: (set_point * 1.5).clamp(1.0, 10.0),
            max_in_flight: u32::try_from(in_flight).context("--in-flight")?,
            ..GateParams::default()
        };
        let params = params.check().context("--load-limit")?;
        let library = nvml::open().context("--load-limit needs NVML (libnvidia-ml.so.1)")?;
        // One that cannot be read does not hide the others.
        let gpus: Vec<_> = nvml::list(&library)?.into_iter().flatten().collect();
        let found = match gpu {
            Some(uuid) => gpus.iter().find(|facts| facts.uuid == uuid),
            None => gpus.first(),
        };
        let Some(facts) = found else { bail!("--load-limit: no such GPU on this machine") };
        let clock = match builtin::laws_of(&facts.gpu_type) {
            Some(laws) => laws.clock,
            None => ClockLaw::new(MegaHertz(1), MegaHertz(1), 1.0, 0.0).context("clock law")?,
        };
        let sensor = NvmlSensor::new(library, None, &facts.uuid)?;
        Ok(Self { gate: LaunchGate::new(params), clock, sensor, sampled_at: None, reading: None })
    }

    fn step(&mut self, kernel_ns: u64) -> LaunchLimits {
        let now = monitor::now();
        if self.sampled_at.is_none_or(|at| now.since(at) >= SAMPLE_EVERY) {
            self.sampled_at = Some(now);
            if let Ok(sample) = self.sensor.read(now) {
                let load = self.load(&sample);
                self.reading =
                    load.map(|load| LoadReading { refreshed_at: sample.refreshed_at, load });
            }
        }
        let budget = self.gate.step(now, self.reading);
        LaunchLimits::new(budget, kernel_ns, self.gate.params().queue_for)
    }

    /// By SM activity where the GPU tells it, else by utilisation, which is never less.
    fn load(&self, sample: &GpuSample) -> Option<GpuLoad> {
        self.clock.load_of(sample).or_else(|| {
            let clock = sample.sm_clock.unwrap_or(self.clock.threshold());
            Some(self.clock.load(sample.gpu_util?, clock))
        })
    }
}
