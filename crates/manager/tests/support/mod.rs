//! A fake node for the tests of the manager: GPUs that are numbers, jobs that run until they are
//! told to end.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use muxflow_abi::control::rhythm::BUCKETS;
use muxflow_agent::control_block::JobCounts;
use muxflow_agent::gpu::{Event, OfflineSpec, StopReason};
use muxflow_agent::launch::{Exit, StopCause};
use muxflow_manager::node::{GpuSight, NodePort, OnlineSight, Rhythm};
use muxflow_policy::node::fault::Fault;
use muxflow_types::{
    Bytes, GpuId, GpuSample, GpuType, HealthState, JobId, Micros, Percent, ServiceId, SmCount,
    SmShare,
};

pub(crate) struct FakeNode {
    dir: PathBuf,
    gpus: Mutex<Vec<GpuSight>>,
    running: Mutex<BTreeMap<JobId, GpuId>>,
    exits: Mutex<BTreeMap<JobId, Exit>>,
    found: Mutex<Vec<(JobId, u64)>>,
    tell: Mutex<Sender<(String, Event)>>,
    events: Mutex<Receiver<(String, Event)>>,
    next_look: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    launches: Mutex<u32>,
    refuses: Mutex<Option<(bool, String)>>,
}

pub(crate) fn gpu(index: u32, service: Option<&str>) -> GpuSight {
    let sms = SmCount(40);
    let mut sample = GpuSample::empty(Micros(1));
    sample.gpu_util = Percent::new(40.0).ok();
    sample.sm_activity = Percent::new(30.0).ok();
    GpuSight {
        gpu: GpuId::new(&format!("GPU-{index:08x}-0000-0000-0000-000000000000")).unwrap(),
        index,
        gpu_type: GpuType::new("T4").unwrap(),
        name: "Fake T4".into(),
        sms,
        memory: Bytes::from_gib(15),
        health: HealthState::Healthy,
        placeable: true,
        share: SmShare::new(SmCount(24), sms).ok(),
        quota: Bytes::from_gib(5),
        budget: 1.0,
        load: Some(0.3),
        online: service.map(|name| OnlineSight {
            service: ServiceId::new(name).unwrap(),
            pid: Some(1),
            uid: None,
            latency: None,
            critical: false,
        }),
        online_activity: Percent::new(25.0).ok(),
        demand: Percent::new(40.0).ok(),
        offline: None,
        sample: Some(sample),
        outside_mps: Vec::new(),
        mps_pipe_dir: Some("/run/mps".into()),
        multi_user: true,
        stops: BTreeMap::new(),
        faults: BTreeMap::new(),
        mps_starts: 1,
        online_restarts: 0,
    }
}

impl FakeNode {
    pub(crate) fn new(dir: &Path, gpus: Vec<GpuSight>) -> Arc<Self> {
        let (tell, events) = channel();
        Arc::new(FakeNode {
            dir: dir.to_owned(),
            gpus: Mutex::new(gpus),
            running: Mutex::new(BTreeMap::new()),
            exits: Mutex::new(BTreeMap::new()),
            found: Mutex::new(Vec::new()),
            tell: Mutex::new(tell),
            events: Mutex::new(events),
            next_look: Mutex::new(None),
            launches: Mutex::new(0),
            refuses: Mutex::new(None),
        })
    }

    /// Starts are refused from now on, because of the program or for another reason; or no more.
    pub(crate) fn refuse(&self, why: Option<(bool, &str)>) {
        *self.refuses.lock().unwrap() = why.map(|(own, text)| (own, text.to_owned()));
    }

    /// The job has launched its one kernel so often.
    pub(crate) fn launched(&self, count: u32) {
        *self.launches.lock().unwrap() = count;
    }

    /// Something happens while somebody looks next.
    pub(crate) fn at_next_look(&self, happens: impl FnOnce() + Send + 'static) {
        *self.next_look.lock().unwrap() = Some(Box::new(happens));
    }

    pub(crate) fn running(&self) -> BTreeMap<JobId, GpuId> {
        self.running.lock().unwrap().clone()
    }

    pub(crate) fn add(&self, sight: GpuSight) {
        self.gpus.lock().unwrap().push(sight);
    }

    pub(crate) fn change(&self, index: usize, change: impl FnOnce(&mut GpuSight)) {
        change(&mut self.gpus.lock().unwrap()[index]);
    }

    pub(crate) fn send(&self, gpu: &GpuId, event: Event) {
        self.tell.lock().unwrap().send((gpu.as_str().to_owned(), event)).unwrap();
    }

    /// The run is gone, and nobody knows how it ended.
    pub(crate) fn forget(&self, job: &JobId) {
        let Some(gpu) = self.running.lock().unwrap().remove(job) else { return };
        for sight in self.gpus.lock().unwrap().iter_mut().filter(|sight| sight.gpu == gpu) {
            sight.offline = None;
            sight.placeable = true;
        }
    }

