//! One service: a loop that brings what runs to what is wanted, one small step at a time.
//!
//! Every step looks at what there is and does what is missing, so that a crash, a lost order or a GPU
//! that goes away need no case of their own. A replica that is to leave is first taken out of the
//! front, then finishes what it has, and only then is told to stop.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
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

/// How long a process may take to leave after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
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
}

#[derive(Debug)]
struct Rolling {
    old: String,
    new: Option<String>,
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
    rolling: Option<Rolling>,
    not_before: Instant,
    waiting_for: Option<String>,
    ended_rollout: Option<String>,
    removed: bool,
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

/// A port that nobody has at this moment.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

impl Service {
    /// Nothing runs yet but what is remembered and still there.
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
            ended_rollout: None,
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
                service.add(&one.name, &one.place, one.port);
                tracing::info!(replica = one.name, gpu = one.place, "replica found running");
            }
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

    fn add(&mut self, name: &str, place: &str, port: u16) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let replica = Arc::new(Replica::new(name, place, address));
        self.pool.add(Arc::clone(&replica));
        let check =
            check::watch(Arc::clone(&self.pool), Arc::clone(&replica), self.spec.health.clone());
        // It ends by itself once the replica has been told to leave.
        drop(self.runtime.spawn(check));
        self.slots.push(Slot { replica, phase: Phase::Up, since: Instant::now() });
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
        let differs = (&spec.argv, &spec.env, &spec.cwd, spec.user, &spec.gpu_type, &spec.health)
            != (
                &self.spec.argv,
                &self.spec.env,
                &self.spec.cwd,
                self.spec.user,
                &self.spec.gpu_type,
                &self.spec.health,
            );
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

    /// Why fewer run than wanted, or why the last rolling restart was ended.
    pub fn waiting_for(&self) -> Option<&str> {
        self.waiting_for.as_deref().or(self.ended_rollout.as_deref())
    }

