//! Control groups, version 1, 2 or both at once: a group per workload with its processors, its
//! memory limit, and a way to kill all of it.
//!
//! What there is gets found at run time from the mount table. Each controller is taken from
//! version 2 where it offers it, else from version 1, else it is missing and the caller is told.
//! Groups live under `muxflow/` at the top of each hierarchy, not under the agent's own group: they
//! must outlive the agent and the unit or pod that it runs in.

mod look;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{AgentError, Result, file};
use crate::process::{self, ProcessKey};
use crate::sys;

/// Hierarchies that are mounted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Mounts {
    v2: Option<PathBuf>,
    /// Version 1: controller and where it is mounted.
    v1: Vec<(String, PathBuf)>,
    /// Version 1: where controllers are mounted that are not used here.
    unused: Vec<PathBuf>,
}

/// Reads the text of `/proc/self/mountinfo`.
fn parse_mounts(mountinfo: &str) -> Mounts {
    let mut mounts = Mounts::default();
    for line in mountinfo.lines() {
        let Some((front, back)) = line.split_once(" - ") else { continue };
        let Some(at) = front.split_ascii_whitespace().nth(4) else { continue };
        let at = PathBuf::from(at.replace("\\040", " "));
        let mut back = back.split_ascii_whitespace();
        match back.next() {
            Some("cgroup2") if mounts.v2.is_none() => mounts.v2 = Some(at),
            Some("cgroup") => {
                let options = back.nth(1).unwrap_or_default();
                let known = mounts.v1.len();
                for name in ["cpuset", "memory", "freezer"] {
                    if options.split(',').any(|option| option == name) {
                        mounts.v1.push((name.to_owned(), at.clone()));
                    }
                }
                if mounts.v1.len() == known {
                    mounts.unused.push(at);
                }
            }
            _ => {}
        }
    }
    mounts
}

/// Where one controller is to be had.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Controller {
    V2(PathBuf),
    V1(PathBuf),
    Missing,
}

/// What a group is held to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Processors, in the kernel's list form such as `0-3,8`; none means all.
    pub cpus: Option<String>,
    /// Memory in bytes; none means no limit.
    pub memory_bytes: Option<u64>,
}

/// The control groups of this machine.
#[derive(Debug, Clone)]
pub struct Cgroups {
    parent: String,
    tracking: Controller,
    memory: Controller,
    cpuset: Controller,
    /// Hierarchies of version 1 from which nothing is wanted but to be out of the agent's own group: a
    /// kubelet, runc and systemd end everybody whom they find in the group of what they end, in any of
    /// them.
    unused: Vec<PathBuf>,
}

/// Processors that a list may name, and numbers that it may hold, those that come again counted again.
const MOST_CPUS: usize = 65_536;

/// Reads a list such as `0-3,8` into processor numbers, each once. The list may come from anybody:
/// what it takes to read one does not grow with how often it repeats itself.
pub fn parse_cpus(list: &str) -> Option<Vec<usize>> {
    let (mut cpus, mut named) = (BTreeSet::new(), 0);
    for part in list.trim().split(',').filter(|p| !p.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (from.trim().parse::<usize>().ok()?, to.trim().parse::<usize>().ok()?);
        if to < from || to >= MOST_CPUS {
            return None;
        }
        named += to - from + 1;
        if named > MOST_CPUS {
            return None;
        }
        cpus.extend(from..=to);
    }
    (!cpus.is_empty()).then(|| cpus.into_iter().collect())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(file("write", path))
}

