//! Starting and stopping the workloads of one GPU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muxflow_abi::control::Settings;
use muxflow_types::{Bytes, JobId, ServiceId, SmCount, SmShare};

use super::comebacks::{Comebacks, SETTLED_AFTER_S, back_off};
use super::culprit::{Recent, Suspicion};
use super::supervisor::{Offline, Online, Supervisor};
use super::{ActiveJob, Event, OfflineSpec, OnlineSpec, StopReason};
use crate::cgroup::encode;
use crate::control_block::ControlBlock;
use crate::environment::{self, GpuSide, Restraint};
use crate::error::{AgentError, Result};
use crate::installed;
use crate::launch::{self, Exit, Kind, Launch};
use crate::mps::daemon::MpsDaemon;
use crate::process::ProcessKey;
use crate::runner::Running;

/// Beyond the limits of its steps, a stop gets this before it is killed.
pub(super) const STOP_MARGIN: Duration = Duration::from_secs(3);

/// The driver counts what it needs for itself against its cap; the interposer holds the job to its
/// quota before that, so the cap is only for what slips past the interposer.
const DRIVER_SLACK: Bytes = Bytes(512 << 20);

/// The variable with which a client names its static partition.
const SM_PARTITION: &str = "CUDA_MPS_SM_PARTITION";

/// A service that ended so often without having settled is not placed beside.
const AGAIN: u32 = 2;

impl Online {
    /// Why no job may be placed beside it now. A service that is not there holds no memory: what a
    /// job would be lent then, the service would lack when it comes.
    fn unrest(&self, now_s: u64) -> Option<String> {
        let Some(running) = &self.running else {
            return Some(format!("its service {} does not run", self.service));
        };
        if running.launch.outside_mps {
            let service = &self.service;
            return Some(format!(
                "service {service} was started while MPS did not run and shares with nobody: end its process, and it is started again under MPS"
            ));
        }
        unsettled(self.failures, now_s.saturating_sub(running.run.started_at_s)).then(|| {
            let (service, times) = (&self.service, self.failures);
            format!("service {service} ended {times} times and has not run for {SETTLED_AFTER_S} s since")
        })
    }
}

fn unsettled(failures: u32, ran_s: u64) -> bool {
    failures >= AGAIN && ran_s <= SETTLED_AFTER_S
}

/// The sixteen bytes of `GPU-xxxxxxxx-xxxx-…`; all zero, which means any device, when it is not one.
pub fn uuid_bytes(uuid: &str) -> [u8; 16] {
    let digits: Vec<u8> = uuid
        .strip_prefix("GPU-")
        .unwrap_or_default()
        .chars()
        .filter(|c| *c != '-')
        .filter_map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect();
    let mut bytes = [0; 16];
    if digits.len() == 32 {
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            *byte = pair.iter().fold(0, |sum, digit| sum << 4 | digit);
        }
    }
    bytes
}

impl Supervisor {
    fn refuse<T>(&self, workload: &str, reason: impl Into<String>) -> Result<T> {
        Err(AgentError::Start { workload: workload.to_owned(), reason: reason.into() })
    }

    /// Why no job may be placed here now.
    pub(super) fn unrest(&self) -> Option<String> {
        if let Some(daemon) = self.daemon.as_ref().filter(|_| !self.mps_runs()) {
            let program = daemon.spec().program.display();
            return Some(format!(
                "MPS does not run ({program}): without it nothing holds a job to its share"
            ));
        }
        let online = self.online.as_ref().filter(|_| self.params.defences.eviction)?;
        online.unrest(launch::now_s())
    }

    fn base_environment(&self) -> BTreeMap<String, String> {
        let list = self.params.pass_env.iter().map(String::as_str);
        environment::passed(std::env::vars(), list)
    }

    /// The job's part of the SMs where they are cut for good.
    fn partition_share(&self) -> Option<SmShare> {
        let both = self.daemon.as_ref().and_then(MpsDaemon::partitions)?;
        // The probe saw the service's part only.
        let online = self.shared.sms.load(Ordering::Relaxed);
        let sms = online.saturating_mul(both.chunks) / (both.chunks - both.offline_chunks).max(1);
        SmShare::new(SmCount(both.offline_sms(sms)), SmCount(sms)).ok()
    }

    fn mps_dirs(&self) -> Option<(std::path::PathBuf, std::path::PathBuf)> {
        self.daemon.as_ref().map(|daemon| (daemon.spec().pipe_dir(), daemon.spec().log_dir()))
    }

