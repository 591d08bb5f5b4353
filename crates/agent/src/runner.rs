//! Starting workloads through keepers, and finding them again after the agent has restarted.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cgroup::{Cgroups, Group, Limits, encode};
use crate::environment::CONTROL_VARIABLE;
use crate::error::{AgentError, Result, file};
use crate::keeper::{self, Answer, ChildProgram};
use crate::launch::{self, Exit, Kind, Launch, Run, WorkloadDir};
use crate::process::{self, ProcessKey};
use crate::stop::StepTaken;
use crate::stop_drive::StopDrive;
use crate::sys::{self, ChildSetup};

/// How long a keeper may take to start a workload.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Starts and finds the workloads of one state directory.
#[derive(Debug)]
pub struct Runner {
    dir: PathBuf,
    cgroups: Cgroups,
    child: ChildProgram,
    _lock: fs::File,
}

/// A workload that runs.
#[derive(Debug)]
pub struct Running {
    /// What it was started with.
    pub launch: Launch,
    /// Which processes it is.
    pub run: Run,
    files: WorkloadDir,
    keeper: Option<OwnedFd>,
    main: Option<OwnedFd>,
    child: Option<Child>,
    /// The stop of a job whose keeper was killed.
    orphan: Option<StopDrive>,
    /// Its stop leaves hardly any time to save anything.
    hastened: bool,
    /// When the output of a service without a keeper is looked at.
    rotate_at: Instant,
}

/// As often as a keeper does.
const ROTATE_EVERY: Duration = Duration::from_millis(500);

/// What was found of an earlier agent's workload.
#[derive(Debug)]
pub enum Found {
    /// It runs.
    Running(Box<Running>),
    /// It ended while nobody looked.
    Ended {
        /// What it was.
        launch: Box<Launch>,
        /// How it ended.
        exit: Exit,
    },
}

impl Runner {
    /// Takes the state directory for this agent alone.
    pub fn open(dir: &Path, cgroups: Cgroups, child: ChildProgram) -> Result<Self> {
        let workloads = dir.join("workloads");
        fs::create_dir_all(&workloads).map_err(file("create", &workloads))?;
        let path = dir.join("agent.lock");
        let lock = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(file("open", &path))?;
        if !sys::lock_for_life(&lock).map_err(file("lock", &path))? {
            return Err(AgentError::AnotherAgent { path });
        }
        for lacking in cgroups.shortcomings() {
            tracing::warn!("{lacking}");
        }
        Ok(Runner { dir: workloads, cgroups, child, _lock: lock })
    }

    /// The control groups in use.
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    fn files(&self, kind: Kind, name: &str) -> WorkloadDir {
        WorkloadDir::new(self.dir.join(encode(&format!("{}-{name}", kind.as_str()))))
    }

    /// The control group of a workload.
    pub fn group(&self, kind: Kind, name: &str, limits: &Limits) -> Result<Group> {
        self.cgroups.create(&format!("{}-{name}", kind.as_str()), limits)
    }

