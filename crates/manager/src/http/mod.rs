//! The HTTP API: thin handlers, one file per area, under `/v1`, with an OpenAPI description that is
//! made from them.

pub mod auth;
pub mod cluster;
pub mod connections;
pub mod dashboard;
pub mod events;
pub mod jobs;
pub mod places;
pub mod problem;
pub mod seats;
pub mod server;
pub mod services;

use std::sync::Arc;

use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::manager::Manager;

/// What the description says of the whole.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "MuxFlow",
        description = "Jobs, GPUs, services and events of one MuxFlow manager. On the local socket the kernel tells who calls; on TCP give `Authorization: Bearer TOKEN`.",
        version = "1"
    ),
    tags((name = "jobs"), (name = "cluster"), (name = "events"), (name = "services"))
)]
pub struct Description;

/// The routes of the manager itself.
pub fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(cluster::health))
        .routes(routes!(cluster::gpus))
        .routes(routes!(cluster::gpu))
        .routes(routes!(cluster::history))
        .routes(routes!(cluster::pairings))
        .routes(routes!(cluster::plan))
        .routes(routes!(cluster::plan_record))
        .routes(routes!(cluster::summary))
        .routes(routes!(cluster::pause))
        .routes(routes!(cluster::resume))
        .routes(routes!(jobs::submit, jobs::list))
        .routes(routes!(jobs::look, jobs::cancel))
        .routes(routes!(jobs::detail))
        .routes(routes!(jobs::output))
        .routes(routes!(events::list))
        .routes(routes!(events::stream))
}
