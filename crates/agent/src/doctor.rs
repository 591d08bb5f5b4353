//! What is wrong on a node and how to mend it: every assumption of the agent, tried one by one.
//!
//! Each check is independent of the others, so that one broken part does not hide the next, and none
//! changes anything that outlives it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cgroup::Cgroups;
use crate::config::AgentConfig;
use crate::host::HostReader;
use crate::keeper::ChildProgram;
use crate::monitor::dcgm::Dcgm;
use crate::monitor::nvml::{self, NvmlSensor};
use crate::monitor::{ActivitySource, Sensor, now};
use crate::mps::probe::{self, Attached};
use muxflow_policy::node::builtin;
use muxflow_types::Micros;

/// Memory in use from which nothing is left to lend.
const NEARLY_FULL_PCT: f64 = 88.0;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grade {
    /// As it should be.
    Good,
    /// It works, but something is missing.
    Weak,
    /// Offline work cannot run, or the service is not safe.
    Bad,
}

impl Grade {
    /// The word that is printed.
    pub fn as_str(self) -> &'static str {
        match self {
            Grade::Good => "ok",
            Grade::Weak => "weak",
            Grade::Bad => "BAD",
        }
    }
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub subject: String,
    /// How it came out.
    pub grade: Grade,
    /// What was seen.
    pub seen: String,
    /// How to mend it, when it is not good.
    pub remedy: Option<String>,
}

fn good(subject: &str, seen: impl Into<String>) -> Finding {
    Finding { subject: subject.into(), grade: Grade::Good, seen: seen.into(), remedy: None }
}

fn found(subject: &str, grade: Grade, seen: impl Into<String>, remedy: &str) -> Finding {
    Finding { subject: subject.into(), grade, seen: seen.into(), remedy: Some(remedy.into()) }
}

/// Looks at everything.
pub fn examine(config: &AgentConfig, child: &ChildProgram) -> Vec<Finding> {
    let mut all = vec![user(), groups(&config.cgroup_parent), host(&config.host_proc)];
    all.extend(directories(config));
    all.push(interposer(&config.interposer));
    all.push(mps_program(config));
    all.push(kernel_log(config.kernel_log.as_deref()));
    all.extend(gpus(config, child));
    all.extend(defences(config));
    all
}

fn user() -> Finding {
    // SAFETY: takes nothing and cannot fail.
    match unsafe { libc::geteuid() } {
        0 => good("user", "root"),
        uid => found(
            "user",
            Grade::Weak,
            format!("uid {uid}"),
            "run the agent as root: control groups, other users' jobs and the kernel log need it",
        ),
    }
}

fn groups(parent: &str) -> Finding {
    let groups = Cgroups::detect(parent);
    let lacking = groups.shortcomings();
    if lacking.is_empty() {
        return good("control groups", groups.describe());
    }
    found(
        "control groups",
        Grade::Weak,
        lacking.join("; "),
        "mount cgroup v2 at /sys/fs/cgroup and delegate cpuset and memory, or give the container a writable one",
    )
}

fn host(proc: &Path) -> Finding {
    let reader = HostReader::new(proc);
    let reading = reader.read(now());
    match (reading.memory, reading.pressure_full) {
        (Some(_), Some(_)) => good("host signs", reader.describe()),
        (Some(_), None) => found(
            "host signs",
            Grade::Weak,
            reader.describe(),
            "boot with psi=1: without it, memory pressure is only seen through kswapd",
        ),
        (None, _) => found(
            "host signs",
            Grade::Bad,
            reader.describe(),
            "mount /proc; MemAvailable is needed",
        ),
    }
}

fn directories(config: &AgentConfig) -> Vec<Finding> {
    let writable = |subject: &str, dir: &PathBuf| {
        let probe = dir.join(format!(".doctor-{}", std::process::id()));
        let existed = dir.exists();
        let tried = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&probe, ""));
        drop(std::fs::remove_file(&probe));
        if !existed {
            // Only looked: the agent makes it when it starts.
            drop(std::fs::remove_dir(dir));
        }
        match tried {
            Ok(()) => good(subject, dir.display().to_string()),
            Err(error) => found(
                subject,
                Grade::Bad,
                format!("{}: {error}", dir.display()),
                "give the agent a directory that it may write to",
            ),
        }
    };
    let mut all = vec![writable("state directory", &config.state_dir)];
    let run = writable("run directory", &config.run_dir);
    let there = config.run_dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let in_memory = is_memory_file_system(there);
    all.push(if run.grade == Grade::Good && !in_memory {
        found(
            "run directory",
            Grade::Weak,
            format!("{} is on a disk", config.run_dir.display()),
            "use a directory on tmpfs such as /run: writing back a page can delay the launch gate",
        )
    } else {
        run
    });
    all
}

fn is_memory_file_system(dir: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    let Ok(path) = std::ffi::CString::new(dir.as_os_str().as_bytes()) else { return false };
    let mut stats = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a zero-ended path and room for the answer, which is read only when the call filled it.
    unsafe {
        libc::statfs(path.as_ptr(), stats.as_mut_ptr()) == 0
            && [TMPFS, RAMFS].contains(&stats.assume_init().f_type)
    }
}

fn interposer(path: &Path) -> Finding {
    let remedy = "build it with `cargo build --profile xcuda -p muxflow-xcuda` and set `interposer` to libxcuda.so";
    match std::fs::read(path) {
        Err(error) => {
            found("interposer", Grade::Bad, format!("{}: {error}", path.display()), remedy)
        }
        Ok(bytes) if !bytes.starts_with(b"\x7fELF") => {
            found("interposer", Grade::Bad, format!("{} is no library", path.display()), remedy)
        }
        Ok(_) => good("interposer", path.display().to_string()),
    }
}