    /// Starts a workload. Whatever ran under its name before must have ended.
    pub fn start(&self, launch: Launch) -> Result<Running> {
        let files = self.files(launch.kind, &launch.name);
        if let Some(run) = launch::read::<Run>(&files.run_file())?
            && is_this_boot(&run)
            && run.main.is_alive()
        {
            return Err(AgentError::RunsAlready { workload: launch.name, pid: run.main.pid });
        }
        fs::create_dir_all(files.path()).map_err(file("create", files.path()))?;
        if has_keeper(&files)? {
            // It is starting the workload, or clearing up after it.
            return Err(AgentError::RunsAlready { workload: launch.name, pid: 0 });
        }
        for old in [files.run_file(), files.exit_file()] {
            match fs::remove_file(&old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file("remove", &old)(error));
                }
                _ => {}
            }
        }
        clear_away(&launch)?;
        launch::write(&files.launch_file(), &launch)?;
        let (mut child, answer) = self.start_keeper(&files)?;
        let run = match answer {
            Answer::Started(_) => launch::read::<Run>(&files.run_file())
                .map_err(|error| Answer::Failed(error.to_string()))
                .and_then(|run| {
                    run.ok_or_else(|| Answer::Failed("its keeper left no run.json".into()))
                }),
            failed => Err(failed),
        };
        match run {
            Ok(run) => {
                let mut running = Running::attach(launch, run, files);
                running.child = Some(child);
                Ok(running)
            }
            Err(failed) => {
                take_back(&launch, &mut child);
                drop(fs::remove_file(files.launch_file()));
                Err(failed.into_error(launch.name))
            }
        }
    }

    fn start_keeper(&self, files: &WorkloadDir) -> Result<(Child, Answer)> {
        let (program, arguments) = &self.child;
        // Made each time: an agent that leaves removes the groups that nobody is in.
        let keepers = self.cgroups.create("keepers", &Limits::default())?;
        let (groups, affinity) = keepers.entrance()?;
        let setup = ChildSetup { groups, affinity, new_session: true, ..ChildSetup::default() };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .arg("keep")
            .arg(files.path())
            .env_clear()
            .envs(keeper::child_environment())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(crate::logs::open(&files.log_file("keeper"))?);
        let mut child =
            sys::with_setup(&mut command, setup).spawn().map_err(file("start", program))?;
        let answer = match child.stdout.take() {
            Some(out) => keeper::read_answer(out, START_LIMIT),
            None => Answer::Failed("it has no standard output".into()),
        };
        Ok((child, answer))
    }

    /// Looks for the workloads of an agent that is no more. What cannot be understood is left where
    /// it is and told.
    pub fn recover(&self) -> Result<(Vec<Found>, Vec<AgentError>)> {
        let (mut found, mut troubles) = (Vec::new(), Vec::new());
        let entries = fs::read_dir(&self.dir).map_err(file("read", &self.dir))?;
        let mut dirs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        dirs.sort();
        for dir in dirs {
            match recover_one(WorkloadDir::new(dir)) {
                Ok(Some(one)) => found.push(one),
                Ok(None) => {}
                Err(error) => troubles.push(error),
            }
        }
        Ok((found, troubles))
    }

    /// How the last start of a workload ended, when that is written down.
    pub fn last_exit(&self, kind: Kind, name: &str) -> Result<Option<Exit>> {
        launch::read(&self.files(kind, name).exit_file())
    }

    /// The file of a workload's output, `stdout` or `stderr`.
    pub fn log_file(&self, kind: Kind, name: &str, stream: &str) -> PathBuf {
        self.files(kind, name).log_file(stream)
    }

    /// The end of a workload has been told: only its output stays, and it is not found again.
    pub fn settle(&self, kind: Kind, name: &str) -> Result<()> {
        let path = self.files(kind, name).launch_file();
        fs::remove_file(&path).map_err(file("remove", &path))
    }

    /// Forgets a workload that has ended: its directory goes, if there is one.
    pub fn forget(&self, kind: Kind, name: &str) -> Result<()> {
        let files = self.files(kind, name);
        if !files.path().exists() {
            return Ok(());
        }
        if has_keeper(&files)? {
            return Err(AgentError::RunsAlready { workload: name.to_owned(), pid: 0 });
        }
        fs::remove_dir_all(files.path()).map_err(file("remove", files.path()))
    }
}

fn is_this_boot(run: &Run) -> bool {
    run.boot_id == process::boot_id()
}

/// A keeper holds the lock for as long as it lives.
fn has_keeper(files: &WorkloadDir) -> Result<bool> {
    let path = files.lock_file();
    let lock = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let lock = lock.map_err(file("open", &path))?;
    Ok(!sys::try_lock(&lock).map_err(file("lock", &path))?)
}

/// What is left of a workload whose main process and keeper are gone. Where the kernel does not track
/// its processes, those of a job are known by the name of their control block, and those of a service
/// by nothing.
fn left_of(launch: &Launch) -> std::io::Result<Vec<u32>> {
    let listed = match &launch.control_dir {
        _ if launch.group.tracks() => launch.group.processes(),
        Some(dir) => process::carrying(CONTROL_VARIABLE, dir.as_os_str())?,
        None => Vec::new(),
    };
    Ok(listed.into_iter().filter(|pid| process::is_there(*pid)).collect())
}

/// Nothing of an earlier run may stay when the next one begins. Those who find it first stop it in
/// the clean order; here it is killed.
fn clear_away(launch: &Launch) -> Result<()> {
    let left = || left_of(launch).unwrap_or_default();
    if left().is_empty() {
        return Ok(());
    }
    tracing::warn!(workload = launch.name, pids = ?left(), "left by an earlier run: killed");
    launch.group.kill_all(|| left_of(launch), Duration::from_secs(5));
    match left().first() {
        Some(&pid) => Err(AgentError::RunsAlready { workload: launch.name.clone(), pid }),
        None => Ok(()),
    }
}

