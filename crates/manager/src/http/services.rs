//! Services: declare, look, restart, remove.

use std::io::ErrorKind;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use muxflow_agent::sys;
use muxflow_api::problem::Problem;
use muxflow_api::service::{ServiceDeclaration, ServiceList, ServiceView};
use muxflow_services::ServiceError;
use muxflow_services::manager::ServiceManager;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::jobs::HIDDEN;
use super::problem::{Body, Refusal, Segments};
use crate::error::ManagerError;
use crate::user::Caller;

impl From<ServiceError> for Refusal {
    fn from(error: ServiceError) -> Self {
        let text = error.to_string();
        match error {
            ServiceError::Declaration { field, .. } => {
                ManagerError::Invalid { field: field.to_owned(), problem: text }.into()
            }
            ServiceError::Unknown { .. } => Refusal::new(StatusCode::NOT_FOUND, "not-found", text),
            ServiceError::Listen { .. }
            | ServiceError::NotTakenUp { .. }
            | ServiceError::Shadow { .. } => ManagerError::Conflict(text).into(),
            ServiceError::NotWritten { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                Refusal::new(StatusCode::INSUFFICIENT_STORAGE, "disk-full", text)
            }
            ServiceError::NotWritten { source, .. } => {
                let text = format!("{text}: {source}");
                Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", text)
            }
            _ => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", text),
        }
    }
}

/// A service takes a GPU from the jobs of all others, so only operators may declare one.
fn operator(caller: &Caller) -> Result<(), Refusal> {
    if caller.is_operator() {
        return Ok(());
    }
    let text =
        format!("user {} may not change services; root and the manager's user may", caller.name);
    Err(ManagerError::Forbidden(text).into())
}

/// All services.
#[utoipa::path(get, path = "/v1/services", tag = "services", responses(
    (status = 200, body = ServiceList), (status = "4XX", body = Problem)))]
async fn list(State(services): State<Arc<ServiceManager>>, caller: Caller) -> Json<ServiceList> {
    let items = services.list().into_iter().map(|view| as_seen_by(&caller, view)).collect();
    Json(ServiceList { items })
}

/// As with jobs: environments hold passwords.
fn as_seen_by(caller: &Caller, mut view: ServiceView) -> ServiceView {
    if !caller.is_operator() {
        view.declared.env.values_mut().for_each(|value| HIDDEN.clone_into(value));
    }
    view
}

/// Declares a service, or changes the one of this name.
#[utoipa::path(post, path = "/v1/services", tag = "services", request_body = ServiceDeclaration, responses(
    (status = 201, body = ServiceView), (status = "4XX", body = Problem),
    (status = 507, body = Problem, description = "The disk is full; nothing was declared.")))]
async fn declare(
    State(services): State<Arc<ServiceManager>>,
    caller: Caller,
    Body(mut declared): Body<ServiceDeclaration>,
) -> Result<(StatusCode, Json<ServiceView>), Refusal> {
    operator(&caller)?;
    // Written down, so that who declared it is still known after a restart. Root at a manager of
    // another user can have it started as that user only.
    let uid = if sys::own_uid() == 0 { caller.uid } else { sys::own_uid() };
    declared.user.get_or_insert_with(|| uid.to_string());
    // It is on the disk before the answer goes.
    let declaring = tokio::task::spawn_blocking(move || -> Result<ServiceView, ServiceError> {
        services.declare(&declared)?;
        services.get(&declared.name)
    });
    match declaring.await {
        Ok(declared) => Ok((StatusCode::CREATED, Json(declared?))),
        Err(error) => Err(Refusal::given_up(&error)),
    }
}

/// One service.
#[utoipa::path(get, path = "/v1/services/{name}", tag = "services",
    params(("name" = String, Path, description = "The service.")),
    responses((status = 200, body = ServiceView), (status = "4XX", body = Problem)))]
async fn look(
    State(services): State<Arc<ServiceManager>>,
    caller: Caller,
    Segments(name): Segments<String>,
) -> Result<Json<ServiceView>, Refusal> {
    Ok(Json(as_seen_by(&caller, services.get(&name)?)))
}

/// Lets requests under way finish, stops the replicas and forgets the service.
#[utoipa::path(delete, path = "/v1/services/{name}", tag = "services",
    params(("name" = String, Path, description = "The service.")),
    responses((status = 200, body = ServiceView), (status = "4XX", body = Problem)))]
async fn remove(
    State(services): State<Arc<ServiceManager>>,
    caller: Caller,
    Segments(name): Segments<String>,
) -> Result<Json<ServiceView>, Refusal> {
    operator(&caller)?;
    let last = services.get(&name)?;
    services.remove(&name).await?;
    Ok(Json(last))
}

/// Replaces every replica, one after another, without losing a request.
#[utoipa::path(post, path = "/v1/services/{name}/restart", tag = "services",
    params(("name" = String, Path, description = "The service.")),
    responses((status = 202, body = ServiceView), (status = "4XX", body = Problem)))]
async fn restart(
    State(services): State<Arc<ServiceManager>>,
    caller: Caller,
    Segments(name): Segments<String>,
) -> Result<(StatusCode, Json<ServiceView>), Refusal> {
    operator(&caller)?;
    services.restart(&name)?;
    Ok((StatusCode::ACCEPTED, Json(services.get(&name)?)))
}

/// The routes.
pub fn routes(services: Arc<ServiceManager>) -> OpenApiRouter {
    OpenApiRouter::new()
        .routes(routes!(list, declare))
        .routes(routes!(look, remove))
        .routes(routes!(restart))
        .with_state(services)
}
