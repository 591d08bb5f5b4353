//! The keeper: one small process beside each workload, which starts it, waits for it, and stops it.
//!
//! It exists because the agent may die at any moment. The keeper then still knows how an online
//! service ended (only a parent can), and stops offline work in the clean order. It stands outside
//! the group of the workload and outside the agent's own control group, session and unit. When a
//! keeper itself is killed, an online service goes on, an offline program gets SIGTERM from the
//! kernel, and the agent stops what is left in the same order.
//!
//! SIGTERM to the keeper asks for a stop; SIGHUP, before or after, says that it must be a short one:
//! the service waits for the memory of the job. One thread, one poll loop, no allocation that matters.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{AgentError, Result, file, system};
use crate::launch::{self, Exit, Kind, Launch, Run, StopCause, WorkloadDir};
use crate::logs;
use crate::process::{self, ProcessKey};
use crate::stop::StepTaken;
use crate::stop_drive::{self, StopDrive};
use crate::sys::{self, ChildSetup, Ended, OomScore};

/// First word that a keeper says when its workload runs.
pub const STARTED: &str = "started";
/// And when its program can be started nowhere on this node.
pub const UNSTARTABLE: &str = "unstartable";

const TICK: Duration = Duration::from_millis(500);
const STOP_TICK: Duration = Duration::from_millis(5);
const WRITE_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Runs a keeper: `dir` holds the workload's `launch.json`. Says `started PID` on `answer` once the
/// workload runs, and returns when it is gone.
pub fn run(dir: &Path, mut answer: impl Write) -> Result<()> {
    let files = WorkloadDir::new(dir);
    let path = files.launch_file();
    let launch: Launch = launch::read(&path)?.ok_or_else(|| AgentError::Start {
        workload: dir.display().to_string(),
        reason: format!("{} is missing", path.display()),
    })?;
    let _lock = lock(&files, &launch)?;
    let signals =
        sys::signal_fd(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD, libc::SIGPIPE])
            .map_err(system("watch signals"))?;
    sys::become_subreaper().map_err(system("become the reaper of the workload"))?;
    let agent = match launch.kind {
        Kind::Offline => Some(launch.agent.open().map_err(system("watch the agent"))?),
        Kind::Online => None,
    };
    if agent.is_some() && sys::parent() != launch.agent.pid {
        // Started by an agent that is gone, while its successor has written a new launch: that one
        // has a keeper of its own.
        return Err(AgentError::Start {
            workload: launch.name,
            reason: "the agent that started this keeper is gone".into(),
        });
    }
    let main = start(&files, &launch).and_then(|main| {
        let run = Run {
            boot_id: process::boot_id(),
            keeper: ProcessKey::own(),
            main,
            started_at_s: launch::now_s(),
        };
        launch::write(&files.run_file(), &run).map(|()| main)
    });
    // One that nobody could find again does not run.
    let main = main.inspect_err(|_| {
        launch.group.kill_all(below_us, Duration::from_secs(5));
    })?;
    // An agent that no longer listens is noticed by its handle, not here.
    drop(writeln!(answer, "{STARTED} {}", main.pid));
    drop(answer);
    let mut keeper = Keeper { files, launch, main, agent, signals, ended: None, hastened: false };
    let exit = keeper.watch();
    let written = write_exit(&keeper.files.exit_file(), &exit, keeper.launch.kind);
    if let Err(error) = keeper.launch.group.remove() {
        tracing::warn!(workload = keeper.launch.name, error = %error, "a control group is left");
    }
    written
}

/// Writes down how the workload ended. While the disk is full it tries again for a job: a run whose end
/// nobody knows would be done twice. A service is to run again at once, however it ended: the agent
/// waits for the end of this keeper only.
fn write_exit(path: &Path, exit: &Exit, kind: Kind) -> Result<()> {
    loop {
        match launch::write(path, exit) {
            Err(AgentError::File { source, .. })
                if kind == Kind::Offline
                    && matches!(
                        source.kind(),
                        ErrorKind::StorageFull | ErrorKind::QuotaExceeded
                    ) =>
            {
                std::thread::sleep(WRITE_AGAIN_AFTER);
            }
            other => return other,
        }
    }
}

fn lock(files: &WorkloadDir, launch: &Launch) -> Result<File> {
    let path = files.lock_file();
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let opened = opened.map_err(file("open", &path))?;
    if sys::try_lock(&opened).map_err(file("lock", &path))? {
        return Ok(opened);
    }
    let pid = launch::read::<Run>(&files.run_file())?.map_or(0, |run| run.main.pid);
    Err(AgentError::RunsAlready { workload: launch.name.clone(), pid })
}

