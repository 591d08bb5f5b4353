//! The manager's state and what callers may do with it. Handlers of the API, the scheduler loop and
//! the reader of the node's events all come here; every change of a job goes through
//! [`Manager::step`].

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use muxflow_api::cluster::{HealthView, PauseView, PlanRecord};
use muxflow_api::jobs::{Cancelled, JobState, JobSubmit, JobView, Submitted};
use muxflow_predictor::Registry;
use muxflow_store::Store;
use muxflow_store::events::NewEvent;
use muxflow_store::jobs::{Change, JobFilter, JobRow, SqlResult};
use muxflow_store::submission::{Inserted, QueueLimits, Submission};
use muxflow_types::{ClusterPlan, ClusterSnapshot, JobId, Micros};

use crate::bus::{self, Bus};
use crate::clock;
use crate::error::{ManagerError, Result};
use crate::history::History;
use crate::lifecycle::{self, Happening, Wish};
use crate::node::NodePort;
pub use crate::settings::Settings;
use crate::user::Caller;
use crate::{submit, views};

/// Why the scheduler should look now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wake {
    /// Something happened, in words.
    Event(String),
    /// The manager leaves.
    Leave,
}

/// The last plan with what it was made from, to explain it.
#[derive(Debug)]
pub struct Planned {
    /// What was known.
    pub snapshot: ClusterSnapshot,
    /// What was decided.
    pub plan: ClusterPlan,
    /// The models that were in use.
    pub registry: Arc<Registry>,
}

/// The manager.
pub struct Manager {
    /// What it is held to.
    pub settings: Settings,
    /// The node.
    pub node: Arc<dyn NodePort>,
    /// Readings of each GPU.
    pub history: History,
    /// Tells what happened.
    pub bus: Bus,
    /// Jobs taken off to protect services.
    pub evictions: AtomicU64,
    /// Errors on GPUs.
    pub faults: AtomicU64,
    /// Bytes of submissions that were taken in since the last sweep.
    pub taken_in: AtomicU64,
    store: Mutex<Store>,
    reader: Mutex<Store>,
    wake: Sender<Wake>,
    paused: AtomicBool,
    plan: Mutex<Option<Arc<PlanRecord>>>,
    plan_file: PathBuf,
    planned: Mutex<Option<Arc<Planned>>>,
    began: Instant,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").field("settings", &self.settings).finish_non_exhaustive()
    }
}

