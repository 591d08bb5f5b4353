//! MPS on one GPU: kept alive, watched, and tried out as a client.
//!
//! That a server is gone is not yet an error. The control daemon serves one user at a time, unless it
//! was told otherwise: when a client of another user comes and the server has no clients, the daemon
//! ends it and starts another. Only a server that goes while clients are attached has crashed.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::time::Instant;

use muxflow_policy::node::fault::Fault;
use muxflow_types::Micros;

use super::FaultSeen;
use super::supervisor::Supervisor;
use crate::monitor;
use crate::mps::control::ServerStatus;
use crate::mps::daemon::{MpsDaemon, MpsState};
use crate::mps::probe::{self, Attached};
use crate::process::{self, ProcessKey};

/// The MPS server of a GPU as it was last seen.
#[derive(Debug, Default)]
pub(super) struct ServerSeen {
    pub(super) server: Option<ProcessKey>,
    pub(super) clients: Vec<u32>,
}

/// How a server went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    /// Nobody was attached to it.
    Unused,
    /// Its clients went down with it.
    UnderClients,
}

impl ServerSeen {
    /// Says it once, when the server is gone.
    fn take_gone(&mut self) -> Option<Gone> {
        if self.server?.is_alive() {
            return None;
        }
        let unused = self.clients.is_empty();
        *self = ServerSeen::default();
        Some(if unused { Gone::Unused } else { Gone::UnderClients })
    }

    /// Clients that ended while their server lived have left it in peace.
    pub(super) fn forget_who_left(&mut self) {
        let here = |pid: &u32| process::is_there(*pid);
        let here: Vec<u32> = self.clients.iter().copied().filter(here).collect();
        // Looked at after the clients: what they died of was not the death of this server.
        if self.server.is_some_and(ProcessKey::is_alive) {
            self.clients = here;
        }
    }
}

impl Supervisor {
    pub(super) fn start_mps(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        match daemon.ensure() {
            Ok(_) => {}
            Err(error) => {
                let text = format!("MPS cannot be started: {error}");
                self.alert(text);
            }
        }
        if let Some(daemon) = &self.daemon {
            self.shared.status().mps_starts = daemon.started();
        }
    }

    /// Starts MPS, or finds what an earlier agent left. A daemon that died while nobody looked leaves
    /// the service on a server of its own or on none: beside a new one, nothing would hold a job to
    /// its share. It is answered as the crash that it is, and all end up on one server.
    pub(super) fn find_mps(&mut self) {
        if let Some(daemon) = self.daemon.as_ref().filter(|daemon| daemon.died_unseen()) {
            let serves = self.online.as_ref().is_some_and(|online| {
                online.running.as_ref().is_some_and(|running| !running.launch.outside_mps)
            });
            if serves || daemon.has_processes() {
                self.see(Fault::MpsCrash, None);
            }
        }
        self.start_mps();
    }

    /// Finds out whether the driver caps memory, unless that is known. MPS that does not answer now may
    /// do so the next time.
    pub(super) fn learn_caps_memory(&mut self) {
        if self.caps_memory.is_none() {
            let asked = || self.daemon.as_ref().map_or(Some(false), |d| d.control().caps_memory());
            self.caps_memory = self.params.driver_memory_limit.or_else(asked);
        }
    }

    /// A daemon runs, or none is wanted.
    pub(super) fn mps_runs(&self) -> bool {
        self.daemon.as_ref().is_none_or(|daemon| daemon.process().is_some())
    }

    /// A daemon that an earlier agent started with other settings makes room for one with those of
    /// now, once nobody uses it.
    fn renew_mps(&mut self) {
        let serves = self.online.as_ref().is_some_and(|online| online.running.is_some());
        if serves || self.offline.is_some() || self.guest.is_some() {
            return;
        }
        let Some(daemon) = self.daemon.as_mut().filter(|daemon| daemon.is_outdated()) else {
            return;
        };
        tracing::info!(gpu = daemon.spec().uuid, "MPS is started again with the settings of now");
        if let Err(error) = daemon.renew() {
            self.alert(format!("MPS cannot be restarted: {error}"));
        }
    }

    /// Looks whether the server lives, and now and then asks the daemon.
    pub(super) fn watch_mps(&mut self) {
        if self.answer_crash() || self.daemon.is_none() || Instant::now() < self.next_mps {
            return;
        }
        self.next_mps = Instant::now() + self.params.mps_every;
        let state = self.daemon.as_ref().map(MpsDaemon::state);
        // The server that was known may have crashed while the daemon answered, and another one have
        // taken its place.
        if self.answer_crash() {
            return;
        }
        match state {
            Some(MpsState::Down) => {
                let served = std::mem::take(&mut self.mps).server.is_some();
                if served {
                    self.see(Fault::MpsCrash, None);
                } else {
                    self.find_mps();
                }
            }
            Some(MpsState::Serving { server, status, clients }) => {
                let unused = clients.is_empty();
                self.mps = ServerSeen { server: ProcessKey::of(server), clients };
                if status == ServerStatus::Fault {
                    self.see(Fault::MpsFault, None);
                } else if unused {
                    self.renew_mps();
                }
            }
            Some(MpsState::Silent(reason)) => {
                tracing::warn!(gpu = self.uuid(), reason, "MPS does not answer");
                self.check_attach();
            }
            // The last client has left and the server with it.
            Some(MpsState::Idle) => {
                self.mps = ServerSeen::default();
                self.renew_mps();
            }
            None => {}
        }
        if Instant::now() >= self.next_probe && self.repair.is_none() {
            self.check_attach();
        }
    }