fn start(files: &WorkloadDir, launch: &Launch) -> Result<ProcessKey> {
    let failed = |reason: String| AgentError::Start { workload: launch.name.clone(), reason };
    let (program, arguments) =
        launch.argv.split_first().ok_or_else(|| failed("it has no program to run".into()))?;
    let (groups, affinity) = launch.group.entrance()?;
    let cwd = CString::new(launch.cwd.as_os_str().as_bytes())
        .map_err(|_| failed("its working directory has a zero byte in its name".into()))?;
    let setup = ChildSetup {
        groups,
        affinity,
        user: launch.user,
        supplementary: launch.user.map(sys::groups_of).unwrap_or_default(),
        // When the keeper is killed, offline work is told to leave; the interposer drains it.
        death_signal: (launch.kind == Kind::Offline).then_some(libc::SIGTERM),
        new_session: true,
        cwd: Some(cwd),
        // The agent may be one that the kernel spares; jobs go before everybody else.
        oom_score: Some(match launch.kind {
            Kind::Offline => OomScore::First,
            Kind::Online => OomScore::Usual,
        }),
    };
    for stream in ["stdout", "stderr"] {
        // On a full disk it is made later, by the first rotation.
        drop(logs::begin(&files.log_file(stream)));
    }
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(&launch.env)
        .stdin(Stdio::null())
        .stdout(logs::open(&files.log_file("stdout"))?)
        .stderr(logs::open(&files.log_file("stderr"))?);
    let child = sys::with_setup(&mut command, setup).spawn().map_err(|error| {
        let reason = format!("`{program}` in {}: {error}", launch.cwd.display());
        match is_its_own_fault(&error) {
            true => AgentError::Unstartable { workload: launch.name.clone(), reason },
            false => failed(reason),
        }
    })?;
    ProcessKey::of(child.id()).ok_or_else(|| failed("it was gone at once".into()))
}

/// Everything below this process, which reaps what its workload leaves behind.
fn below_us() -> std::io::Result<Vec<u32>> {
    process::below(std::process::id())
}

/// Errors that lie in the program or the directory. Others are the node's, and pass: no process or no
/// memory can be had, a disk does not answer.
fn is_its_own_fault(error: &std::io::Error) -> bool {
    use libc::{E2BIG, EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOEXEC, ENOTDIR};
    let own = [E2BIG, EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOEXEC, ENOTDIR];
    error.raw_os_error().is_some_and(|number| own.contains(&number))
}

struct Keeper {
    files: WorkloadDir,
    launch: Launch,
    main: ProcessKey,
    agent: Option<OwnedFd>,
    signals: OwnedFd,
    ended: Option<Ended>,
    /// A stop leaves hardly any time to save anything.
    hastened: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Noticed {
    Nothing,
    StopAsked,
    AgentGone,
}

impl Keeper {
    fn watch(&mut self) -> Exit {
        let mut stop = None;
        while self.ended.is_none() && stop.is_none() {
            stop = match self.look(TICK) {
                Noticed::Nothing => None,
                Noticed::StopAsked => Some(StopCause::Asked),
                Noticed::AgentGone => Some(StopCause::AgentGone),
            };
            self.files.rotate_logs(&self.launch);
        }
        let steps = match (stop, self.launch.kind) {
            (Some(_), Kind::Offline) => self.stop_offline(),
            // A program may leave processes behind that have work in flight.
            (None, Kind::Offline) if self.has_clients() => self.stop_offline(),
            (Some(_), Kind::Online) => {
                self.stop_online();
                Vec::new()
            }
            (None, _) => Vec::new(),
        };
        // Whatever the program left running goes with it.
        let oom = self.launch.group.oom_kills().is_some_and(|count| count > 0);
        let all_gone = self.launch.group.kill_all(below_us, Duration::from_secs(5));
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.ended.is_none() && Instant::now() < deadline {
            self.look(STOP_TICK);
        }
        let (run, fingerprint) = (self.launch.run_number(), self.launch.fingerprint);
        let of = Exit::of(self.ended);
        Exit { out_of_memory: oom, stop, steps, all_gone, run, fingerprint, ..of }
    }

