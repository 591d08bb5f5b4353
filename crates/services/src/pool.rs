//! The replicas of a service as the front sees them, and the choice among them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use muxflow_agent::monitor;
use muxflow_types::Micros;
use tokio::sync::Notify;

use crate::latency::{Histogram, LatencyWindow, slo_latency};
use crate::upstream::Connections;

/// Whether a replica gets requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaState {
    /// It has not answered a health check yet.
    Starting,
    /// It gets requests.
    Ready,
    /// It failed: none until a health check passes.
    Down,
    /// It finishes what it has and gets no more.
    Draining,
    /// It was told to leave.
    Stopping,
}

impl fmt::Display for ReplicaState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReplicaState::Starting => "starting",
            ReplicaState::Ready => "ready",
            ReplicaState::Down => "down",
            ReplicaState::Draining => "draining",
            ReplicaState::Stopping => "stopping",
        })
    }
}

#[derive(Debug)]
struct Live {
    state: ReplicaState,
    since: Instant,
    /// When each request under way began, by ticket.
    under_way: BTreeMap<u64, Instant>,
    tickets: u64,
    latency: LatencyWindow,
    /// Ages of requests that ended without an answer, past the SLO.
    unanswered: LatencyWindow,
}

/// One replica.
#[derive(Debug)]
pub struct Replica {
    /// Its name.
    pub name: String,
    /// The GPU it is on.
    pub place: String,
    /// Where it listens.
    pub address: SocketAddr,
    pub(crate) connections: Connections,
    live: Mutex<Live>,
}

/// Percentiles look back this far.
pub const WINDOW: (Micros, usize) = (Micros::from_millis(500), 10);