impl Cgroups {
    /// Finds what this machine has. `parent` is the directory for all groups, such as `muxflow`.
    pub fn detect(parent: &str) -> Self {
        let mounts = parse_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default());
        Self::from_mounts(&mounts, parent)
    }

    fn from_mounts(mounts: &Mounts, parent: &str) -> Self {
        let v1 = |name: &str| {
            let found = mounts.v1.iter().find(|(controller, _)| controller == name);
            found.map_or(Controller::Missing, |(_, at)| Controller::V1(at.clone()))
        };
        let mut groups = Cgroups {
            parent: parent.to_owned(),
            tracking: v1("freezer"),
            memory: v1("memory"),
            cpuset: v1("cpuset"),
            unused: mounts.unused.clone(),
        };
        if let Some(root) = &mounts.v2 {
            groups.tracking = Controller::V2(root.clone());
            let offered = enable(root, parent);
            if offered.iter().any(|name| name == "memory") {
                groups.memory = Controller::V2(root.clone());
            }
            if offered.iter().any(|name| name == "cpuset") {
                groups.cpuset = Controller::V2(root.clone());
            }
        }
        for controller in [&mut groups.tracking, &mut groups.memory, &mut groups.cpuset] {
            if let Controller::V1(at) | Controller::V2(at) = controller
                && prepare_parent(&at.join(parent)).is_err()
            {
                *controller = Controller::Missing;
            }
        }
        // Version 2 may have taken the place of a hierarchy of version 1 that is mounted all the same.
        let used = [&groups.tracking, &groups.memory, &groups.cpuset].map(|controller| {
            let (Controller::V1(at) | Controller::V2(at)) = controller else { return None };
            Some(at.clone())
        });
        let known = mounts.v1.iter().map(|(_, at)| at);
        groups.unused.extend(known.filter(|at| !used.contains(&Some((*at).clone()))).cloned());
        // Where none may be made, the process stays in the agent's.
        groups.unused.retain(|at| prepare_parent(&at.join(parent)).is_ok());
        groups
    }

    /// Groups that do nothing: for machines where none may be made.
    pub fn none() -> Self {
        let missing = Controller::Missing;
        Cgroups {
            parent: String::new(),
            tracking: missing.clone(),
            memory: missing.clone(),
            cpuset: missing,
            unused: Vec::new(),
        }
    }

    /// What this machine lacks, each with what that means, in words for a log or for `doctor`.
    pub fn shortcomings(&self) -> Vec<&'static str> {
        let mut lacking = Vec::new();
        if self.tracking == Controller::Missing {
            lacking.push(
                "no cgroup to track processes: a workload is killed by walking its descendants, and a process that detaches itself in that moment can escape",
            );
        }
        if self.memory == Controller::Missing {
            lacking.push(
                "no memory cgroup: memory limits of workloads are not enforced, only host-wide eviction protects",
            );
        }
        if self.cpuset == Controller::Missing {
            lacking.push(
                "no cpuset cgroup: offline work is kept to its processors by affinity, which a process can change",
            );
        }
        lacking
    }

    /// One line that says where each controller comes from.
    pub fn describe(&self) -> String {
        let word = |controller: &Controller| match controller {
            Controller::V2(_) => "v2",
            Controller::V1(_) => "v1",
            Controller::Missing => "missing",
        };
        format!(
            "tracking {}, memory {}, cpuset {}",
            word(&self.tracking),
            word(&self.memory),
            word(&self.cpuset)
        )
    }

    /// Removes the groups that nobody is in, and the directory of all groups when it is empty then.
    /// The kernel refuses to remove a group with a process in it, so this can be done at any time.
    pub fn remove_empty(&self) {
        let mut places: Vec<PathBuf> = [&self.tracking, &self.memory, &self.cpuset]
            .into_iter()
            .filter_map(|controller| match controller {
                Controller::V2(at) | Controller::V1(at) => Some(at.join(&self.parent)),
                Controller::Missing => None,
            })
            .chain(self.unused.iter().map(|at| at.join(&self.parent)))
            .filter(|_| !self.parent.is_empty())
            .collect();
        places.dedup();
        for place in places {
            let groups = fs::read_dir(&place).into_iter().flatten().flatten();
            for group in groups.filter(|entry| entry.path().is_dir()) {
                // Those that are in use stay.
                drop(fs::remove_dir(group.path()));
            }
            drop(fs::remove_dir(&place));
        }
    }

    /// Makes the group of a workload, or takes the one that is there, and sets its limits.
    pub fn create(&self, name: &str, limits: &Limits) -> Result<Group> {
        let mut group = Group { dirs: Vec::new(), kill_file: None, affinity: None };
        let place = |at: &Path| at.join(&self.parent).join(encode(name));
        match &self.tracking {
            Controller::V2(at) => {
                let dir = group.add(place(at))?;
                group.kill_file = Some(dir.join("cgroup.kill")).filter(|f| f.exists());
            }
            Controller::V1(at) => drop(group.add(place(at))?),
            Controller::Missing => {}
        }
        match &self.memory {
            Controller::V2(at) => {
                let dir = group.add(place(at))?;
                let limit = limits.memory_bytes.map_or("max".to_owned(), |b| b.to_string());
                write(&dir.join("memory.max"), &limit)?;
            }
            Controller::V1(at) => {
                let dir = group.add(place(at))?;
                let limit = limits.memory_bytes.map_or("-1".to_owned(), |b| b.to_string());
                write(&dir.join("memory.limit_in_bytes"), &limit)?;
            }
            Controller::Missing => {}
        }
        match (&self.cpuset, &limits.cpus) {
            (Controller::V2(at), Some(cpus)) => {
                let dir = group.add(place(at))?;
                write(&dir.join("cpuset.cpus"), cpus)?;
            }
            (Controller::V1(at), cpus) => {
                let dir = group.add(place(at))?;
                inherit_cpuset(&dir)?;
                if let Some(cpus) = cpus {
                    write(&dir.join("cpuset.cpus"), cpus)?;
                }
            }
            (Controller::Missing, Some(cpus)) => group.affinity = parse_cpus(cpus),
            (_, None) => {}
        }
        for at in &self.unused {
            group.add(place(at))?;
        }
        Ok(group)
    }
}

