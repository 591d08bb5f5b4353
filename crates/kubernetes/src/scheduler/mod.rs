//! The scheduler: watches, plans, binds and evicts, as long as it holds the lease.
//!
//! A cycle reads the watches into a snapshot, lets the planner of `policy` plan it, checks the plan,
//! and sends what follows from it. Between two reschedulings only waiting jobs are planned, onto GPUs
//! that are free, and jobs on GPUs in danger are evicted; each interval, everything is planned anew.
//! All state is in the cluster. What is kept here between two cycles is only what the watches have
//! not shown yet.

mod apart;
mod apply;
mod aside;
mod brake;
mod claim;
mod constraint;
pub mod counters;
mod decide;
mod lease;
mod models;
mod offer;
mod planning;
pub(crate) mod pods;
mod profiles;
mod snapshot;
mod told;
pub(crate) mod watches;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use muxflow_policy::cluster::{Memory, Parameters, Planner};
use muxflow_predictor::Registry;
use muxflow_types::{GpuId, Micros};
use tokio::sync::watch;

use self::apply::{Hands, Outcome, Permit};
use self::aside::Aside;
use self::brake::Brake;
use self::counters::Counters;
use self::lease::{Claim, Valid};
use self::models::Models;
use self::snapshot::{Assembled, Assumed, View, assemble};
use self::watches::Watches;
use crate::Error;

/// What an operator may set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pods with this `schedulerName` are ours.
    pub scheduler: String,
    /// Where the lease is.
    pub namespace: String,
    /// This replica, as the lease names it.
    pub identity: String,
    /// How long a dead leader blocks the others.
    pub lease: Duration,
    /// How long changes are gathered before a cycle.
    pub settle: Duration,
    /// A GPU whose agent has been silent for longer takes nothing new.
    pub stale_after: Duration,
    /// A leader takes silence for a reason to evict once it has watched for so long.
    pub listen: Duration,
    /// A leader that has finished no look at the cluster for so long is taken to hang.
    pub stall: Duration,
    /// The planner's own settings, the interval of rescheduling included.
    pub parameters: Parameters,
    /// What the scheduler did, for a page of metrics.
    pub counters: Arc<Counters>,
}

impl Settings {
    /// The defaults, for a replica of this name.
    pub fn new(namespace: &str, identity: &str) -> Self {
        Settings {
            scheduler: crate::names::SCHEDULER.to_owned(),
            namespace: namespace.to_owned(),
            identity: identity.to_owned(),
            lease: Duration::from_secs(15),
            settle: Duration::from_millis(500),
            stale_after: Duration::from_secs(300),
            listen: Duration::from_secs(300),
            stall: Duration::from_secs(300),
            parameters: Parameters::default(),
            counters: Arc::default(),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let bad =
            |setting, problem: &str| Err(Error::Setting { setting, problem: problem.to_owned() });
        if self.lease < Duration::from_secs(1) {
            return bad("lease", "must be at least 1 s");
        }
        if self.identity.is_empty() {
            return bad("identity", "must not be empty; replicas are told apart by it");
        }
        if self.scheduler.is_empty() {
            return bad("scheduler", "must not be empty; write the schedulerName of the pods");
        }
        Ok(())
    }
}

/// The name of the lease.
pub const LEASE: &str = "muxflow-scheduler";
/// How long the first lists may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// A cycle runs at least this often: a status grows old without any change.
const TICK: Duration = Duration::from_secs(5);
/// Between two cycles of one long piece of work.
const SOON: Duration = Duration::from_millis(50);
/// When to try again what was refused.
const RETRY: Duration = Duration::from_secs(1);
/// A cycle sends requests for so long at most; then the world is looked at again, GPUs in danger
/// first.
const SENDING: Duration = Duration::from_secs(10);
/// After a cycle that changed nothing, so many times as long as it took goes by before the next one:
/// in a large cluster something is reported all the time.
const REST: u32 = 3;

/// Runs until `stop` is done; then gives the lease back.
pub async fn run(
    client: Client,
    settings: Settings,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    settings.check()?;
    let planner = Planner::new(settings.parameters.clone())?;
    let (tell, mut valid) = watch::channel(None);
    let (end, ended) = watch::channel(false);
    let claim =
        Claim::new(client.clone(), &settings.namespace, LEASE, &settings.identity, settings.lease);
    let watching = (Arc::clone(&settings.counters), settings.stall);
    let tending = tokio::spawn(tend(claim, tell, ended, watching));
    let mut brake = Brake::new(Instant::now());
    let leading = async {
        loop {
            // Taken before anything is read: what is read in one term must not be acted upon in another.
            let term = loop {
                if let Some(held) = *valid.borrow_and_update() {
                    break held.term;
                }
                if valid.changed().await.is_err() {
                    return Ok(());
                }
            };
            tracing::info!(identity = settings.identity, "this replica leads");
            settings.counters.lead(true);
            let leader = Leader::new(&client, &settings, &planner, &mut brake).await?;
            leader.lead(&mut valid, term).await?;
            settings.counters.lead(false);
            tracing::warn!(identity = settings.identity, "this replica no longer leads");
        }
    };
    let result = tokio::select! {
        result = leading => result,
        () = settings.counters.hangs(settings.stall) => Err(Error::Hangs(settings.stall)),
        () = stop => Ok(()),
    };
    // Nothing is sent any more; only now may the lease go.
    let _ = end.send_replace(true);
    if let Err(error) = tending.await {
        tracing::warn!(%error, "the task that tends the lease ended badly");
    }
    result
}

/// Keeps the lease, or tries to get it, and tells until when it is ours. The lease of a leader that
/// hangs runs out: another replica may do what this one does not.
async fn tend(
    mut claim: Claim,
    tell: watch::Sender<Option<Valid>>,
    mut ended: watch::Receiver<bool>,
    (counters, stall): (Arc<Counters>, Duration),
) {
    loop {
        let period = claim.period();
        let tended = async {
            if counters.is_stalled(stall) {
                return Err(Error::Hangs(stall));
            }
            claim.tend().await
        };
        match tokio::time::timeout(period * 2, tended).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the lease could not be tended"
            ),
            Err(_) => tracing::warn!("the lease could not be tended in time"),
        }
        let valid = claim.valid();
        tell.send_if_modified(|now| std::mem::replace(now, valid) != valid);
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            _ = ended.changed() => break,
        }
    }
    claim.release().await;
}

