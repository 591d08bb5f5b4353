//! What breaks on a GPU, and what follows from it for those who are on it.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::sync::atomic::Ordering;

use muxflow_gpu_model::Rng;

use super::requests::code;
use super::{Device, Peer, Role};
use crate::fault::{Fault, event};
use crate::sys;
use crate::wire::{Kind, Message};

/// What is broken now.
#[derive(Debug)]
pub(super) struct State {
    pub lost: bool,
    pub last_xid: u32,
    pub xids: u32,
    pub ecc_errors: [u32; 2],
    pub remapped_rows: [u32; 2],
    pub compute_mode: u32,
    pub nvml_error: u32,
    pub nvml_blocked: bool,
    pub dcgm_error: u32,
    pub sensor_lie_pct: u32,
    pub recovery_action: u32,
    /// Bytes that somebody wants, and which client that is; 0 for nobody who is known.
    pub burst: (u64, u32),
    pub kill_propagates_pct: u32,
    pub faulted_servers: BTreeSet<i32>,
    /// Those that died. Kept rather than asking who is there: a process that calls itself a client of
    /// a server may know it by the number of another namespace.
    pub dead_servers: BTreeSet<i32>,
    due: Vec<(u64, Fault, i32)>,
    rng: Rng,
}

impl State {
    pub(super) fn new(seed: u64) -> State {
        State {
            lost: false,
            last_xid: 0,
            xids: 0,
            ecc_errors: [0; 2],
            remapped_rows: [0; 2],
            compute_mode: 0,
            nvml_error: 0,
            nvml_blocked: false,
            dcgm_error: 0,
            sensor_lie_pct: 0,
            recovery_action: 0,
            burst: (0, 0),
            kill_propagates_pct: 0,
            faulted_servers: BTreeSet::new(),
            dead_servers: BTreeSet::new(),
            due: Vec::new(),
            rng: Rng::new(seed),
        }
    }

    /// Host time of the next fault that is to come.
    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.due.iter().map(|(at, ..)| *at).min()
    }
}

impl Device {
    /// A fault now, or `after_ms` from now. `error` says more than the XID, or is 0.
    pub(super) fn inject(
        &mut self,
        kind: u64,
        value: u64,
        error: u32,
        pid: i32,
        after_ms: u64,
    ) -> u32 {
        let Some(fault) = Fault::from_wire(kind, value) else { return code::INVALID_VALUE };
        if after_ms > 0 {
            let at = sys::monotonic_ns().saturating_add(after_ms.saturating_mul(1_000_000));
            self.state.due.push((at, fault, pid));
            return 0;
        }
        self.strike(fault, pid, error)
    }

    /// Strikes with whatever is due.
    pub(super) fn fire_due_faults(&mut self) {
        let now = sys::monotonic_ns();
        while let Some(i) = self.state.due.iter().position(|(at, ..)| *at <= now) {
            let (_, fault, pid) = self.state.due.remove(i);
            self.strike(fault, pid, 0);
        }
    }

    fn strike(&mut self, fault: Fault, pid: i32, error: u32) -> u32 {
        // Whom it strikes depends on who is at work now, not when somebody last looked.
        self.run_up_to_now();
        match fault {
            Fault::Xid(xid) => return self.xid(xid, pid, error),
            Fault::KillPropagates(pct) => self.state.kill_propagates_pct = pct,
            Fault::MpsCrash => return self.tell_servers(&[event::MPS_CRASH]),
            Fault::MpsHang => return self.tell_servers(&[event::MPS_HANG]),
            Fault::Throttle(mhz) => {
                self.engine.clock_cap_mhz = (mhz > 0).then_some(f64::from(mhz));
                self.engine.rates_changed();
            }
            Fault::MemoryBurst(mib) => return self.burst(u64::from(mib) << 20, pid),
            Fault::NvmlBlock(on) => self.state.nvml_blocked = on,
            Fault::NvmlError(error) => self.state.nvml_error = error,
            Fault::DcgmError(error) => self.state.dcgm_error = error,
            Fault::SensorLie(pct) => self.state.sensor_lie_pct = pct,
            Fault::Reset => self.reset(),
        }
        0
    }

    /// Somebody wants this much memory: the client that is named, or one that nobody knows.
    fn burst(&mut self, bytes: u64, pid: i32) -> u32 {
        let named = self.clients(|p| p.pid == pid && p.contexts > 0).first().copied();
        if pid != 0 && bytes > 0 && named.is_none() {
            return code::INVALID_VALUE;
        }
        self.state.burst = (bytes, named.unwrap_or(0));
        0
    }

