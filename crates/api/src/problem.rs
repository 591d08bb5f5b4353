//! What the HTTP API answers when it does not do as asked.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// One word for programs, such as `not-found`.
    pub code: String,
    /// What is wrong and what would be right, for people.
    pub message: String,
    /// The field of the request that is to blame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}
