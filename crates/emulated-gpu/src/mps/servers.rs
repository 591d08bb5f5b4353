//! The servers that a daemon has started: which one serves a user, what they report, and how they end.

use std::process::{Child, Command};

use super::daemon::Daemon;
use super::limits::Limits;
use super::server::report;
use super::topic;
use crate::wire::{Kind, Message};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Initializing,
    Active,
    Fault,
}

impl Status {
    pub(super) fn word(self) -> &'static str {
        match self {
            Status::Initializing => "INITIALIZING",
            Status::Active => "ACTIVE",
            Status::Fault => "FAULT",
        }
    }
}

pub(super) struct Server {
    pub child: Child,
    pub uid: u32,
    pub status: Status,
    pub hung: bool,
    /// Takes no clients any more, and ends with its last.
    pub closing: bool,
    /// Its connection, by key.
    pub peer: Option<u64>,
    /// Limits for clients to come.
    pub limits: Limits,
}

impl Daemon {
    /// A server reported.
    pub(super) fn heard(&mut self, key: u64, pid: u32, what: u64) {
        let Some(server) = self.servers.get_mut(&pid) else { return };
        let line = match what {
            report::READY => {
                server.peer = Some(key);
                server.status = Status::Active;
                format!("Server {pid} is ready")
            }
            report::FAULT => {
                server.status = Status::Fault;
                format!("Server {pid} encountered a fatal fault; new clients are refused")
            }
            report::RECOVERED => {
                server.status = Status::Active;
                format!("Server {pid} recovered")
            }
            // The daemon goes on saying that all is well: that is what makes it a hang.
            report::HANG => {
                server.hung = true;
                return;
            }
            _ => {
                server.hung = false;
                format!("Server {pid} was reset")
            }
        };
        self.log(&line);
    }

    /// Servers that ended by themselves are forgotten; their clients find out at the device.
    pub(super) fn reap(&mut self) {
        let mut ended = Vec::new();
        for (pid, server) in &mut self.servers {
            if server.child.try_wait().ok().flatten().is_some() {
                ended.push(*pid);
            }
        }
        for pid in ended {
            self.servers.remove(&pid);
            self.log(&format!("Server {pid} exited"));
        }
    }

    /// Has a client of a server thrown out.
    pub(super) fn throw_out(&mut self, server: u32, client: i32) {
        let Some(key) = self.servers.get(&server).and_then(|s| s.peer) else { return };
        let values = [topic::SERVER, 1, client.unsigned_abs().into()];
        self.reply(key, &Message::new(Kind::Ping, &values), &[]);
        self.log(&format!("Client {client} of server {server} terminated"));
    }

    /// The server of a user. Without multi-user mode only one user is served at a time: others
    /// wait until its clients have left. `earlier` are the users of those who wait already: whoever
    /// came first has the next server, and a server that starts is never stopped for another user's.
    pub(super) fn server_for(&mut self, uid: u32, earlier: &[u32]) -> Option<u32> {
        let same = |s: &Server| self.options.multi_user || s.uid == uid;
        if let Some((pid, server)) = self.servers.iter().find(|(_, s)| same(s)) {
            // Who comes while it closes waits for the next.
            return (!server.closing).then_some(*pid);
        }
        let needed = |(pid, server): (&u32, &Server)| {
            server.status == Status::Initializing
                || !server.closing && earlier.contains(&server.uid)
                || !self.clients_of(*pid).is_empty()
        };
        if earlier.iter().any(|other| *other != uid) || self.servers.iter().any(needed) {
            return None;
        }
        let others: Vec<u32> = self.servers.keys().copied().collect();
        for pid in others {
            self.stop_server(pid);
        }
        self.start_server(uid)
    }

    pub(super) fn stop_server(&mut self, pid: u32) {
        if let Some(mut server) = self.servers.remove(&pid)
            && server.child.kill().is_ok()
            && server.child.wait().is_err()
        {
            // Already gone.
        }
    }

    /// Starts a server for a user.
    pub(super) fn start_server(&mut self, uid: u32) -> Option<u32> {
        let gpus: Vec<String> = self.options.gpus.iter().map(ToString::to_string).collect();
        let child = Command::new(&self.options.server_program)
            .arg(self.options.node.root())
            .arg(gpus.join(","))
            .arg(self.options.pipe_directory.join("control"))
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) => {
                let program = self.options.server_program.display();
                self.log(&format!("Cannot start {program}: {error}"));
                return None;
            }
        };
        let pid = child.id();
        self.log(&format!("Starting new server {pid} for user {uid}"));
        let server = Server {
            child,
            uid,
            status: Status::Initializing,
            hung: false,
            closing: false,
            peer: None,
            limits: self.defaults.clone(),
        };
        self.servers.insert(pid, server);
        Some(pid)
    }
}
