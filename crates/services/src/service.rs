//! One service: a loop that brings what runs to what is wanted, one small step at a time.
//!
//! Every step looks at what there is and does what is missing, so that a crash, a lost order or a GPU
//! that goes away need no case of their own. A replica that is to leave is first taken out of the
//! front, then finishes what it has, and only then is told to stop. One that is to come is first
//! written down and only then ordered: whoever takes up after us knows of all that may run.

mod rollout;
mod start;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muxflow_agent::monitor;
use muxflow_types::Micros;
use tokio::runtime::Handle;

use crate::check;
use crate::executor::{Executor, Place, ReplicaLaunch, Standing};
use crate::pool::{Pool, Replica, ReplicaState};
use crate::scale::{ScaleParams, Scaler};
use crate::spec::ServiceSpec;

/// Which replica has which GPU: shared by all services.
pub type PlaceBook = Arc<Mutex<BTreeMap<String, String>>>;

/// The address of a replica that is only waited for until it is gone.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// After an order that failed.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The load is averaged over this time, and must be low for the second before a replica goes.
const SCALE_TIMES: (Micros, Micros) = (Micros::from_secs(2), Micros::from_secs(30));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Up,
    Leaving,
    Ordered,
}

#[derive(Debug)]
struct Slot {
    replica: Arc<Replica>,
    phase: Phase,
    since: Instant,
    /// [`ServiceSpec::mark`] of what it was started as; none when that is not known.
    mark: Option<String>,
    /// To be ordered once it is written down.
    planned: Option<Box<ReplicaLaunch>>,
    /// To leave before its successor comes, once it is seen that things can be written down.
    goes_first: bool,
}

/// What is remembered of a replica over a restart of the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remembered {
    /// Its name.
    pub name: String,
    /// Its GPU.
    pub place: String,
    /// Its port.
    pub port: u16,
    /// [`ServiceSpec::mark`] of what it was started as; files of before have none.
    pub mark: Option<String>,
}

/// One service under way.
pub struct Service {
    /// What was declared.
    pub spec: ServiceSpec,
    /// The replicas as the front sees them.
    pub pool: Arc<Pool>,
    executor: Arc<dyn Executor>,
    book: PlaceBook,
    runtime: Handle,
    scaler: Scaler,
    slots: Vec<Slot>,
    to_restart: VecDeque<String>,
    rolling: Option<rollout::Rolling>,
    not_before: Instant,
    waiting_for: Option<String>,
    rollout_waits: Option<String>,
    ended_rollout: Option<String>,
    /// The replica whose order failed last, and why.
    not_started: Option<(String, String)>,
    /// Why the last write failed, and when to try again.
    cannot_write: Option<(String, Instant)>,
    removed: bool,
}