    /// Waits for something to happen, and takes note of it.
    fn look(&mut self, limit: Duration) -> Noticed {
        let mut fds = vec![self.signals.as_raw_fd()];
        fds.extend(self.agent.as_ref().map(AsRawFd::as_raw_fd));
        let ready = sys::poll_readable(&fds, limit).unwrap_or_default();
        let mut noticed = Noticed::Nothing;
        while let Some((signal, _)) = sys::take_signal(self.signals.as_fd()) {
            match signal {
                libc::SIGTERM => noticed = Noticed::StopAsked,
                libc::SIGHUP => self.hastened = true,
                _ => {}
            }
        }
        while let Some((pid, ended)) = sys::reap_any() {
            if pid == self.main.pid {
                self.ended = Some(ended);
            }
        }
        if ready.get(1) == Some(&true) && noticed == Noticed::Nothing {
            noticed = Noticed::AgentGone;
        }
        noticed
    }

    /// All processes of the workload that live.
    fn members(&self) -> Vec<u32> {
        let group = &self.launch.group;
        let all = if group.tracks() { group.processes() } else { below_us().unwrap_or_default() };
        all.into_iter().filter(|pid| process::is_there(*pid)).collect()
    }

    fn has_clients(&self) -> bool {
        stop_drive::block_of(&self.launch).is_some_and(|block| block.answers().live > 0)
    }

    fn stop_online(&mut self) {
        let deadline = Instant::now() + Duration::from_millis(self.launch.online_grace_ms);
        drop(sys::kill(self.main.pid, libc::SIGTERM));
        while self.ended.is_none() && Instant::now() < deadline {
            self.look(Duration::from_millis(20));
        }
    }

    fn stop_offline(&mut self) -> Vec<StepTaken> {
        let mut drive = StopDrive::begin(&self.launch);
        let mut rotate_at = Instant::now() + TICK;
        loop {
            self.look(STOP_TICK);
            self.agent = None;
            if Instant::now() >= rotate_at {
                // It may save its state for long, and say much about it.
                self.files.rotate_logs(&self.launch);
                rotate_at = Instant::now() + TICK;
            }
            if self.hastened {
                drive.hasten();
            }
            let (alive, main) = (self.ended.is_none(), self.main);
            let members = || self.members();
            // Nobody else has its id as long as it is not reaped.
            let signal = |signal| main.is_alive() && sys::kill(main.pid, signal).is_ok();
            if drive.turn(&self.launch, alive, members, signal) {
                return drive.taken();
            }
        }
    }
}

/// What a keeper said when it was started.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The workload runs as this process.
    Started(u32),
    /// It does not, for this reason.
    Failed(String),
    /// It cannot, for this reason, which lies in its program or its directory.
    Unstartable(String),
}

impl Answer {
    /// What went wrong with a workload that does not run.
    pub fn into_error(self, workload: String) -> AgentError {
        match self {
            Answer::Unstartable(reason) => AgentError::Unstartable { workload, reason },
            Answer::Failed(reason) => AgentError::Start { workload, reason },
            Answer::Started(pid) => AgentError::RunsAlready { workload, pid },
        }
    }
}

/// Reads the answer of a keeper, for at most `limit`.
pub fn read_answer(mut from: impl Read + AsRawFd, limit: Duration) -> Answer {
    let deadline = Instant::now() + limit;
    let mut text = Vec::new();
    let mut buffer = [0; 512];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = sys::poll_readable(&[from.as_raw_fd()], left).unwrap_or_default();
        if ready.first() != Some(&true) {
            if left.is_zero() {
                return Answer::Failed(format!("no answer within {} ms", limit.as_millis()));
            }
            continue;
        }
        match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.extend_from_slice(buffer.get(..count).unwrap_or_default()),
        }
        if text.contains(&b'\n') {
            break;
        }
    }
    let text = String::from_utf8_lossy(&text);
    let line = text.trim();
    let pid = line.strip_prefix(STARTED).and_then(|rest| rest.trim().parse().ok());
    let unstartable = line.strip_prefix(UNSTARTABLE).map(str::trim);
    match pid {
        Some(pid) => Answer::Started(pid),
        None if unstartable.is_some() => {
            Answer::Unstartable(unstartable.unwrap_or_default().to_owned())
        }
        None if line.is_empty() => Answer::Failed("the keeper left without a word".into()),
        None => Answer::Failed(line.to_owned()),
    }
}

/// What one of the agent's own children is started with: nothing of the agent's environment but
/// what the loader needs.
pub fn child_environment() -> BTreeMap<String, String> {
    let keep = ["PATH", "LD_LIBRARY_PATH", "RUST_LOG", "RUST_BACKTRACE"];
    crate::environment::passed(std::env::vars(), keep)
}

/// The program and arguments with which the agent starts its children.
pub type ChildProgram = (PathBuf, Vec<String>);