    pub(super) fn start_online(&mut self, spec: &OnlineSpec) {
        if let Some(online) = &mut self.online {
            tracing::info!(service = %online.service, "a service is on this GPU already");
            if online.service == spec.service {
                // One that was found running is known from its launch alone.
                online.latency_file.clone_from(&spec.latency_file);
            }
            return;
        }
        let name = spec.service.as_str();
        let group = match self.node.runner.group(Kind::Online, name, &spec.limits) {
            Ok(group) => group,
            Err(error) => {
                self.shared.status().claimed = None;
                return self.alert(format!("service {name} cannot start: {error}"));
            }
        };
        let dirs = self.mps_dirs();
        let gpu = GpuSide {
            uuid: self.uuid(),
            mps_pipe_dir: dirs.as_ref().map(|(pipe, _)| pipe.as_path()),
            mps_log_dir: dirs.as_ref().map(|(_, log)| log.as_path()),
        };
        let launch = Launch {
            name: name.to_owned(),
            kind: Kind::Online,
            gpu: self.uuid().to_owned(),
            argv: spec.argv.clone(),
            env: environment::online(self.base_environment(), &spec.env, gpu),
            cwd: spec.cwd.clone(),
            user: spec.user,
            limits: spec.limits.clone(),
            group,
            logs: self.params.logs,
            control_dir: None,
            mps: None,
            stop: crate::stop::StopLimits::default(),
            online_grace_ms: spec.grace_ms,
            agent: ProcessKey::own(),
            fingerprint: 0,
            outside_mps: false,
        };
        self.online = Some(Online {
            service: spec.service.clone(),
            launch,
            running: None,
            latency_file: spec.latency_file.clone(),
            failures: 0,
            not_before: None,
            comebacks: Comebacks::default(),
            started_at_s: 0,
        });
        self.restart_online_when_due();
    }

    /// Starts the service, when it is wanted, not there, and its wait is over.
    pub(super) fn restart_online_when_due(&mut self) {
        let Some(online) = &self.online else { return };
        if online.running.is_some() || online.not_before.is_some_and(|at| Instant::now() < at) {
            return;
        }
        if self.was_lost {
            // It would only fail, and that is not its fault: it comes when the device is back.
            return;
        }
        self.start_mps();
        let outside_mps = !self.mps_runs();
        let Some(online) = &mut self.online else { return };
        if outside_mps {
            tracing::warn!(service = %online.service, "started without MPS: it shares with nobody");
        }
        // Its group went with the last process.
        let limits = &online.launch.limits;
        let group = self.node.runner.group(Kind::Online, &online.launch.name, limits);
        // A new MPS daemon has new partitions.
        match self.daemon.as_ref().and_then(MpsDaemon::partitions) {
            Some(both) => drop(online.launch.env.insert(SM_PARTITION.into(), both.online.clone())),
            None => drop(online.launch.env.remove(SM_PARTITION)),
        }
        let started = group.and_then(|group| {
            online.launch.group = group;
            online.launch.outside_mps = outside_mps;
            online.launch.agent = ProcessKey::own();
            self.node.runner.start(online.launch.clone())
        });
        match started {
            Ok(running) => {
                let (service, pid) = (online.service.clone(), running.main().pid);
                online.started_at_s = running.run.started_at_s;
                online.running = Some(running);
                tracing::info!(service = %service, pid, "service runs");
                self.shared.status().online = Some((service.clone(), pid));
                self.tell(Event::OnlineStarted { service, pid, adopted: false });
            }
            Err(error) => {
                let wait = back_off(online.failures);
                online.failures = online.failures.saturating_add(1);
                online.not_before = Some(Instant::now() + wait);
                let text = format!("service {} cannot start: {error}", online.service);
                self.alert(text);
            }
        }
    }

    pub(super) fn online_ended(&mut self, exit: Exit) {
        let Some(online) = &mut self.online else { return };
        let lasted = online.running.take().map(|running| running.run.started_at_s);
        if lasted.is_some_and(|started| launch::now_s().saturating_sub(started) > SETTLED_AFTER_S) {
            online.failures = 0;
        }
        if !self.was_lost {
            online.not_before = Some(Instant::now() + back_off(online.failures));
            online.failures = online.failures.saturating_add(1);
        }
        let (service, again) = (online.service.clone(), online.failures >= AGAIN);
        tracing::warn!(service = %service, code = exit.code, signal = exit.signal, "service ended");
        {
            let mut status = self.shared.status();
            status.online = None;
            status.online_restarts += 1;
        }
        self.tell(Event::OnlineEnded { service, exit });
        if again && self.params.defences.eviction {
            // It may lack what the job holds, and no sample shows that once it is gone.
            let reason = StopReason::Health("the service cannot start beside it".into());
            self.stop_guest(None, &reason);
            self.begin_stop(reason);
        }
    }