/// Turns on what version 2 offers below its top and below our parent; says what then is there.
fn enable(root: &Path, parent: &str) -> Vec<String> {
    let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let below = root.join(parent);
    let mut enabled = Vec::new();
    for name in offered.split_ascii_whitespace().filter(|n| ["memory", "cpuset"].contains(n)) {
        let on = |dir: &Path| fs::write(dir.join("cgroup.subtree_control"), format!("+{name}"));
        let done = on(root).and_then(|()| fs::create_dir_all(&below)).and_then(|()| on(&below));
        match done {
            Ok(()) => enabled.push(name.to_owned()),
            Err(error) => {
                tracing::warn!(controller = name, error = %error, "cannot turn on a controller of cgroup v2");
            }
        }
    }
    enabled
}

fn prepare_parent(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(file("create", dir))?;
    if dir.join("cpuset.mems").exists() { inherit_cpuset(dir) } else { Ok(()) }
}

/// Version 1 refuses processes in a cpuset without memory nodes or processors.
fn inherit_cpuset(dir: &Path) -> Result<()> {
    for name in ["cpuset.mems", "cpuset.cpus"] {
        let own = dir.join(name);
        let present = fs::read_to_string(&own).unwrap_or_default();
        if !dir.join("cpuset.memory_migrate").exists() || !present.trim().is_empty() {
            continue;
        }
        let above = dir.parent().map(|up| up.join(name)).unwrap_or_default();
        let given = fs::read_to_string(&above).map_err(file("read", &above))?;
        write(&own, given.trim())?;
    }
    Ok(())
}

/// A name that is safe as one path component, and different for different names.
pub fn encode(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' || (byte == b'.' && !text.is_empty()) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("_{byte:02x}"));
        }
    }
    text
}

/// The groups of one workload, one directory per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    dirs: Vec<PathBuf>,
    kill_file: Option<PathBuf>,
    affinity: Option<Vec<usize>>,
}

