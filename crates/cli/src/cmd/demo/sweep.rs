//! Leaves nothing behind: whatever a phase started and did not end is ended here, and every directory
//! of it is removed. Found by name: all of it carries the demo's own label.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use muxflow_agent::sys;

/// What belongs to one demo.
#[derive(Debug)]
pub(super) struct Traces {
    /// In arguments, variables and control groups of its processes.
    pub(super) label: String,
    /// To be removed.
    pub(super) dirs: Vec<PathBuf>,
}

/// Mount points of control groups, of both versions.
fn hierarchies() -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let at = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let kind = after.split(' ').next()?;
        matches!(kind, "cgroup" | "cgroup2")
            .then(|| before.split(' ').nth(4))
            .flatten()
            .map(PathBuf::from)
    };
    text.lines().filter_map(at).collect()
}

fn mentions(path: &Path, label: &[u8]) -> bool {
    let text = std::fs::read(path).unwrap_or_default();
    text.windows(label.len()).any(|window| window == label)
}

impl Traces {
    /// Processes that carry the label, this one and its parents aside.
    pub(super) fn processes(&self) -> Vec<u32> {
        let own = std::process::id();
        let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
        let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let ours = |pid: &u32| {
            let of = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
            let named = |name: &str| mentions(&of(name), self.label.as_bytes());
            *pid != own && (named("environ") || named("cmdline") || named("cgroup"))
        };
        pids.filter(ours).collect()
    }

    /// Ends what still runs and removes what is left. Says what could not be removed.
    pub(super) fn sweep(&self) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let left = self.processes();
            // Orphans come to this process, which is their reaper.
            while sys::reap_any().is_some() {}
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            for pid in left {
                // It may be gone already.
                drop(sys::kill(pid, libc::SIGKILL));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut kept: Vec<String> =
            self.processes().iter().map(|pid| format!("process {pid}")).collect();
        for at in hierarchies() {
            remove_groups(&at.join(&self.label));
        }
        for dir in &self.dirs {
            let gone = std::fs::remove_dir_all(dir).is_ok() || !dir.exists();
            if !gone {
                kept.push(dir.display().to_string());
            }
        }
        kept
    }
}

impl Drop for Traces {
    /// However the demo ends.
    fn drop(&mut self) {
        drop(self.sweep());
    }
}

/// Control groups are removed from the leaves on; files in them are not real.
fn remove_groups(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        remove_groups(&entry.path());
    }
    // A group whose last process has just ended may take a moment.
    for _ in 0..50 {
        match std::fs::remove_dir(dir) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_found_by_their_label_and_ended() {
        let dir = tempfile::tempdir().unwrap();
        let label = dir.path().file_name().unwrap().to_string_lossy().into_owned();
        let traces = Traces { label: label.clone(), dirs: vec![dir.path().to_owned()] };
        assert!(traces.processes().is_empty());
        let mut child =
            std::process::Command::new("sleep").arg("100").env("X", &label).spawn().unwrap();
        while traces.processes() != [child.id()] {
            std::thread::sleep(Duration::from_millis(5));
        }
        sys::kill(child.id(), libc::SIGKILL).unwrap();
        child.wait().unwrap();
        assert_eq!(traces.sweep(), Vec::<String>::new());
        assert!(!dir.path().exists());
    }
}
