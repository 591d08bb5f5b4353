//! Jobs: submit, list, look, cancel, output.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use muxflow_api::jobs::{
    Cancelled, JobDetail, JobList, JobState, JobSubmit, JobView, LogPiece, Submitted,
};
use muxflow_api::problem::Problem;
use muxflow_store::jobs::JobFilter;
use serde::Deserialize;
use utoipa::IntoParams;

use super::problem::{Body, Query, Refusal, Segments, blocking};
use crate::error::ManagerError;
use crate::manager::Manager;
use crate::user::Caller;
use crate::{logs, views};

/// What stands for a value that the caller may not see.
pub(super) const HIDDEN: &str = "(hidden)";
/// A page of jobs ends when what they were submitted with takes this much: a few of the largest are
/// many times what a page should be.
const PAGE_BYTES: usize = 4 << 20;
/// The longest that a request may wait for something to happen.
const LONGEST_WAIT_MS: u64 = 20_000;

/// Takes a job, or an array of jobs, in.
#[utoipa::path(post, path = "/v1/jobs", tag = "jobs", request_body = JobSubmit, responses(
    (status = 201, body = Submitted),
    (status = "4XX", body = Problem, description = "Nothing was taken in."),
    (status = 507, body = Problem, description = "The disk is full; nothing was taken in."),
))]
pub async fn submit(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Body(wanted): Body<JobSubmit>,
) -> Result<(StatusCode, Json<Submitted>), Refusal> {
    let made = blocking(move || manager.submit(&caller, &wanted)).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Which jobs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// States, with commas between; `open` stands for all that have not ended.
    state: Option<String>,
    /// Of this user: a name or a number; `me` is the caller.
    user: Option<String>,
    /// Of this array.
    array: Option<String>,
    /// The `next` of the page before.
    before: Option<u64>,
    /// At most so many; fewer, with a `next`, when they take more than some megabytes.
    #[param(minimum = 1, maximum = 500, default = 100)]
    limit: Option<u64>,
}

impl ListQuery {
    fn filter(&self, caller: &Caller) -> Result<JobFilter, ManagerError> {
        let mut filter = JobFilter { array: self.array.clone(), ..JobFilter::default() };
        // Each once, however often it is named: the query has only so many places.
        let mut states = BTreeSet::new();
        for word in self.state.iter().flat_map(|list| list.split(',')).filter(|w| !w.is_empty()) {
            match JobState::parse(word) {
                Some(state) => drop(states.insert(state.as_str())),
                None if word == "open" => {
                    let open = JobState::ALL.into_iter().filter(|state| !state.is_final());
                    states.extend(open.map(JobState::as_str));
                }
                None => {
                    let all = JobState::ALL.map(JobState::as_str).join(", ");
                    let problem = format!("`{word}` is no state; there are open, {all}");
                    return Err(ManagerError::invalid("state", problem));
                }
            }
        }
        filter.states = states.into_iter().map(str::to_owned).collect();
        filter.uid = match self.user.as_deref() {
            None => None,
            Some("me") => Some(caller.uid),
            Some(name) => {
                let user = Caller::of_name(name);
                let unknown = || ManagerError::NotFound { what: "user", name: name.to_owned() };
                Some(user.ok_or_else(unknown)?.uid)
            }
        };
        filter.before = self.before.map(|before| i64::try_from(before).unwrap_or(i64::MAX));
        Ok(filter)
    }
}

/// Checks how many are asked for.
pub(super) fn limit(
    given: Option<u64>,
    otherwise: usize,
    allowed: RangeInclusive<u64>,
) -> Result<usize, ManagerError> {
    match given {
        None => Ok(otherwise),
        Some(limit) if allowed.contains(&limit) => Ok(usize::try_from(limit).unwrap_or(otherwise)),
        Some(limit) => Err(ManagerError::invalid(
            "limit",
            format!("{limit} is out of range; write {} to {}", allowed.start(), allowed.end()),
        )),
    }
}

/// Jobs, newest first.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(ListQuery), responses(
    (status = 200, body = JobList),
    (status = "4XX", body = Problem),
))]
pub async fn list(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<Json<JobList>, Refusal> {
    let filter = query.filter(&caller)?;
    let limit = limit(query.limit, 100, 1..=500)?;
    let mut page = blocking(move || page(&manager, &filter, limit)).await?;
    page.items = page.items.into_iter().map(|job| as_seen_by(&caller, job)).collect();
    Ok(Json(page))
}

fn page(manager: &Manager, filter: &JobFilter, limit: usize) -> Result<JobList, ManagerError> {
    let (rows, more) = manager.reader().job_page(filter, limit, PAGE_BYTES)?;
    let next = rows.last().filter(|_| more).and_then(|row| u64::try_from(row.number).ok());
    let items = rows.iter().map(|row| manager.view(row)).collect::<Result<_, _>>()?;
    Ok(JobList { items, next })
}

/// Environments hold passwords: others see that there is one, not what is in it.
fn as_seen_by(caller: &Caller, mut job: JobView) -> JobView {
    if !caller.may_act_for(job.uid) {
        job.submit.env.values_mut().for_each(|value| HIDDEN.clone_into(value));
    }
    job
}

/// How long to wait.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WaitQuery {
    /// Answer when the job has ended, or after so many milliseconds.
    #[param(maximum = 20_000)]
    wait_ms: Option<u64>,
}

