//! An executor of plain processes, a load generator and a server, for the tests of this program.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muxflow_api::service::{ServiceDeclaration, ServiceView};
use muxflow_services::ServiceError;
use muxflow_services::executor::{Executor, Place, ReplicaLaunch, Standing};
use muxflow_services::manager::ServiceManager;
use muxflow_types::GpuType;

/// More than all buffers between a replica and a client hold, of half a mebibyte each.
pub(crate) const MANY_CHUNKS: usize = 128;

const LONG: Duration = Duration::from_secs(60);

pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What was told last of each place.
type Told = BTreeMap<String, Standing>;

/// Starts processes and, like the agent, starts them again when they die.
pub(crate) struct Processes {
    gpus: usize,
    dir: PathBuf,
    running: Mutex<BTreeMap<String, (ReplicaLaunch, Child)>>,
    pub(crate) told: Mutex<Told>,
    pub(crate) starts: AtomicUsize,
    /// Replicas that were not written down when they were started.
    pub(crate) unwritten: Mutex<Vec<String>>,
    /// GPUs that have a job.
    pub(crate) jobs: Mutex<BTreeSet<String>>,
    /// Why nothing can be started.
    pub(crate) refuses: Mutex<Option<String>>,
    pub(crate) shadow: AtomicBool,
}

