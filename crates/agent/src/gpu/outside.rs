//! Processes on a GPU that nobody holds back: those of a job without the interposer, and those that
//! nobody told us of, which outside MPS can share with nobody.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::Fault;

use super::culprit::Suspicion;
use super::supervisor::Supervisor;
use super::{ActiveJob, StopReason};
use crate::process;

/// A process must have been there this long: a new client is not in the list of MPS at once.
const SETTLED: Duration = Duration::from_secs(3);

impl Supervisor {
    /// A GPU process of the job without the interposer cannot be held back.
    pub(super) fn look_for_strangers(&mut self) {
        if !self.params.defences.ungated_stop {
            return;
        }
        let Some(active) = self.shared.job() else { return };
        if self.guest.is_some() {
            return self.look_for_strange_guests(&active);
        }
        let Some(offline) = &mut self.offline else { return };
        if active.block.is_torn() && offline.reason.is_none() {
            let (job, pid) = (offline.job.clone(), offline.running.main().pid);
            offline.suspicion = Suspicion::Named;
            self.alert(format!(
                "the control block of job {job} was cut short: it can no longer be held back and is stopped"
            ));
            return self.see(Fault::UngatedProcess, Some(pid));
        }
        let on_gpu = self.shared.monitor.published().processes.map(|(_, pids)| pids);
        let on_gpu = on_gpu.unwrap_or_default();
        let (registered, members) = (active.block.registered(), offline.running.processes());
        let stranger = |pid: &&u32| {
            members.contains(pid)
                && !registered.contains(pid)
                && (on_gpu.contains(pid) || self.mps.clients.contains(pid))
        };
        let now = Instant::now();
        let found: BTreeSet<u32> =
            on_gpu.iter().chain(&self.mps.clients).filter(stranger).copied().collect();
        offline.strangers.retain(|pid, _| found.contains(pid));
        for pid in found {
            offline.strangers.entry(pid).or_insert(now);
        }
        let overdue = |since: &Instant| now.duration_since(*since) >= self.params.register_within;
        let worst = offline.strangers.iter().find(|(_, since)| overdue(since));
        if let Some((&pid, _)) = worst
            && offline.reason.is_none()
        {
            let job = offline.job.clone();
            offline.suspicion = Suspicion::Named;
            self.alert(format!(
                "process {pid} of job {job} uses the GPU without the interposer (cleared environment, static program or another libc): the job is stopped"
            ));
            self.see(Fault::UngatedProcess, Some(pid));
        }
    }

    /// Gives back what dead processes held. Those of one namespace do it for each other when they need
    /// it; a container that was started again cannot see the dead of the one before.
    pub(super) fn reclaim(&self) {
        if let Some(active) = self.shared.job() {
            active.block.reclaim();
        }
    }

    /// As above for a guest, whose processes only their control group tells from those of others.
    fn look_for_strange_guests(&mut self, active: &ActiveJob) {
        let on_gpu = self.shared.monitor.published().processes.map(|(_, pids)| pids);
        let on_gpu = on_gpu.unwrap_or_default();
        let Some(guest) = &mut self.guest else { return };
        if guest.stop.is_some() {
            return;
        }
        let named = active.block.registered_names();
        let strange = |pid: &&u32| {
            is_of_pod(**pid, active.job.as_str())
                && process::own_name(**pid).is_some_and(|name| !named.contains(&name))
        };
        let all: BTreeSet<u32> = on_gpu.into_iter().chain(self.mps.clients.clone()).collect();
        let found: BTreeSet<u32> = all.iter().filter(strange).copied().collect();
        guest.strangers.retain(|pid, _| found.contains(pid));
        let now = Instant::now();
        for pid in found {
            guest.strangers.entry(pid).or_insert(now);
        }
        let overdue = |since: &Instant| now.duration_since(*since) >= self.params.register_within;
        let worst = guest.strangers.iter().find(|(_, since)| overdue(since)).map(|(pid, _)| *pid);
        let job = &active.job;
        let why = match worst {
            _ if active.block.is_torn() => {
                format!("the control block of guest {job} was cut short: it must leave")
            }
            Some(pid) => format!(
                "process {pid} of guest {job} uses the GPU without the interposer: the guest must leave"
            ),
            None => return,
        };
        self.alert(why);
        self.stop_guest(None, &StopReason::Fault(Fault::UngatedProcess));
    }

