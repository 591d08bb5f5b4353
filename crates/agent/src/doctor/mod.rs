//! What is wrong on a node and how to mend it: every assumption of the agent, tried one by one.
//!
//! Each check is independent of the others, so that one broken part does not hide the next: findings
//! are told as they come, and a driver that does not answer is a finding. Control groups are only
//! looked at, and what a check must make to know (a file in a directory, a client that attaches) is
//! gone when it is over.

mod gpus;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::cgroup::Cgroups;
use crate::config::AgentConfig;
use crate::host::HostReader;
use crate::installed;
use crate::keeper::ChildProgram;
use crate::monitor::now;

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

/// Looks at everything, and tells each finding when it has it.
pub fn examine(config: &AgentConfig, child: &ChildProgram, mut tell: impl FnMut(Finding)) {
    tell(user());
    tell(groups(&config.cgroup_parent));
    tell(host(&config.host_proc));
    directories(config).into_iter().for_each(&mut tell);
    blamed(config).into_iter().for_each(&mut tell);
    tell(interposer(&config.interposer));
    tell(mps_program(config));
    tell(kernel_log(config.kernel_log.as_deref()));
    defences(config).into_iter().for_each(&mut tell);
    gpus::watched(config, child, &mut tell);
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
    let groups = Cgroups::look(parent);
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
        let made: Vec<&Path> = dir.ancestors().take_while(|dir| !dir.exists()).collect();
        let tried = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&probe, ""));
        drop(std::fs::remove_file(&probe));
        // Only looked: the agent makes them when it starts.
        made.into_iter().for_each(|dir| drop(std::fs::remove_dir(dir)));
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

/// Jobs that broke something again and again, as the agent wrote it down.
fn blamed(config: &AgentConfig) -> Vec<Finding> {
    let path = config.state_dir.join("blamed.json");
    match Blame::open(path, config.laws.retry) {
        Ok(blame) => {
            let told = |(job, times)| {
                let remedy = "mend its program, or leave it out; it is forgotten when it has broken nothing for a while ([retry] of the laws), and kept off critical services until then";
                let seen = format!("job {job} was to blame for {times} errors of late: fail-prone");
                found("jobs", Grade::Weak, seen, remedy)
            };
            blame.fail_prone().into_iter().map(told).collect()
        }
        Err(error) => {
            let remedy = "an agent does not start on it: give it back its contents, or remove it and who was to blame is forgotten";
            vec![found("jobs", Grade::Bad, error.to_string(), remedy)]
        }
    }
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
    match installed::flaw(path) {
        Some(flaw) => found("interposer", Grade::Bad, flaw, installed::REMEDY),
        None => good("interposer", path.display().to_string()),
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
    let program = mps.program.display();
    match version_of(&mps.program) {
        Ok(said) => good("MPS", format!("{program} {said}")),
        Err(error) => found(
            "MPS",
            Grade::Bad,
            format!("{program}: {error}"),
            "install the driver's compute utilities, or set mps.program to the full path",
        ),
    }
}

/// What the control program says of itself, within a few seconds.
fn version_of(program: &Path) -> Result<String, String> {
    let mut command = Command::new(program);
    command.arg("-v").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let deadline = Instant::now() + Duration::from_secs(5);
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            None => {
                drop(child.kill());
                drop(child.wait());
                return Err("`-v` does not come back".into());
            }
        }
    };
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        drop(out.read_to_string(&mut said));
    }
    match status.success() {
        true => Ok(said.trim().replace('\n', " ")),
        false => Err(format!("`-v` ended with {status}")),
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

fn defences(config: &AgentConfig) -> Vec<Finding> {
    let d = config.defences;
    let off: Vec<&str> = [
        ("gate", d.gate),
        ("eviction", d.eviction),
        ("quota", d.quota),
        ("clean_stop", d.clean_stop),
        ("error_response", d.error_response),
        ("ungated_stop", d.ungated_stop),
        ("host_eviction", d.host_eviction),
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
        let mut findings = Vec::new();
        examine(&config, &child, |finding| findings.push(finding));
        let made = ["state", "run"].map(|name| dir.path().join(name).exists());
        assert_eq!(made, [false, false], "it only looks");
        for finding in &findings {
            assert_eq!(finding.grade == Grade::Good, finding.remedy.is_none(), "{finding:?}");
        }
        let bad =
            |subject: &str| findings.iter().any(|f| f.subject == subject && f.grade == Grade::Bad);
        assert!(bad("interposer") && bad("MPS") && bad("defences"), "{findings:#?}");
    }

    #[test]
    fn jobs_that_break_things_again_and_again_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, format!("state_dir = '{}'\n", dir.path().display())).unwrap();
        let config = AgentConfig::read(&path).unwrap();
        assert_eq!(blamed(&config), [], "nobody is to blame");
        let blame = Blame::open(dir.path().join("blamed.json"), config.laws.retry).unwrap();
        let [bad, once] = ["bad", "once"].map(|name| muxflow_types::JobId::new(name).unwrap());
        blame.add(&once);
        (0..3).for_each(|_| blame.add(&bad));
        let told = blamed(&config);
        assert!(told.len() == 1 && told[0].seen.contains("job bad"), "{told:?}");
        std::fs::write(dir.path().join("blamed.json"), "[").unwrap();
        assert_eq!(blamed(&config)[0].grade, Grade::Bad, "the agent would not start");
    }
}
