//! Processes of other id namespaces: a container's processes name themselves by ids that mean nothing
//! here, yet the agent must see when one of them dies.
//!
//! Each is looked for once among the processes that this namespace sees, by its namespace, its id there
//! and its start; from then on its id here tells whether it lives. One that was never found may live
//! somewhere that cannot be seen from here, and counts as living: memory stays charged rather than being
//! given out twice.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use muxflow_abi::control::Owner;

use crate::process::{self, ProcessKey};

/// How long a process that was not found is not looked for again: a search reads all of `/proc`.
const SEARCH_EVERY: Duration = Duration::from_millis(500);

/// What is known of processes of other namespaces.
#[derive(Debug, Default)]
pub(crate) struct Foreign {
    known: Mutex<BTreeMap<(u64, u32, u32), Known>>,
}

#[derive(Debug, Clone, Copy)]
enum Known {
    Here(ProcessKey),
    NotFound(Instant),
}

impl Foreign {
    /// Whether a process of another namespace lives, as far as can be known.
    pub(crate) fn is_alive(&self, owner: Owner, namespace: u64) -> bool {
        let name = (namespace, owner.pid, owner.start_ticks);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known().get(&name).copied();
        match before {
            Some(Known::Here(key)) => return key.is_alive(),
            Some(Known::NotFound(at)) if at.elapsed() < SEARCH_EVERY => return true,
            _ => {}
        }
        // Others are not kept waiting by the search.
        let found = find(owner, namespace).map_or(Known::NotFound(Instant::now()), Known::Here);
        let mut known = known();
        // A job has a thousand processes at most; more than that are names of the long dead.
        if known.len() >= 4096 {
            known.clear();
        }
        known.insert(name, found);
        true
    }

    /// The id here of a process that [`Self::is_alive`] found.
    pub(crate) fn pid_here(&self, owner: Owner, namespace: u64) -> Option<u32> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known.get(&(namespace, owner.pid, owner.start_ticks)) {
            Some(Known::Here(key)) => Some(key.pid),
            _ => None,
        }
    }
}

/// The process here that has this id in that namespace.
fn find(owner: Owner, namespace: u64) -> Option<ProcessKey> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        if namespace_of(pid) != Some(namespace) || innermost_id(pid) != Some(owner.pid) {
            return None;
        }
        let start_ticks = process::stat(pid).ok()?.start_ticks;
        let same = start_ticks & u64::from(u32::MAX) == u64::from(owner.start_ticks);
        same.then_some(ProcessKey { pid, start_ticks })
    })
}

/// The inode of a process's id namespace, where we may know it.
fn namespace_of(pid: u32) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|meta| meta.ino())
}

/// The id that a process has in its own namespace.
fn innermost_id(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// The inode of this process's own id namespace; zero when it cannot be known.
pub(crate) fn own() -> u64 {
    static INODE: OnceLock<u64> = OnceLock::new();
    *INODE.get_or_init(|| namespace_of(std::process::id()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_was_seen_is_known_to_die() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let start = process::stat(child.id()).unwrap().start_ticks & u64::from(u32::MAX);
        let owner = Owner { pid: child.id(), start_ticks: u32::try_from(start).unwrap() };
        let foreign = Foreign::default();
        assert!(foreign.is_alive(owner, own()), "found among all processes");
        assert!(foreign.is_alive(owner, own()), "and alive by its id here");
        let other = Owner { start_ticks: owner.start_ticks ^ 1, ..owner };
        assert!(foreign.is_alive(owner, own() + 1), "a namespace that cannot be seen from here");
        assert_eq!(foreign.pid_here(owner, own()), Some(child.id()));
        assert_eq!(foreign.pid_here(owner, own() + 1), None, "that number is somebody else's");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!foreign.is_alive(owner, own()));
        assert!(foreign.is_alive(other, own()), "never found: it may be anywhere");
    }
}
