//! An emulated node with `muxflow up` in it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use muxflow_agent::cgroup::Cgroups;
use muxflow_api::cluster::{GpuList, GpuView, HealthView};
use muxflow_api::jobs::JobView;
use muxflow_e2e::build::{client, products, xcuda};
use muxflow_manager::client::{Client, Place};

pub(crate) const LONG: Duration = Duration::from_secs(90);
/// Long enough for the manager to take it; nobody else knows it.
pub(crate) const TOKEN: &str = "a-token-of-the-tests";

/// The command of a worker: kernels of this many microseconds on so many SMs, with pauses that can be
/// changed in `NAME.pause`.
pub(crate) fn worker(
    dir: &Path,
    name: &str,
    kernel_us: u32,
    sms: u32,
    pause_us: u32,
) -> Vec<String> {
    let pause = dir.join(format!("{name}.pause"));
    fs::write(&pause, pause_us.to_string()).unwrap();
    let words = [variable("MUXFLOW_TEST_WORKER"), kernel_us.to_string().into()];
    let rest = [sms.to_string().into(), pause, "-".into()];
    words.into_iter().chain(rest).map(|word| word.display().to_string()).collect()
}

/// Says whether this process is root; where it must be and is not, that is a failure.
pub(crate) fn root(what: &str) -> bool {
    let root = muxflow_agent::sys::own_uid() == 0;
    if !root {
        println!("SKIPPED: run the tests as root to see {what}");
        assert!(std::env::var_os("CI").is_none(), "CI runs as root");
    }
    root
}

/// Runs the ignored test `name` inside an emulated node.
pub(crate) fn inside(name: &str, gpus: &str) {
    let built = products();
    let mut command = Command::new(built.join("muxflow-emulated-node"));
    command
        .args(["--gpus", gpus, "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("MUXFLOW_TEST_BUILT", built)
        .env("MUXFLOW_TEST_XCUDA", xcuda())
        .env("MUXFLOW_TEST_WORKER", client("worker", &[]));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    assert!(text.contains("1 passed"), "nothing ran inside: {text}");
    for line in text.lines().filter(|line| line.starts_with("MEASURED")) {
        println!("{line}");
    }
}

pub(crate) fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).map(PathBuf::from).expect("run by another test")
}

pub(crate) struct World {
    dir: tempfile::TempDir,
    run: PathBuf,
    up: Option<Child>,
    pub(crate) client: Client,
}

impl World {
    /// Starts `muxflow up` with more lines of configuration.
    pub(crate) fn start(more: &str) -> Self {
        World::start_in(tempfile::tempdir().unwrap(), more)
    }

    /// The same, in a directory that may hold something already.
    pub(crate) fn start_in(dir: tempfile::TempDir, more: &str) -> Self {
        let label = dir.path().file_name().unwrap().to_string_lossy().replace('.', "");
        let run = Path::new("/dev/shm").join(format!("muxflow-e2e-{label}"));
        let log = variable("MUXFLOW_EMULATED_DIR").join("kernel.log");
        fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let text = format!(
            "state_dir = '{0}/state'\nrun_dir = '{1}'\nlisten = '127.0.0.1:0'\n{more}\n\
             [[token]]\nuser = '{uid}'\ntoken = '{TOKEN}'\n\
             [agent]\ninterposer = '{2}'\nmetrics = ''\nkernel_log = '{3}'\n\
             cgroup_parent = 'muxflow-e2e-{label}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n",
            dir.path().display(),
            run.display(),
            variable("MUXFLOW_TEST_XCUDA").display(),
            log.display(),
            uid = muxflow_agent::sys::own_uid(),
        );
        fs::write(dir.path().join("up.toml"), text).unwrap();
        let client = Client::new(Place::Socket(run.join("manager.sock"))).unwrap();
        let mut world = World { dir, run, up: None, client };
        world.up();
        world
    }

    pub(crate) fn base(&self) -> &Path {
        self.dir.path()
    }

    /// What is gone after a reboot: sockets, pipes, control blocks.
    pub(crate) fn run(&self) -> &Path {
        &self.run
    }

    /// Changes the configuration for the next start.
    pub(crate) fn change(&self, edit: impl FnOnce(String) -> String) {
        let path = self.base().join("up.toml");
        fs::write(&path, edit(fs::read_to_string(&path).unwrap())).unwrap();
    }