impl Replica {
    /// One that has yet to answer.
    pub fn new(name: &str, place: &str, address: SocketAddr) -> Self {
        Replica {
            name: name.to_owned(),
            place: place.to_owned(),
            address,
            connections: Connections::new(address),
            live: Mutex::new(Live {
                state: ReplicaState::Starting,
                since: Instant::now(),
                under_way: BTreeMap::new(),
                tickets: 0,
                latency: LatencyWindow::new(WINDOW.0, WINDOW.1),
                unanswered: LatencyWindow::new(WINDOW.0, WINDOW.1),
            }),
        }
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its state, and for how long.
    pub fn state(&self) -> (ReplicaState, Duration) {
        let live = self.live();
        (live.state, live.since.elapsed())
    }

    /// Requests under way.
    pub fn outstanding(&self) -> u32 {
        self.live().outstanding()
    }

    /// Latencies of the last seconds; those of requests that got no answer are at least these.
    pub fn recent(&self) -> Histogram {
        let (live, now) = (self.live(), monitor::now());
        let mut recent = live.latency.recent(now);
        recent.merge(&live.unanswered.recent(now));
        recent
    }

    /// What is held against the SLO. A request under way counts with its age once that is past the
    /// SLO: whatever becomes of it, it is late.
    pub fn slo_latency(&self, slo: Option<Micros>) -> Option<Micros> {
        let (live, now) = (self.live(), monitor::now());
        let mut late = live.unanswered.recent(now);
        let ages = live.under_way.values().map(|began| micros(began.elapsed()));
        ages.filter(|age| *age > late_after(slo)).for_each(|age| late.add(age));
        slo_latency(&live.latency.recent(now), &late, live.latency.length())
    }

    fn turn(&self, from: &[ReplicaState], to: ReplicaState) -> bool {
        let mut live = self.live();
        let turns = from.contains(&live.state);
        if turns {
            live.state = to;
            live.since = Instant::now();
        }
        turns
    }
}

impl Live {
    fn outstanding(&self) -> u32 {
        u32::try_from(self.under_way.len()).unwrap_or(u32::MAX)
    }
}

fn micros(time: Duration) -> Micros {
    Micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// A request without an answer is late from this age on. Before, nothing is known of it: that a
/// replica refuses a request at once does not mean that it is quick.
fn late_after(slo: Option<Micros>) -> Micros {
    slo.unwrap_or(Micros(WINDOW.0.0 * WINDOW.1 as u64))
}

/// A place in a replica's line, given back when dropped. One that is dropped without an answer, be it
/// that the replica broke off, that its time was over or that the client left, counts as late when it
/// is.
#[derive(Debug)]
pub struct Ticket {
    /// The replica that was chosen.
    pub replica: Arc<Replica>,
    pool: Arc<Pool>,
    number: u64,
}

impl Ticket {
    /// The answer is complete: its latency counts.
    pub fn answered(&self) {
        let mut live = self.replica.live();
        if let Some(began) = live.under_way.remove(&self.number) {
            live.latency.add(monitor::now(), micros(began.elapsed()));
        }
    }

    /// It did not answer: no more requests to it until a health check passes.
    pub fn failed(&self) {
        if self.replica.turn(&[ReplicaState::Ready], ReplicaState::Down) {
            tracing::warn!(replica = self.replica.name, "replica does not answer");
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut live = self.replica.live();
        if let Some(began) = live.under_way.remove(&self.number) {
            let age = micros(began.elapsed());
            if age > late_after(self.pool.slo()) {
                live.unanswered.add(monitor::now(), age);
            }
        }
        drop(live);
        self.pool.changed.notify_waiters();
    }
}

/// All replicas of a service.
#[derive(Debug, Default)]
pub struct Pool {
    replicas: Mutex<Vec<Arc<Replica>>>,
    turn: std::sync::atomic::AtomicUsize,
    waiting: std::sync::atomic::AtomicU32,
    /// 0 is none.
    slo_us: std::sync::atomic::AtomicU64,
    changed: Notify,
}

impl Pool {
    /// The replicas.
    pub fn replicas(&self) -> Vec<Arc<Replica>> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What latencies are held against from now on.
    pub fn set_slo(&self, slo: Option<Micros>) {
        let us = slo.map_or(0, |slo| slo.0);
        self.slo_us.store(us, std::sync::atomic::Ordering::Relaxed);
    }

    fn slo(&self) -> Option<Micros> {
        let us = self.slo_us.load(std::sync::atomic::Ordering::Relaxed);
        (us > 0).then_some(Micros(us))
    }

    /// Adds one.
    pub fn add(&self, replica: Arc<Replica>) {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner).push(replica);
    }

    /// Takes one out.
    pub fn remove(&self, name: &str) {
        let mut replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        replicas.retain(|replica| replica.name != name);
    }

    /// A health check passed.
    pub fn passed(&self, replica: &Replica) {
        if replica.turn(&[ReplicaState::Starting, ReplicaState::Down], ReplicaState::Ready) {
            tracing::info!(replica = replica.name, "replica is ready");
            self.changed.notify_waiters();
        }
    }

    /// Too many health checks failed.
    pub fn failed(&self, replica: &Replica) {
        if replica.turn(&[ReplicaState::Ready], ReplicaState::Down) {
            tracing::warn!(replica = replica.name, "replica fails its health check");
        }
    }

    /// No more requests to it.
    pub fn drain(&self, replica: &Replica) {
        use ReplicaState::{Down, Draining, Ready, Starting};
        replica.turn(&[Starting, Ready, Down], Draining);
    }

    /// It was told to leave.
    pub fn stopping(&self, replica: &Replica) {
        use ReplicaState::{Down, Draining, Ready, Starting, Stopping};
        replica.turn(&[Starting, Ready, Down, Draining], Stopping);
    }

    /// Requests under way and those that wait for a replica.
    pub fn load(&self) -> u32 {
        let under_way: u32 = self.replicas().iter().map(|replica| replica.outstanding()).sum();
        under_way + self.waiting.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The ready replica with the fewest requests under way that is not in `tried`; the turn goes
    /// round among equals.
    fn choose(self: &Arc<Self>, tried: &[String]) -> Option<Ticket> {
        let replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = self.turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let count = replicas.len().max(1);
        let ready = replicas.iter().enumerate().filter_map(|(index, replica)| {
            let live = replica.live();
            let fits = live.state == ReplicaState::Ready && !tried.contains(&replica.name);
            fits.then_some((live.under_way.len(), (index + count - turn % count) % count, replica))
        });
        let (_, _, chosen) = ready.min_by_key(|(outstanding, order, _)| (*outstanding, *order))?;
        // Still under the lock of the list; only a drain can come between, and is seen here.
        let mut live = chosen.live();
        if live.state != ReplicaState::Ready {
            return None;
        }
        let number = live.tickets;
        live.tickets += 1;
        live.under_way.insert(number, Instant::now());
        drop(live);
        let replica = Arc::clone(chosen);
        Some(Ticket { replica, pool: Arc::clone(self), number })
    }

    /// Waits for a replica until `deadline`. One that was tried is taken again only when no other is
    /// ready.
    pub async fn acquire(self: &Arc<Self>, tried: &[String], deadline: Instant) -> Option<Ticket> {
        if let Some(ticket) = self.choose(tried).or_else(|| self.choose(&[])) {
            return Some(ticket);
        }
        let _waits = Waits::new(&self.waiting);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(ticket) = self.choose(tried).or_else(|| self.choose(&[])) {
                return Some(ticket);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            if tokio::time::timeout(left, changed).await.is_err() {
                return None;
            }
        }
    }
}

struct Waits<'a>(&'a std::sync::atomic::AtomicU32);

impl<'a> Waits<'a> {
    fn new(count: &'a std::sync::atomic::AtomicU32) -> Self {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Waits(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(count: u16) -> Arc<Pool> {
        let pool = Arc::new(Pool::default());
        for index in 0..count {
            let replica = Replica::new(&format!("r{index}"), "gpu", ([127, 0, 0, 1], index).into());
            pool.add(Arc::new(replica));
        }
        pool
    }

    #[test]
    fn the_least_busy_ready_one_is_chosen() {
        let pool = pool(3);
        assert!(pool.choose(&[]).is_none(), "none is ready");
        let all = pool.replicas();
        pool.passed(&all[0]);
        pool.passed(&all[2]);
        let first = pool.choose(&[]).unwrap();
        let second = pool.choose(&[]).unwrap();
        assert_ne!(first.replica.name, second.replica.name);
        assert_eq!(pool.load(), 2);
        let freed = first.replica.name.clone();
        drop(first);
        assert_eq!(pool.choose(&[]).unwrap().replica.name, freed);
        assert_ne!(
            pool.choose(std::slice::from_ref(&freed)).unwrap().replica.name,
            freed,
            "was tried"
        );
    }

    #[test]
    fn equals_take_turns() {
        let pool = pool(3);
        for replica in pool.replicas() {
            pool.passed(&replica);
        }
        let names: Vec<String> =
            (0..6).map(|_| pool.choose(&[]).unwrap().replica.name.clone()).collect();
        for name in ["r0", "r1", "r2"] {
            assert_eq!(names.iter().filter(|n| *n == name).count(), 2, "{names:?}");
        }
    }

    #[test]
    fn one_that_drains_or_failed_gets_nothing_and_returns_only_by_a_check() {
        let pool = pool(1);
        let replica = pool.replicas().remove(0);
        pool.passed(&replica);
        pool.choose(&[]).unwrap().failed();
        assert!(pool.choose(&[]).is_none());
        pool.passed(&replica);
        assert!(pool.choose(&[]).is_some());
        pool.drain(&replica);
        pool.passed(&replica);
        assert!(pool.choose(&[]).is_none(), "draining is for good");
    }

    #[test]
    fn requests_without_an_answer_are_late_once_they_are_past_the_slo() {
        let pool = pool(1);
        let (hour, slo) = (Some(Micros::from_secs(3600)), Some(Micros::from_millis(20)));
        let replica = pool.replicas().remove(0);
        pool.passed(&replica);
        pool.set_slo(hour);
        drop(pool.choose(&[]).unwrap());
        assert_eq!(replica.recent().total(), 0, "one that is refused at once says nothing");
        pool.set_slo(slo);
        let hanging: Vec<Ticket> = (0..3).map(|_| pool.choose(&[]).unwrap()).collect();
        assert_eq!(replica.slo_latency(hour), None);
        std::thread::sleep(Duration::from_millis(60));
        assert!(replica.slo_latency(slo).unwrap() >= Micros::from_millis(60), "while they hang");
        drop(hanging);
        assert_eq!(replica.outstanding(), 0);
        assert!(replica.slo_latency(slo).unwrap() >= Micros::from_millis(60), "and afterwards");
        assert_eq!(replica.recent().total(), 3);
    }

    #[tokio::test]
    async fn a_request_waits_for_the_first_ready_one() {
        let pool = pool(1);
        let waiter = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move { pool.acquire(&[], Instant::now() + Duration::from_secs(20)).await.is_some() }
        });
        while pool.load() == 0 {
            tokio::task::yield_now().await;
        }
        pool.passed(&pool.replicas()[0]);
        assert!(waiter.await.unwrap());
        assert_eq!(pool.load(), 0);
        pool.drain(&pool.replicas()[0]);
        assert!(pool.acquire(&[], Instant::now()).await.is_none());
    }
}