    /// A run of an earlier manager is on its way out.
    pub(crate) fn finds(&self, job: &JobId, run: u64) {
        self.found.lock().unwrap().push((job.clone(), run));
    }

    /// It is gone, and nothing is left of it.
    pub(crate) fn loses(&self, job: &JobId) {
        self.found.lock().unwrap().retain(|(found, _)| found != job);
    }

    /// The end of a run is written down, and nobody tells.
    pub(crate) fn keeps_exit(&self, job: &JobId, exit: Exit) {
        self.exits.lock().unwrap().insert(job.clone(), exit);
    }

    pub(crate) fn end(&self, job: &JobId, exit: Exit, reason: Option<StopReason>) {
        let Some(gpu) = self.running.lock().unwrap().remove(job) else { return };
        for sight in self.gpus.lock().unwrap().iter_mut().filter(|sight| sight.gpu == gpu) {
            sight.offline = None;
            sight.placeable = true;
        }
        let requeue = reason.is_some() || exit.code != Some(0);
        self.exits.lock().unwrap().insert(job.clone(), exit.clone());
        let (job, fail_prone, blamed) = (job.clone(), false, false);
        self.send(&gpu, Event::JobEnded { job, exit, reason, requeue, fail_prone, blamed });
    }

    /// An error on the GPU for which the job may be to blame: the node stops it.
    pub(crate) fn fault(&self, job: &JobId, run: u64, fault: Fault, blamed: bool) {
        let gpu = self.running()[job].clone();
        self.forget(job);
        let stop = Some(StopCause::Asked);
        let exit = Exit { signal: Some(9), run, stop, ..Exit::unknown() };
        let (job, reason) = (job.clone(), Some(StopReason::Fault(fault)));
        let (requeue, fail_prone) = (true, false);
        self.send(&gpu, Event::JobEnded { job, exit, reason, requeue, fail_prone, blamed });
    }
}

impl NodePort for FakeNode {
    fn look(&self) -> Vec<GpuSight> {
        let happens = self.next_look.lock().unwrap().take();
        if let Some(happens) = happens {
            happens();
        }
        self.gpus.lock().unwrap().clone()
    }

    fn start(&self, gpu: &GpuId, spec: OfflineSpec) -> Result<(), String> {
        if let Some((unstartable, reason)) = self.refuses.lock().unwrap().clone() {
            let (run, job) = (spec.run_number(), spec.job);
            self.send(gpu, Event::JobRefused { job, run, unstartable, reason });
            return Ok(());
        }
        self.running.lock().unwrap().insert(spec.job.clone(), gpu.clone());
        for sight in self.gpus.lock().unwrap().iter_mut().filter(|sight| sight.gpu == *gpu) {
            sight.offline = Some((spec.job.clone(), JobCounts::default()));
            sight.placeable = false;
        }
        let share = spec.share.unwrap();
        let quota = spec.quota.unwrap_or(Bytes::from_gib(1));
        self.send(gpu, Event::JobStarted { job: spec.job, pid: 1, share, quota });
        Ok(())
    }

    fn stop(&self, _: &GpuId, job: &JobId) -> Result<(), String> {
        let exit = Exit { signal: Some(15), ..Exit::unknown() };
        self.end(job, exit, Some(StopReason::Asked));
        Ok(())
    }

    fn next_event(&self, limit: Duration) -> Option<(String, Event)> {
        self.events.lock().unwrap().recv_timeout(limit).ok()
    }

    fn found(&self) -> Vec<(JobId, u64)> {
        self.found.lock().unwrap().clone()
    }

    fn last_exit(&self, job: &JobId) -> Option<Exit> {
        self.exits.lock().unwrap().get(job).cloned()
    }

    fn log_file(&self, job: &JobId, stream: &str) -> PathBuf {
        self.dir.join(format!("{job}.{stream}"))
    }

    fn output_bytes(&self, job: &JobId) -> u64 {
        std::fs::metadata(self.log_file(job, "stdout")).map_or(0, |file| file.len())
    }

    fn forget(&self, job: &JobId) -> Result<(), String> {
        if self.running().contains_key(job) {
            return Err("it runs".into());
        }
        match std::fs::remove_file(self.log_file(job, "stdout")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    fn rhythm(&self, gpu: &GpuId) -> Option<Rhythm> {
        let count = *self.launches.lock().unwrap();
        let running = self.running();
        let (job, _) = running.iter().find(|(_, on)| *on == gpu).filter(|_| count > 0)?;
        let mut launches = [0; BUCKETS];
        launches[0] = count;
        // One reading each second.
        let at = Micros::from_secs(u64::from(count));
        Some(Rhythm { job: job.clone(), at, launches, peak: Bytes::from_gib(1) })
    }

    fn samples(&self, _: &GpuId, _: Micros) -> Vec<GpuSample> {
        Vec::new()
    }
}