    fn reset(&mut self) {
        let everybody: Vec<u32> = self.clients(|_| true);
        self.fail(&everybody, code::DEVICE_UNAVAILABLE);
        self.empty(&everybody);
        let mode = self.state.compute_mode;
        let rng = self.state.rng.clone();
        let dead_servers = std::mem::take(&mut self.state.dead_servers);
        self.state = State { compute_mode: mode, rng, dead_servers, ..State::new(0) };
        self.public.gone.store(0, Ordering::Release);
        self.engine.clock_cap_mhz = None;
        self.engine.rates_changed();
        self.tell_servers(&[event::RESET]);
    }

    /// Keys of the clients that fit.
    fn clients(&self, fits: impl Fn(&Peer) -> bool) -> Vec<u32> {
        let of_role = self.peers.iter().filter(|(_, p)| p.role == Role::Client && fits(p));
        of_role.map(|(key, _)| *key).collect()
    }

    /// From now on every call of these clients returns `error`; their work is gone, with what they
    /// have pushed and nobody has taken yet.
    pub(super) fn fail(&mut self, keys: &[u32], error: u32) {
        self.run_up_to_now();
        for key in keys {
            if let Some(channel) = self.channel(*key) {
                // The first fault is the one that sticks.
                let set = (0, error);
                let order = (Ordering::SeqCst, Ordering::SeqCst);
                if channel.fault.compare_exchange(set.0, set.1, order.0, order.1).is_ok() {
                    channel.host_bell.fetch_add(1, Ordering::SeqCst);
                    sys::futex_wake(&channel.host_bell);
                }
            }
            self.engine.abort_client(*key);
        }
        self.public.losses.fetch_add(1, Ordering::Release);
        self.run_up_to_now();
    }

    /// What these clients held is free.
    fn empty(&mut self, keys: &[u32]) {
        for key in keys {
            if let Some(peer) = self.peers.get_mut(key) {
                peer.used_bytes = 0;
                if std::mem::take(&mut peer.contexts) > 0 {
                    self.tell_server_of(*key, event::MPS_LEFT);
                }
            }
        }
    }

    /// A fault of one client: it takes along all that share its MPS server.
    fn fail_with_neighbours(&mut self, key: u32, error: u32) {
        let Some(server) = self.peers.get(&key).map(|p| p.server_pid) else { return };
        if server == 0 {
            self.fail(&[key], error);
            return;
        }
        self.strike_server(server, error);
    }

    /// A fault under an MPS server: its clients here fail, and it takes the fault to other GPUs.
    fn strike_server(&mut self, server: i32, error: u32) {
        self.fail_clients_of(server, error);
        self.tell_servers(&[event::MPS_FAULT, server.unsigned_abs().into(), error.into()]);
    }

    /// The clients of an MPS server fail, and new ones are refused until it has recovered.
    pub(super) fn fail_clients_of(&mut self, server: i32, error: u32) {
        let all = self.clients(|p| p.server_pid == server);
        self.fail(&all, error);
        self.state.faulted_servers.insert(server);
    }

    /// Whom a fault strikes when nobody was named: a client with work, else any with a context.
    fn culprit(&self, pid: i32) -> Option<u32> {
        let named = |p: &Peer| pid == 0 || p.pid == pid;
        let all = self.clients(|p| named(p) && p.contexts > 0);
        all.iter().find(|k| self.engine.is_busy(**k)).or_else(|| all.first()).copied()
    }

    fn xid(&mut self, xid: u32, pid: i32, told: u32) -> u32 {
        let culprit = self.culprit(pid);
        let of_one = matches!(xid, 13 | 31 | 43 | 45 | 94);
        if of_one && culprit.is_none() {
            return code::INVALID_VALUE;
        }
        let pid = culprit.and_then(|k| self.peers.get(&k)).map_or(0, |p| p.pid);
        let misaligned = xid == 13 && told == code::MISALIGNED_ADDRESS;
        self.log_xid(xid, pid, misaligned);
        self.state.last_xid = xid;
        self.state.xids += 1;
        self.tell_observers(event::XID, xid.into());
        let everybody: Vec<u32> = self.clients(|_| true);
        let (error, contained) = match xid {
            13 if misaligned => (code::MISALIGNED_ADDRESS, true),
            13 => (719, true),
            31 => (700, true),
            43 | 45 => (719, true),
            94 => (214, true),
            48 | 95 => (214, false),
            79 => (code::UNKNOWN, false),
            _ => (0, true),
        };
        match (contained, culprit) {
            _ if error == 0 => {}
            (true, Some(culprit)) => self.fail_with_neighbours(culprit, error),
            (true, None) => {}
            (false, _) => {
                self.fail(&everybody, error);
                let servers: Vec<i32> = self.servers();
                for server in servers {
                    self.strike_server(server, error);
                }
            }
        }
        match xid {
            48 | 95 => {
                self.state.ecc_errors[0] += 1;
                self.state.recovery_action = 1;
            }
            94 => self.state.ecc_errors[0] += 1,
            63 => self.state.remapped_rows[1] += 1,
            79 => {
                self.state.lost = true;
                self.public.gone.store(1, Ordering::Release);
            }
            154 => self.state.recovery_action = 1,
            _ => {}
        }
        0
    }