    /// True when the server crashed, which is answered then.
    fn answer_crash(&mut self) -> bool {
        match self.mps.take_gone() {
            None => false,
            Some(Gone::Unused) => {
                tracing::info!(gpu = self.uuid(), "an MPS server without clients has gone");
                false
            }
            Some(Gone::UnderClients) => {
                self.see(Fault::MpsCrash, None);
                true
            }
        }
    }

    pub(super) fn see(&mut self, fault: Fault, pid: Option<u32>) {
        self.answer(FaultSeen { at: monitor::now(), fault, pid });
    }

    /// A server that hangs is found by a client that hangs with it.
    pub(super) fn check_attach(&mut self) {
        if self.probe() == Attached::Hung {
            self.see(Fault::MpsHang, None);
        }
    }

    /// Whose server it is, as far as that is known: a client of anybody else would wait until the
    /// last client of this one has left. None is the agent's own user.
    fn served_user(&self) -> Option<(u32, u32)> {
        if let Some(online) = &self.online {
            return online.launch.user;
        }
        if let Some(offline) = &self.offline {
            return offline.running.launch.user;
        }
        // Whom a guest runs as is seen in its processes only.
        self.guest.as_ref()?;
        let pid = *self.shared.job()?.block.registered().first()?;
        let process = std::fs::metadata(format!("/proc/{pid}")).ok()?;
        Some((process.uid(), process.gid()))
    }

    /// Tries to attach as a client.
    pub(super) fn probe(&mut self) -> Attached {
        // As for all who come: the server may make room for this client.
        self.mps.forget_who_left();
        self.next_probe = Instant::now() + self.params.probe_every;
        self.probe_began = monitor::now();
        // Without a daemon a client attaches outside MPS, and shows nothing of it.
        let under_mps = self.mps_runs();
        let pipe_dir = self.daemon.as_ref().map(|daemon| daemon.spec().pipe_dir());
        let user = self.served_user();
        let (child, limit) = (&self.params.child, self.params.probe_limit);
        let attached = {
            let partitions = self.daemon.as_ref().and_then(MpsDaemon::partitions);
            let partition = partitions.map(|both| both.online.as_str());
            probe::run_in(child, self.uuid(), pipe_dir.as_deref(), partition, user, limit)
        };
        let now = monitor::now();
        let took = match &attached {
            Attached::Yes { sms, took } => {
                if under_mps && self.mps_runs() {
                    self.evidence.probe_passed_at = Some(now);
                }
                self.shared.sms.store(*sms, Ordering::Relaxed);
                *took
            }
            Attached::Refused { reason } => {
                tracing::warn!(gpu = self.uuid(), reason, "a client cannot attach");
                limit
            }
            Attached::Hung => {
                tracing::warn!(gpu = self.uuid(), "a client hangs while attaching");
                limit
            }
        };
        let took = Micros(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        self.shared.status().attach = Some((matches!(attached, Attached::Yes { .. }), took));
        attached
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn start() -> (Child, ProcessKey) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let key = ProcessKey::of(child.id()).unwrap();
        (child, key)
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_server_crashes_only_under_clients() {
        let ((server, key), (client, of)) = (start(), start());
        let mut seen = ServerSeen { server: Some(key), clients: vec![of.pid] };
        seen.forget_who_left();
        assert_eq!(seen.take_gone(), None, "it lives");
        end(server);
        end(client);
        seen.forget_who_left();
        assert_eq!(seen.take_gone(), Some(Gone::UnderClients), "both are gone: it took them along");
        assert_eq!(seen.take_gone(), None, "said once");
        let (server, key) = start();
        let mut seen = ServerSeen { server: Some(key), clients: Vec::new() };
        end(server);
        assert_eq!(seen.take_gone(), Some(Gone::Unused));
    }

    #[test]
    fn who_left_before_the_server_went_does_not_count() {
        let ((server, key), (client, of)) = (start(), start());
        let mut seen = ServerSeen { server: Some(key), clients: vec![of.pid] };
        end(client);
        seen.forget_who_left();
        end(server);
        assert_eq!(seen.take_gone(), Some(Gone::Unused));
    }
}