/// One replica while it leads.
struct Leader<'a> {
    settings: &'a Settings,
    planner: &'a Planner,
    watches: Watches,
    hands: Hands,
    models: Models,
    /// What the last plan left, and whose speeds are in it.
    memory: (Memory, Arc<Registry>),
    assumed: BTreeMap<String, Assumed>,
    /// GPUs with a pod that nobody reports, and since when.
    missing: BTreeMap<GpuId, Micros>,
    /// Pods that no plan can place as they are.
    aside: Aside,
    brake: &'a mut Brake,
    /// When the watches were opened.
    since: Instant,
}

impl<'a> Leader<'a> {
    async fn new(
        client: &Client,
        settings: &'a Settings,
        planner: &'a Planner,
        brake: &'a mut Brake,
    ) -> Result<Self, Error> {
        Ok(Leader {
            settings,
            planner,
            watches: Watches::open(client, PATIENCE).await?,
            hands: Hands::new(client.clone(), &settings.identity),
            models: Models::default(),
            memory: (Memory::default(), Arc::default()),
            assumed: BTreeMap::new(),
            missing: BTreeMap::new(),
            aside: Aside::default(),
            brake,
            since: Instant::now(),
        })
    }

    /// Runs cycles until the lease is lost. A watch that has ended ends all: another replica, or this one
    /// started anew, sees what goes on.
    async fn lead(
        mut self,
        valid: &mut watch::Receiver<Option<Valid>>,
        term: i32,
    ) -> Result<(), Error> {
        let interval = Duration::from_micros(self.settings.parameters.interval.0);
        let mut reschedule_at = Instant::now() + interval;
        let (changed, reported) = (self.watches.changed.clone(), self.watches.reported.clone());
        let mut wait = Duration::ZERO;
        let mut settle = self.settings.settle;
        let mut idle = false;
        loop {
            tokio::select! {
                () = changed.notified() => {}
                // What a GPU reports matters to who waits for one. Where nobody does, the tick sees it.
                () = reported.notified(), if !idle => {}
                () = tokio::time::sleep(wait) => {}
            }
            tokio::time::sleep(settle).await;
            let still = current(valid).is_some_and(|valid| valid.term == term);
            if !still {
                return Ok(());
            }
            self.watches.check()?;
            let reschedule = Instant::now() >= reschedule_at;
            if reschedule {
                reschedule_at = Instant::now() + interval;
            }
            let began = Instant::now();
            let outcome = self.cycle(reschedule, valid, term).await?;
            self.settings.counters.looked();
            idle = outcome.idle;
            // What was postponed for the lease's sake goes on at once; words can wait.
            let again = outcome.failed + outcome.untold;
            (wait, settle) = match (outcome.postponed, again) {
                (1.., _) => (Duration::ZERO, SOON),
                (0, 1..) => (RETRY, self.settings.settle),
                (0, 0) if outcome.bound.is_empty() && outcome.evicted == 0 => {
                    (TICK, self.settings.settle.max((began.elapsed() * REST).min(TICK)))
                }
                (0, 0) => (TICK, self.settings.settle),
            };
            wait = wait.min(reschedule_at.saturating_duration_since(Instant::now()));
        }
    }

