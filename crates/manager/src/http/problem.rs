//! From what went wrong to an answer that says so, and extractors that answer in the same form.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use muxflow_api::problem::Problem;
use muxflow_store::StoreError;

use crate::error::ManagerError;

/// An answer that is not a success.
#[derive(Debug)]
pub struct Refusal {
    status: StatusCode,
    problem: Problem,
}

impl Refusal {
    /// With this status, word and text.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let problem = Problem { code: code.to_owned(), message: message.into(), field: None };
        Refusal { status, problem }
    }

    /// The thread that was to do it did not come to an end.
    pub fn given_up(error: &tokio::task::JoinError) -> Self {
        let text = format!("the request was given up: {error}");
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", text)
    }

    /// The caller is not known.
    pub fn unauthorized(message: &str) -> Self {
        Refusal::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(self.problem)).into_response()
    }
}

impl From<ManagerError> for Refusal {
    fn from(error: ManagerError) -> Self {
        let message = error.in_full();
        let (status, code) = match &error {
            ManagerError::Invalid { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid"),
            ManagerError::NotFound { .. } | ManagerError::IsArray { .. } => {
                (StatusCode::NOT_FOUND, "not-found")
            }
            ManagerError::Forbidden(_) => (StatusCode::FORBIDDEN, "forbidden"),
            ManagerError::Conflict(_) => (StatusCode::CONFLICT, "conflict"),
            ManagerError::Limit { .. } | ManagerError::LimitBytes { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "limit")
            }
            ManagerError::Store(StoreError::DiskFull { .. }) => {
                (StatusCode::INSUFFICIENT_STORAGE, "disk-full")
            }
            _ => {
                tracing::error!(error = message, "a request failed");
                (StatusCode::INTERNAL_SERVER_ERROR, "failed")
            }
        };
        let field = match error {
            ManagerError::Invalid { field, .. } => Some(field),
            _ => None,
        };
        Refusal { status, problem: Problem { code: code.to_owned(), message, field } }
    }
}

macro_rules! from_rejection {
    ($rejection:ident) => {
        impl From<$rejection> for Refusal {
            fn from(rejection: $rejection) -> Self {
                Refusal::new(rejection.status(), "malformed", rejection.body_text())
            }
        }
    };
}
from_rejection!(JsonRejection);
from_rejection!(QueryRejection);
from_rejection!(PathRejection);

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(Json), rejection(Refusal))]
pub struct Body<T>(pub T);

/// The query of the address.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Refusal))]
pub struct Query<T>(pub T);

/// Parts of the path.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Refusal))]
pub struct Segments<T>(pub T);

/// Runs something that waits for the disk, away from the threads that answer others.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> crate::error::Result<T> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Refusal::from),
        Err(error) => Err(Refusal::given_up(&error)),
    }
}