/// Ends a start that failed, however far it came. The keeper is the reaper of all that it started:
/// it is held until they are gone, so that nobody loses them, and starts nothing meanwhile.
fn take_back(launch: &Launch, keeper: &mut Child) {
    let held = sys::kill(keeper.id(), libc::SIGSTOP);
    let deadline = Instant::now() + Duration::from_secs(1);
    let stands = |stat: process::Stat| matches!(stat.state, 'T' | 'Z' | 'X');
    while held.is_ok() && !process::stat(keeper.id()).is_ok_and(stands) && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    launch.group.kill_all(|| process::below(keeper.id()), Duration::from_secs(2));
    drop(keeper.kill());
    drop(keeper.wait());
    drop(launch.group.remove());
}

fn recover_one(files: WorkloadDir) -> Result<Option<Found>> {
    let Some(launch) = launch::read::<Launch>(&files.launch_file())? else { return Ok(None) };
    let mut run = launch::read::<Run>(&files.run_file())?;
    let deadline = Instant::now() + START_LIMIT;
    while run.is_none() && has_keeper(&files)? && Instant::now() < deadline {
        // A keeper that the earlier agent started a moment before it died.
        std::thread::sleep(Duration::from_millis(10));
        run = launch::read::<Run>(&files.run_file())?;
    }
    let lives = |run: &Run| run.main.is_alive() || run.keeper.is_alive();
    let run = run.filter(is_this_boot);
    let is_there = run.as_ref().is_some_and(lives);
    // Read after that look: a keeper writes it before it goes.
    let exit = launch::read::<Exit>(&files.exit_file())?;
    if let Some(run) = run
        && (is_there || outlived_both(&launch, exit.as_ref()))
    {
        return Ok(Some(Found::Running(Box::new(Running::attach(launch, run, files)))));
    }
    if launch.kind == Kind::Offline {
        // Its keeper was killed before it could write down whom it had started.
        clear_away(&launch)?;
    }
    let nobody_saw = || Exit { run: launch.run_number(), ..Exit::unknown() };
    let exit = exit.unwrap_or_else(nobody_saw);
    Ok(Some(Found::Ended { launch: Box::new(launch), exit }))
}

/// Whether a job goes on though its main process and its keeper were killed: its children do.
fn outlived_both(launch: &Launch, exit: Option<&Exit>) -> bool {
    // Those that cannot be looked at live.
    let left = || left_of(launch).map_or(true, |left| !left.is_empty());
    launch.kind == Kind::Offline && exit.is_none() && left()
}

/// Sends a signal to a process; false when it is gone.
fn tell(handle: Option<&OwnedFd>, process: ProcessKey, signal: i32) -> bool {
    match handle {
        Some(handle) => sys::pidfd_signal(handle.as_fd(), signal).is_ok(),
        // No handle could be had; its id is still its own while it lives.
        None => process.is_alive() && sys::kill(process.pid, signal).is_ok(),
    }
}

impl Running {
    fn attach(launch: Launch, run: Run, files: WorkloadDir) -> Self {
        let keeper = run.keeper.open().ok();
        let main = run.main.open().ok();
        let rotate_at = Instant::now();
        Running {
            launch,
            run,
            files,
            keeper,
            main,
            child: None,
            orphan: None,
            hastened: false,
            rotate_at,
        }
    }

    /// The main process.
    pub fn main(&self) -> ProcessKey {
        self.run.main
    }

    /// A handle of its keeper, for whoever may have to stop it without waiting.
    pub fn keeper_handle(&self) -> Option<OwnedFd> {
        self.keeper.as_ref()?.try_clone().ok()
    }

    /// All its processes.
    pub fn processes(&self) -> Vec<u32> {
        if self.launch.group.tracks() {
            return self.launch.group.processes();
        }
        if self.run.keeper.is_alive() {
            return process::descendants(self.run.keeper.pid);
        }
        process::with_below(self.run.main).unwrap_or_default()
    }