fn unpoisoned<T>(result: std::result::Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

const PAUSED_NOTE: &str = "paused";

impl Manager {
    /// Opens the store and stands ready; nothing runs yet.
    pub fn open(
        store: &Path,
        node: Arc<dyn NodePort>,
        settings: Settings,
    ) -> Result<(Arc<Self>, Receiver<Wake>)> {
        let writer = Store::open(store)?;
        let reader = Store::open_read_only(store)?;
        let paused = writer.note(PAUSED_NOTE)?.as_deref() == Some("yes");
        let plan_file = store.with_file_name("last-plan.json");
        let plan = std::fs::read(&plan_file).ok();
        let plan = plan.and_then(|text| serde_json::from_slice(&text).ok());
        let (wake, wakes) = mpsc::channel();
        let manager = Manager {
            history: History::new(settings.history_points),
            settings,
            node,
            bus: Bus::default(),
            evictions: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            taken_in: AtomicU64::new(0),
            store: Mutex::new(writer),
            reader: Mutex::new(reader),
            wake,
            paused: AtomicBool::new(paused),
            plan: Mutex::new(plan.map(Arc::new)),
            plan_file,
            planned: Mutex::new(None),
            began: Instant::now(),
        };
        Ok((Arc::new(manager), wakes))
    }

    /// The store, for writing.
    pub fn store(&self) -> MutexGuard<'_, Store> {
        unpoisoned(self.store.lock())
    }

    /// The store, for reading beside a writer.
    pub fn reader(&self) -> MutexGuard<'_, Store> {
        unpoisoned(self.reader.lock())
    }

    /// Has the scheduler look soon.
    pub fn wake(&self, cause: impl Into<String>) {
        // It may have left already.
        drop(self.wake.send(Wake::Event(cause.into())));
    }

    /// Tells the scheduler to leave.
    pub fn leave(&self) {
        drop(self.wake.send(Wake::Leave));
    }

    /// Whether offline work is held back. Asked inside [`Manager::change`], the answer holds until the
    /// change is written.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// The last plan.
    pub fn plan(&self) -> Option<Arc<PlanRecord>> {
        unpoisoned(self.plan.lock()).clone()
    }

    /// The last plan of this process, with what it was made from.
    pub fn planned(&self) -> Option<Arc<Planned>> {
        unpoisoned(self.planned.lock()).clone()
    }

    /// Keeps a plan as the last one, in memory and in `last-plan.json` beside the store.
    pub fn set_plan(&self, plan: PlanRecord, planned: Planned) -> Result<()> {
        *unpoisoned(self.planned.lock()) = Some(Arc::new(planned));
        let text = serde_json::to_string(&plan).map_err(|error| {
            ManagerError::Conflict(format!("a plan cannot be written: {error}"))
        })?;
        let beside = self.plan_file.with_extension("new");
        let written = std::fs::write(&beside, text);
        if let Err(error) = written.and_then(|()| std::fs::rename(&beside, &self.plan_file)) {
            // It is for looking at afterwards; jobs do not wait for it.
            tracing::warn!(error = %error, path = %self.plan_file.display(), "the plan is not saved");
        }
        *unpoisoned(self.plan.lock()) = Some(Arc::new(plan));
        Ok(())
    }

    /// Whether all is well, and who asks.
    pub fn health(&self, caller: &Caller) -> HealthView {
        HealthView {
            status: "ok".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            paused: self.is_paused(),
            shadow: self.settings.shadow,
            uptime_s: self.began.elapsed().as_secs(),
            user: caller.name.clone(),
        }
    }

    /// Writes down that something happened, and tells it.
    pub fn tell(&self, event: NewEvent) {
        let written = self.change(|change| {
            change.tell(event.clone());
            Ok(())
        });
        if let Err(error) = written {
            tracing::error!(error = error.in_full(), text = event.text, "an event is lost");
        }
    }

    /// Changes the store and tells what happened, after it is written.
    pub fn change<T>(&self, work: impl FnOnce(&mut Change<'_, '_>) -> SqlResult<T>) -> Result<T> {
        // Told while the store is held: whoever listens hears of things in the order of their numbers.
        let mut store = self.store();
        let (value, told) = store.change(work)?;
        told.into_iter().for_each(|(seq, event)| self.bus.tell(bus::view(seq, event)));
        drop(store);
        Ok(value)
    }

    /// Takes a job through one step of its life, if that step is possible. `edit` writes what goes
    /// with it. The new row comes back, or none when it was not possible.
    pub fn step(
        &self,
        id: &JobId,
        happening: Happening,
        edit: impl FnOnce(&mut JobRow),
    ) -> Result<Option<JobRow>> {
        let now = clock::now();
        self.change(|change| {
            let Some(mut row) = change.job(id)? else { return Ok(None) };
            if !advance(change, &mut row, happening, now, edit)? {
                return Ok(None);
            }
            Ok(Some(row))
        })
    }

    /// Takes jobs in.
    pub fn submit(&self, caller: &Caller, wanted: &JobSubmit) -> Result<Submitted> {
        submit::check(wanted)?;
        submit::check_here(wanted)?;
        let own = muxflow_agent::sys::own_uid();
        if own != 0 && caller.uid != own {
            return Err(ManagerError::Forbidden(format!(
                "this manager does not run as root and can start jobs only as its own user ({own}); {} cannot submit here",
                caller.name
            )));
        }
        let jobs = submit::jobs(wanted)?;
        let now = clock::now();
        let deadline = wanted.deadline_s.map(|s| now.saturating_add(Micros::from_secs(s)));
        let submission = Submission {
            uid: caller.uid,
            gid: caller.gid,
            user: caller.name.clone(),
            state: JobState::Submitted.as_str().to_owned(),
            at: now,
            deadline,
        };
        let Settings { jobs_per_user: limit, queue_bytes_per_user: bytes, .. } = self.settings;
        let limits = QueueLimits { jobs: limit, bytes };
        let inserted = self.store().insert_jobs(&submission, &jobs, limits)?;
        match inserted {
            Inserted::Kept(id, ids) => {
                let bytes = jobs.iter().map(|job| job.submit.len() as u64).sum();
                self.taken_in.fetch_add(bytes, Ordering::Relaxed);
                self.wake(format!("{id} submitted"));
                Ok(Submitted { id, jobs: ids.iter().map(|id| id.as_str().to_owned()).collect() })
            }
            Inserted::OverLimit { open } => Err(ManagerError::Limit {
                user: caller.name.clone(),
                open,
                limit: limit.unwrap_or(0),
            }),
            Inserted::OverBytes { kept, asked } => Err(ManagerError::LimitBytes {
                user: caller.name.clone(),
                kept,
                asked,
                limit: bytes.unwrap_or(0),
            }),
        }
    }

    /// The id of a job, checked.
    pub fn id(text: &str) -> Result<JobId> {
        JobId::new(text).map_err(|_| ManagerError::NotFound { what: "job", name: text.to_owned() })
    }

    /// A job's row.
    pub fn row(&self, id: &str) -> Result<JobRow> {
        let reader = self.reader();
        if let Some(row) = reader.job(&Self::id(id)?)? {
            return Ok(row);
        }
        let array = JobFilter { array: Some(id.to_owned()), ..JobFilter::default() };
        match reader.jobs(&array, 1)?.first() {
            Some(member) => Err(ManagerError::IsArray {
                array: id.to_owned(),
                member: member.id.as_str().to_owned(),
            }),
            None => Err(ManagerError::NotFound { what: "job", name: id.to_owned() }),
        }
    }

    /// A job.
    pub fn job(&self, id: &str) -> Result<JobView> {
        self.view(&self.row(id)?)
    }

    /// A job as it is told.
    pub fn view(&self, row: &JobRow) -> Result<JobView> {
        views::job(row, clock::now(), self.is_paused())
    }

    /// Asks for the end of a job, or of all jobs of an array.
    pub fn cancel(&self, caller: &Caller, id: &str) -> Result<Cancelled> {
        let array = JobFilter { array: Some(id.to_owned()), ..JobFilter::default() };
        let mut rows = self.reader().jobs(&array, usize::MAX)?;
        if rows.is_empty() {
            rows.push(self.row(id)?);
        }
        if let Some(other) = rows.iter().find(|row| !caller.may_act_for(row.uid)) {
            return Err(ManagerError::Forbidden(format!(
                "job {} belongs to {}; only they or an operator may cancel it",
                other.id, other.user
            )));
        }
        let now = clock::now();
        let open = rows.iter().filter(|row| !row.is_final);
        // All of an array at once: one write to the disk, and nobody sees half of it.
        let cancelled = self.change(|change| {
            let mut cancelled = Vec::new();
            for id in open.map(|row| &row.id) {
                let Some(mut row) = change.job(id)? else { continue };
                let stepped = advance(change, &mut row, Happening::Cancel, now, |row| {
                    row.cancel = true;
                    row.reason = format!("cancelled by {}", caller.name);
                })?;
                if stepped {
                    cancelled.push(row);
                }
            }
            Ok(cancelled)
        })?;
        cancelled.iter().for_each(|row| self.stop_on_node(row));
        self.wake(format!("{id} cancelled"));
        Ok(Cancelled { jobs: cancelled.iter().map(|row| row.id.as_str().to_owned()).collect() })
    }

    /// Has the node stop the run of a job; when it cannot, the next look at the node will tell.
    pub fn stop_on_node(&self, row: &JobRow) {
        if let Some(gpu) = &row.gpu
            && !row.is_final
            && let Err(error) = self.node.stop(gpu, &row.id)
        {
            tracing::warn!(job = %row.id, error, "cannot be stopped");
        }
    }

    /// Holds all offline work back, or lets it go on.
    pub fn set_paused(&self, caller: &Caller, paused: bool) -> Result<PauseView> {
        if !caller.is_operator() {
            return Err(ManagerError::Forbidden(format!(
                "{} is no operator: only root and the user that runs the manager may pause and resume",
                caller.name
            )));
        }
        {
            // Both under the lock of the store: whoever changes jobs sees it from here on.
            let mut store = self.store();
            store.put_note(PAUSED_NOTE, if paused { "yes" } else { "no" })?;
            self.paused.store(paused, Ordering::Release);
        }
        let word = if paused { "paused" } else { "resumed" };
        self.tell(NewEvent {
            at: clock::now(),
            kind: "operator",
            gpu: None,
            job: None,
            service: None,
            text: format!("{word} by {}", caller.name),
        });
        let mut stopping = 0;
        if paused {
            stopping = self.drain()?;
        }
        self.wake(word);
        Ok(PauseView { paused, stopping })
    }

    /// Has every job leave its GPU.
    fn drain(&self) -> Result<u64> {
        let rows = self.reader().open_jobs()?;
        let mut stopping = 0;
        for row in rows {
            let stepped = self.step(&row.id, Happening::AskStop, |row| {
                row.reason = "offline work is paused".to_owned();
            })?;
            if let Some(row) = stepped {
                stopping += 1;
                self.stop_on_node(&row);
            }
        }
        Ok(stopping)
    }

    /// The file of a job's output; only for its owner and operators.
    pub fn log_file(&self, caller: &Caller, id: &str, stream: &str) -> Result<(PathBuf, bool)> {
        let row = self.row(id)?;
        if !caller.may_act_for(row.uid) {
            return Err(ManagerError::Forbidden(format!(
                "job {id} belongs to {}; only they or an operator may read its output",
                row.user
            )));
        }
        Ok((self.node.log_file(&row.id, stream), row.is_final))
    }
}

