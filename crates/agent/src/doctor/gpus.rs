//! The checks of the GPUs: what can be read of each, what the agent remembers of it, and whether a
//! client can attach.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use muxflow_policy::node::builtin;
use muxflow_types::{GpuSample, Micros};
use nvml_wrapper::Nvml;

use super::{Finding, Grade, found, good};
use crate::cgroup::encode;
use crate::config::AgentConfig;
use crate::keeper::ChildProgram;
use crate::marks;
use crate::monitor::dcgm::DcgmLink;
use crate::monitor::nvml::{self, GpuFacts, NvmlSensor};
use crate::monitor::{ActivitySource, Sensor, SensorFailure, now};
use crate::mps::control::MpsControl;
use crate::mps::daemon;
use crate::mps::probe::{self, Attached};

/// Memory in use from which nothing is left to lend.
const NEARLY_FULL_PCT: f64 = 88.0;

/// A driver that says nothing for so long does not answer.
const SILENT_FOR: Duration = Duration::from_secs(20);

/// The checks of the GPUs in a thread of their own: a call into a driver may block for ever, and the
/// thread then ends with the program.
pub(super) fn watched(config: &AgentConfig, child: &ChildProgram, tell: &mut impl FnMut(Finding)) {
    let (send, receive) = mpsc::channel();
    let (config, child) = (config.clone(), child.clone());
    let body = move || gpus(&config, &child, &|finding| drop(send.send(finding)));
    if let Err(error) = std::thread::Builder::new().name("doctor".into()).spawn(body) {
        return tell(found("GPUs", Grade::Bad, error.to_string(), "end some processes"));
    }
    loop {
        match receive.recv_timeout(SILENT_FOR) {
            Ok(finding) => tell(finding),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let seen = format!("the driver does not answer for {} s", SILENT_FOR.as_secs());
                let remedy = "look for XIDs in the kernel log; reset the GPU or reboot the machine";
                return tell(found("GPUs", Grade::Bad, seen, remedy));
            }
        }
    }
}

fn gpus(config: &AgentConfig, child: &ChildProgram, tell: &impl Fn(Finding)) {
    let lost = "check `nvidia-smi`: a GPU that cannot be read is lost or needs a reset";
    let nvml = match nvml::open() {
        Ok(nvml) => nvml,
        Err(error) => {
            let remedy = "install the NVIDIA driver, or put the directory of libnvidia-ml.so.1 on the loader's path";
            return tell(found("GPUs", Grade::Bad, error.to_string(), remedy));
        }
    };
    let listed = match nvml::list(&nvml) {
        Ok(listed) if !listed.is_empty() => listed,
        Ok(_) => {
            return tell(found("GPUs", Grade::Bad, "none", "check `nvidia-smi` and the PCI bus"));
        }
        Err(error) => return tell(found("GPUs", Grade::Bad, error.to_string(), lost)),
    };
    let dcgm = DcgmLink::open(Micros::from_millis(100)).ok().map(Arc::new);
    for (number, facts) in listed.into_iter().enumerate() {
        match facts {
            Ok(facts) => one_gpu(config, child, &facts, (&nvml, dcgm.as_ref()), tell),
            Err(error) => {
                tell(found(&format!("GPU {number}"), Grade::Bad, error.to_string(), lost));
            }
        }
    }
}

fn one_gpu(
    config: &AgentConfig,
    child: &ChildProgram,
    gpu: &GpuFacts,
    (nvml, dcgm): (&Arc<Nvml>, Option<&Arc<DcgmLink>>),
    tell: &impl Fn(Finding),
) {
    let subject = format!("GPU {} {}", gpu.name, gpu.uuid);
    let known = config.laws.gpus.contains_key(&gpu.gpu_type);
    if !known && builtin::laws_of(&gpu.gpu_type).is_none() {
        tell(found(
            &subject,
            Grade::Bad,
            format!("no laws for type {}", gpu.gpu_type),
            "add a section for the type to the node laws; `muxflow config print` shows one",
        ));
    }
    if let Some(need) = marks::disabled_for(&config.state_dir, &gpu.uuid) {
        tell(found(
            &subject,
            Grade::Bad,
            format!("the agent has disabled it: it waits for {need}"),
            &format!(
                "see to that; after a reset that the driver does not show, say so: `muxflow node was-reset {}`, with the `--config` of the agent",
                gpu.uuid
            ),
        ));
    }
    match NvmlSensor::new(Arc::clone(nvml), dcgm.cloned(), &gpu.uuid) {
        Ok(mut sensor) => sensors(&subject, &mut sensor).into_iter().for_each(tell),
        Err(error) => tell(found(&subject, Grade::Bad, error.to_string(), "reset the GPU")),
    }
    tell(attach(&subject, child, &gpu.uuid, config));
}