fn mps_program(config: &AgentConfig) -> Finding {
    let Some(mps) = &config.mps else {
        return found(
            "MPS",
            Grade::Weak,
            "switched off",
            "set mps.enabled: without MPS, kernels of two processes take turns instead of sharing SMs",
        );
    };
    let asked = Command::new(&mps.program).arg("-v").stdin(Stdio::null()).output();
    match asked {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).trim().replace('\n', " ");
            good("MPS", format!("{} {said}", mps.program.display()))
        }
        Err(error) => found(
            "MPS",
            Grade::Bad,
            format!("{}: {error}", mps.program.display()),
            "install the driver's compute utilities, or set mps.program to the full path",
        ),
    }
}

fn kernel_log(path: Option<&Path>) -> Finding {
    let Some(path) = path else {
        return found(
            "kernel log",
            Grade::Weak,
            "not watched",
            "set kernel_log: XID 154 is told only there",
        );
    };
    match std::fs::File::open(path) {
        Ok(_) => good("kernel log", path.display().to_string()),
        Err(error) => found(
            "kernel log",
            Grade::Weak,
            format!("{}: {error}", path.display()),
            "run as root or give CAP_SYSLOG: the process behind an XID and XID 154 are told only there",
        ),
    }
}

fn gpus(config: &AgentConfig, child: &ChildProgram) -> Vec<Finding> {
    let nvml = match nvml::open() {
        Ok(nvml) => nvml,
        Err(error) => {
            let remedy = "install the NVIDIA driver, or put the directory of libnvidia-ml.so.1 on the loader's path";
            return vec![found("GPUs", Grade::Bad, error.to_string(), remedy)];
        }
    };
    let facts = match nvml::list(&nvml) {
        Ok(facts) if !facts.is_empty() => facts,
        Ok(_) => {
            return vec![found("GPUs", Grade::Bad, "none", "check `nvidia-smi` and the PCI bus")];
        }
        Err(error) => {
            let remedy = "check `nvidia-smi`: a GPU that cannot be read is lost or needs a reset";
            return vec![found("GPUs", Grade::Bad, error.to_string(), remedy)];
        }
    };
    let dcgm = Dcgm::open(Micros::from_millis(100)).ok().map(std::sync::Arc::new);
    let mut all = Vec::new();
    for gpu in &facts {
        let subject = format!("GPU {} {}", gpu.name, gpu.uuid);
        let known = config.laws.gpus.contains_key(&gpu.gpu_type);
        if !known && builtin::laws_of(&gpu.gpu_type).is_none() {
            all.push(found(
                &subject,
                Grade::Bad,
                format!("no laws for type {}", gpu.gpu_type),
                "add a section for the type to the node laws; `muxflow config print` shows one",
            ));
        }
        match NvmlSensor::new(std::sync::Arc::clone(&nvml), dcgm.clone(), &gpu.uuid) {
            Ok(mut sensor) => all.extend(sensors(&subject, &mut sensor)),
            Err(error) => {
                all.push(found(&subject, Grade::Bad, error.to_string(), "reset the GPU"));
            }
        }
        all.push(attach(&subject, child, &gpu.uuid));
    }
    all
}

fn sensors(subject: &str, sensor: &mut NvmlSensor) -> Vec<Finding> {
    let source = sensor.source();
    let activity = match source {
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
    let read = match sensor.read(now()) {
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

fn attach(subject: &str, child: &ChildProgram, uuid: &str) -> Finding {
    match probe::run(child, uuid, None, None, Duration::from_secs(10)) {
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
            "a client was killed in the middle of work: end MPS (`echo quit | nvidia-cuda-mps-control`) and start the agent again",
        ),
    }
}

fn defences(config: &AgentConfig) -> Vec<Finding> {
    let d = config.defences;
    let off: Vec<&str> = [
        ("gate", d.gate),
        ("eviction", d.eviction),
        ("quota", d.quota),
        ("clean_stop", d.clean_stop),
        ("error_response", d.error_response),
    ]
    .into_iter()
    .filter_map(|(name, on)| (!on).then_some(name))
    .collect();
    if off.is_empty() {
        return Vec::new();
    }
    vec![found(
        "defences",
        Grade::Bad,
        format!("switched off: {}", off.join(", ")),
        "remove them from [defences]; they are for experiments only",
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_that_is_not_good_says_how_to_mend_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        let text = format!(
            "state_dir = '{0}/state'\nrun_dir = '{0}/run'\ninterposer = '{0}/none.so'\nkernel_log = '{0}/none'\n[mps]\nprogram = '{0}/none'\n[defences]\ngate = false\n",
            dir.path().display()
        );
        std::fs::write(&path, text).unwrap();
        let config = AgentConfig::read(&path).unwrap();
        let child = ("/bin/false".into(), Vec::new());
        let findings = examine(&config, &child);
        for finding in &findings {
            assert_eq!(finding.grade == Grade::Good, finding.remedy.is_none(), "{finding:?}");
        }
        let bad =
            |subject: &str| findings.iter().any(|f| f.subject == subject && f.grade == Grade::Bad);
        assert!(bad("interposer") && bad("MPS") && bad("defences"), "{findings:#?}");
    }
}