    pub(crate) fn log(&self) -> String {
        let text = fs::read_to_string(self.base().join("up.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// Starts the manager and waits until it answers.
    pub(crate) fn up(&mut self) {
        let path = self.base().join("up.log");
        let log = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        let child = Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"))
            .args(["up", "--config"])
            .arg(self.base().join("up.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.up = Some(child);
        let deadline = Instant::now() + LONG;
        while self.client.get::<HealthView>("/v1/health").is_err() {
            let left = self.up.as_mut().unwrap().try_wait().unwrap();
            assert!(left.is_none(), "the manager left: {left:?}\n{}", self.log());
            assert!(Instant::now() < deadline, "the manager does not answer\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The TCP address that the manager has told.
    pub(crate) fn address(&self) -> String {
        let text = fs::read_to_string(self.base().join("up.log")).unwrap();
        let plain: String = text.replace('\u{1b}', "");
        let line = plain.lines().rev().find(|line| line.contains("and on TCP")).unwrap();
        let at = line.rfind("127.0.0.1:").unwrap();
        line[at..].chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect()
    }

    /// The end of the manager without a word.
    pub(crate) fn kill(&mut self) {
        let mut up = self.up.take().unwrap();
        up.kill().unwrap();
        up.wait().unwrap();
    }

    /// Asks the manager to leave; how long that took.
    pub(crate) fn leave(&mut self) -> Duration {
        let mut up = self.up.take().unwrap();
        let began = Instant::now();
        muxflow_agent::sys::kill(up.id(), libc_term()).unwrap();
        while up.try_wait().unwrap().is_none() {
            if began.elapsed() > LONG {
                up.kill().unwrap();
                up.wait().unwrap();
                panic!("it does not leave\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        began.elapsed()
    }

    pub(crate) fn wait_healthy(&self, gpus: usize) {
        let deadline = Instant::now() + LONG;
        loop {
            let seen: GpuList = self.client.get("/v1/gpus").unwrap();
            if seen.items.iter().filter(|gpu| gpu.placeable && gpu.sms > 0).count() >= gpus {
                return;
            }
            assert!(Instant::now() < deadline, "never healthy: {seen:#?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A command of `muxflow` that talks to the manager.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"));
        command.args(words).env("MUXFLOW_SOCKET", self.run.join("manager.sock"));
        command
    }

    /// Runs a command of `muxflow` against the manager.
    pub(crate) fn muxflow(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// The same, called by another user.
    pub(crate) fn muxflow_as(&self, uid: u32, words: &[&str]) -> Output {
        self.command(words).uid(uid).gid(uid).current_dir("/").output().unwrap()
    }

    pub(crate) fn gpus(&self) -> Vec<GpuView> {
        self.client.get::<GpuList>("/v1/gpus").unwrap().items
    }

    /// Waits for anything.
    pub(crate) fn until(&self, what: &str, holds: impl Fn() -> bool) {
        self.until_within(LONG, what, holds);
    }

    pub(crate) fn until_within(&self, limit: Duration, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + limit;
        while !holds() {
            assert!(Instant::now() < deadline, "never: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same, and it must succeed.
    pub(crate) fn must(&self, words: &[&str]) -> String {
        let output = self.muxflow(words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "muxflow {words:?}: {text}{errors}\n{}", self.log());
        text
    }

    pub(crate) fn job(&self, id: &str) -> JobView {
        self.client.get(&format!("/v1/jobs/{id}")).unwrap()
    }

    pub(crate) fn wait(&self, id: &str, what: &str, holds: impl Fn(&JobView) -> bool) -> JobView {
        let deadline = Instant::now() + LONG;
        loop {
            let job = self.job(id);
            if holds(&job) {
                return job;
            }
            assert!(Instant::now() < deadline, "never: {what}: {job:#?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The worker as a job: kernels of this many microseconds, one after another.
    pub(crate) fn worker(&self, kernel_us: u32) -> Vec<String> {
        worker(self.base(), "worker", kernel_us, 8, 0)
    }

    /// Asks the manager to leave, ends MPS, and sees that nothing is left.
    pub(crate) fn end(mut self) {
        let mut up = self.up.take().unwrap();
        muxflow_agent::sys::kill(up.id(), libc_term()).unwrap();
        let status = up.wait().unwrap();
        assert!(status.success(), "{status}\n{}", self.log());
        for entry in fs::read_dir(self.run.join("mps")).unwrap().flatten() {
            let quit = Command::new("sh")
                .args(["-c", "echo quit -t 5 | nvidia-cuda-mps-control"])
                .env("CUDA_MPS_PIPE_DIRECTORY", entry.path().join("pipe"))
                .status();
            assert!(quit.is_ok());
        }
        drop(fs::remove_dir_all(&self.run));
        if let Some(label) = self.run.file_name() {
            Cgroups::detect(&label.to_string_lossy()).remove_empty();
        }
    }
}

impl Drop for World {
    /// A test that failed leaves no manager behind; jobs go with it.
    fn drop(&mut self) {
        if let Some(mut up) = self.up.take() {
            drop(muxflow_agent::sys::kill(up.id(), libc_term()));
            drop(up.wait());
        }
    }
}

fn libc_term() -> i32 {
    15
}
