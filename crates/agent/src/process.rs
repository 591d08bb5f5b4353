//! Which process is which: a process id alone is not a name, for ids are used again.
//!
//! A [`ProcessKey`] is an id with the start time that `/proc` tells, and it is only believed within
//! one boot. All that the agent keeps of processes over its own restart is kept as such keys.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::sys;

/// One process, told apart from a later one with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessKey {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// The part of `/proc/PID/stat` that the agent uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// One letter: `R`, `S`, `Z` and so on.
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Time spent in user and kernel mode, in ticks.
    pub cpu_ticks: u64,
    /// Threads that it has.
    pub threads: u64,
    /// When it started, in ticks since boot.
    pub start_ticks: u64,
}

/// Reads the text of `/proc/PID/stat`. The name may contain anything, so fields are counted from
/// its last closing bracket.
pub fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        cpu_ticks: number(11)?.saturating_add(number(12)?),
        threads: number(17)?,
        start_ticks: number(19)?,
    })
}

impl Stat {
    /// Whether the process has ended and only waits for its parent. One whose first thread has left
    /// while others run looks the same, but for their number.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

/// The stat of a process. Only what [`is_gone`] says of an error means that it is not there: without
/// a free file descriptor nobody can be looked at, and everybody lives.
pub fn stat(pid: u32) -> io::Result<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_stat(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether an error about a process means that there is no such process.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Whether a process with this id runs, whichever it is; also when that cannot be found out.
pub fn is_there(pid: u32) -> bool {
    stat(pid).map_or_else(|error| !is_gone(&error), |stat| !stat.has_ended())
}

impl ProcessKey {
    /// The key of a process that is there now and can be looked at.
    pub fn of(pid: u32) -> Option<Self> {
        Some(ProcessKey { pid, start_ticks: stat(pid).ok()?.start_ticks })
    }

    /// This process.
    pub fn own() -> Self {
        let pid = std::process::id();
        ProcessKey::of(pid).unwrap_or(ProcessKey { pid, start_ticks: 0 })
    }

    /// Whether this very process still runs. One that has ended and is not reaped does not; one that
    /// cannot be looked at does, for those who ask kill what is left of the dead.
    pub fn is_alive(self) -> bool {
        let same = |s: Stat| s.start_ticks == self.start_ticks && !s.has_ended();
        stat(self.pid).map_or_else(|error| !is_gone(&error), same)
    }

    /// A handle on this very process; fails when it is gone.
    pub fn open(self) -> io::Result<OwnedFd> {
        let handle = sys::pidfd_open(self.pid)?;
        // The handle is on whoever had the id at that moment: look afterwards, then it is certain.
        if self.is_alive() { Ok(handle) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    }
}

/// What a process calls itself: its id in its own namespace of ids, and which namespace that is.
pub fn own_name(pid: u32) -> Option<(u32, u64)> {
    use std::os::unix::fs::MetadataExt;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let innermost = ids.split_ascii_whitespace().last()?.parse().ok()?;
    Some((innermost, fs::metadata(format!("/proc/{pid}/ns/pid")).ok()?.ino()))
}

/// Names this boot: keys of another boot mean nothing.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// All processes below one, children before their own children.
pub fn descendants(root: u32) -> Vec<u32> {
    below(root).unwrap_or_default()
}

/// A process and all below it; nobody when it is gone, for its id may be another's by now.
pub(crate) fn with_below(root: ProcessKey) -> io::Result<Vec<u32>> {
    if !root.is_alive() {
        return Ok(Vec::new());
    }
    let mut all = below(root.pid)?;
    all.insert(0, root.pid);
    Ok(all)
}

/// Processes that were started with this variable set so, whoever their parents are.
pub(crate) fn carrying(variable: &str, value: &std::ffi::OsStr) -> io::Result<Vec<u32>> {
    use std::os::unix::ffi::OsStrExt;
    let wanted = [variable.as_bytes(), b"=", value.as_bytes()].concat();
    let mut found = Vec::new();
    for pid in all()? {
        match fs::read(format!("/proc/{pid}/environ")) {
            Ok(environment) => {
                if environment.split(|byte| *byte == 0).any(|entry| entry == wanted) {
                    found.push(pid);
                }
            }
            // Another user's: none of ours.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied || is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Every process there is.
fn all() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// As [`descendants`], but fails when they cannot be looked at.
pub(crate) fn below(root: u32) -> io::Result<Vec<u32>> {
    let mut parents: Vec<(u32, u32)> = Vec::new();
    for pid in all()? {
        match stat(pid) {
            Ok(stat) => parents.push((pid, stat.parent)),
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        let children = parents.iter().filter(|(pid, p)| *p == parent && !found.contains(pid));
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        found.extend(children);
        next += 1;
    }
    found.remove(0);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_brackets_and_spaces_do_not_confuse() {
        let text = "42 (a) b) c) S 7 42 42 0 -1 4194560 1 0 0 0 11 22 0 0 20 0 1 0 9876 1 2";
        let stat = parse_stat(text).unwrap();
        let expected = Stat { state: 'S', parent: 7, cpu_ticks: 33, threads: 1, start_ticks: 9876 };
        assert_eq!(stat, expected);
        assert!(!stat.has_ended() && Stat { state: 'Z', ..stat }.has_ended());
        let first_left = Stat { state: 'Z', threads: 3, ..stat };
        assert!(!first_left.has_ended(), "its other threads run");
        assert_eq!(parse_stat("42 (x"), None);
        assert_eq!(parse_stat("42 (x) S 1 2"), None);
    }

    #[test]
    fn without_descriptors_everybody_lives() {
        const NAME: &str = "process::tests::without_descriptors_everybody_lives";
        if std::env::var_os("MUXFLOW_TEST_WITHOUT_DESCRIPTORS").is_none() {
            // In a process of its own: the limit would hold for the tests beside it.
            let own = std::env::current_exe().unwrap();
            let mut again = std::process::Command::new(own);
            again.args(["--exact", NAME]).env("MUXFLOW_TEST_WITHOUT_DESCRIPTORS", "1");
            let done = again.output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let key = ProcessKey::of(child.id()).unwrap();
        let mut files = Vec::new();
        crate::descriptors::lower(64).unwrap();
        while let Ok(file) = fs::File::open("/dev/null") {
            files.push(file);
        }
        let (seen, alive, there) = (stat(key.pid), key.is_alive(), is_there(key.pid));
        drop(files);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(seen.unwrap_err().raw_os_error(), Some(libc::EMFILE));
        assert!(alive && there, "nobody could look");
        assert!(!key.is_alive() && !is_there(key.pid));
    }

    #[test]
    fn a_key_names_one_process_only() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let key = ProcessKey::of(child.id()).unwrap();
        assert!(key.is_alive());
        assert!(key.open().is_ok());
        let later = ProcessKey { start_ticks: key.start_ticks + 1, ..key };
        assert!(!later.is_alive(), "same id, another process");
        assert!(later.open().is_err());
        assert!(descendants(std::process::id()).contains(&child.id()));
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while key.is_alive() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert!(!key.is_alive(), "ended and not yet reaped is not alive");
        child.wait().unwrap();
        assert!(!key.is_alive());
    }
}