impl Group {
    fn add(&mut self, dir: PathBuf) -> Result<PathBuf> {
        fs::create_dir_all(&dir).map_err(file("create", &dir))?;
        if !self.dirs.contains(&dir) {
            self.dirs.push(dir.clone());
        }
        Ok(dir)
    }

    /// Descriptors through which a child enters the group, and the affinity it sets where no cpuset
    /// does.
    pub fn entrance(&self) -> Result<(Vec<OwnedFd>, Option<Vec<usize>>)> {
        let open = |dir: &PathBuf| {
            let path = dir.join("cgroup.procs");
            let opened = fs::OpenOptions::new().write(true).open(&path);
            opened.map(OwnedFd::from).map_err(file("open", &path))
        };
        let files = self.dirs.iter().map(open).collect::<Result<_>>()?;
        Ok((files, self.affinity.clone()))
    }

    /// Whether the kernel tracks the processes of this group.
    pub fn tracks(&self) -> bool {
        !self.dirs.is_empty()
    }

    /// The processes in it.
    pub fn processes(&self) -> Vec<u32> {
        self.listed().unwrap_or_default()
    }

    /// The processes in it; a group that is gone has none.
    fn listed(&self) -> io::Result<Vec<u32>> {
        let mut all: Vec<u32> = Vec::new();
        for dir in &self.dirs {
            match fs::read_to_string(dir.join("cgroup.procs")) {
                Ok(text) => all.extend(text.lines().filter_map(|l| l.parse::<u32>().ok())),
                Err(error) if process::is_gone(&error) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(error) => return Err(error),
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Kills everything in it and waits until nothing is left; `false` when something is. Where the
    /// kernel does not track its processes, `found` says again and again which they are.
    pub fn kill_all(&self, found: impl Fn() -> io::Result<Vec<u32>>, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        // Without a group, those whose parent has died can no longer be found: remember them.
        let mut seen: Vec<ProcessKey> = Vec::new();
        loop {
            let members = if self.tracks() { self.listed() } else { found() };
            let listed = members.as_deref().unwrap_or_default();
            seen.extend(listed.iter().filter_map(|&pid| ProcessKey::of(pid)));
            seen.retain(|key| key.is_alive());
            seen.sort_unstable();
            seen.dedup();
            // Whom nobody can list is not gone.
            if seen.is_empty() && members.is_ok_and(|all| !all.into_iter().any(process::is_there)) {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            if let Some(path) = &self.kill_file
                && let Err(error) = fs::write(path, "1")
            {
                tracing::debug!(error = %error, "cgroup.kill refused, killing one by one");
            }
            for key in &seen {
                drop(sys::kill(key.pid, libc::SIGKILL));
            }
            sleep(Duration::from_millis(2));
        }
    }

    /// How much memory it uses, where the kernel counts it.
    pub fn memory_bytes(&self) -> Option<u64> {
        let read = |name: &str| {
            let mut dirs = self.dirs.iter();
            dirs.find_map(|dir| fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok())
        };
        read("memory.current").or_else(|| read("memory.usage_in_bytes"))
    }

    /// How often the kernel killed a process of it for want of memory.
    pub fn oom_kills(&self) -> Option<u64> {
        let read =
            |name: &str| self.dirs.iter().find_map(|dir| fs::read_to_string(dir.join(name)).ok());
        let text = read("memory.events").or_else(|| read("memory.oom_control"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
        line.trim().parse().ok()
    }

    /// Removes the group, which must be empty.
    pub fn remove(&self) -> Result<()> {
        for dir in &self.dirs {
            let deadline = Instant::now() + Duration::from_secs(1);
            loop {
                match fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    // The last process has ended and the kernel still holds it for a moment.
                    Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(2)),
                    Err(source) => {
                        let path = dir.clone();
                        return Err(AgentError::File { operation: "remove", path, source });
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