fn spawn(launch: &ReplicaLaunch) -> Child {
    Command::new(&launch.argv[0])
        .args(&launch.argv[1..])
        .envs(&launch.env)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl Processes {
    pub(crate) fn running(&self) -> usize {
        self.running.lock().unwrap().len()
    }

    /// What the agent's slow loop does every few milliseconds.
    fn look_after(&self) {
        for (launch, child) in self.running.lock().unwrap().values_mut() {
            if child.try_wait().unwrap().is_some() {
                *child = spawn(launch);
            }
        }
    }
}

impl Executor for Processes {
    fn places(&self) -> Vec<Place> {
        let running = self.running.lock().unwrap();
        let place = |index| {
            let id = format!("GPU-{index}");
            let taken_by =
                running.get(&id).map(|(launch, child)| (launch.name.clone(), Some(child.id())));
            let has_job = self.jobs.lock().unwrap().contains(&id);
            let (gpu_type, is_declared) = (GpuType::new("T4").unwrap(), taken_by.is_some());
            Place { id, gpu_type, taken_by, is_declared, has_job, usable: true }
        };
        (0..self.gpus).map(place).collect()
    }

    fn start(&self, place: &str, launch: &ReplicaLaunch) -> Result<(), ServiceError> {
        assert!(!self.is_shadow(), "nothing is started in shadow mode");
        if let Some(reason) = self.refuses.lock().unwrap().clone() {
            return Err(ServiceError::Executor { replica: launch.name.clone(), reason });
        }
        let (service, _) = launch.name.rsplit_once('-').unwrap();
        let text = std::fs::read_to_string(self.dir.join(format!("{service}.json")));
        let text = text.unwrap_or_default();
        if !text.contains(&format!(r#""name":{:?}"#, launch.name)) || !text.contains(place) {
            self.unwritten.lock().unwrap().push(format!("{}: {text}", launch.name));
        }
        self.starts.fetch_add(1, Ordering::Relaxed);
        let before =
            self.running.lock().unwrap().insert(place.into(), (launch.clone(), spawn(launch)));
        assert!(before.is_none(), "two on one GPU");
        Ok(())
    }

    fn stop(&self, place: &str, replica: &str) -> Result<(), ServiceError> {
        assert!(!self.is_shadow(), "nothing is stopped in shadow mode");
        let (launch, mut child) = self.running.lock().unwrap().remove(place).unwrap();
        assert_eq!(launch.name, replica);
        signal(child.id(), libc::SIGTERM);
        go_on(child.id());
        child.wait().unwrap();
        Ok(())
    }

    fn tell(&self, place: &str, standing: Standing) {
        self.told.lock().unwrap().insert(place.into(), standing);
    }

    fn is_shadow(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
    }
}

#[expect(unsafe_code, reason = "there is no other way to send a signal")]
fn signal(pid: u32, signal: i32) {
    // SAFETY: plain system call with numbers.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

pub(crate) fn kill(pid: u32) {
    signal(pid, libc::SIGKILL);
}

/// It hangs until [`go_on`].
pub(crate) fn hang(pid: u32) {
    signal(pid, libc::SIGSTOP);
}

pub(crate) fn go_on(pid: u32) {
    signal(pid, libc::SIGCONT);
}

pub(crate) fn is_alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

/// A service of this very program; one that is out for so long is replaced.
pub(crate) fn declaration(name: &str, restart_after_ms: u64, more: &str) -> ServiceDeclaration {
    let own = std::env::current_exe().unwrap();
    let text = format!(
        r#"{{"name": {name:?}, "command": [{:?}, "--exact", "replica_server", "--ignored"],
            "health": {{"every_ms": 50, "down_after": 1, "restart_after_ms": {restart_after_ms}}}
            {more}}}"#,
        own.display().to_string()
    );
    serde_json::from_str(&text).unwrap()
}

pub(crate) struct World {
    dir: tempfile::TempDir,
    pub(crate) runtime: tokio::runtime::Runtime,
    pub(crate) manager: ServiceManager,
    pub(crate) executor: Arc<Processes>,
    stop: Arc<AtomicBool>,
    keeper: Option<JoinHandle<()>>,
}

fn manager(
    executor: &Arc<Processes>,
    dir: &std::path::Path,
    runtime: &tokio::runtime::Runtime,
) -> ServiceManager {
    let executor: Arc<dyn Executor> = Arc::clone(executor) as Arc<dyn Executor>;
    ServiceManager::start(executor, dir, runtime.handle().clone()).unwrap()
}

impl World {
    pub(crate) fn start(gpus: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
        let executor = Arc::new(Processes {
            gpus,
            dir: dir.path().to_owned(),
            running: Mutex::default(),
            told: Mutex::default(),
            starts: AtomicUsize::new(0),
            unwritten: Mutex::default(),
            jobs: Mutex::default(),
            refuses: Mutex::default(),
            shadow: AtomicBool::new(false),
        });
        let stop = Arc::new(AtomicBool::new(false));
        let (inside, stopped) = (Arc::clone(&executor), Arc::clone(&stop));
        let keeper = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                inside.look_after();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let manager = manager(&executor, dir.path(), &runtime);
        World { dir, runtime, manager, executor, stop, keeper: Some(keeper) }
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// What is written down of `test`.
    pub(crate) fn written(&self) -> serde_json::Value {
        let text = std::fs::read_to_string(self.dir().join("test.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Changes what is written down of `test`, while no manager runs.
    pub(crate) fn rewrite(&self, edit: impl FnOnce(&mut serde_json::Value)) {
        let mut value = self.written();
        edit(&mut value);
        std::fs::write(self.dir().join("test.json"), value.to_string()).unwrap();
    }

    /// Nothing more of `test` can be written down, as on a full disk: what is written goes here first.
    pub(crate) fn fill_disk(&self) {
        std::fs::create_dir(self.dir().join("test.new")).unwrap();
    }

    pub(crate) fn empty_disk(&self) {
        std::fs::remove_dir(self.dir().join("test.new")).unwrap();
    }

    /// The processes of its replicas, in order.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.view().replicas.iter().filter_map(|r| r.pid).collect();
        pids.sort_unstable();
        pids
    }

    pub(crate) fn restart_manager(&mut self) {
        self.stop_manager();
        self.start_manager();
    }

    pub(crate) fn start_manager(&mut self) {
        self.manager = manager(&self.executor, self.dir.path(), &self.runtime);
    }

    pub(crate) fn stop_manager(&mut self) {
        self.manager.shutdown();
        // The port is free once the front has seen that it is to close.
        until("the front closes", || {
            let port = u16::try_from(self.written()["declared"]["port"].as_u64().unwrap()).unwrap();
            TcpStream::connect(("127.0.0.1", port)).is_err()
        });
    }

    /// Declares `test`, served by this very program.
    pub(crate) fn declare(&self, more: &str) -> SocketAddr {
        self.manager.declare(&declaration("test", 30_000, more)).unwrap()
    }

    pub(crate) fn view(&self) -> ServiceView {
        self.manager.get("test").unwrap()
    }

    pub(crate) fn wait(&self, what: &str, holds: impl Fn(&ServiceView) -> bool) {
        let deadline = Instant::now() + LONG;
        loop {
            let view = self.view();
            if holds(&view) {
                return;
            }
            assert!(Instant::now() < deadline, "never: {what}: {view:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.manager.shutdown();
        self.stop.store(true, Ordering::Relaxed);
        drop(self.keeper.take().map(JoinHandle::join));
        for (_, child) in self.executor.running.lock().unwrap().values_mut() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// One request over a connection of its own: status and body; 0 when there is no answer.
pub(crate) fn request(to: SocketAddr, what: &str, body: &str) -> (u16, String) {
    let ask = || -> std::io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_read_timeout(Some(LONG))?;
        let length = body.len();
        let head = format!(
            "{what} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let text = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        Ok((status, body.to_owned()))
    };
    ask().unwrap_or_default()
}

/// A request whose client hangs up after a while.
pub(crate) fn give_up(to: SocketAddr, what: &str, after: Duration) {
    let mut stream = TcpStream::connect(to).unwrap();
    let head = format!("{what} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    std::thread::sleep(after);
}

pub(crate) fn get(to: SocketAddr, path: &str) -> (u16, String) {
    request(to, &format!("GET {path}"), "")
}

/// Clients that ask without pause.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    counts: Arc<(AtomicU64, AtomicU64)>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(to: SocketAddr, clients: usize, what: &'static str) -> Self {
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let client = |_| {
            let (stop, counts): (Arc<AtomicBool>, Arc<(AtomicU64, AtomicU64)>) =
                (Arc::clone(&stop), Arc::clone(&counts));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let (status, _) = request(to, what, "");
                    counts.0.fetch_add(1, Ordering::Relaxed);
                    if status != 200 {
                        counts.1.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        };
        let clients = (0..clients).map(client).collect();
        Load { stop, counts, clients }
    }

    /// Waits for so many more answers.
    pub(crate) fn wait_for(&self, more: u64) {
        let from = self.counts.0.load(Ordering::Relaxed);
        until("answers", || self.counts.0.load(Ordering::Relaxed) >= from + more);
    }

    pub(crate) fn stop(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
        (self.counts.0.load(Ordering::Relaxed), self.counts.1.load(Ordering::Relaxed))
    }
}

/// The server of a replica: threads and blocking sockets.
pub(crate) fn serve() {
    let port: u16 = std::env::var("PORT").unwrap().parse().unwrap();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let posts = Arc::new(AtomicU64::new(0));
    for stream in listener.incoming().flatten() {
        let posts = Arc::clone(&posts);
        std::thread::spawn(move || drop(answer(stream, &posts)));
    }
}

fn answer(stream: TcpStream, posts: &AtomicU64) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    // Connections are kept, as real servers do.
    loop {
        let (mut first, mut length) = (String::new(), 0_usize);
        if reader.read_line(&mut first)? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let text = match path.as_str() {
            "/healthz" if std::env::var_os("SICK").is_some() => {
                stream.write_all(b"HTTP/1.1 500 Sick\r\nContent-Length: 0\r\n\r\n")?;
                continue;
            }
            "/healthz" => "ok".into(),
            "/big" => "z".repeat(3 << 20),
            "/chunks" | "/many-chunks" => {
                let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
                stream.write_all(head.as_bytes())?;
                let chunk = format!("{:x}\r\n{}\r\n", 1 << 19, "z".repeat(1 << 19));
                for _ in 0..if path == "/chunks" { 6 } else { MANY_CHUNKS } {
                    stream.write_all(chunk.as_bytes())?;
                }
                stream.write_all(b"0\r\n\r\n")?;
                continue;
            }
            "/length" => body.len().to_string(),
            "/count" => {
                let count = posts.fetch_add(1, Ordering::Relaxed) + 1;
                format!("{} {count}", String::from_utf8_lossy(&body))
            }
            "/broken" => {
                return stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhal");
            }
            "/held" => {
                let held = PathBuf::from(std::env::var_os("TEST_HELD").unwrap());
                while held.exists() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                "late but sure".into()
            }
            "/hang" => {
                std::thread::sleep(LONG);
                return Ok(());
            }
            _ => {
                std::thread::sleep(Duration::from_millis(5));
                std::process::id().to_string()
            }
        };
        let length = text.len();
        let whole = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}");
        stream.write_all(whole.as_bytes())?;
    }
}