    pub(super) fn stop_online(&mut self, service: &ServiceId) {
        let theirs = |online: &mut Online| online.service == *service;
        let Some(mut online) = self.online.take_if(theirs) else { return };
        if let Some(running) = &mut online.running {
            running.ask_stop();
            let limit = Duration::from_millis(online.launch.online_grace_ms) + STOP_MARGIN;
            if !matches!(running.wait(limit), Ok(Some(_))) {
                running.kill();
            }
            drop(self.node.runner.settle(Kind::Online, &online.launch.name));
        }
        self.shared.status().online = None;
        self.shared.latency_us.store(0, Ordering::Relaxed);
    }

    /// Brings the service back: its context is lost, whatever the process does. `alone` is a service
    /// that nobody shared the GPU with.
    pub(super) fn bring_online_back(&mut self, alone: bool) {
        let Some(online) = &mut self.online else { return };
        let ran_s = launch::now_s().saturating_sub(online.started_at_s);
        if let Some(mut running) = online.running.take() {
            running.ask_stop();
            if !matches!(running.wait(Duration::from_millis(500)), Ok(Some(_))) {
                running.kill();
                drop(running.wait(Duration::from_secs(5)));
            }
            self.shared.status().online_restarts += 1;
        }
        online.failures = 0;
        let wait = online.comebacks.wait_after(ran_s, alone);
        online.not_before = (!wait.is_zero()).then(|| Instant::now() + wait);
        self.restart_online_when_due();
    }

    pub(super) fn start_offline(&mut self, spec: &OfflineSpec) -> Result<()> {
        let name = spec.job.as_str();
        if spec.not_after.is_some_and(|at| Instant::now() > at) {
            return self
                .refuse(name, "the order came too late: the GPU was busy with something else");
        }
        if let Some(offline) = &self.offline {
            return self.refuse(name, format!("job {} is on this GPU", offline.job));
        }
        if self.repair.is_some() {
            return self.refuse(name, "the GPU is disabled");
        }
        if let Some(reason) = self.unrest() {
            return self.refuse(name, reason);
        }
        if let Some(flaw) = installed::flaw(&self.params.interposer) {
            // The loader would go on without it, and the job would run free.
            let remedy = installed::REMEDY;
            return self
                .refuse(name, format!("there is no interposer to hold it: {flaw}; {remedy}"));
        }
        let status = self.shared.status().clone();
        if !self.shared.host_calm.load(Ordering::Acquire) {
            return self.refuse(name, "the host was short of memory a moment ago");
        }
        if !status.placeable {
            return self.refuse(name, format!("the GPU is {}", status.health));
        }
        let multi_user = self.daemon.as_ref().is_some_and(MpsDaemon::serves_all_users);
        let online_user = self.online.as_ref().map(|online| online.launch.user);
        // Nobody named is the agent's own user.
        let uid = |user: Option<(u32, u32)>| user.map_or_else(crate::sys::own_uid, |(uid, _)| uid);
        if !multi_user && online_user.is_some_and(|user| uid(user) != uid(spec.user)) {
            let outdated = self.daemon.as_ref().is_some_and(MpsDaemon::is_outdated);
            let how = match outdated {
                true => {
                    "mps.multi_user counts from the next start of MPS on: stop the service for a moment"
                }
                false => "set mps.multi_user or run both as one user",
            };
            return self.refuse(
                name,
                format!("the service runs as another user, and its MPS server serves one: {how}"),
            );
        }
        let Some(share) = self.partition_share().or(spec.share).or(status.share) else {
            return self.refuse(name, "the service needs all SMs, or none were counted yet");
        };
        let quota = spec.quota.unwrap_or(status.quota);
        if quota.0 == 0 {
            return self.refuse(name, "the service leaves no memory to lend");
        }
        let control_dir = self.params.run_dir.join(encode(self.uuid())).join(encode(name));
        let mut settings = Settings {
            checkpoint_window_ms: spec.stop.checkpoint_ms,
            drain_limit_ms: spec.stop.drain_ms,
            ..Settings::default()
        };
        settings.devices[0] = uuid_bytes(self.uuid());
        let capped = if self.params.defences.quota { quota.0 } else { u64::MAX };
        self.learn_caps_memory();
        let block = ControlBlock::create(&control_dir, &settings, capped, spec.user)?;
        let launch = self
            .offline_launch(spec, share, quota, &control_dir)
            .inspect_err(|_| drop(std::fs::remove_dir_all(&control_dir)))?;
        // The fast loop must know the job before its first launch, or no heartbeat comes.
        let active = Arc::new(ActiveJob::new(spec.job.clone(), block, share, spec.stop));
        self.shared.set_job(Some(Arc::clone(&active)));
        let running = match self.node.runner.start(launch) {
            Ok(running) => running,
            Err(error) => {
                self.shared.set_job(None);
                drop(std::fs::remove_dir_all(&control_dir));
                return Err(error);
            }
        };
        let pid = running.main().pid;
        if self.params.defences.clean_stop
            && let Some(keeper) = running.keeper_handle()
        {
            drop(active.keeper.set(keeper));
        }
        self.node.breaker().came(spec.job.clone());
        tracing::info!(gpu = self.uuid(), job = name, pid, share = %share.percent().value(), quota = %quota, "job runs");
        self.offline = Some(offline_of(spec.job.clone(), running));
        self.tell(Event::JobStarted { job: spec.job.clone(), pid, share, quota });
        Ok(())
    }

