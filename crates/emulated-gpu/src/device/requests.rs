//! What the device answers over its sockets.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::engine::Limits;
use super::{Device, Role};
use crate::channel::{Channel, MAGIC, Shared};
use crate::facts::{Process, Stats};
use crate::fault::{event, server_order};
use crate::sys;
use crate::wire::{Kind, Message, Plain, Received};

/// CUDA errors that the device itself decides on.
pub(crate) mod code {
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const DEVICE_UNAVAILABLE: u32 = 46;
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const MISALIGNED_ADDRESS: u32 = 716;
    pub(crate) const MPS_SERVER_GONE: u32 = 806;
    pub(crate) const MPS_SERVER_NOT_READY: u32 = 807;
    pub(crate) const MPS_MAX_CLIENTS: u32 = 808;
    pub(crate) const NOT_SUPPORTED: u32 = 801;
    pub(crate) const UNKNOWN: u32 = 999;
}

/// Contexts that one GPU takes under MPS.
const MPS_CONTEXTS: u32 = 60;

impl Device {
    /// Reads one request of a peer and answers it.
    pub(super) fn serve(&mut self, key: u32) {
        let Some(peer) = self.peers.get(&key) else { return };
        let received = match peer.socket.receive() {
            Ok(Some(received)) => received,
            Ok(None) | Err(_) => {
                self.lost(key);
                return;
            }
        };
        let (reply, tail, fds) = self.answer(key, received);
        let raw: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let Some(peer) = self.peers.get(&key) else { return };
        if peer.socket.send(&reply, &tail, &raw).is_err() {
            self.lost(key);
        }
    }

