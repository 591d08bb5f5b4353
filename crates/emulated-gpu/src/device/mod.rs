//! The device process: one GPU, its clients, and the clock.
//!
//! One thread waits for sockets, the doorbell and the next moment at which somebody could be
//! waiting for a completion. Nobody waiting means sleeping, however much work is queued: work
//! carries its own time, so running late changes no result.

mod engine;
mod faults;
mod forecast;
mod meter;
mod requests;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::channel::{Channel, MAGIC, Public, Shared};
use crate::facts::{Facts, text};
use crate::fault::event;
use crate::node::Node;
use crate::profile::Profile;
use crate::wire::{self, Socket};
use crate::{EmulationError, sys};
use engine::{CopyRates, Effect, Engine};

/// How to run a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The node.
    pub node: Node,
    /// Which GPU.
    pub index: usize,
    /// Device seconds per second.
    pub time_factor: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// End when this process ends.
    pub parent: Option<i32>,
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Has not said yet; may only ask.
    Observer,
    /// Runs work.
    Client,
    /// An MPS server.
    Server,
}

struct Peer {
    socket: Socket,
    pidfd: Option<OwnedFd>,
    pid: i32,
    role: Role,
    channel: Option<Shared<Channel>>,
    heap: Option<OwnedFd>,
    tail: u64,
    used_bytes: u64,
    limit_bytes: u64,
    contexts: u32,
    server_pid: i32,
    sm_cap: f64,
    subscribed: u64,
    hung: bool,
}

/// One running device.
struct Device {
    node: Node,
    facts: Facts,
    engine: Engine,
    public: Shared<Public>,
    public_fd: OwnedFd,
    doorbell: OwnedFd,
    listener: OwnedFd,
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    state: faults::State,
    start_ns: u64,
    effects: Vec<Effect>,
    dead: Vec<u32>,
}

