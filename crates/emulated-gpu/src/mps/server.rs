//! The MPS server process: stands for its clients at the devices, and tells the daemon when a
//! fault has struck them.
//!
//! One server serves several GPUs, and a fault on one reaches those that share a client with it, directly
//! or through others: that is how far the real server contains it. So the devices tell the server who
//! has a context where, and the server strikes the GPUs that are linked. It takes new clients again when
//! nobody is left on any of them and the devices have said that they know.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::topic;
use crate::fault::{event, server_order};
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
    /// A GPU was reset.
    pub const RESET: u64 = 4;
    /// Those whom a fault struck are gone, and all devices take clients again.
    pub const RECOVERED: u64 = 5;
}

/// How a GPU stands with this server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Well,
    /// A fault struck it, and its clients are not gone yet.
    Struck,
    /// They are gone; the device was asked to take new ones and has not answered.
    Asked,
}

/// One GPU as the server knows it.
struct Gpu {
    socket: Socket,
    health: Health,
    /// Processes with a context there.
    clients: BTreeSet<u64>,
}

struct Server {
    daemon: Socket,
    gpus: Vec<Gpu>,
    /// The daemon believes that there is a fault.
    faulted: bool,
}

/// Runs until the daemon goes away, is told to end, or crashes on demand.
pub fn run(node: &Node, gpus: &[usize], control: &Path) -> Result<(), EmulationError> {
    let daemon = Socket::connect(control)
        .map_err(|source| EmulationError::NoDevice { path: control.to_owned(), source })?;
    let mut server = Server { daemon, gpus: Vec::new(), faulted: false };
    for gpu in gpus {
        let path = node.socket(*gpu);
        let failed = |source| EmulationError::NoDevice { path: path.clone(), source };
        let socket = Socket::connect(&path).map_err(failed)?;
        socket.ask(&Message::new(Kind::Server, &[]), &[], &[]).map_err(failed)?;
        server.gpus.push(Gpu { socket, health: Health::Well, clients: BTreeSet::new() });
    }
    server.tell(report::READY);
    loop {
        let ready = server.poll(Duration::from_secs(3600))?;
        if ready[0] {
            match server.daemon.receive() {
                Ok(Some(received)) => server.obey(&received.message),
                _ => return Ok(()),
            }
        }
        server.listen()?;
        server.recover();
    }
}

/// Who speaks of this server calls it by this number.
fn own() -> u64 {
    std::process::id().into()
}

impl Server {
    fn tell(&self, what: u64) {
        let message = Message::new(Kind::Ping, &[topic::SERVER, what]);
        if self.daemon.send(&message, &[], &[]).is_err() {
            // A daemon that is gone is noticed at the next wait.
        }
    }

    /// Whether the daemon and each of the devices has something to say.
    fn poll(&self, timeout: Duration) -> Result<Vec<bool>, EmulationError> {
        let mut fds = vec![self.daemon.fd()];
        fds.extend(self.gpus.iter().map(|gpu| gpu.socket.fd()));
        let mut ready = Vec::new();
        sys::poll(&fds, Some(timeout), &mut ready)
            .map_err(|source| EmulationError::System { what: "wait for devices", source })?;
        Ok(ready)
    }

    /// What the daemon wants done at the devices: throw a client out.
    fn obey(&self, message: &Message) {
        let [_, _, pid, ..] = message.values;
        for gpu in &self.gpus {
            gpu.send(&Message::new(Kind::Terminate, &[pid]));
        }
    }

    /// Takes in all that the devices have said. A client that a fault has struck may be gone on another
    /// GPU before the fault is read here: who leaves still links GPUs until nothing is left to read.
    fn listen(&mut self) -> Result<(), EmulationError> {
        let mut left: Vec<(usize, u64)> = Vec::new();
        loop {
            let ready = self.poll(Duration::ZERO)?;
            let speaks: Vec<usize> = (0..self.gpus.len()).filter(|i| ready[i + 1]).collect();
            if speaks.is_empty() {
                break;
            }
            let mut gone = Vec::new();
            for i in speaks {
                match self.gpus[i].socket.receive() {
                    Ok(Some(received)) => self.hear(i, &received.message, &mut left),
                    _ => gone.push(i),
                }
            }
            for i in gone.into_iter().rev() {
                self.gpus.remove(i);
                left.retain(|(gpu, _)| *gpu != i);
                left.iter_mut().filter(|(gpu, _)| *gpu > i).for_each(|(gpu, _)| *gpu -= 1);
            }
        }
        for (i, pid) in left {
            self.gpus[i].clients.remove(&pid);
        }
        Ok(())
    }

