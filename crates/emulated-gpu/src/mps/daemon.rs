//! The MPS control daemon: lets clients in, starts servers, answers commands.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::closing::{self, Quit};
use super::limits::{Limits, device_key};
use super::partitions::Partition;
use super::servers::{Server, Status};
use super::{code, topic};
use crate::facts::{Facts, Process, Stats};
use crate::node::Node;
use crate::wire::{self, Kind, Message, Plain, Received, Socket};
use crate::{EmulationError, sys};

/// Most clients of one server.
const MOST_CLIENTS: usize = 60;

/// How a daemon runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node whose GPUs it serves.
    pub node: Node,
    /// Which of them.
    pub gpus: Vec<usize>,
    /// Where clients find it.
    pub pipe_directory: PathBuf,
    /// Where it logs.
    pub log_directory: PathBuf,
    /// The server program.
    pub server_program: PathBuf,
    /// One server for all users.
    pub multi_user: bool,
    /// Every client names a partition of the SMs.
    pub static_partitions: bool,
    /// Version of the commands: 2 or 3.
    pub protocol: u32,
}

pub(super) struct Client {
    pub pid: i32,
    pub uid: u32,
    /// Its server; none while it waits.
    pub server: Option<u32>,
    own: String,
    /// Readable once its process is gone; children may hold copies of its connection.
    life: Option<OwnedFd>,
}

enum Peer {
    Unknown,
    Client(Client),
    Server,
}

/// A running daemon.
pub(super) struct Daemon {
    pub options: Options,
    listener: OwnedFd,
    /// One connection to each device, to notice that its process is gone.
    devices: Vec<Socket>,
    /// UUIDs of the served GPUs. Asked for at the start: the paths of the devices are gone when the
    /// container is that started the daemon.
    served: String,
    peers: BTreeMap<u64, (Socket, Peer)>,
    next: u64,
    pub servers: BTreeMap<u32, Server>,
    pub defaults: Limits,
    pub partitions: BTreeMap<String, Partition>,
    pub partitions_made: u32,
    pub quitting: bool,
    pub quit: Option<Quit>,
}

/// Runs until `quit`, until its directory is removed, or until its last device is gone: a node that ends
/// takes its daemons along, whoever has started them.
pub fn run(options: Options) -> Result<(), EmulationError> {
    let write = |path: &Path| {
        let path = path.to_owned();
        move |source| EmulationError::Write { path, source }
    };
    for folder in [&options.pipe_directory, &options.log_directory] {
        std::fs::create_dir_all(folder).map_err(write(folder))?;
    }
    let path = options.pipe_directory.join("control");
    if Socket::connect(&path).is_ok() {
        let source = std::io::Error::other("an MPS control daemon already listens there");
        return Err(EmulationError::Write { path, source });
    }
    let listener = wire::listen(&path).map_err(write(&path))?;
    let directory = std::fs::File::open(&options.pipe_directory);
    let directory = directory.map_err(write(&options.pipe_directory))?;
    let pid_file = options.pipe_directory.join("nvidia-cuda-mps-control.pid");
    std::fs::write(&pid_file, format!("{}\n", std::process::id())).map_err(write(&pid_file))?;
    let devices =
        options.gpus.iter().filter_map(|g| Socket::connect(&options.node.socket(*g)).ok());
    let served = options.gpus.iter().filter_map(|g| device_facts(&options.node, *g));
    let served: Vec<String> = served.map(|f| device_key(&uuid_text(&f))).collect();
    let mut daemon = Daemon {
        devices: devices.collect(),
        served: served.join(","),
        options,
        listener,
        peers: BTreeMap::new(),
        next: 1,
        servers: BTreeMap::new(),
        defaults: Limits::from_environment(),
        partitions: BTreeMap::new(),
        partitions_made: 0,
        quitting: false,
        quit: None,
    };
    daemon.log("Starting control daemon");
    // Who removes its directory has no use for it any more: nobody could find it there. Looked at through
    // the directory itself: a container that is gone may have taken its mounts along, and clients still
    // find the daemon where the host has it.
    while !daemon.quitting && sys::has_entry(directory.as_fd(), c"control") {
        daemon.turn()?;
    }
    daemon.log("Exiting");
    for server in daemon.servers.values_mut() {
        if server.child.kill().is_ok() && server.child.wait().is_err() {
            // Already gone.
        }
    }
    for file in ["control", "nvidia-cuda-mps-control.pid"] {
        let path = daemon.options.pipe_directory.join(file);
        if std::fs::remove_file(path).is_err() {
            // Somebody has cleaned up already.
        }
    }
    daemon.answer_quit();
    Ok(())
}