    /// Brings the list of processes outside MPS up to date.
    pub(super) fn look_outside(&mut self) {
        let listed = self.shared.monitor.published().processes;
        let Some((_, on_gpu)) = listed else { return };
        let mut ours: BTreeSet<u32> = self.mps.clients.iter().copied().collect();
        ours.extend(self.mps.server.map(|server| server.pid));
        ours.insert(std::process::id());
        if let Some(offline) = &self.offline {
            ours.extend(offline.running.processes());
        }
        if let Some(running) = self.online.as_ref().and_then(|online| online.running.as_ref()) {
            ours.extend(running.processes());
        }
        // What a guest does without the interposer is looked at above.
        let guest = self.guest.as_ref().map(|guest| guest.job.clone());
        let is_guest = |pid: u32| guest.as_ref().is_some_and(|job| is_of_pod(pid, job.as_str()));
        let strange = |pid: &&u32| {
            !ours.contains(pid) && !is_of_mps(**pid) && process::is_there(**pid) && !is_guest(**pid)
        };
        let now = Instant::now();
        let found: BTreeSet<u32> = on_gpu.iter().filter(strange).copied().collect();
        self.others.retain(|pid, _| found.contains(pid));
        for pid in found {
            self.others.entry(pid).or_insert(now);
        }
        let settled = self.others.iter().filter(|(_, since)| now.duration_since(**since) > SETTLED);
        let outside: Vec<u32> = settled.map(|(pid, _)| *pid).collect();
        let before = std::mem::replace(&mut self.shared.status().outside, outside.clone());
        if outside.is_empty() {
            return;
        }
        // Nothing is placed beside it; what was there before it came leaves.
        let pids: Vec<String> = outside.iter().map(u32::to_string).collect();
        let cause = format!("process {} runs outside MPS", pids.join(", "));
        self.stop_guest(None, &StopReason::Health(cause.clone()));
        if self.offline.as_ref().is_some_and(|offline| offline.reason.is_none()) {
            self.begin_stop(StopReason::Health(cause));
        }
        if outside != before {
            self.alert(format!(
                "GPU {}: process {outside:?} runs outside MPS, so no job is placed here{}",
                self.uuid(),
                self.way_in()
            ));
        }
    }
}

impl Supervisor {
    /// How a process comes under MPS.
    fn way_in(&self) -> String {
        let Some(daemon) = &self.daemon else { return String::new() };
        let dir = daemon.spec().pipe_dir();
        format!(
            "; restart it with CUDA_MPS_PIPE_DIRECTORY={}, or declare it as a service",
            dir.display()
        )
    }
}

/// A guest is a pod, and its name is in the path of its control groups.
pub(super) fn is_of_pod(pid: u32, job: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| names_pod(&text, job))
}

fn names_pod(cgroup: &str, job: &str) -> bool {
    // Under systemd a dash in a name becomes another sign.
    let written = [format!("pod{job}"), format!("pod{}", job.replace('-', "_"))];
    written.iter().any(|name| cgroup.contains(name.as_str()))
}

/// The server shows up as a process of its own.
fn is_of_mps(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().starts_with("nvidia-cuda-mps")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_told_from_others_by_its_control_group() {
        let uid = "2d9a6c1e-0f2b-4c3d-9e8f-001122334455";
        for group in [
            "0::/kubepods/burstable/pod2d9a6c1e-0f2b-4c3d-9e8f-001122334455/abc",
            "0::/kubepods.slice/kubepods-burstable-pod2d9a6c1e_0f2b_4c3d_9e8f_001122334455.slice/c",
        ] {
            assert!(names_pod(group, uid), "{group}");
            assert!(!names_pod(group, "2d9a6c1e-0f2b-4c3d-9e8f-001122334456"));
        }
        assert!(!names_pod("0::/system.slice/other.service", uid));
    }
}