    fn hear(&mut self, i: usize, message: &Message, left: &mut Vec<(usize, u64)>) {
        let [kind, server, data, ..] = message.values;
        let gpu = &mut self.gpus[i];
        if message.kind == Kind::Reply as u32 {
            if kind == server_order::RECOVER && gpu.health == Health::Asked {
                gpu.health = Health::Well;
            }
            return;
        }
        match kind {
            event::MPS_JOINED if server == own() => {
                left.retain(|known| *known != (i, data));
                gpu.clients.insert(data);
            }
            event::MPS_LEFT if server == own() => left.push((i, data)),
            event::MPS_FAULT if server == own() => self.strike(i, data),
            event::MPS_HANG => self.tell(report::HANG),
            event::RESET => {
                // It has forgotten all faults; an answer that is on its way still comes.
                if gpu.health == Health::Struck {
                    gpu.health = Health::Well;
                }
                self.tell(report::RESET);
            }
            // The crash that was asked for.
            event::MPS_CRASH => std::process::abort(),
            _ => {}
        }
    }

    /// A fault on one GPU, which has failed its clients there: all that are linked with it follow.
    fn strike(&mut self, first: usize, error: u64) {
        for i in linked(self.gpus.iter().map(|gpu| &gpu.clients).collect(), first) {
            let gpu = &mut self.gpus[i];
            if i != first && gpu.health == Health::Well {
                gpu.send(&Message::new(Kind::Set, &[server_order::STRIKE, own(), error]));
            }
            // One that was asked forgets this fault too: nobody has joined since.
            if gpu.health == Health::Well {
                gpu.health = Health::Struck;
            }
        }
        self.faulted = true;
        self.tell(report::FAULT);
    }

    /// Asks the devices to take clients again when those that were struck are gone, and tells the daemon
    /// when all have said yes.
    fn recover(&mut self) {
        let struck = self.gpus.iter().filter(|gpu| gpu.health == Health::Struck);
        if struck.clone().all(|gpu| gpu.clients.is_empty()) {
            for gpu in self.gpus.iter_mut().filter(|gpu| gpu.health == Health::Struck) {
                gpu.send(&Message::new(Kind::Set, &[server_order::RECOVER, own()]));
                gpu.health = Health::Asked;
            }
        }
        if self.faulted && self.gpus.iter().all(|gpu| gpu.health == Health::Well) {
            self.faulted = false;
            self.tell(report::RECOVERED);
        }
    }
}

impl Gpu {
    /// The answer comes behind events that may be on their way; both are read in the loop.
    fn send(&self, request: &Message) {
        if self.socket.send(request, &[], &[]).is_err() {
            // A device that is gone has no clients.
        }
    }
}

/// The GPUs that share a client with this one, directly or through others; itself among them.
fn linked(clients: Vec<&BTreeSet<u64>>, first: usize) -> BTreeSet<usize> {
    let mut reached = BTreeSet::from([first]);
    let mut next = vec![first];
    while let Some(i) = next.pop() {
        for (j, others) in clients.iter().enumerate() {
            if !clients[i].is_disjoint(others) && reached.insert(j) {
                next.push(j);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_linked_by_the_clients_that_they_share() {
        let on = [vec![1, 2], vec![2, 3], vec![4], vec![3], vec![]].map(BTreeSet::from_iter);
        let from = |first: usize| linked(on.iter().collect(), first).into_iter().collect();
        let all: [Vec<usize>; 5] = [0, 1, 2, 3, 4].map(from);
        assert_eq!(all, [vec![0, 1, 3], vec![0, 1, 3], vec![2], vec![0, 1, 3], vec![4]]);
    }
}
