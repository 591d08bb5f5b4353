//! The pure heart of the device: streams of work in, completions at exact device times out.
//!
//! It steps `gpu-model` from event to event: rates are constant between two events, and change
//! when a kernel arrives or ends, when the clock moves, or when the time slice passes to another
//! group of clients. All times are device nanoseconds as `f64`. Work carries the time at which the
//! client pushed it, so the engine may be run late without changing any result.

mod clients;
mod passing;
mod urgency;

use std::collections::{BTreeMap, VecDeque};

use muxflow_gpu_model::contention::clock_factor;
use muxflow_gpu_model::{ClientId, ClockState, GpuProfile, Load, Resident, contend};

use super::meter::Meters;
use crate::channel::{Entry, Op};

/// Kernels of one client that the hardware's queues let run at the same time.
const CONCURRENT_KERNELS: usize = 32;

/// What a client may use, fixed when it came.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    /// SMs.
    pub sm_cap: f64,
    /// Clients of one group share the GPU in space (MPS); groups take turns.
    pub group: u32,
}

/// What the engine tells the outside.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Effect {
    /// A stream has come to a sequence.
    Completed { client: u32, stream: u32, seq: u64, time_ns: f64 },
    /// An event got its time.
    Recorded { client: u32, slot: u32, time_ns: f64 },
    /// A host function may run now.
    HostReady { client: u32, stream: u32, seq: u64 },
    /// A stream has come to where its client wanted to hear of it.
    Notified { client: u32 },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Queued {
    pub(super) entry: Entry,
    pub(super) arrival_ns: f64,
    /// Least device time of all work queued in this stream up to and with this.
    pub(super) cumulative_ns: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Head {
    /// Not looked at yet, or held by another stream.
    Waiting,
    /// Its kernel or copy runs.
    Running,
    /// The client's host function runs.
    Host,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Queued>,
    pub(super) head: Head,
    pub(super) completed: u64,
    pub(super) host_done: u64,
    pub(super) cumulative_ns: f64,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) limits: Limits,
    pub(super) streams: BTreeMap<u32, Stream>,
    /// Streams with work.
    pub(super) busy: Vec<u32>,
    pub(super) running: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub(super) client: u32,
    pub(super) stream: u32,
    pub(super) group: u32,
    pub(super) resident: Resident,
    pub(super) left_ns: f64,
    pub(super) rate: f64,
    /// Of its stream; lower is more urgent.
    pub(super) priority: i32,
    /// Whether it stands still for more urgent ones.
    pub(super) held: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Copying {
    pub(super) client: u32,
    pub(super) stream: u32,
    pub(super) engine: Op,
    pub(super) left_bytes: f64,
    pub(super) rate: f64,
}

/// Bytes per device nanosecond of the copy engines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyRates {
    /// Over PCIe, each direction.
    pub pcie: f64,
    /// Inside the device's memory.
    pub device: f64,
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Engine {
    profile: GpuProfile,
    copy_rates: CopyRates,
    pub(super) now_ns: f64,
    clock: ClockState,
    /// A fault may hold the clock below this, MHz.
    pub clock_cap_mhz: Option<f64>,
    pub(super) clients: BTreeMap<u32, Client>,
    pub(super) kernels: Vec<Running>,
    pub(super) copies: Vec<Copying>,
    load: Load,
    dirty: bool,
    group: Option<u32>,
    slice_end_ns: f64,
    switch_until_ns: f64,
    /// Counters.
    pub meters: Meters,
    effects: Vec<Effect>,
    residents: Vec<Resident>,
    rates: Vec<f64>,
}

impl Engine {
    pub(crate) fn new(profile: GpuProfile, copy_rates: CopyRates) -> Engine {
        let clock = ClockState::cold(&profile.power);
        let meters = Meters::new(&profile.refresh);
        Engine {
            profile,
            copy_rates,
            now_ns: 0.0,
            clock,
            clock_cap_mhz: None,
            clients: BTreeMap::new(),
            kernels: Vec::new(),
            copies: Vec::new(),
            load: Load::default(),
            dirty: true,
            group: None,
            slice_end_ns: 0.0,
            switch_until_ns: 0.0,
            meters,
            effects: Vec::new(),
            residents: Vec::new(),
            rates: Vec::new(),
        }
    }

    pub(crate) fn now_ns(&self) -> f64 {
        self.now_ns
    }

    pub(crate) fn clock_mhz(&self) -> f64 {
        self.clock_cap_mhz.map_or(self.clock.mhz, |cap| self.clock.mhz.min(cap))
    }

    pub(crate) fn temperature_c(&self) -> f64 {
        self.clock.temperature_c
    }

    pub(crate) fn set_power_limit_w(&mut self, watts: f64) {
        self.profile.power.limit_w = watts;
    }

    /// The power that the present load draws.
    pub(crate) fn power_w(&self) -> f64 {
        self.profile.power.power_w(&self.load, self.clock_ratio())
    }

    /// Something outside changed how fast kernels go.
    pub(crate) fn rates_changed(&mut self) {
        self.dirty = true;
    }

    fn clock_ratio(&self) -> f64 {
        (self.clock_mhz() / f64::from(self.profile.power.max_mhz)).clamp(0.01, 1.0)
    }

    pub(super) fn least_ns(&self, entry: &Entry) -> f64 {
        match Op::from_number(entry.op) {
            Op::Kernel => entry.amount as f64,
            Op::CopyIn | Op::CopyOut => entry.amount as f64 / self.copy_rates.pcie,
            Op::CopyDevice => entry.amount as f64 / self.copy_rates.device,
            _ => 0.0,
        }
    }

    /// Lets device time pass up to `to_ns`, and hands over what happened.
    pub(crate) fn advance(&mut self, to_ns: f64, effects: &mut Vec<Effect>) {
        loop {
            self.pump();
            self.refresh_rates();
            let next = self.next_event_ns();
            if next > to_ns {
                self.pass(to_ns);
                break;
            }
            self.pass(next);
            self.finish();
        }
        effects.append(&mut self.effects);
    }

    /// Starts whatever can start now, until nothing changes.
    fn pump(&mut self) {
        let mut changed = true;
        while changed {
            changed = false;
            let clients: Vec<u32> =
                self.clients.iter().filter(|(_, c)| !c.busy.is_empty()).map(|(k, _)| *k).collect();
            for client in clients {
                let busy = self.clients.get(&client).map(|c| c.busy.clone()).unwrap_or_default();
                for stream in busy {
                    while self.pump_stream(client, stream) {
                        changed = true;
                    }
                }
            }
        }
    }

    /// Looks at the head of one stream; true when it completed at once.
    fn pump_stream(&mut self, client: u32, number: u32) -> bool {
        let Some(it) = self.clients.get(&client) else { return false };
        let Some(stream) = it.streams.get(&number) else { return false };
        let Some(head) = stream.queue.front() else { return false };
        if head.arrival_ns > self.now_ns || stream.head == Head::Running {
            return false;
        }
        let entry = head.entry;
        match Op::from_number(entry.op) {
            Op::Nop | Op::Close => self.complete(client, number),
            Op::Notify => {
                self.complete(client, number);
                self.effects.push(Effect::Notified { client });
            }
            Op::Record => {
                let (slot, time_ns) = (entry.target, self.now_ns);
                self.effects.push(Effect::Recorded { client, slot, time_ns });
                self.complete(client, number);
            }
            Op::Wait => {
                let come = it.streams.get(&entry.target).map_or(u64::MAX, |s| s.completed);
                if come < entry.amount {
                    return false;
                }
                self.complete(client, number);
            }
            Op::Host => {
                if stream.host_done >= entry.seq {
                    self.complete(client, number);
                    return true;
                }
                if stream.head != Head::Host {
                    self.set_head(client, number, Head::Host);
                    self.effects.push(Effect::HostReady { client, stream: number, seq: entry.seq });
                }
                return false;
            }
            Op::Kernel => {
                if it.running >= CONCURRENT_KERNELS {
                    return false;
                }
                self.start_kernel(client, number, entry);
                return false;
            }
            engine @ (Op::CopyIn | Op::CopyOut | Op::CopyDevice) => {
                self.set_head(client, number, Head::Running);
                let left_bytes = (entry.amount as f64).max(1.0);
                self.copies.push(Copying { client, stream: number, engine, left_bytes, rate: 1.0 });
                self.dirty = true;
                return false;
            }
        }
        true
    }

    fn start_kernel(&mut self, client: u32, stream: u32, entry: Entry) {
        let Some(it) = self.clients.get_mut(&client) else { return };
        it.running += 1;
        let sane = |v: f32, low: f64, high: f64| {
            let v = f64::from(v);
            if v.is_finite() { v.clamp(low, high) } else { low }
        };
        // A context may have less than its process.
        let of_context = if entry.target == 0 { f64::INFINITY } else { f64::from(entry.target) };
        let resident = Resident {
            client: ClientId(client),
            sm_cap: it.limits.sm_cap.min(of_context),
            sm_fill: sane(entry.sm_fill, 0.01, 4096.0),
            occupancy: sane(entry.occupancy, 0.0, 1.0),
            issue: sane(entry.issue, 0.0, 1.0),
            bandwidth: sane(entry.bandwidth, 0.0, 1.0),
            kernel_us: entry.amount as f64 / 1e3,
        };
        let group = it.limits.group;
        let left_ns = (entry.amount as f64).max(1.0);
        let (rate, priority, held) = (0.0, entry.priority, false);
        let running = Running { client, stream, group, resident, left_ns, rate, priority, held };
        self.kernels.push(running);
        self.set_head(client, stream, Head::Running);
        self.dirty = true;
    }

    fn set_head(&mut self, client: u32, stream: u32, head: Head) {
        if let Some(s) = self.clients.get_mut(&client).and_then(|c| c.streams.get_mut(&stream)) {
            s.head = head;
        }
    }

    fn complete(&mut self, client: u32, number: u32) {
        let Some(it) = self.clients.get_mut(&client) else { return };
        let Some(stream) = it.streams.get_mut(&number) else { return };
        let Some(done) = stream.queue.pop_front() else { return };
        stream.completed = done.entry.seq;
        stream.head = Head::Waiting;
        let seq = done.entry.seq;
        let empty = stream.queue.is_empty();
        if empty {
            it.busy.retain(|s| *s != number);
            // Keeps the sum from growing without bound.
            stream.cumulative_ns = 0.0;
        }
        self.effects.push(Effect::Completed { client, stream: number, seq, time_ns: self.now_ns });
    }

    /// Whose turn it is, and how fast everything goes.
    fn refresh_rates(&mut self) {
        let turn_over = self.now_ns >= self.slice_end_ns;
        let absent = !self.kernels.iter().any(|k| Some(k.group) == self.group);
        if !self.kernels.is_empty() && (turn_over || absent) {
            self.next_group();
        }
        if !self.dirty {
            return;
        }
        self.dirty = false;
        self.residents.clear();
        let switching = self.now_ns < self.switch_until_ns;
        let group = self.group;
        if !switching {
            urgency::hold_back(&mut self.kernels, self.profile.sms.into());
            let on = self.kernels.iter().filter(|k| Some(k.group) == group && !k.held);
            self.residents.extend(on.map(|k| k.resident));
        }
        self.rates.clear();
        self.rates.resize(self.residents.len(), 0.0);
        self.load = if self.residents.is_empty() {
            Load { busy: !self.kernels.is_empty(), ..Load::default() }
        } else {
            contend(&self.profile, &self.residents, &mut self.rates)
        };
        let ratio = self.clock_ratio();
        let mut rates = self.rates.iter();
        for k in &mut self.kernels {
            k.rate = 0.0;
            if !switching && Some(k.group) == group && !k.held {
                let rate = rates.next().copied().unwrap_or(1.0);
                k.rate = (rate * clock_factor(&k.resident, ratio)).max(1e-6);
            }
        }
        for engine in [Op::CopyIn, Op::CopyOut, Op::CopyDevice] {
            let sharing = self.copies.iter().filter(|c| c.engine == engine).count().max(1) as f64;
            let full = if engine == Op::CopyDevice {
                self.copy_rates.device
            } else {
                self.copy_rates.pcie
            };
            for c in self.copies.iter_mut().filter(|c| c.engine == engine) {
                c.rate = full / sharing;
            }
        }
        if self.copies.iter().any(|c| c.engine == Op::CopyDevice) {
            self.load.dram_activity = 1.0_f64.min(self.load.dram_activity + 0.8);
            self.load.busy = true;
        }
    }

    /// Passes the turn to the next group that has kernels.
    fn next_group(&mut self) {
        let after = |g: u32| self.group.is_none_or(|now| g > now);
        let next = self.kernels.iter().map(|k| k.group).filter(|g| after(*g)).min();
        let next = next.or_else(|| self.kernels.iter().map(|k| k.group).min());
        let slicing = &self.profile.time_slicing;
        if next != self.group {
            if self.group.is_some() {
                self.switch_until_ns = self.now_ns + slicing.switch_us * 1e3;
            }
            self.group = next;
            self.dirty = true;
        }
        self.slice_end_ns = self.now_ns.max(self.switch_until_ns) + slicing.slice_us * 1e3;
    }

    /// When something next changes by itself.
    pub(crate) fn next_event_ns(&self) -> f64 {
        let mut next = f64::INFINITY;
        for k in self.kernels.iter().filter(|k| k.rate > 0.0) {
            next = next.min(self.now_ns + k.left_ns / k.rate);
        }
        for c in &self.copies {
            next = next.min(self.now_ns + c.left_bytes / c.rate);
        }
        if !self.kernels.is_empty() {
            next = next.min(self.now_ns + self.clock.next_step_us().max(1.0) * 1e3);
            if self.now_ns < self.switch_until_ns {
                next = next.min(self.switch_until_ns);
            }
            let group = self.kernels[0].group;
            if self.kernels.iter().any(|k| k.group != group) {
                next = next.min(self.slice_end_ns.max(self.now_ns + 1.0));
            }
        }
        for it in self.clients.values() {
            for number in &it.busy {
                let Some(stream) = it.streams.get(number) else { continue };
                if let Some(head) = stream.queue.front()
                    && stream.head == Head::Waiting
                    && head.arrival_ns > self.now_ns
                {
                    next = next.min(head.arrival_ns);
                }
            }
        }
        next
    }
}