/// Reads until SM activity has come, or has had the time to.
fn settled_read(sensor: &mut NvmlSensor) -> Result<GpuSample, SensorFailure> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let sample = sensor.read(now())?;
        if sample.sm_activity.is_some() || Instant::now() > deadline {
            return Ok(sample);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn sensors(subject: &str, sensor: &mut NvmlSensor) -> Vec<Finding> {
    let read = settled_read(sensor);
    let source = sensor.source();
    let silent = matches!(&read, Ok(sample) if sample.sm_activity.is_none());
    let activity = match source {
        ActivitySource::Dcgm | ActivitySource::Gpm | ActivitySource::ProcessUtilisation
            if silent =>
        {
            found(
                subject,
                Grade::Bad,
                format!("SM activity from {}: no value comes", source.as_str()),
                "see that nv-hostengine runs and may profile this GPU; without SM activity no offline work is started",
            )
        }
        ActivitySource::Dcgm | ActivitySource::Gpm => {
            good(subject, format!("SM activity from {}", source.as_str()))
        }
        ActivitySource::ProcessUtilisation => found(
            subject,
            Grade::Weak,
            "SM activity from NVML's per-process figure: coarse",
            "install DCGM 4 (libdcgm.so.4) for true SM activity",
        ),
        ActivitySource::None => found(
            subject,
            Grade::Bad,
            "nothing tells SM activity",
            "install DCGM 4 (libdcgm.so.4); without SM activity no offline work is started",
        ),
    };
    let read = match read {
        Ok(sample)
            if sample.memory_share().is_some_and(|share| share.value() > NEARLY_FULL_PCT) =>
        {
            found(
                subject,
                Grade::Weak,
                format!("memory {:.0} % in use", sample.memory_share().map_or(0.0, |s| s.value())),
                "nothing is left to lend: give the service less memory or a GPU of its own",
            )
        }
        Ok(_) => good(subject, "counters can be read"),
        Err(failure) => {
            found(subject, Grade::Bad, failure.to_string(), "reset the GPU or the machine")
        }
    };
    vec![activity, read]
}

/// Where clients of the agent's daemon come in, and the user whom its server serves now: anybody else
/// would wait.
fn way_in(config: &AgentConfig, uuid: &str) -> Option<(PathBuf, Option<(u32, u32)>)> {
    let program = config.mps.as_ref()?.program.clone();
    let pipe_dir = daemon::living(&config.run_dir.join("mps").join(encode(uuid)))?;
    let control = MpsControl::new(program, pipe_dir.clone(), Duration::from_secs(3));
    let server = control.servers().ok().and_then(|servers| servers.first().copied());
    let client = server.and_then(|server| control.clients(server).ok()?.first().copied());
    let owner = client.and_then(|pid| std::fs::metadata(format!("/proc/{pid}")).ok());
    Some((pipe_dir, owner.map(|owner| (owner.uid(), owner.gid()))))
}

fn attach(subject: &str, child: &ChildProgram, uuid: &str, config: &AgentConfig) -> Finding {
    let (pipe_dir, user) = way_in(config, uuid).unzip();
    let attached =
        probe::run(child, uuid, pipe_dir.as_deref(), user.flatten(), Duration::from_secs(10));
    match attached {
        Attached::Yes { sms, took } => {
            good(subject, format!("a client attaches in {} ms; {sms} SMs", took.as_millis()))
        }
        Attached::Refused { reason } => found(
            subject,
            Grade::Bad,
            format!("a client cannot attach: {reason}"),
            "check that libcuda.so.1 fits the driver, and that the GPU is not in an exclusive mode held by another",
        ),
        Attached::Hung => found(
            subject,
            Grade::Bad,
            "a client hangs while attaching",
            &match pipe_dir {
                Some(dir) => format!(
                    "a client was killed in the middle of work; the agent finds that within mps.probe_every_s, or end MPS now: `echo quit | CUDA_MPS_PIPE_DIRECTORY={} nvidia-cuda-mps-control`",
                    dir.display()
                ),
                None => "end the MPS daemon that is not the agent's: `echo quit | nvidia-cuda-mps-control`".to_owned(),
            },
        ),
    }
}
