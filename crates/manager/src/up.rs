//! Agent and manager in one process: what `muxflow up` runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use muxflow_agent::agent::{Agent, AgentHandle, NamedGpu};
use muxflow_agent::error::AgentError;
use muxflow_agent::gpu::Order;
use muxflow_agent::keeper::ChildProgram;
use muxflow_agent::sys;
use muxflow_types::GpuId;

use crate::agent_port::AgentPort;
use crate::config::UpConfig;
use crate::error::{ManagerError, Result};
use crate::http::server::{Extras, Server};
use crate::manager::{Manager, Wake};
use crate::node::NodePort;
use crate::scheduler::speeds::Speeds;
use crate::scheduler::watch::Watch;
use crate::scheduler::{Scheduler, SchedulerSettings};

/// The loops of a manager that runs.
#[derive(Debug)]
pub struct Loops {
    leave: Arc<AtomicBool>,
    manager: Arc<Manager>,
    threads: Vec<JoinHandle<()>>,
}

/// The file of the store in a state directory.
pub fn store_file(state_dir: &Path) -> PathBuf {
    state_dir.join("muxflow.db")
}

impl Loops {
    /// Finds out what became of earlier runs, and starts to schedule.
    pub fn start(
        manager: &Arc<Manager>,
        wakes: std::sync::mpsc::Receiver<Wake>,
        settings: SchedulerSettings,
        store: PathBuf,
    ) -> Result<Self> {
        manager.reconcile(&settings.retry)?;
        let speeds = Arc::new(Speeds::default());
        let retry = settings.retry;
        let scheduler = Arc::new(Scheduler { manager: Arc::clone(manager), settings, speeds });
        scheduler.speeds.load(&manager.reader(), scheduler.gpu_types())?;
        let leave = Arc::new(AtomicBool::new(false));
        let mut loops =
            Loops { leave: Arc::clone(&leave), manager: Arc::clone(manager), threads: Vec::new() };
        let (m, l) = (Arc::clone(manager), Arc::clone(&leave));
        loops.spawn("events", move || m.pump(&retry, &l))?;
        let (m, l) = (Arc::clone(manager), Arc::clone(&leave));
        loops.spawn("tidy", move || m.keep_tidy(&l))?;
        let (s, l) = (Arc::clone(&scheduler), Arc::clone(&leave));
        loops.spawn("watch", move || Watch::new(s).run(&l))?;
        let (s, l) = (Arc::clone(&scheduler), Arc::clone(&leave));
        loops.spawn("retrain", move || s.retrain(&store, &l))?;
        loops.spawn("scheduler", move || scheduler.run(&wakes, &leave))?;
        Ok(loops)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        let failed = |source| ManagerError::File {
            operation: "start the thread",
            path: name.into(),
            source,
        };
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }

    /// Ends the loops; what runs goes on.
    pub fn stop(mut self) {
        self.leave.store(true, Ordering::Release);
        self.manager.leave();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// A machine that is managed.
#[derive(Debug)]
pub struct Up {
    /// The manager.
    pub manager: Arc<Manager>,
    agent: Arc<Agent>,
    loops: Option<Loops>,
    server: Option<Server>,
    _lock: fs::File,
}

/// Takes a state directory for this manager alone.
fn lock(dir: &Path) -> Result<fs::File> {
    let failed = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| ManagerError::File { operation, path, source }
    };
    muxflow_agent::private::own_directory(dir, 0o700).map_err(failed("use", dir))?;
    let path = dir.join("manager.lock");
    let opened = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let opened = opened.map_err(failed("open", &path))?;
    match sys::lock_for_life(&opened).map_err(failed("lock", &path))? {
        true => Ok(opened),
        false => Err(ManagerError::AnotherManager { path }),
    }
}

/// The GPU that a setting names by its UUID or its number; none when it cannot be used now, which is
/// told: the others go on.
fn found(agent: &Agent, gpu: &str, setting: &str) -> Result<Option<GpuId>> {
    let wrong = |error: AgentError| {
        let reason = format!("{setting}: {error}");
        ManagerError::Config { path: "the configuration".into(), reason }
    };
    match agent.named_gpu(gpu).map_err(wrong)? {
        NamedGpu::Usable(uuid) => Ok(GpuId::new(uuid).ok()),
        NamedGpu::Unusable(why) => {
            tracing::error!(gpu, why, "{setting}: goes without its GPU; restart when it is back");
            Ok(None)
        }
    }
}

/// Has the agent run the services of its configuration; in shadow mode only those that run already.
fn start_configured(agent: &Agent, config: &UpConfig) -> Result<()> {
    for (gpu, spec) in &config.agent.online {
        let uuid = found(agent, gpu, &format!("agent: service {}", spec.service))?;
        let Some(uuid) = uuid.as_ref().map(GpuId::as_str) else { continue };
        let runs = agent.status(uuid).is_some_and(|s| s.claimed.as_ref() == Some(&spec.service));
        if config.settings.shadow && !runs {
            tracing::warn!(service = %spec.service, "a configured service is not started in shadow mode");
            continue;
        }
        // Another service may have been found there: that one stays, and the rest goes on.
        if let Err(error) = agent.order(uuid, Order::StartOnline(Box::new(spec.clone()))) {
            tracing::error!(service = %spec.service, error = %error, "a configured service was not started");
        }
    }
    Ok(())
}

impl Up {
    /// Starts agent and manager. `extras` sees the agent and the manager, and adds to the server.
    pub fn start(
        config: &UpConfig,
        child: ChildProgram,
        extras: impl FnOnce(&AgentHandle, &Arc<Manager>) -> Result<Extras>,
    ) -> Result<Self> {
        let lock = lock(&config.state_dir)?;
        let store = store_file(&config.state_dir);
        // Before the agent: a store that cannot be used must not cost a start.
        drop(muxflow_store::Store::open(&store)?);
        let agent = Arc::new(Agent::start(&config.agent, child)?);
        let port: Arc<dyn NodePort> = Arc::new(AgentPort::new(Arc::clone(&agent), &config.agent));
        let (manager, wakes) = Manager::open(&store, port, config.settings.clone())?;
        let mut scheduler = config.scheduler.clone();
        let aside = scheduler.profiler.set_aside.as_ref();
        let aside =
            aside.map(|gpu| found(&agent, gpu.as_str(), "profiler.set_aside")).transpose()?;
        scheduler.profiler.set_aside = aside.flatten();
        start_configured(&agent, config)?;
        let extras = extras(&agent.handle(), &manager)?;
        let loops = Loops::start(&manager, wakes, scheduler, store)?;
        let server = Server::start(Arc::clone(&manager), &config.listen, extras)?;
        Ok(Up { manager, agent, loops: Some(loops), server: Some(server), _lock: lock })
    }

    /// The server.
    pub fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    /// The agent.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Stops offline work in the clean order and leaves. Services and MPS go on; fronts were closed by
    /// whoever made them.
    pub fn shutdown(mut self) {
        drop(self.server.take());
        if let Some(loops) = self.loops.take() {
            loops.stop();
        }
        let Up { manager, agent, .. } = self;
        drop(manager);
        match Arc::into_inner(agent) {
            Some(agent) => agent.shutdown(),
            None => {
                tracing::error!("somebody still holds the agent: jobs are left to their keepers")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_given_back_in_a_moment_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let soon = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(300));
            drop(held);
        });
        let taken = lock(dir.path()).unwrap();
        soon.join().unwrap();
        let refused = lock(dir.path()).unwrap_err();
        assert!(matches!(refused, ManagerError::AnotherManager { .. }), "{refused}");
        drop(taken);
    }
}
