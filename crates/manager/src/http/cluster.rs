//! The cluster: health, GPUs, pairings, the last plan, the summary, pause and resume.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use muxflow_api::cluster::{
    GpuHistory, GpuList, GpuView, HealthView, PairingList, PauseView, PlanRecord, PlanView, Summary,
};
use muxflow_api::problem::Problem;
use muxflow_types::GpuId;
use serde::Deserialize;
use utoipa::IntoParams;

use super::problem::{Query, Refusal, Segments, blocking};
use crate::error::ManagerError;
use crate::manager::Manager;
use crate::user::Caller;
use crate::{clock, views};

/// Whether the manager is there, and who it takes the caller for.
#[utoipa::path(get, path = "/v1/health", tag = "cluster", responses(
    (status = 200, body = HealthView), (status = "4XX", body = Problem)))]
pub async fn health(State(manager): State<Arc<Manager>>, caller: Caller) -> Json<HealthView> {
    Json(manager.health(&caller))
}

/// All GPUs.
#[utoipa::path(get, path = "/v1/gpus", tag = "cluster", responses(
    (status = 200, body = GpuList), (status = "4XX", body = Problem)))]
pub async fn gpus(
    State(manager): State<Arc<Manager>>,
    _: Caller,
) -> Result<Json<GpuList>, Refusal> {
    let now = clock::now();
    blocking(move || {
        let items = manager.node.look().iter().map(|gpu| views::gpu(gpu, now)).collect();
        Ok(Json(GpuList { items }))
    })
    .await
}

/// A GPU by its UUID or its number.
fn find(manager: &Manager, name: &str) -> Result<crate::node::GpuSight, ManagerError> {
    let number: Option<u32> = name.parse().ok();
    let mut all = manager.node.look().into_iter();
    all.find(|gpu| gpu.gpu.as_str() == name || Some(gpu.index) == number)
        .ok_or_else(|| ManagerError::NotFound { what: "GPU", name: name.to_owned() })
}

/// One GPU, by its UUID or its number.
#[utoipa::path(get, path = "/v1/gpus/{id}", tag = "cluster",
    params(("id" = String, Path, description = "The GPU.")),
    responses((status = 200, body = GpuView), (status = "4XX", body = Problem)))]
pub async fn gpu(
    State(manager): State<Arc<Manager>>,
    _: Caller,
    Segments(id): Segments<String>,
) -> Result<Json<GpuView>, Refusal> {
    blocking(move || Ok(Json(views::gpu(&find(&manager, &id)?, clock::now())))).await
}

/// How far back.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SpanQuery {
    /// So many seconds; all that is kept when left out.
    #[param(minimum = 1)]
    span_s: Option<u64>,
}

/// What a GPU went through, for charts.
#[utoipa::path(get, path = "/v1/gpus/{id}/history", tag = "cluster",
    params(("id" = String, Path, description = "The GPU."), SpanQuery),
    responses((status = 200, body = GpuHistory), (status = "4XX", body = Problem)))]
pub async fn history(
    State(manager): State<Arc<Manager>>,
    _: Caller,
    Segments(id): Segments<String>,
    Query(query): Query<SpanQuery>,
) -> Result<Json<GpuHistory>, Refusal> {
    let span_us = query.span_s.unwrap_or(u64::MAX).saturating_mul(1_000_000);
    blocking(move || {
        let gpu: GpuId = find(&manager, &id)?.gpu;
        let points = manager.history.since(&gpu, clock::now().0.saturating_sub(span_us));
        Ok(Json(GpuHistory { step_ms: manager.settings.history_step_ms, points }))
    })
    .await
}

/// Who shares which GPU, with the speed predicted and the speed seen.
#[utoipa::path(get, path = "/v1/pairings", tag = "cluster", responses(
    (status = 200, body = PairingList), (status = "4XX", body = Problem)))]
pub async fn pairings(
    State(manager): State<Arc<Manager>>,
    _: Caller,
) -> Result<Json<PairingList>, Refusal> {
    blocking(move || manager.pairings()).await.map(Json)
}

/// How much of the plan.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PlanQuery {
    /// With the snapshot that it was made from.
    snapshot: Option<bool>,
}

/// The last plan.
#[utoipa::path(get, path = "/v1/plan", tag = "cluster", params(PlanQuery), responses(
    (status = 200, body = PlanView), (status = "4XX", body = Problem)))]
pub async fn plan(
    State(manager): State<Arc<Manager>>,
    _: Caller,
    Query(query): Query<PlanQuery>,
) -> Json<PlanView> {
    let Some(record) = manager.plan() else {
        return Json(PlanView {
            made: false,
            at_us: 0,
            cause: String::new(),
            applied: false,
            took_us: 0,
            findings: Vec::new(),
            speeds: String::new(),
            plan: serde_json::json!({}),
            snapshot: None,
        });
    };
    let json = |text: &str| serde_json::from_str(text).unwrap_or(serde_json::json!({}));
    Json(PlanView {
        made: true,
        at_us: record.at_us,
        cause: record.cause.clone(),
        applied: record.applied,
        took_us: record.took_us,
        findings: record.findings.clone(),
        speeds: record.speeds.clone(),
        plan: json(&record.plan),
        snapshot: query.snapshot.unwrap_or(false).then(|| json(&record.snapshot)),
    })
}

/// The last plan with everything that it was made from, for `muxflow replay`.
#[utoipa::path(get, path = "/v1/plan/record", tag = "cluster", responses(
    (status = 200, body = PlanRecord), (status = "4XX", body = Problem)))]
pub async fn plan_record(
    State(manager): State<Arc<Manager>>,
    _: Caller,
) -> Result<Json<PlanRecord>, Refusal> {
    match manager.plan() {
        Some(record) => Ok(Json(PlanRecord::clone(&record))),
        None => {
            Err(ManagerError::NotFound { what: "plan", name: "the last one".to_owned() }.into())
        }
    }
}

/// The whole at a glance.
#[utoipa::path(get, path = "/v1/summary", tag = "cluster", responses(
    (status = 200, body = Summary), (status = "4XX", body = Problem)))]
pub async fn summary(
    State(manager): State<Arc<Manager>>,
    _: Caller,
) -> Result<Json<Summary>, Refusal> {
    blocking(move || manager.summary()).await.map(Json)
}

/// Has all offline work leave its GPUs, and starts none until it is resumed.
#[utoipa::path(post, path = "/v1/pause", tag = "cluster", responses(
    (status = 200, body = PauseView), (status = "4XX", body = Problem),
    (status = 507, body = Problem, description = "The disk is full; nothing was changed.")))]
pub async fn pause(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
) -> Result<Json<PauseView>, Refusal> {
    blocking(move || manager.set_paused(&caller, true)).await.map(Json)
}

/// Lets offline work go on.
#[utoipa::path(post, path = "/v1/resume", tag = "cluster", responses(
    (status = 200, body = PauseView), (status = "4XX", body = Problem),
    (status = 507, body = Problem, description = "The disk is full; nothing was changed.")))]
pub async fn resume(
    State(manager): State<Arc<Manager>>,
    caller: Caller,
) -> Result<Json<PauseView>, Refusal> {
    blocking(move || manager.set_paused(&caller, false)).await.map(Json)
}