    async fn cycle(
        &mut self,
        reschedule: bool,
        valid: &watch::Receiver<Option<Valid>>,
        term: i32,
    ) -> Result<Outcome, Error> {
        let started = Instant::now();
        self.settings.counters.look();
        let pods = self.watches.pods.state();
        self.forget_what_is_shown(&pods);
        let speeds = self.models.registry(&self.watches.models.state());
        let world = self.view(reschedule, &pods, &speeds);
        self.note_missing(&world);
        if world.is_idle() {
            return Ok(Outcome { idle: true, ..Outcome::default() });
        }
        let (jobs, gpus) = (world.snapshot.jobs.len(), world.snapshot.gpus.len());
        let residents = world.residents;
        let planning = planning::plan(self.planner, &mut self.memory, world, speeds);
        let Some((world, plan)) = planning.await else {
            return Ok(Outcome::default());
        };
        let planned = started.elapsed();
        let mut actions = decide::decide(world, &plan);
        let held = self.brake.hold(&mut actions, residents, Instant::now());
        if held > 0 {
            tracing::error!(
                held,
                "too many pods would be evicted at once; these stay until minutes have passed"
            );
        }
        let permit = Permit { valid: valid.clone(), term, until: Instant::now() + SENDING };
        let outcome = self.hands.apply(actions, &pods, &permit, self.settings.lease / 3).await;
        for (pod, assumed) in outcome.bound.iter().chain(&outcome.unsure) {
            self.assumed.insert(pod.uid.clone(), assumed.clone());
        }
        for (uid, note) in &outcome.aside {
            self.aside.put(uid.clone(), note.clone(), Instant::now());
        }
        let counts = [outcome.bound.len(), outcome.evicted, outcome.failed];
        self.settings.counters.cycle(counts, [jobs, gpus], planned, started.elapsed());
        tracing::info!(
            jobs,
            gpus,
            reschedule,
            bound = outcome.bound.len(),
            evicted = outcome.evicted,
            failed = outcome.failed,
            postponed = outcome.postponed,
            untold = outcome.untold,
            plan_ms = planned.as_secs_f64() * 1e3,
            cycle_ms = started.elapsed().as_secs_f64() * 1e3,
            "a cycle"
        );
        Ok(outcome)
    }

    fn view(&self, reschedule: bool, pods: &[Arc<Pod>], models: &Registry) -> Assembled {
        assemble(&View {
            at: pods::micros(jiff::Timestamp::now()),
            scheduler: &self.settings.scheduler,
            stale_after: micros(self.settings.stale_after),
            listen: micros(self.settings.listen),
            watched: micros(self.since.elapsed()),
            reschedule,
            pods,
            nodes: &self.watches.nodes.state(),
            gpus: &self.watches.gpus.state(),
            profiles: &self.watches.profiles.state(),
            models,
            jobs: &self.watches.jobs.state(),
            assumed: &self.assumed,
            aside: &self.aside.now(Instant::now()),
            missing: &self.missing,
        })
    }

    /// Remembers since when GPUs with a pod have been missed.
    fn note_missing(&mut self, world: &Assembled) {
        self.missing.retain(|gpu, _| world.missing.contains(gpu));
        for gpu in &world.missing {
            self.missing.entry(gpu.clone()).or_insert(world.snapshot.at);
        }
    }

    /// Drops assumptions that the watch has caught up with: the pod is shown bound, or not at all;
    /// and those that nothing has come of. Of a binding that was made though nobody answered, the pod
    /// is told now.
    fn forget_what_is_shown(&mut self, pods: &[Arc<Pod>]) {
        if self.assumed.is_empty() && self.aside.is_empty() {
            return;
        }
        let waiting: std::collections::BTreeSet<&str> = pods
            .iter()
            .filter(|p| pods::node(p).is_none())
            .filter_map(|p| p.metadata.uid.as_deref())
            .collect();
        self.aside.forget_all_but(&waiting);
        let now = Instant::now();
        let mut unheard = Vec::new();
        self.assumed.retain(|uid, assumed| {
            let waits = waiting.contains(uid.as_str());
            if !waits && assumed.until.is_some() {
                unheard.push((uid.clone(), assumed.clone()));
            }
            waits && assumed.until.is_none_or(|until| now < until)
        });
        for (uid, assumed) in unheard {
            let is_it = |p: &&Arc<Pod>| p.metadata.uid.as_deref() == Some(uid.as_str());
            let gpu =
                |p: &Pod| pods::annotation(p, crate::names::GPU) == Some(assumed.gpu.as_str());
            if let Some(pod) = pods.iter().find(is_it).filter(|p| gpu(p)) {
                self.hands.tell_bound(pods::PodName::of(pod), &assumed);
            }
        }
    }
}

fn micros(time: Duration) -> Micros {
    Micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// Whether this replica may act, by the lease as it is now.
fn current(valid: &mut watch::Receiver<Option<Valid>>) -> Option<Valid> {
    (*valid.borrow_and_update()).filter(|valid| valid.until > Instant::now())
}