impl Daemon {
    pub(super) fn log(&self, line: &str) {
        let path = self.options.log_directory.join("control.log");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seconds = now.map_or(0.0, |d| d.as_secs_f64());
        let text = format!("[{seconds:.3} Control {}] {line}\n", std::process::id());
        let file = OpenOptions::new().create(true).append(true).open(path);
        if file.and_then(|mut f| f.write_all(text.as_bytes())).is_err() {
            // A log that cannot be written must not stop the daemon.
        }
    }

    fn turn(&mut self) -> Result<(), EmulationError> {
        let keys: Vec<u64> = self.peers.keys().copied().collect();
        let mut fds = vec![self.listener.as_raw_fd()];
        fds.extend(self.devices.iter().map(Socket::fd));
        let watched = fds.len();
        fds.extend(self.peers.values().map(|(socket, _)| socket.fd()));
        let lives = self.peers.iter().filter_map(|(key, (_, peer))| match peer {
            Peer::Client(Client { life: Some(life), .. }) => Some((*key, life.as_raw_fd())),
            _ => None,
        });
        let (alive, lives): (Vec<u64>, Vec<i32>) = lives.unzip();
        fds.extend(lives);
        let mut ready = Vec::new();
        sys::poll(&fds, Some(self.patience()), &mut ready)
            .map_err(|source| EmulationError::System { what: "wait for clients", source })?;
        for (i, key) in keys.iter().enumerate() {
            if ready[watched + i] {
                self.serve(*key);
            }
        }
        for (key, gone) in alive.iter().zip(&ready[watched + keys.len()..]) {
            if *gone {
                self.lost(*key);
            }
        }
        if ready[0] {
            while let Some(socket) = wire::accept(self.listener.as_fd()) {
                self.peers.insert(self.next, (socket, Peer::Unknown));
                self.next += 1;
            }
        }
        self.lose_devices(&ready[1..watched]);
        self.reap();
        self.close_down();
        self.let_in();
        Ok(())
    }

    fn lose_devices(&mut self, ready: &[bool]) {
        if !ready.contains(&true) {
            return;
        }
        let mut ready = ready.iter();
        self.devices.retain(|socket| {
            !ready.next().is_some_and(|ready| *ready) || matches!(socket.receive(), Ok(Some(_)))
        });
        if self.devices.is_empty() {
            self.log("No device is left");
            self.quitting = true;
        }
    }

    fn serve(&mut self, key: u64) {
        let Some((socket, _)) = self.peers.get(&key) else { return };
        let Ok(Some(received)) = socket.receive() else {
            self.lost(key);
            return;
        };
        let (pid, uid) = socket.peer();
        let Received { message, tail, .. } = received;
        let text = String::from_utf8_lossy(&tail).into_owned();
        match message.values[0] {
            topic::COMMAND if closing::is_quit(&text) => self.begin_quit(key, &text),
            topic::COMMAND => {
                let (ok, answer) = self.command(text.trim());
                let status = u32::from(!ok);
                self.reply(key, &Message::reply(status, &[]), answer.as_bytes());
            }
            topic::CLIENT => {
                self.log(&format!("Accepting connection from pid {pid}, user {uid}"));
                let client = Client { pid, uid, server: None, own: text, life: sys::pidfd(pid) };
                if let Some((_, peer)) = self.peers.get_mut(&key) {
                    *peer = Peer::Client(client);
                }
            }
            topic::SERVER => {
                if let Some((_, peer)) = self.peers.get_mut(&key) {
                    *peer = Peer::Server;
                }
                self.heard(key, pid.unsigned_abs(), message.values[1]);
            }
            _ => {}
        }
    }