    /// A hang-up is a death, unless the process lives on and only a forked child closed its copy.
    fn lost(&mut self, key: u32) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.hung = true;
        }
        self.dead.push(key);
    }

    fn answer(&mut self, key: u32, received: Received) -> (Message, Vec<u8>, Vec<OwnedFd>) {
        let Received { message, fds, .. } = received;
        let v = message.values;
        let plain =
            |status: u32, values: &[u64]| (Message::reply(status, values), Vec::new(), Vec::new());
        let is = |kind: Kind| message.kind == kind as u32;
        if is(Kind::Hello) {
            return self.hello(key, &message, fds);
        } else if is(Kind::Allocate) {
            return plain(self.allocate(key, v[0]), &[]);
        } else if is(Kind::Free) {
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.used_bytes = peer.used_bytes.saturating_sub(v[0]);
            }
            return plain(0, &[]);
        } else if is(Kind::MemoryInfo) {
            let own = self.bytes_of(key);
            let (free, total) = self.memory_seen_by(key);
            return plain(0, &[free, total, own]);
        } else if is(Kind::Context) {
            return plain(self.context(key, v[0].cast_signed()), &[]);
        } else if is(Kind::OpenHeap) {
            let heap = self.peers.get(&(v[0] as u32)).and_then(|p| p.heap.as_ref());
            return match heap.and_then(|h| h.try_clone().ok()) {
                Some(heap) => (Message::reply(0, &[]), Vec::new(), vec![heap]),
                None => plain(code::INVALID_VALUE, &[]),
            };
        } else if is(Kind::Alive) {
            let other = v[0] as u32;
            let alive = self.channel(other).is_some() && self.fault_of(other) == 0;
            return plain(0, &[alive.into()]);
        } else if is(Kind::Stats) {
            self.catch_up();
            let facts = self.facts;
            let mut tail = self.stats().bytes().to_vec();
            tail.extend_from_slice(facts.bytes());
            return (Message::reply(0, &[]), tail, Vec::new());
        } else if is(Kind::Processes) {
            self.catch_up();
            let tail = self.processes().iter().flat_map(|p| p.bytes().to_vec()).collect();
            return (Message::reply(0, &[]), tail, Vec::new());
        } else if is(Kind::Subscribe) {
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.subscribed = v[0];
            }
            return plain(0, &[]);
        } else if is(Kind::Server) {
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.role = Role::Server;
                peer.pidfd = sys::pidfd(peer.pid);
                // The number of one that died may come again.
                self.state.dead_servers.remove(&peer.pid);
            }
            return plain(0, &[]);
        } else if is(Kind::Terminate) {
            let found = self.terminate(v[0] as i32);
            return plain(if found { 0 } else { code::INVALID_VALUE }, &[]);
        } else if is(Kind::Inject) {
            // A client speaks of itself, and may know itself by the number of another namespace.
            let client = self.peers.get(&key).filter(|p| p.role == Role::Client).map(|p| p.pid);
            let pid = client.unwrap_or(v[3] as i32);
            let error = client.map_or(0, |_| v[2] as u32);
            return plain(self.inject(v[0], v[1], error, pid, v[4]), &[]);
        } else if is(Kind::Set) {
            return match v[0] {
                server_order::RECOVER => {
                    self.server_recovered(v[1] as i32);
                    plain(0, &[server_order::RECOVER])
                }
                server_order::STRIKE => {
                    self.fail_clients_of(v[1] as i32, v[2] as u32);
                    plain(0, &[])
                }
                what => plain(self.set(what, v[1]), &[]),
            };
        }
        plain(code::NOT_SUPPORTED, &[])
    }

    fn hello(
        &mut self,
        key: u32,
        message: &Message,
        mut fds: Vec<OwnedFd>,
    ) -> (Message, Vec<u8>, Vec<OwnedFd>) {
        let refuse = |status| (Message::reply(status, &[]), Vec::new(), Vec::new());
        if self.state.lost {
            return refuse(code::DEVICE_UNAVAILABLE);
        }
        let [_, server, cap, limit, ..] = message.values;
        let server_pid = server as i32;
        if server_pid != 0 && self.state.faulted_servers.contains(&server_pid) {
            return refuse(code::MPS_SERVER_NOT_READY);
        }
        if self.state.dead_servers.contains(&server_pid) {
            return refuse(code::MPS_SERVER_GONE);
        }
        let sms = f64::from(self.facts.sms);
        let sm_cap = if cap == 0 { sms } else { (cap as f64 / 1000.0).clamp(1.0, sms) };
        let bytes = Shared::<Channel>::BYTES as u64;
        let made = sys::memfd(c"channel", bytes)
            .and_then(|fd| Ok((Shared::<Channel>::map(fd.as_fd())?, fd)));
        let others = (self.public_fd.try_clone(), self.doorbell.try_clone());
        let (Ok((channel, channel_fd)), (Ok(public), Ok(doorbell))) = (made, others) else {
            return refuse(code::UNKNOWN);
        };
        channel.magic.store(MAGIC, Ordering::Release);
        let Some(peer) = self.peers.get_mut(&key) else { return refuse(code::UNKNOWN) };
        peer.role = Role::Client;
        peer.pidfd = sys::pidfd(peer.pid);
        peer.channel = Some(channel);
        peer.heap = fds.pop();
        peer.server_pid = server_pid;
        peer.sm_cap = sm_cap;
        peer.limit_bytes = if limit == 0 { u64::MAX } else { limit };
        // Clients of one MPS server share the GPU in space; everybody else takes turns.
        let group = if server_pid == 0 { key } else { u32::MAX / 2 + server.min(1 << 30) as u32 };
        self.engine.add_client(key, Limits { sm_cap, group });
        let tail = self.facts.bytes().to_vec();
        (Message::reply(0, &[u64::from(key)]), tail, vec![public, channel_fd, doorbell])
    }

    /// What was allocated.
    fn allocated_bytes(&self) -> u64 {
        self.peers.values().map(|p| p.used_bytes).sum()
    }

    /// What a burst has got of what it wants: all that is free, and what gets free meanwhile.
    fn burst_bytes(&self) -> u64 {
        let free = self.facts.memory_bytes[0].saturating_sub(self.allocated_bytes());
        self.state.burst.0.min(free)
    }

    fn used_bytes(&self) -> u64 {
        self.allocated_bytes() + self.burst_bytes()
    }

    /// What a client holds, with a burst of its own.
    fn bytes_of(&self, key: u32) -> u64 {
        let burst = if self.state.burst.1 == key { self.burst_bytes() } else { 0 };
        self.peers.get(&key).map_or(0, |p| p.used_bytes) + burst
    }

    fn memory_seen_by(&self, key: u32) -> (u64, u64) {
        let total = self.facts.memory_bytes[0];
        let free = total.saturating_sub(self.used_bytes());
        match self.peers.get(&key) {
            Some(p) if p.limit_bytes != u64::MAX => {
                (free.min(p.limit_bytes.saturating_sub(self.bytes_of(key))), total)
            }
            _ => (free, total),
        }
    }

    /// The error that a fault has left to a client, or 0.
    fn fault_of(&self, key: u32) -> u32 {
        self.channel(key).map_or(0, |channel| channel.fault.load(Ordering::SeqCst))
    }

    fn allocate(&mut self, key: u32, bytes: u64) -> u32 {
        let fault = self.fault_of(key);
        if fault != 0 {
            // It was emptied, or will be: what it took now nobody would give back.
            return fault;
        }
        let (free, _) = self.memory_seen_by(key);
        let Some(peer) = self.peers.get_mut(&key) else { return code::UNKNOWN };
        if bytes > free {
            return code::OUT_OF_MEMORY;
        }
        peer.used_bytes += bytes;
        0
    }

    fn context(&mut self, key: u32, change: i64) -> u32 {
        let bytes = self.facts.context_bytes;
        let exclusive = self.state.compute_mode;
        let Some(peer) = self.peers.get(&key) else { return code::UNKNOWN };
        let under_mps = peer.server_pid != 0;
        if change > 0 {
            let fault = self.fault_of(key);
            if fault != 0 {
                return fault;
            }
            let others = self.peers.iter().filter(|(k, p)| **k != key && p.contexts > 0);
            let (mut contexts, mut strangers) = (0, 0);
            for (_, other) in others {
                contexts += other.contexts;
                strangers += u32::from(other.server_pid == 0 || !under_mps);
            }
            if exclusive == 2 || (exclusive == 3 && strangers > 0) {
                return code::DEVICE_UNAVAILABLE;
            }
            if under_mps && contexts + peer.contexts >= MPS_CONTEXTS {
                return code::MPS_MAX_CLIENTS;
            }
            let status = self.allocate(key, bytes);
            if status == 0
                && let Some(peer) = self.peers.get_mut(&key)
            {
                peer.contexts += 1;
                if peer.contexts == 1 {
                    self.tell_server_of(key, event::MPS_JOINED);
                }
            }
            return status;
        }
        if let Some(peer) = self.peers.get_mut(&key)
            && peer.contexts > 0
        {
            peer.contexts -= 1;
            peer.used_bytes = peer.used_bytes.saturating_sub(bytes);
            if peer.contexts == 0 {
                self.tell_server_of(key, event::MPS_LEFT);
            }
        }
        0
    }

    /// Settings: 1 power limit in milliwatts, 2 compute mode.
    fn set(&mut self, what: u64, value: u64) -> u32 {
        match what {
            1 => {
                let most = f64::from(self.facts.power_limit_mw[1]);
                let watts = value as f64 / 1000.0;
                if value as f64 > most || watts < 10.0 {
                    return code::INVALID_VALUE;
                }
                self.catch_up();
                self.engine.set_power_limit_w(watts);
                self.facts.power_limit_mw[0] = value as u32;
                0
            }
            2 => {
                self.state.compute_mode = value as u32;
                0
            }
            _ => code::NOT_SUPPORTED,
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let m = &self.engine.meters;
        let (profiling, profiling_ns) = m.profiling();
        let ([busy, dram], utilisation_ns) = m.utilisation();
        let pct = |fraction: f64| (fraction * 100.0).round().clamp(0.0, 100.0) as u32;
        let now_clock = self.engine.clock_mhz();
        let (clock, clock_ns) = m.clock_mhz().unwrap_or((now_clock, 0.0));
        let (power, power_ns) = m.power_w().unwrap_or_else(|| (self.engine.power_w(), 0.0));
        let temperature = m.temperature_c().unwrap_or_else(|| self.engine.temperature_c());
        // What the sensors say, which is the truth unless they were told to lie.
        let lie = u64::from(self.state.sensor_lie_pct);
        let said = |truth: u64, most: u64| if lie == 0 { truth } else { most * lie / 100 };
        Stats {
            time_ns: self.engine.now_ns() as u64,
            profiling_time_ns: profiling_ns as u64,
            sensor_time_ns: [utilisation_ns, clock_ns, power_ns].map(|ns| ns as u64),
            used_bytes: said(self.used_bytes(), self.facts.memory_bytes[0]),
            utilisation_pct: [pct(busy), pct(dram)],
            clock_mhz: [
                said(clock.round() as u64, self.facts.max_mhz.into()) as u32,
                self.facts.memory_mhz,
            ],
            power_mw: [(power * 1e3) as u32, self.facts.power_limit_mw[0]],
            temperature_c: temperature.round() as u32,
            throttle_reasons: self.throttle_reasons(now_clock, busy),
            profiling,
            integrals: m.integrals,
            profiling_sums: m.profiling_sums(),
            pcie_bytes_per_s: m.pcie_bytes_per_s(),
            energy_mj: (m.energy_j * 1e3) as u64,
            pcie_bytes: m.pcie_bytes.map(|b| b as u64),
            kernels: m.kernels,
            xid: [self.state.last_xid, self.state.xids],
            ecc_errors: self.state.ecc_errors,
            remapped_rows: self.state.remapped_rows,
            compute_mode: self.state.compute_mode,
            nvml_error: self.state.nvml_error,
            nvml_blocked: u32::from(self.state.nvml_blocked),
            recovery_action: self.state.recovery_action,
            lost: u32::from(self.state.lost),
            dcgm_error: self.state.dcgm_error,
        }
    }

    /// NVML's bits: idle 1, software power cap 4, hardware thermal 0x40, hardware slowdown 8.
    fn throttle_reasons(&self, clock: f64, busy: f64) -> u32 {
        let mut reasons = 0;
        if busy <= 0.0 {
            reasons |= 1;
        } else if clock + 1.0 < f64::from(self.facts.max_mhz) {
            reasons |= 4;
        }
        if self.engine.temperature_c() > f64::from(self.facts.temperature_limits_c[0]) {
            reasons |= 0x20;
        }
        if self.engine.clock_cap_mhz.is_some() {
            reasons |= 0x48;
        }
        reasons
    }

    fn processes(&mut self) -> Vec<Process> {
        let mut all = Vec::new();
        for (key, peer) in &self.peers {
            if peer.role == Role::Observer || (peer.role == Role::Client && peer.contexts == 0) {
                continue;
            }
            let ([busy, dram], changed_ns) = self.engine.meters.client(*key);
            all.push(Process {
                pid: peer.pid as u32,
                server_pid: peer.server_pid as u32,
                used_bytes: self.bytes_of(*key),
                utilisation_pct: [(busy * 100.0).round() as u32, (dram * 100.0).round() as u32],
                time_ns: changed_ns as u64,
                sm_cap_thousandths: (peer.sm_cap * 1000.0) as u32,
                is_server: u32::from(peer.role == Role::Server),
            });
        }
        all
    }
}