/// Runs a device until its parent ends or it is killed.
pub fn run(options: &Options) -> Result<(), EmulationError> {
    sys::exact_timers();
    let system = |what| move |source| EmulationError::System { what, source };
    let mut device = Device::new(options)?;
    let parent =
        match options.parent {
            Some(pid) => Some(sys::pidfd(pid).ok_or_else(|| {
                system("watch the parent process")(std::io::Error::last_os_error())
            })?),
            None => None,
        };
    let mut fds = Vec::new();
    let mut owners = Vec::new();
    let mut ready = Vec::new();
    loop {
        device.catch_up();
        let timeout = device.sleep_time();
        fds.clear();
        owners.clear();
        fds.push(device.listener.as_raw_fd());
        fds.push(device.doorbell.as_raw_fd());
        fds.push(parent.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        for (key, peer) in &device.peers {
            if !peer.hung {
                fds.push(peer.socket.fd());
                owners.push((*key, false));
            }
            if let Some(pidfd) = &peer.pidfd {
                fds.push(pidfd.as_raw_fd());
                owners.push((*key, true));
            }
        }
        sys::poll(&fds, timeout, &mut ready).map_err(system("wait for clients"))?;
        if ready[2] {
            return Ok(());
        }
        if ready[1] {
            sys::quiet(device.doorbell.as_fd());
        }
        for (i, (key, is_pid)) in owners.iter().enumerate() {
            if !ready[3 + i] {
                continue;
            }
            if *is_pid { device.dead.push(*key) } else { device.serve(*key) }
        }
        if ready[0] {
            device.accept();
        }
        device.bury();
    }
}

impl Device {
    fn new(options: &Options) -> Result<Device, EmulationError> {
        let system = |what| move |source| EmulationError::System { what, source };
        let profile = Profile::read(&options.node.profile(options.index))?;
        let mut facts = profile.facts;
        facts.index = options.index as u32;
        facts.pci = [0, 0x3b + options.index as u32, 0];
        facts.time_factor = options.time_factor;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        facts.started_us = since.map_or(0, |d| d.as_micros() as u64);
        facts.uuid = uuid(&options.node, options.index, options.seed);
        facts.serial = text(&format!("13220{:08}", 21_000_000 + options.index));
        let rates = CopyRates {
            pcie: facts.pcie_bytes_per_s / 1e9,
            device: facts.dram_bytes_per_s / 1e9 / 2.0 * 0.8,
        };
        let bytes = Shared::<Public>::BYTES as u64;
        let public_fd = sys::memfd(c"gpu", bytes).map_err(system("make shared memory"))?;
        let public =
            Shared::<Public>::map(public_fd.as_fd()).map_err(system("map shared memory"))?;
        let start_ns = sys::monotonic_ns();
        public.start_ns.store(start_ns, Ordering::Relaxed);
        public.factor.store(options.time_factor.to_bits(), Ordering::Relaxed);
        public.magic.store(MAGIC, Ordering::Release);
        let path = options.node.socket(options.index);
        let listener =
            wire::listen(&path).map_err(|source| EmulationError::Write { path, source })?;
        Ok(Device {
            node: options.node.clone(),
            facts,
            engine: Engine::new(profile.model, rates),
            public,
            public_fd,
            doorbell: sys::eventfd().map_err(system("make an eventfd"))?,
            listener,
            peers: BTreeMap::new(),
            next_peer: 1,
            state: faults::State::new(options.seed ^ options.index as u64),
            start_ns,
            effects: Vec::new(),
            dead: Vec::new(),
        })
    }

    /// Device time of a host time.
    fn device_ns(&self, host_ns: u64) -> f64 {
        host_ns.saturating_sub(self.start_ns) as f64 * self.facts.time_factor
    }

    /// Host time of a device time.
    fn host_ns(&self, device_ns: f64) -> u64 {
        self.start_ns.saturating_add((device_ns / self.facts.time_factor) as u64)
    }

    /// Takes what the clients pushed, lets time pass up to now, and tells them.
    fn catch_up(&mut self) {
        self.fire_due_faults();
        self.run_up_to_now();
    }

    /// The same without faults that are due.
    fn run_up_to_now(&mut self) {
        let now = sys::monotonic_ns();
        for (key, peer) in &mut self.peers {
            let Some(channel) = &peer.channel else { continue };
            let head = channel.head.0.load(Ordering::Acquire);
            // A client that runs ahead of what fits has broken the rules: take what is there.
            let from = peer.tail.max(head.saturating_sub(crate::channel::RING as u64));
            for position in from..head {
                let entry = channel.take(position);
                if entry.stream as usize >= crate::channel::STREAMS {
                    continue;
                }
                let at = entry.time_ns.clamp(self.start_ns, now) - self.start_ns;
                self.engine.submit(*key, entry, at as f64 * self.facts.time_factor);
            }
            peer.tail = head;
            channel.tail.0.store(head, Ordering::Release);
            if from < head && channel.fault.load(Ordering::SeqCst) != 0 {
                // What was pushed past a fault never runs.
                self.engine.abort_client(*key);
            }
            let hosts: Vec<u32> = self.engine.hosts(*key).collect();
            for stream in hosts {
                let done = channel.streams[stream as usize].host_done.load(Ordering::Acquire);
                self.engine.host_done(*key, stream, done);
            }
        }
        let to = self.device_ns(now);
        let mut effects = std::mem::take(&mut self.effects);
        self.engine.advance(to, &mut effects);
        self.tell(&effects);
        effects.clear();
        self.effects = effects;
    }

    /// Writes completions into the clients' shared memory, and wakes who sleeps there.
    fn tell(&self, effects: &[Effect]) {
        let mut touched: Vec<(u32, u32)> = Vec::new();
        for effect in effects {
            match *effect {
                Effect::Completed { client, stream, seq, time_ns } => {
                    let Some(channel) = self.channel(client) else { continue };
                    let slot = &channel.streams[stream as usize];
                    slot.completed_time_ns.store(time_ns as u64, Ordering::Relaxed);
                    slot.completed.store(seq, Ordering::SeqCst);
                    if touched.last() != Some(&(client, stream)) {
                        touched.push((client, stream));
                    }
                }
                Effect::Recorded { client, slot, time_ns } => {
                    let Some(channel) = self.channel(client) else { continue };
                    if let Some(event) = channel.events.get(slot as usize) {
                        event.store(time_ns as u64, Ordering::Release);
                    }
                }
                Effect::HostReady { client, stream, seq } => {
                    let Some(channel) = self.channel(client) else { continue };
                    channel.streams[stream as usize].host_ready.store(seq, Ordering::SeqCst);
                    channel.host_bell.fetch_add(1, Ordering::SeqCst);
                    sys::futex_wake(&channel.host_bell);
                }
                Effect::Notified { client } => {
                    let Some(channel) = self.channel(client) else { continue };
                    channel.host_bell.fetch_add(1, Ordering::SeqCst);
                    sys::futex_wake(&channel.host_bell);
                }
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for (client, stream) in touched {
            let Some(channel) = self.channel(client) else { continue };
            let slot = &channel.streams[stream as usize];
            if slot.sleepers.load(Ordering::SeqCst) > 0 {
                sys::futex_wake(Channel::word(slot));
            }
        }
    }

    fn channel(&self, client: u32) -> Option<&Channel> {
        self.peers.get(&client)?.channel.as_deref()
    }

    /// How long nobody can be waiting for anything; `None` is until somebody rings.
    fn sleep_time(&self) -> Option<Duration> {
        let mut next = f64::INFINITY;
        for (key, peer) in &self.peers {
            let Some(channel) = &peer.channel else { continue };
            let quiet = self.engine.earliest_any_ns(*key);
            let quiet = if quiet.is_finite() { self.host_ns(quiet) } else { 0 };
            channel.quiet_until_ns.store(quiet, Ordering::Relaxed);
            for stream in self.engine.busy_streams(*key) {
                let slot = &channel.streams[*stream as usize];
                let wanted = slot.wanted.load(Ordering::SeqCst);
                if wanted > slot.completed.load(Ordering::Relaxed) {
                    next = next.min(self.engine.earliest_ns(*key, *stream, wanted));
                }
            }
            for (stream, seq) in self.engine.first_host(*key) {
                next = next.min(self.engine.earliest_ns(*key, stream, seq));
            }
        }
        let due = self.state.next_due_ns();
        let now = sys::monotonic_ns();
        let mut wait = None;
        // Nothing changes before the engine's own next event; without one, somebody must ring.
        let next = next.max(self.engine.next_event_ns());
        if next.is_finite() {
            wait = Some(self.host_ns(next).saturating_sub(now).max(1_000));
        }
        if let Some(due) = due {
            let left = due.saturating_sub(now);
            wait = Some(wait.map_or(left, |w| w.min(left)));
        }
        wait.map(|ns| Duration::from_nanos(ns.min(3_600_000_000_000)))
    }

    fn accept(&mut self) {
        while let Some(socket) = wire::accept(self.listener.as_fd()) {
            let (pid, _) = socket.peer();
            let key = self.next_peer;
            self.next_peer += 1;
            self.peers.insert(
                key,
                Peer {
                    pidfd: None,
                    socket,
                    pid,
                    role: Role::Observer,
                    channel: None,
                    heap: None,
                    tail: 0,
                    used_bytes: 0,
                    limit_bytes: u64::MAX,
                    contexts: 0,
                    server_pid: 0,
                    sm_cap: f64::from(self.facts.sms),
                    subscribed: 0,
                    hung: false,
                },
            );
        }
    }

    /// Forgets those who died: their memory is free, their work is gone.
    fn bury(&mut self) {
        if !self.dead.is_empty() {
            // What they pushed last counts too: it decides whether they died with work in flight.
            self.catch_up();
        }
        while let Some(key) = self.dead.pop() {
            let Some(peer) = self.peers.remove(&key) else { continue };
            let unfinished = self.engine.remove_client(key);
            match peer.role {
                Role::Client if unfinished => self.died_with_work(&peer),
                Role::Server => self.server_died(peer.pid),
                _ => {}
            }
            if peer.contexts > 0 {
                self.tell_server_of_peer(&peer, event::MPS_LEFT);
            }
            if peer.role == Role::Client {
                if self.state.burst.1 == key {
                    self.state.burst = (0, 0);
                }
                self.node.remove_shared_events(self.facts.index as usize, key);
                self.public.losses.fetch_add(1, Ordering::Release);
            }
        }
    }
}

/// A UUID that is the same whenever the same node is started again.
fn uuid(node: &Node, index: usize, seed: u64) -> [u8; 16] {
    let mut state = 0xcbf2_9ce4_8422_2325_u64 ^ seed;
    let path: PathBuf = node.gpu(index);
    for byte in path.as_os_str().as_encoded_bytes() {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let mut bytes = [0; 16];
    for chunk in bytes.chunks_mut(8) {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}