/// What somebody wants of a job beside running it.
pub fn wish(row: &JobRow, now: Micros) -> Wish {
    if row.cancel {
        Wish::Cancel
    } else if row.deadline.is_some_and(|deadline| deadline <= now) {
        Wish::Expire
    } else {
        Wish::None
    }
}

/// One step of a job's life inside a transaction; says whether it was possible.
pub fn advance(
    change: &mut Change<'_, '_>,
    row: &mut JobRow,
    happening: Happening,
    now: Micros,
    edit: impl FnOnce(&mut JobRow),
) -> SqlResult<bool> {
    let Some(before) = JobState::parse(&row.state) else { return Ok(false) };
    let Some(after) = lifecycle::next(before, wish(row, now), happening) else { return Ok(false) };
    row.waited = views::waited(row, before, now);
    row.state = after.as_str().to_owned();
    row.is_final = after.is_final();
    row.changed_at = now;
    if after.is_final() {
        row.ended_at = Some(now);
    }
    edit(row);
    match happening {
        Happening::Profile | Happening::Start => {
            row.run += 1;
            row.started_at = row.started_at.or(Some(now));
            let purpose = if happening == Happening::Profile { "profile" } else { "work" };
            change.begin_run(row, purpose)?;
        }
        Happening::Blamed { .. } => change.judge_run(row, &row.reason)?,
        Happening::Ended(_) | Happening::Refused => {
            change.end_run(row, now, &row.reason)?;
            row.gpu = None;
            row.share = None;
            row.quota_bytes = None;
        }
        _ => {}
    }
    change.put(row)?;
    let reason = if row.reason.is_empty() { String::new() } else { format!(": {}", row.reason) };
    change.tell(NewEvent {
        at: now,
        kind: "job",
        gpu: row.gpu.as_ref().map(|gpu| gpu.as_str().to_owned()),
        job: Some(row.id.as_str().to_owned()),
        service: None,
        text: format!("{before} → {after}{reason}"),
    });
    Ok(true)
}