    /// All its processes where the kernel does not track them, for those who kill them.
    fn untracked(&self) -> std::io::Result<Vec<u32>> {
        let mut all = process::with_below(self.run.main)?;
        if self.run.keeper.is_alive() {
            all.extend(process::below(self.run.keeper.pid)?);
        } else {
            all.extend(left_of(&self.launch)?);
        }
        Ok(all)
    }

    /// The file of its output, `stdout` or `stderr`.
    pub fn log_file(&self, stream: &str) -> PathBuf {
        self.files.log_file(stream)
    }

    /// How it ended, once it has. When its keeper was killed and it is offline, what is left of it
    /// is stopped here, in the clean order: ask again until it is over.
    pub fn poll_exit(&mut self) -> Result<Option<Exit>> {
        if let Some(child) = &mut self.child
            && matches!(child.try_wait(), Ok(Some(_)))
        {
            self.child = None;
        }
        if self.run.keeper.is_alive() {
            return Ok(None);
        }
        if let Some(exit) = launch::read::<Exit>(&self.files.exit_file())? {
            return Ok(Some(exit));
        }
        // Without a keeper. An online service goes on; its end will be seen, not its code.
        if self.launch.kind == Kind::Online && self.run.main.is_alive() {
            if Instant::now() >= self.rotate_at {
                self.files.rotate_logs(&self.launch);
                self.rotate_at = Instant::now() + ROTATE_EVERY;
            }
            return Ok(None);
        }
        let steps = match self.launch.kind {
            Kind::Online => Vec::new(),
            Kind::Offline => match self.stop_orphan() {
                Some(steps) => steps,
                None => return Ok(None),
            },
        };
        let all_gone = self.kill();
        drop(self.launch.group.remove());
        let exit = Exit { all_gone, steps, run: self.launch.run_number(), ..Exit::unknown() };
        match launch::write(&self.files.exit_file(), &exit) {
            // A service is to run again, also on a full disk: nobody asks how it ended.
            Err(error) if self.launch.kind == Kind::Online => {
                tracing::warn!(workload = self.launch.name, error = %error, "its end is not kept");
            }
            written => written?,
        }
        Ok(Some(exit))
    }

    /// One turn of the stop of a job without a keeper; the steps it took, when it is over. The kernel
    /// has sent the program SIGTERM when the keeper died: it drains, and may save its state.
    fn stop_orphan(&mut self) -> Option<Vec<StepTaken>> {
        let (launch, main, run) = (&self.launch, &self.main, &self.run);
        let drive = self.orphan.get_or_insert_with(|| {
            tracing::warn!(workload = launch.name, "its keeper is gone: stopping it from here");
            StopDrive::begin(launch)
        });
        if self.hastened {
            drive.hasten();
        }
        let signal = |signal: i32| {
            if let Some(main) = main {
                drop(sys::pidfd_signal(main.as_fd(), signal));
            }
            // How it ends is nobody's to see.
            true
        };
        let members = || match launch.group.tracks() {
            true => launch.group.processes(),
            false => process::with_below(run.main).unwrap_or_default(),
        };
        let over = drive.turn(launch, run.main.is_alive(), members, signal);
        over.then(|| drive.taken())
    }

    /// Asks for a stop and comes back at once.
    pub fn ask_stop(&self) {
        if !tell(self.keeper.as_ref(), self.run.keeper, libc::SIGTERM) {
            tell(self.main.as_ref(), self.run.main, libc::SIGTERM);
        }
    }

    /// Leaves it hardly any time to save its state, whether its stop is under way or comes.
    pub fn hasten(&mut self) {
        tell(self.keeper.as_ref(), self.run.keeper, libc::SIGHUP);
        self.hastened = true;
    }

    /// Waits until it has ended, for at most `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<Exit>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(exit) = self.poll_exit()? {
                return Ok(Some(exit));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let fd = self.keeper.as_ref().or(self.main.as_ref()).map(AsRawFd::as_raw_fd);
            let step = left.min(Duration::from_millis(50));
            // The handle of a keeper that is gone is always ready.
            match fd.filter(|_| self.orphan.is_none()) {
                Some(fd) => drop(sys::poll_readable(&[fd], step)),
                None => std::thread::sleep(step.min(Duration::from_millis(5))),
            }
        }
    }

    /// Kills all of it at once: the very last means, when its keeper does not do its work.
    pub fn kill(&self) -> bool {
        self.launch.group.kill_all(|| self.untracked(), Duration::from_secs(5))
    }
}