    /// What to remember.
    pub fn to_remember(&self) -> Vec<Remembered> {
        let kept = self.slots.iter().filter(|slot| slot.phase != Phase::Ordered);
        kept.map(|slot| Remembered {
            name: slot.replica.name.clone(),
            place: slot.replica.place.clone(),
            port: slot.replica.address.port(),
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
            slot.since = Instant::now();
            self.pool.drain(&slot.replica);
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

    /// One step. `places` is what the executor says now.
    pub fn step(&mut self, now: Micros) {
        let places = self.executor.places();
        self.scaler.step(now, self.pool.load());
        self.finish_leaving(&places);
        self.replace_broken();
        self.roll(&places);
        let (up, wanted) = (self.up(), self.wanted() as usize);
        self.waiting_for = None;
        if up < wanted {
            self.start_one(&places);
        } else if up > wanted && self.rolling.is_none() && !self.removed {
            let newest = self.slots.iter().rev().find(|slot| slot.phase == Phase::Up);
            if let Some(name) = newest.map(|slot| slot.replica.name.clone()) {
                tracing::info!(replica = name, "replica is no longer needed");
                self.leave(&name);
            }
        }
        for slot in self.slots.iter().filter(|slot| slot.phase == Phase::Up) {
            let latency = slot.replica.slo_latency(self.spec.slo);
            let (slo, critical) = (self.spec.slo, self.spec.critical);
            self.executor.tell(&slot.replica.place, Standing { latency, slo, critical });
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
            self.book().retain(|_, taken_by| *taken_by != name);
            self.slots.retain(|slot| slot.replica.name != name);
        }
    }

    /// One that has been out for too long is started anew, elsewhere if there is room.
    fn replace_broken(&mut self) {
        let limit = self.spec.health.restart_after;
        let broken = self.slots.iter().find(|slot| {
            let (state, since) = slot.replica.state();
            slot.phase == Phase::Up
                && matches!(state, ReplicaState::Down | ReplicaState::Starting)
                && since > limit
        });
        if let Some(name) = broken.map(|slot| slot.replica.name.clone()) {
            tracing::warn!(replica = name, "replica has been out for too long and is replaced");
            self.leave(&name);
        }
    }

    fn roll(&mut self, places: &[Place]) {
        match self.rolling.take() {
            Some(Rolling { old, new: Some(new) }) if self.has(&old) && self.has(&new) => {
                // The old one leaves once the new one serves.
                if self.is_ready(&new) {
                    self.leave(&old);
                }
                self.rolling = Some(Rolling { old, new: Some(new) });
            }
            Some(Rolling { old, new: Some(new) }) if self.is_up(&old) => {
                // The new one never served: what serves now stays, and nothing else is replaced.
                let text = format!(
                    "the rolling restart was ended: {new} was not ready within {} s, and {old} goes on as it was; mend the declaration and declare it again",
                    self.spec.health.restart_after.as_secs_f64()
                );
                tracing::error!(service = %self.spec.name, "{text}");
                self.to_restart.clear();
                self.ended_rollout = Some(text);
            }
            Some(rolling) if self.has(&rolling.old) => {
                self.leave(&rolling.old);
                self.rolling = Some(rolling);
            }
            Some(rolling) => {
                // The old one is gone; the next waits until all others serve again.
                let up: Vec<&Slot> = self.slots.iter().filter(|s| s.phase == Phase::Up).collect();
                let whole = up.len() >= self.wanted() as usize
                    && up.iter().all(|slot| slot.replica.state().0 == ReplicaState::Ready);
                if !whole {
                    self.rolling = Some(rolling);
                }
            }
            None => {}
        }
        if self.rolling.is_some() {
            return;
        }
        while let Some(old) = self.to_restart.pop_front() {
            if self.has(&old) {
                // With a free GPU the new one comes first.
                let new = self.try_start(places).ok();
                self.rolling = Some(Rolling { old, new });
                return;
            }
        }
    }

    fn start_one(&mut self, places: &[Place]) {
        if Instant::now() < self.not_before {
            return;
        }
        if let Err(reason) = self.try_start(places) {
            self.waiting_for = Some(reason);
        }
    }

    fn try_start(&mut self, places: &[Place]) -> Result<String, String> {
        let kind = self.spec.gpu_type.clone();
        let fits = |place: &&Place| kind.as_ref().is_none_or(|kind| *kind == place.gpu_type);
        let mut of_type = places.iter().filter(fits).peekable();
        if of_type.peek().is_none() {
            let kind = kind.map_or_else(|| "GPU".to_owned(), |kind| kind.to_string());
            return Err(format!("this machine has no {kind}"));
        }
        let name = self.new_name();
        let free = of_type
            .filter(|place| place.usable && place.taken_by.is_none())
            .find(|place| self.reserve(&place.id, &name));
        let Some(place) = free else {
            return Err("every GPU that fits has a service already or is disabled".into());
        };
        let started = free_port().map_err(|e| e.to_string()).and_then(|port| {
            let launch = ReplicaLaunch {
                name: name.clone(),
                argv: self.spec.argv_on(port),
                env: self.spec.env_on(port),
                cwd: self.spec.cwd.clone(),
                user: self.spec.user,
                grace_ms: u64::try_from(GRACE.as_millis()).unwrap_or(u64::MAX),
                slo: self.spec.slo,
                critical: self.spec.critical,
            };
            self.executor.start(&place.id, &launch).map_err(|e| e.to_string())?;
            Ok(port)
        });
        match started {
            Ok(port) => {
                tracing::info!(replica = name, gpu = place.id, port, "replica is started");
                self.add(&name, &place.id, port);
                Ok(name)
            }
            Err(reason) => {
                self.book().retain(|_, taken_by| *taken_by != name);
                self.not_before = Instant::now() + AGAIN_AFTER;
                Err(reason)
            }
        }
    }

    /// The lowest number that is free: names stay short, and files of ended replicas are used again.
    fn new_name(&self) -> String {
        let book = self.book();
        let leaves = |name: &str| self.rolling.as_ref().is_some_and(|rolling| rolling.old == name);
        let mut number = 0_u32;
        loop {
            let name = format!("{}-{number}", self.spec.name);
            let taken = book.values().any(|taken| *taken == name) || self.has(&name);
            // The name of one that is being replaced must not come back meanwhile.
            if !taken && !leaves(&name) && !self.to_restart.contains(&name) {
                return name;
            }
            number += 1;
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