    fn offline_launch(
        &self,
        spec: &OfflineSpec,
        share: muxflow_types::SmShare,
        quota: muxflow_types::Bytes,
        control_dir: &std::path::Path,
    ) -> Result<Launch> {
        let dirs = self.mps_dirs();
        let gpu = GpuSide {
            uuid: self.uuid(),
            mps_pipe_dir: dirs.as_ref().map(|(pipe, _)| pipe.as_path()),
            mps_log_dir: dirs.as_ref().map(|(_, log)| log.as_path()),
        };
        let partitions = self.daemon.as_ref().and_then(MpsDaemon::partitions);
        let capped = self.caps_memory == Some(true) && self.params.defences.quota;
        let restraint = Restraint {
            interposer: &self.params.interposer,
            control_dir,
            share,
            driver_memory_limit: capped.then(|| quota.saturating_add(DRIVER_SLACK)),
            sm_partition: partitions.map(|both| both.offline.as_str()),
        };
        let base = self.base_environment();
        let mps = self
            .daemon
            .as_ref()
            .map(|daemon| (daemon.spec().program.clone(), daemon.spec().pipe_dir()));
        Ok(Launch {
            name: spec.job.as_str().to_owned(),
            kind: Kind::Offline,
            gpu: self.uuid().to_owned(),
            argv: spec.argv.clone(),
            env: environment::offline(base, &spec.env, gpu, &restraint),
            cwd: spec.cwd.clone(),
            user: spec.user,
            limits: spec.limits.clone(),
            group: self.node.runner.group(Kind::Offline, spec.job.as_str(), &spec.limits)?,
            logs: self.params.logs,
            control_dir: Some(control_dir.to_owned()),
            mps,
            stop: spec.stop,
            online_grace_ms: 0,
            agent: ProcessKey::own(),
            fingerprint: spec.fingerprint(),
            outside_mps: false,
        })
    }

    /// Takes over a workload that an earlier agent started.
    pub fn adopt(&mut self, running: Running) -> Result<()> {
        let invalid = |error: muxflow_types::IdError| AgentError::Start {
            workload: running.launch.name.clone(),
            reason: error.to_string(),
        };
        let pid = running.main().pid;
        match running.launch.kind {
            Kind::Online => {
                let service = ServiceId::new(&running.launch.name).map_err(invalid)?;
                tracing::info!(service = %service, pid, "service found running");
                {
                    let mut status = self.shared.status();
                    status.claimed = Some(service.clone());
                    status.online = Some((service.clone(), pid));
                }
                self.tell(Event::OnlineStarted { service: service.clone(), pid, adopted: true });
                self.online = Some(Online {
                    service,
                    launch: running.launch.clone(),
                    started_at_s: running.run.started_at_s,
                    running: Some(running),
                    latency_file: None,
                    failures: 0,
                    not_before: None,
                    comebacks: Comebacks::default(),
                });
            }
            Kind::Offline => {
                let job = JobId::new(&running.launch.name).map_err(invalid)?;
                tracing::info!(job = %job, pid, "job found on its way out");
                let mut offline = offline_of(job, running);
                offline.reason = Some(StopReason::Shutdown);
                // Its keeper has begun before now: it is over by then.
                offline.kill_at = Some(Instant::now() + offline.stop_takes());
                self.offline = Some(offline);
            }
        }
        Ok(())
    }
}

fn offline_of(job: JobId, running: Running) -> Offline {
    Offline {
        job,
        running,
        reason: None,
        kill_at: None,
        killed: false,
        silent_at: None,
        suspicion: Suspicion::default(),
        strangers: BTreeMap::new(),
        recent: Recent::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_become_bytes() {
        let bytes = uuid_bytes("GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(bytes[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(bytes[15], 0xff);
        assert_eq!(uuid_bytes("GPU-12"), [0; 16]);
        assert_eq!(uuid_bytes("MIG-00112233-4455-6677-8899-aabbccddeeff"), [0; 16]);
    }

    #[test]
    fn a_service_that_ended_again_and_again_must_run_for_a_while() {
        assert!(!unsettled(0, 0) && !unsettled(1, 0), "once is nothing");
        assert!(unsettled(2, 0) && unsettled(9, SETTLED_AFTER_S));
        assert!(!unsettled(2, SETTLED_AFTER_S + 1), "jobs come back");
    }
}
