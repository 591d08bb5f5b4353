//! The MPS server process: stands for its clients at the devices, and tells the daemon when a
//! fault has struck them.

use std::path::Path;
use std::time::Duration;

use super::topic;
use crate::fault::event;
use crate::node::Node;
use crate::wire::{Kind, Message, Socket};
use crate::{EmulationError, sys};

/// What a server tells its daemon.
pub mod report {
    /// It is up.
    pub const READY: u64 = 1;
    /// A fault struck its clients.
    pub const FAULT: u64 = 2;
    /// It hangs: new clients are never let in.
    pub const HANG: u64 = 3;
    /// All is well again.
    pub const RESET: u64 = 4;
}

/// Runs until the daemon goes away, is told to end, or crashes on demand.
pub fn run(node: &Node, gpus: &[usize], control: &Path) -> Result<(), EmulationError> {
    let daemon = Socket::connect(control)
        .map_err(|source| EmulationError::NoDevice { path: control.to_owned(), source })?;
    let mut devices = Vec::new();
    for gpu in gpus {
        let path = node.socket(*gpu);
        let failed = |source| EmulationError::NoDevice { path: path.clone(), source };
        let socket = Socket::connect(&path).map_err(failed)?;
        socket.ask(&Message::new(Kind::Server, &[]), &[], &[]).map_err(failed)?;
        devices.push((*gpu, socket));
    }
    let tell = |what: u64| {
        let message = Message::new(Kind::Ping, &[topic::SERVER, what]);
        if daemon.send(&message, &[], &[]).is_err() {
            // A daemon that is gone is noticed at the next wait.
        }
    };
    tell(report::READY);
    let own = std::process::id();
    loop {
        let mut fds = vec![daemon.fd()];
        fds.extend(devices.iter().map(|(_, socket)| socket.fd()));
        let mut ready = Vec::new();
        sys::poll(&fds, Some(Duration::from_secs(3600)), &mut ready)
            .map_err(|source| EmulationError::System { what: "wait for devices", source })?;
        if ready[0] {
            match daemon.receive() {
                Ok(Some(received)) => obey(&received.message, &devices),
                _ => return Ok(()),
            }
        }
        let mut gone = Vec::new();
        for (i, (_, socket)) in devices.iter().enumerate() {
            if !ready[i + 1] {
                continue;
            }
            let Ok(Some(received)) = socket.receive() else {
                gone.push(i);
                continue;
            };
            let [kind, data, ..] = received.message.values;
            match kind {
                event::MPS_FAULT if data == u64::from(own) => tell(report::FAULT),
                event::MPS_HANG => tell(report::HANG),
                event::RESET => tell(report::RESET),
                // The crash that was asked for.
                event::MPS_CRASH => std::process::abort(),
                _ => {}
            }
        }
        for i in gone.into_iter().rev() {
            devices.remove(i);
        }
    }
}

/// What the daemon wants done at the devices: throw a client out, or take clients again.
fn obey(message: &Message, devices: &[(usize, Socket)]) {
    let [_, what, pid, ..] = message.values;
    let request = match what {
        1 => Message::new(Kind::Terminate, &[pid]),
        2 => Message::new(Kind::Set, &[3, std::process::id().into()]),
        _ => return,
    };
    for (_, socket) in devices {
        // The answer comes behind events that may be on their way; both are read in the loop.
        if socket.send(&request, &[], &[]).is_err() {
            // A device that is gone has no clients.
        }
    }
}
