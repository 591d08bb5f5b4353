//! What is made to go wrong: beside which service, by which job, and how.

use std::process::Command;

use anyhow::Context;
use muxflow_agent::sys;

use super::Stage;
use crate::cmd::demo::report::Injected;
use crate::cmd::demo::scenario::{FAULT_AT, Offline, SIGTERM_AT};

/// An error waits this part of the day for a job beside the service that it is meant for.
const LATE: f64 = 0.03;

/// A job on the GPU of a service.
struct Victim {
    service: &'static str,
    index: usize,
    job: String,
    pid: u32,
}

impl Stage<'_> {
    /// The GPU of a service with one replica: there nobody can stand in for it.
    fn gpu_of(&self, service: &str) -> Option<usize> {
        let views = self.services().list();
        let view = views.iter().find(|view| view.declared.name == service)?;
        let gpu = &view.replicas.first()?.gpu;
        self.agent().gpus().iter().position(|uuid| uuid == gpu)
    }

    /// A job beside the first of these services; beside another one when it is late, for the first
    /// may have had its job evicted. Each service has one error at most: what came of the first would
    /// be counted for the second.
    fn victim(&self, services: [&'static str; 3], late: bool) -> Option<Victim> {
        let beside = |service: &'static str| {
            let index = self.gpu_of(service)?;
            let (job, pid) = self.jobs.on(self.agent().gpus().get(index)?)?;
            Some(Victim { service, index, job: job.to_owned(), pid: pid? })
        };
        let spared = |service: &&str| self.injected.iter().all(|one| one.beside != **service);
        let services = services.into_iter().filter(spared);
        services.take(if late { 3 } else { 1 }).find_map(beside)
    }

    /// A job touches memory that is not its own.
    pub(super) fn break_memory(&mut self, at_s: f64) -> anyhow::Result<bool> {
        let late = at_s >= (FAULT_AT + LATE) * self.phase.day_s;
        let Some(Victim { service, index, job, pid }) =
            self.victim(["vision", "speech", "ranking"], late)
        else {
            return Ok(self.phase.offline == Offline::None);
        };
        self.view.event(&format!("GPU {index}: {job} touches memory that is not its own (XID 31)"));
        self.inject("XID 31 of a job", service, at_s);
        self.fault(index, Some(pid), &["xid", "31"])?;
        Ok(true)
    }

    /// Somebody ends a job in the middle of its work.
    pub(super) fn terminate(&mut self, at_s: f64) -> anyhow::Result<bool> {
        let late = at_s >= (SIGTERM_AT + LATE) * self.phase.day_s;
        let Some(Victim { service, index, job, pid }) =
            self.victim(["speech", "ranking", "vision"], late)
        else {
            return Ok(self.phase.offline == Offline::None);
        };
        self.view.event(&format!("GPU {index}: SIGTERM to {job} in the middle of its work"));
        self.inject("SIGTERM to a job", service, at_s);
        // It may have left in this very moment.
        drop(sys::kill(pid, libc::SIGTERM));
        Ok(true)
    }

    fn inject(&mut self, what: &str, beside: &str, at_s: f64) {
        let (what, beside) = (what.to_owned(), beside.to_owned());
        self.injected.push(Injected { what, beside, at_s, failed_after: 0, out_ms: 0 });
    }

    pub(super) fn fault(&self, gpu: usize, pid: Option<u32>, words: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.phase.programs.fault);
        command.args(["--gpu", &gpu.to_string()]);
        if let Some(pid) = pid {
            command.args(["--pid", &pid.to_string()]);
        }
        let output = command.args(words).output().context("cannot run the fault injector")?;
        let says = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "the fault injector failed: {says}");
        Ok(())
    }
}
