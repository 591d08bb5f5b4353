//! Processes on a GPU that nobody told us of: outside MPS, they can share with nobody.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::supervisor::Supervisor;
use crate::process;

/// A process must have been there this long: a new client is not in the list of MPS at once.
const SETTLED: Duration = Duration::from_secs(3);

impl Supervisor {
    /// Brings the list of processes outside MPS up to date.
    pub(super) fn look_outside(&mut self) {
        let listed = self.shared.monitor.published().processes;
        let Some((_, on_gpu)) = listed else { return };
        let mut ours: BTreeSet<u32> = self.clients.iter().copied().collect();
        ours.extend(self.server.map(|server| server.pid));
        ours.insert(std::process::id());
        if let Some(offline) = &self.offline {
            ours.extend(offline.running.processes());
        }
        if let Some(running) = self.online.as_ref().and_then(|online| online.running.as_ref()) {
            ours.extend(running.processes());
        }
        let strange = |pid: &&u32| !ours.contains(pid) && !is_of_mps(**pid) && is_there(**pid);
        let now = Instant::now();
        let found: BTreeSet<u32> = on_gpu.iter().filter(strange).copied().collect();
        self.others.retain(|pid, _| found.contains(pid));
        for pid in found {
            self.others.entry(pid).or_insert(now);
        }
        let settled = self.others.iter().filter(|(_, since)| now.duration_since(**since) > SETTLED);
        let outside: Vec<u32> = settled.map(|(pid, _)| *pid).collect();
        let before = std::mem::replace(&mut self.shared.status().outside, outside.clone());
        if outside != before && !outside.is_empty() {
            self.alert(format!(
                "GPU {}: process {outside:?} runs outside MPS, so no job is placed here",
                self.uuid()
            ));
        }
    }
}

/// The server shows up as a process of its own.
fn is_of_mps(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().starts_with("nvidia-cuda-mps")
}

fn is_there(pid: u32) -> bool {
    process::stat(pid).is_some_and(|stat| stat.state != 'Z')
}
