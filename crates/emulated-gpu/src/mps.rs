//! The emulated MPS: how clients are let in, the control daemon, and its server.
//!
//! Everybody meets at the socket `control` in the pipe directory. The daemon knows who is there by the
//! connection and by the process itself, whose children may hold copies of the connection; the server
//! holds a connection to each device, so the devices know when it dies.

mod closing;
mod commands;
pub mod daemon;
pub mod limits;
mod partitions;
pub mod server;
mod servers;
mod version3;

use std::path::PathBuf;

use crate::client::Allowance;
use crate::facts::Facts;
use crate::wire::{Kind, Message, Socket};
use limits::Limits;

/// What a message to the daemon is about.
pub mod topic {
    /// A command of the control program; the text is the command.
    pub const COMMAND: u64 = 1;
    /// A client wants in; the text is its own limits.
    pub const CLIENT: u64 = 2;
    /// A server reports: [topic, state].
    pub const SERVER: u64 = 3;
}

/// Error codes of MPS.
pub mod code {
    /// The daemon cannot be reached or said no.
    pub const CONNECTION_FAILED: u32 = 805;
    /// The server is in a fault or not up.
    pub const SERVER_NOT_READY: u32 = 807;
    /// Too many clients.
    pub const MAX_CLIENTS: u32 = 808;
}

/// The directory where daemon and clients meet.
pub fn pipe_directory() -> PathBuf {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY")
        .map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from)
}

/// Leave to use the GPUs through an MPS server, for as long as it is held.
#[derive(Debug)]
pub struct Admission {
    server_pid: i32,
    limits: Limits,
    /// UUIDs of the GPUs that the daemon serves, in its order.
    served: Vec<String>,
    _connection: Socket,
}

impl Admission {
    /// Asks the MPS daemon, if there is one. Waits as long as the daemon lets it.
    pub fn ask() -> Result<Option<Admission>, u32> {
        let path = pipe_directory().join("control");
        let connection = match Socket::connect(&path) {
            Ok(connection) => connection,
            // No daemon: the GPUs are used without MPS.
            Err(_) => return Ok(None),
        };
        let own = Limits::from_environment();
        let hello = Message::new(Kind::Ping, &[topic::CLIENT]);
        let answer = connection
            .ask(&hello, own.to_text().as_bytes(), &[])
            .map_err(|_| code::CONNECTION_FAILED)?;
        if answer.message.status != 0 {
            return Err(answer.message.status);
        }
        let text = String::from_utf8_lossy(&answer.tail).into_owned();
        let (limits, served) = text.split_once('\n').unwrap_or((&text, ""));
        let limits = Limits::from_text(limits).tightened(&own);
        let served = served.split(',').filter(|s| !s.is_empty()).map(str::to_owned).collect();
        let server_pid = answer.message.values[0] as i32;
        Ok(Some(Admission { server_pid, limits, served, _connection: connection }))
    }

    /// The GPUs that the daemon serves, in its order: a client of MPS sees no others.
    pub fn served<T: Copy>(&self, all: &[(T, Facts)]) -> Vec<(T, Facts)> {
        let find = |uuid: &String| all.iter().find(|(_, facts)| uuid_hex(facts) == *uuid);
        self.served.iter().filter_map(find).copied().collect()
    }

    /// What it allows on a GPU that is served.
    pub fn allowance(&self, facts: &Facts) -> Allowance {
        let uuid = uuid_hex(facts);
        let place = self.served.iter().position(|served| *served == uuid).unwrap_or(usize::MAX);
        // A percentage is rounded down to whole SMs, but never to none.
        let sms = (f64::from(facts.sms) * self.limits.thread_pct / 100.0 + 1e-9).floor().max(1.0);
        Allowance {
            server_pid: self.server_pid,
            sm_cap_thousandths: (sms * 1000.0) as u32,
            // None is told as 0, so a limit of nothing becomes a byte: no context fits into either.
            memory_bytes: self.limits.memory_of(place, &uuid).map_or(0, |bytes| bytes.max(1)),
        }
    }
}

fn uuid_hex(facts: &Facts) -> String {
    facts.uuid.iter().map(|b| format!("{b:02x}")).collect()
}