impl Slot {
    fn new(replica: Arc<Replica>, phase: Phase, mark: Option<String>) -> Self {
        Slot { replica, phase, since: Instant::now(), mark, planned: None, goes_first: false }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("spec", &self.spec)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

fn scale_params(spec: &ServiceSpec) -> ScaleParams {
    ScaleParams {
        min: spec.min_replicas,
        max: spec.max_replicas,
        load_per_replica: spec.load_per_replica,
        smooth_over: SCALE_TIMES.0,
        calm_for: SCALE_TIMES.1,
    }
}

/// Whether a replica of this service would have such a name.
pub fn is_replica_of(service: &str, name: &str) -> bool {
    let rest = name.strip_prefix(service).and_then(|rest| rest.strip_prefix('-'));
    rest.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

impl Service {
    /// Nothing runs yet but what is remembered and still there. As many are wanted as are found, within
    /// bounds, until the load is known: a restart of the manager sends nobody away. A replica that is
    /// there and not remembered has a port that nobody knows: it is told to leave.
    pub fn new(
        spec: ServiceSpec,
        executor: Arc<dyn Executor>,
        book: PlaceBook,
        runtime: Handle,
        remembered: &[Remembered],
    ) -> Self {
        let mut service = Service {
            scaler: Scaler::new(scale_params(&spec)),
            spec,
            pool: Arc::new(Pool::default()),
            executor,
            book,
            runtime,
            slots: Vec::new(),
            to_restart: VecDeque::new(),
            rolling: None,
            not_before: Instant::now(),
            waiting_for: None,
            rollout_waits: None,
            ended_rollout: None,
            not_started: None,
            cannot_write: None,
            removed: false,
        };
        service.pool.set_slo(service.spec.slo);
        let places = service.executor.places();
        for one in remembered {
            let there = |place: &&Place| {
                place.id == one.place
                    && place.taken_by.as_ref().is_some_and(|(n, _)| *n == one.name)
            };
            if places.iter().any(|place| there(&place)) && service.reserve(&one.place, &one.name) {
                service.add(&one.name, &one.place, one.port, one.mark.clone());
                tracing::info!(replica = one.name, gpu = one.place, "replica found running");
                if one.mark.as_ref().is_some_and(|mark| *mark != service.spec.mark()) {
                    // It was declared anew before the manager left, and not replaced yet.
                    service.to_restart.push_back(one.name.clone());
                }
            }
        }
        service.scaler.resume(u32::try_from(service.slots.len()).unwrap_or(u32::MAX));
        if !service.executor.is_shadow() {
            service.stop_unknown(&places);
        }
        service
    }

    fn book(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, String>> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(&self, place: &str, name: &str) -> bool {
        let mut book = self.book();
        match book.contains_key(place) {
            true => false,
            false => book.insert(place.to_owned(), name.to_owned()).is_none(),
        }
    }

    /// Tells replicas to leave that run under a name of ours and are not remembered.
    fn stop_unknown(&mut self, places: &[Place]) {
        for place in places.iter().filter(|place| place.is_declared) {
            let Some((name, _)) = &place.taken_by else { continue };
            if !is_replica_of(self.spec.name.as_str(), name) || self.has(name) {
                continue;
            }
            tracing::warn!(replica = name, gpu = place.id, "runs and is not written down: stopped");
            match self.executor.stop(&place.id, name) {
                Ok(()) => {
                    let replica = Arc::new(Replica::new(name, &place.id, NOWHERE));
                    self.pool.stopping(&replica);
                    self.book().entry(place.id.clone()).or_insert_with(|| name.clone());
                    self.slots.push(Slot::new(replica, Phase::Ordered, None));
                }
                Err(error) => tracing::error!(error = %error, "a replica cannot be stopped"),
            }
        }
    }

    fn add(&mut self, name: &str, place: &str, port: u16, mark: Option<String>) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let replica = Arc::new(Replica::new(name, place, address));
        self.pool.add(Arc::clone(&replica));
        let check =
            check::watch(Arc::clone(&self.pool), Arc::clone(&replica), self.spec.health.clone());
        // It ends by itself once the replica has been told to leave.
        drop(self.runtime.spawn(check));
        self.slots.push(Slot::new(replica, Phase::Up, mark));
    }

    /// Replaces every replica that runs now, one after another.
    pub fn restart(&mut self) {
        self.ended_rollout = None;
        for slot in self.slots.iter().filter(|slot| slot.phase == Phase::Up) {
            if !self.to_restart.contains(&slot.replica.name) {
                self.to_restart.push_back(slot.replica.name.clone());
            }
        }
    }

    /// Takes a new declaration; replicas are replaced when they would be started differently.
    pub fn declare(&mut self, spec: ServiceSpec) {
        let differs = spec.mark() != self.spec.mark();
        self.scaler.change(scale_params(&spec));
        self.spec = spec;
        self.pool.set_slo(self.spec.slo);
        if differs {
            self.restart();
        }
    }

    /// Lets every replica finish and leave.
    pub fn remove(&mut self) {
        self.removed = true;
        self.to_restart.clear();
        self.rolling = None;
        let names: Vec<String> = self.slots.iter().map(|slot| slot.replica.name.clone()).collect();
        for name in names {
            self.leave(&name);
        }
    }

    /// Everything has left after [`Service::remove`].
    pub fn is_gone(&self) -> bool {
        self.removed && self.slots.is_empty()
    }

    /// How many replicas are wanted.
    pub fn wanted(&self) -> u32 {
        if self.removed { 0 } else { self.scaler.wanted() }
    }

    /// Replicas that a rolling restart has yet to replace.
    pub fn restarts_left(&self) -> u32 {
        let left = self.to_restart.len() + usize::from(self.rolling.is_some());
        u32::try_from(left).unwrap_or(u32::MAX)
    }

    /// Why fewer run than wanted, why a rolling restart waits or why the last one was ended.
    pub fn waiting_for(&self) -> Option<&str> {
        let rollout = self.rollout_waits.as_deref().or(self.ended_rollout.as_deref());
        self.waiting_for.as_deref().or(rollout)
    }

    /// What to remember.
    pub fn to_remember(&self) -> Vec<Remembered> {
        let kept = self.slots.iter().filter(|slot| slot.phase != Phase::Ordered);
        kept.map(|slot| Remembered {
            name: slot.replica.name.clone(),
            place: slot.replica.place.clone(),
            port: slot.replica.address.port(),
            mark: slot.mark.clone(),
        })
        .collect()
    }

    fn up(&self) -> usize {
        self.slots.iter().filter(|slot| slot.phase == Phase::Up).count()
    }

    fn leave(&mut self, name: &str) {
        for slot in self.slots.iter_mut().filter(|s| s.replica.name == name && s.phase == Phase::Up)
        {
            slot.phase = Phase::Leaving;
            slot.goes_first = false;
            slot.since = Instant::now();
            self.pool.drain(&slot.replica);
        }
    }

    /// Lets one leave before its successor comes: [`Service::order_planned`] does it.
    fn go_first(&mut self, name: &str) {
        for slot in self.slots.iter_mut().filter(|s| s.replica.name == name && s.phase == Phase::Up)
        {
            slot.goes_first = true;
        }
    }

    fn is_ready(&self, name: &str) -> bool {
        let named = self.slots.iter().find(|slot| slot.replica.name == name);
        named.is_some_and(|slot| slot.replica.state().0 == ReplicaState::Ready)
    }

    fn is_up(&self, name: &str) -> bool {
        self.slots.iter().any(|slot| slot.replica.name == name && slot.phase == Phase::Up)
    }

    fn has(&self, name: &str) -> bool {
        self.slots.iter().any(|slot| slot.replica.name == name)
    }

    /// One step; what it plans is ordered by [`Service::order_planned`].
    pub fn step(&mut self, now: Micros) {
        let places = self.executor.places();
        self.scaler.step(now, self.pool.load());
        self.waiting_for = None;
        if self.executor.is_shadow() {
            if self.up() < self.wanted() as usize {
                self.waiting_for = Some("nothing is started in shadow mode".to_owned());
            }
        } else {
            self.act(&places);
        }
        for slot in self.slots.iter().filter(|slot| slot.phase == Phase::Up) {
            let latency = slot.replica.slo_latency(self.spec.slo);
            let (slo, critical) = (self.spec.slo, self.spec.critical);
            self.executor.tell(&slot.replica.place, Standing { latency, slo, critical });
        }
    }

    fn act(&mut self, places: &[Place]) {
        self.finish_leaving(places);
        self.replace_broken();
        self.roll(places);
        let (up, wanted) = (self.up(), self.wanted() as usize);
        if up < wanted {
            self.start_one(places);
        } else if up > wanted && self.rolling.is_none() && !self.removed {
            let newest = self.slots.iter().rev().find(|slot| slot.phase == Phase::Up);
            if let Some(name) = newest.map(|slot| slot.replica.name.clone()) {
                tracing::info!(replica = name, "replica is no longer needed");
                self.leave(&name);
            }
        }
    }

    /// Drained replicas are told to leave; those that are gone are forgotten.
    fn finish_leaving(&mut self, places: &[Place]) {
        let mut gone = Vec::new();
        for slot in &mut self.slots {
            let replica = &slot.replica;
            match slot.phase {
                Phase::Up => {}
                Phase::Leaving => {
                    let late = slot.since.elapsed() > self.spec.drain_within;
                    if replica.outstanding() > 0 && !late {
                        continue;
                    }
                    match self.executor.stop(&replica.place, &replica.name) {
                        Ok(()) => {
                            self.pool.stopping(replica);
                            slot.phase = Phase::Ordered;
                            slot.since = Instant::now();
                        }
                        Err(error) => tracing::warn!(error = %error, "a replica cannot be stopped"),
                    }
                }
                Phase::Ordered => {
                    let here = places.iter().find(|place| place.id == replica.place);
                    let there = here.and_then(|place| place.taken_by.as_ref());
                    if there.is_none_or(|(name, _)| *name != replica.name) {
                        gone.push(replica.name.clone());
                    }
                }
            }
        }
        for name in gone {
            self.pool.remove(&name);
            self.release(&name);
            self.slots.retain(|slot| slot.replica.name != name);
        }
    }

    /// One that has been out for too long is started anew, elsewhere if there is room. It stays while
    /// its successor could not be written down: it may come to itself.
    fn replace_broken(&mut self) {
        let limit = self.spec.health.restart_after;
        let broken = self.slots.iter().find(|slot| {
            let (state, since) = slot.replica.state();
            slot.phase == Phase::Up
                && matches!(state, ReplicaState::Down | ReplicaState::Starting)
                && since > limit
        });
        let Some(name) = broken.map(|slot| slot.replica.name.clone()) else { return };
        let has_successor = self.up() > self.wanted() as usize;
        match &self.cannot_write {
            Some((why, _)) if !has_successor => self.waiting_for = Some(why.clone()),
            _ => {
                tracing::warn!(replica = name, "replica has been out for too long and is replaced");
                if has_successor { self.leave(&name) } else { self.go_first(&name) }
            }
        }
    }

    /// The replicas with their processes.
    pub fn replicas(&self) -> Vec<(Arc<Replica>, Option<u32>)> {
        let places = self.executor.places();
        let pid = |replica: &Replica| {
            let place = places.iter().find(|place| place.id == replica.place)?;
            place
                .taken_by
                .as_ref()
                .filter(|(name, _)| *name == replica.name)
                .and_then(|(_, pid)| *pid)
        };
        self.slots.iter().map(|slot| (Arc::clone(&slot.replica), pid(&slot.replica))).collect()
    }
}

/// Time for [`Service::step`].
pub fn now() -> Micros {
    monitor::now()
}