    fn log_xid(&self, xid: u32, pid: i32, misaligned: bool) {
        let [domain, bus, slot] = self.facts.pci;
        let place = format!("PCI:{domain:04x}:{bus:02x}:{slot:02x}");
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = name.trim();
        let what = match xid {
            13 if misaligned => {
                "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address"
            }
            13 => "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address",
            31 => {
                "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f8a_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
            }
            43 => "Ch 00000010",
            45 => "Ch 00000010",
            48 => {
                "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 1, subpartition 0."
            }
            63 => "Row Remapper: New row marked for remapping, reset gpu to activate.",
            74 => "NVLink: fatal error detected on link 0(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            79 => "GPU has fallen off the bus.",
            94 => "Contained: SM (0x1). RST: No, D-RST: No",
            95 => "Uncontained: SM (0x1). RST: Yes, D-RST: No",
            154 => "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            _ => "",
        };
        let whose = if pid == 0 || matches!(xid, 63 | 79 | 154) {
            String::new()
        } else {
            format!("pid={pid}, name={name}, ")
        };
        let seconds = sys::monotonic_ns() as f64 / 1e9;
        let line = format!("[{seconds:12.6}] NVRM: Xid ({place}): {xid}, {whose}{what}\n");
        let file = OpenOptions::new().create(true).append(true).open(self.node.kernel_log());
        if let Ok(mut file) = file
            && file.write_all(line.as_bytes()).is_err()
        {
            // A log that cannot be written must not stop the GPU.
        }
    }

    /// Sends an event to all who asked for it. Who does not read loses events, and delays nobody.
    fn tell_observers(&mut self, kind: u64, data: u64) {
        let time = self.engine.now_ns() as u64;
        let message = Message::new(Kind::Event, &[kind, data, time]);
        let mut gone = Vec::new();
        for (key, peer) in &self.peers {
            if peer.subscribed & kind != 0
                && let Err(error) = peer.socket.send(&message, &[], &[])
                && error.kind() != ErrorKind::WouldBlock
            {
                gone.push(*key);
            }
        }
        self.dead.extend(gone);
    }

    fn servers(&self) -> Vec<i32> {
        self.peers.values().filter(|p| p.role == Role::Server).map(|p| p.pid).collect()
    }

    /// Sends an event to all MPS servers on this GPU; refused when there is none.
    fn tell_servers(&self, values: &[u64]) -> u32 {
        let message = Message::new(Kind::Event, values);
        let mut told = false;
        for peer in self.peers.values().filter(|p| p.role == Role::Server) {
            told |= peer.socket.send(&message, &[], &[]).is_ok();
        }
        if told { 0 } else { code::INVALID_VALUE }
    }

    /// Tells the MPS server of a client that it came or went.
    pub(super) fn tell_server_of(&self, key: u32, kind: u64) {
        if let Some(peer) = self.peers.get(&key) {
            self.tell_server_of_peer(peer, kind);
        }
    }

    /// The same for one that is no longer among the peers.
    pub(super) fn tell_server_of_peer(&self, peer: &Peer, kind: u64) {
        if peer.server_pid != 0 {
            let [server, client] = [peer.server_pid, peer.pid].map(|p| p.unsigned_abs().into());
            self.tell_servers(&[kind, server, client]);
        }
    }

    /// A client died with work in flight: under MPS that may strike the others.
    pub(super) fn died_with_work(&mut self, gone: &Peer) {
        let server = gone.server_pid;
        if server == 0 || self.state.kill_propagates_pct == 0 {
            return;
        }
        if self.state.rng.uniform() * 100.0 >= f64::from(self.state.kill_propagates_pct) {
            return;
        }
        self.strike_server(server, 700);
    }

    /// The MPS server is gone: its clients cannot reach the GPU any more, nor those that it has let in
    /// and that come only now.
    pub(super) fn server_died(&mut self, server: i32) {
        let orphans = self.clients(|p| p.server_pid == server);
        self.fail(&orphans, code::MPS_SERVER_GONE);
        self.state.faulted_servers.remove(&server);
        self.state.dead_servers.insert(server);
    }

    /// The MPS server has recovered: it takes clients again.
    pub(super) fn server_recovered(&mut self, server: i32) {
        self.state.faulted_servers.remove(&server);
    }

    /// Throws a client out, as `terminate_client` does.
    pub(super) fn terminate(&mut self, pid: i32) -> bool {
        let keys = self.clients(|p| p.pid == pid && p.server_pid != 0);
        self.fail(&keys, 810);
        self.empty(&keys);
        !keys.is_empty()
    }
}