    pub(super) fn reply(&mut self, key: u64, message: &Message, tail: &[u8]) {
        let Some((socket, _)) = self.peers.get(&key) else { return };
        if socket.send(message, tail, &[]).is_err() {
            self.lost(key);
        }
    }

    pub(super) fn lost(&mut self, key: u64) {
        if let Some((_, Peer::Client(client))) = self.peers.remove(&key) {
            self.log(&format!("Client {} disconnected", client.pid));
        }
    }

    /// Clients of a server.
    pub(super) fn clients_of(&self, server: u32) -> Vec<i32> {
        let all = self.peers.values().filter_map(|(_, p)| match p {
            Peer::Client(c) if c.server == Some(server) => Some(c.pid),
            _ => None,
        });
        all.collect()
    }

    /// Clients without a server, and their users.
    pub(super) fn waiting(&self) -> Vec<(u64, u32)> {
        let all = self.peers.iter().filter_map(|(key, (_, p))| match p {
            Peer::Client(c) if c.server.is_none() => Some((*key, c.uid)),
            _ => None,
        });
        all.collect()
    }

    /// Lets those in who wait and can be served now, first come, first served.
    fn let_in(&mut self) {
        let mut earlier = Vec::new();
        for (key, uid) in self.waiting() {
            if !self.settle(key, uid, &earlier) {
                earlier.push(uid);
            }
        }
    }

    /// Lets one in or sends it away; false when it has to wait, after those who wait already.
    fn settle(&mut self, key: u64, uid: u32, earlier: &[u32]) -> bool {
        let Some(pid) = self.server_for(uid, earlier) else { return false };
        let Some(server) = self.servers.get(&pid) else { return false };
        if server.hung || server.status == Status::Initializing {
            return false;
        }
        let refused = if server.status == Status::Fault {
            Some(code::SERVER_NOT_READY)
        } else {
            (self.clients_of(pid).len() >= MOST_CLIENTS).then_some(code::MAX_CLIENTS)
        };
        if let Some(why) = refused {
            self.reply(key, &Message::reply(why, &[]), &[]);
            self.lost(key);
        } else {
            self.admit(key, pid);
        }
        true
    }

    fn admit(&mut self, key: u64, pid: u32) {
        let Some(server) = self.servers.get(&pid) else { return };
        let limits = server.limits.clone();
        let Some((_, Peer::Client(client))) = self.peers.get_mut(&key) else { return };
        let own = Limits::from_text(&client.own);
        let mut both = limits.tightened(&own);
        if self.options.static_partitions {
            // Percentages do not count there, and who names no partition stays out.
            let Some(partition) = self.partitions.get(&own.partition) else {
                self.reply(key, &Message::reply(code::CONNECTION_FAILED, &[]), &[]);
                self.lost(key);
                return;
            };
            both.thread_pct = partition.percent;
        }
        client.server = Some(pid);
        let who = client.pid;
        let text = format!("{}\n{}", both.to_text(), self.served);
        self.log(&format!("NEW CLIENT {who} from user {}: Server {pid}", self.servers[&pid].uid));
        self.reply(key, &Message::reply(0, &[pid.into()]), text.as_bytes());
    }
}

/// `GPU-xxxxxxxx-xxxx-...`
pub(super) fn uuid_text(facts: &Facts) -> String {
    let hex: String = facts.uuid.iter().map(|b| format!("{b:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{}", parts.join("-"))
}

/// What a process calls itself.
pub(super) fn command_of(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

fn ask(node: &Node, gpu: usize, kind: Kind) -> Option<Received> {
    let socket = Socket::connect(&node.socket(gpu)).ok()?;
    socket.ask(&Message::new(kind, &[]), &[], &[]).ok()
}

/// What a GPU is.
pub(super) fn device_facts(node: &Node, gpu: usize) -> Option<Facts> {
    let answer = ask(node, gpu, Kind::Stats)?;
    Facts::from_bytes(answer.tail.get(size_of::<Stats>()..)?)
}

/// Who is on a GPU.
pub(super) fn device_processes(node: &Node, gpu: usize) -> Vec<Process> {
    let tail = ask(node, gpu, Kind::Processes).map(|answer| answer.tail).unwrap_or_default();
    tail.chunks_exact(size_of::<Process>()).filter_map(Process::from_bytes).collect()
}
