//! Starting a replica: a GPU and a name are found, then it is written down, then ordered.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use super::{AGAIN_AFTER, Service};
use crate::executor::{Place, ReplicaLaunch};

/// How long a process may take to leave after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// Why no replica is started now.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// Every GPU that fits has a service.
    NoRoom(String),
    /// Anything else.
    Otherwise(String),
}

/// A port that nobody has at this moment.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

impl Service {
    pub(super) fn fits(&self, place: &Place) -> bool {
        self.spec.gpu_type.as_ref().is_none_or(|kind| *kind == place.gpu_type)
    }

    pub(super) fn start_one(&mut self, places: &[Place]) {
        if Instant::now() < self.not_before {
            self.waiting_for = self.not_started.as_ref().map(|(_, reason)| reason.clone());
            return;
        }
        if let Err(NotStarted::NoRoom(reason) | NotStarted::Otherwise(reason)) =
            self.try_start(places)
        {
            self.waiting_for = Some(reason);
        }
    }

    /// Finds a place for a replica more, and plans it. A GPU without a job is taken first: no job has
    /// to make room there, and none is slowed down.
    pub(super) fn try_start(&mut self, places: &[Place]) -> Result<String, NotStarted> {
        let of_type: Vec<&Place> = places.iter().filter(|place| self.fits(place)).collect();
        if of_type.is_empty() {
            let kind = self.spec.gpu_type.as_ref().map_or("GPU", |kind| kind.as_str());
            return Err(NotStarted::Otherwise(format!("this machine has no {kind}")));
        }
        let name = self.new_name(places);
        let mut free: Vec<&Place> =
            of_type.into_iter().filter(|place| place.usable && place.taken_by.is_none()).collect();
        free.sort_by_key(|place| place.has_job);
        let Some(place) = free.into_iter().find(|place| self.reserve(&place.id, &name)) else {
            let reason = "every GPU that fits has a service already or is disabled";
            return Err(NotStarted::NoRoom(reason.into()));
        };
        let port = match free_port() {
            Ok(port) => port,
            Err(error) => {
                let reason = format!("no port can be had: {error}");
                self.release(&name);
                self.not_before = Instant::now() + AGAIN_AFTER;
                self.not_started = Some((name, reason.clone()));
                return Err(NotStarted::Otherwise(reason));
            }
        };
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
        let mark = Some(self.spec.mark());
        self.add(&name, &place.id, port, mark);
        if let Some(slot) = self.slots.last_mut() {
            slot.planned = Some(Box::new(launch));
        }
        Ok(name)
    }

    /// Whether the state is to be written although it is on the disk already: somebody leaves before
    /// its successor comes, or the last write failed and it is time to try again.
    pub fn must_write(&self) -> bool {
        let again = self.cannot_write.as_ref().is_some_and(|(_, at)| Instant::now() >= *at);
        again || self.slots.iter().any(|slot| slot.goes_first)
    }

    /// The state was written.
    pub fn can_write(&mut self) {
        self.cannot_write = None;
    }

    /// Orders what was planned, and lets those leave that go first. To be called once it is written
    /// down.
    pub fn order_planned(&mut self) {
        self.let_first_go();
        let mut failed = Vec::new();
        for slot in &mut self.slots {
            let Some(launch) = slot.planned.take() else { continue };
            let (name, gpu) = (&slot.replica.name, &slot.replica.place);
            match self.executor.start(gpu, &launch) {
                Ok(()) => {
                    let port = slot.replica.address.port();
                    tracing::info!(replica = name, gpu, port, "replica is started");
                    self.not_started = None;
                }
                Err(error) => {
                    tracing::warn!(replica = name, gpu, error = %error, "replica is not started");
                    self.pool.stopping(&slot.replica);
                    failed.push((name.clone(), error.to_string()));
                }
            }
        }
        self.give_up(failed);
    }

    fn let_first_go(&mut self) {
        let first = self.slots.iter().filter(|slot| slot.goes_first);
        let names: Vec<String> = first.map(|slot| slot.replica.name.clone()).collect();
        for name in names {
            self.leave(&name);
        }
    }

    /// Gives up what was planned and could not be written down: started all the same, the next manager
    /// would not know of it. Nobody leaves whose successor would be given up too.
    pub fn drop_planned(&mut self, why: &str) {
        self.cannot_write = Some((why.to_owned(), Instant::now() + AGAIN_AFTER));
        for slot in &mut self.slots {
            slot.goes_first = false;
        }
        let planned = self.slots.iter().filter(|slot| slot.planned.is_some());
        let failed = planned.map(|slot| {
            self.pool.stopping(&slot.replica);
            (slot.replica.name.clone(), why.to_owned())
        });
        let failed = failed.collect();
        self.give_up(failed);
    }

    /// Forgets replicas that were not started, and why; the next try comes a little later.
    fn give_up(&mut self, failed: Vec<(String, String)>) {
        for (name, reason) in failed {
            self.pool.remove(&name);
            self.release(&name);
            self.slots.retain(|slot| slot.replica.name != name);
            self.not_before = Instant::now() + AGAIN_AFTER;
            self.waiting_for = Some(reason.clone());
            self.not_started = Some((name, reason));
        }
    }

    pub(super) fn release(&self, name: &str) {
        self.book().retain(|_, taken_by| taken_by != name);
    }

    /// The lowest number that is free: names stay short, and files of ended replicas are used again.
    fn new_name(&self, places: &[Place]) -> String {
        let book = self.book();
        let leaves = |name: &str| self.rolling.as_ref().is_some_and(|rolling| rolling.old == name);
        let runs = |name: &str| {
            places.iter().any(|place| place.taken_by.as_ref().is_some_and(|(n, _)| n == name))
        };
        let mut number = 0_u32;
        loop {
            let name = format!("{}-{number}", self.spec.name);
            let taken = book.values().any(|taken| *taken == name) || self.has(&name) || runs(&name);
            // The name of one that is being replaced must not come back meanwhile.
            if !taken && !leaves(&name) && !self.to_restart.contains(&name) {
                return name;
            }
            number += 1;
        }
    }
}