fn wait(given: Option<u64>) -> Result<Duration, ManagerError> {
    match given.unwrap_or(0) {
        ms if ms <= LONGEST_WAIT_MS => Ok(Duration::from_millis(ms)),
        ms => Err(ManagerError::invalid(
            "wait_ms",
            format!("{ms} is out of range; write 0 to {LONGEST_WAIT_MS} and ask again"),
        )),
    }
}

/// One job.
#[utoipa::path(get, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "The job."), WaitQuery),
    responses((status = 200, body = JobView), (status = "4XX", body = Problem)))]
pub async fn look(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Segments(id): Segments<String>,
    Query(query): Query<WaitQuery>,
) -> Result<Json<JobView>, Refusal> {
    let deadline = tokio::time::Instant::now() + wait(query.wait_ms)?;
    let mut events = manager.bus.listen();
    loop {
        let (asked, name) = (Arc::clone(&manager), id.clone());
        let job = blocking(move || asked.job(&name)).await?;
        if job.state.is_final() || tokio::time::Instant::now() >= deadline {
            return Ok(Json(as_seen_by(&caller, job)));
        }
        // Until something happens to it; a listener that was too slow looks again.
        let news = async {
            while let Ok(event) = events.recv().await {
                if event.job.as_deref() == Some(id.as_str()) {
                    break;
                }
            }
        };
        drop(tokio::time::timeout_at(deadline, news).await);
    }
}

/// One job with its past, and what the last plan says of it.
#[utoipa::path(get, path = "/v1/jobs/{id}/detail", tag = "jobs",
    params(("id" = String, Path, description = "The job.")),
    responses((status = 200, body = JobDetail), (status = "4XX", body = Problem)))]
pub async fn detail(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Segments(id): Segments<String>,
) -> Result<Json<JobDetail>, Refusal> {
    let detail = blocking(move || manager.detail(&id)).await?;
    Ok(Json(JobDetail { job: as_seen_by(&caller, detail.job), ..detail }))
}

/// Asks for the end of a job, or of all jobs of an array.
#[utoipa::path(delete, path = "/v1/jobs/{id}", tag = "jobs",
    params(("id" = String, Path, description = "The job or array.")),
    responses((status = 202, body = Cancelled), (status = "4XX", body = Problem),
        (status = 507, body = Problem, description = "The disk is full; nothing was cancelled.")))]
pub async fn cancel(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Segments(id): Segments<String>,
) -> Result<(StatusCode, Json<Cancelled>), Refusal> {
    let cancelled = blocking(move || manager.cancel(&caller, &id)).await?;
    Ok((StatusCode::ACCEPTED, Json(cancelled)))
}

/// Which output, and from where.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// `stdout` or `stderr`; `stdout` when left out.
    #[param(default = "stdout")]
    stream: Option<String>,
    /// The `next_offset` of the piece before; the beginning when left out.
    offset: Option<u64>,
    /// At most so many bytes; a character, which is never cut in two, takes up to four.
    #[param(minimum = 4, maximum = 1_048_576, default = 65_536)]
    limit: Option<u64>,
    /// Answer when there is something, or after so many milliseconds.
    #[param(maximum = 20_000)]
    wait_ms: Option<u64>,
}

/// A piece of a job's output.
#[utoipa::path(get, path = "/v1/jobs/{id}/logs", tag = "jobs",
    params(("id" = String, Path, description = "The job."), LogQuery),
    responses((status = 200, body = LogPiece), (status = "4XX", body = Problem)))]
pub async fn output(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
    Segments(id): Segments<String>,
    Query(query): Query<LogQuery>,
) -> Result<Json<LogPiece>, Refusal> {
    let stream = match query.stream.as_deref() {
        None | Some("stdout") => "stdout",
        Some("stderr") => "stderr",
        Some(other) => {
            let problem = format!("`{other}` is no stream; write stdout or stderr");
            return Err(ManagerError::invalid("stream", problem).into());
        }
    };
    let limit = limit(query.limit, 65_536, 4..=1 << 20)?;
    let offset = query.offset.unwrap_or(0);
    let deadline = tokio::time::Instant::now() + wait(query.wait_ms)?;
    loop {
        let (asked, caller, id) = (Arc::clone(&manager), caller.clone(), id.clone());
        let piece = blocking(move || {
            let (path, ended) = asked.log_file(&caller, &id, stream)?;
            logs::read(&path, offset, limit, ended)
        })
        .await?;
        if !piece.text.is_empty() || piece.end || tokio::time::Instant::now() >= deadline {
            return Ok(Json(piece));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Manager {
    /// A job with its past, and what the last plan says of it.
    pub fn detail(&self, id: &str) -> Result<JobDetail, ManagerError> {
        let row = self.row(id)?;
        let runs = self.reader().runs(&row.id, 100)?;
        let (candidates, refusals) = self.explained(&row.id);
        Ok(JobDetail {
            job: self.view(&row)?,
            runs: runs.into_iter().map(views::run).collect(),
            candidates,
            refusals,
        })
    }
}
