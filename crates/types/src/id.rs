//! Names of things. Each kind of thing has its own type, so that a job is never looked up by the
//! name of a GPU.

use std::fmt;
use std::sync::Arc;

/// An id that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Empty text.
    #[error("a {kind} must not be empty")]
    Empty {
        /// Which kind of id.
        kind: &'static str,
    },
    /// Too long to be a name that people or tools handle.
    #[error("a {kind} has at most {max} characters; this one has {length}")]
    TooLong {
        /// Which kind of id.
        kind: &'static str,
        /// What was given.
        length: usize,
        /// What is allowed.
        max: usize,
    },
    /// A character that breaks tables, paths or logs.
    #[error(
        "`{text}` is not a {kind}: character {character:?} is not allowed (use letters, digits, `-`, `_`, `.`, `/`, `:`)"
    )]
    Character {
        /// Which kind of id.
        kind: &'static str,
        /// What was given.
        text: String,
        /// The first character that does not belong.
        character: char,
    },
}

const MAX_LENGTH: usize = 253;

fn check(kind: &'static str, text: &str) -> Result<Arc<str>, IdError> {
    if text.is_empty() {
        return Err(IdError::Empty { kind });
    }
    if text.len() > MAX_LENGTH {
        return Err(IdError::TooLong { kind, length: text.chars().count(), max: MAX_LENGTH });
    }
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | ':');
    match text.chars().find(|&c| !allowed(c)) {
        Some(character) => Err(IdError::Character { kind, text: text.to_owned(), character }),
        None => Ok(Arc::from(text)),
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and keeps the text.
            pub fn new(text: &str) -> Result<Self, IdError> {
                check($kind, text).map($name)
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

id!(
    /// One physical GPU, by its UUID as the driver tells it.
    GpuId,
    "GPU id"
);
id!(
    /// One machine.
    NodeId,
    "node id"
);
id!(
    /// A latency-bound service. Its replicas share this id.
    ServiceId,
    "service id"
);
id!(
    /// One best-effort job.
    JobId,
    "job id"
);
id!(
    /// A kind of GPU, such as `T4`; predictors and thresholds are kept per type.
    GpuType,
    "GPU type"
);
id!(
    /// What a job or service runs, as far as profiles are concerned: two jobs of one workload
    /// share a profile.
    WorkloadName,
    "workload name"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_refuse_what_breaks_tables_and_paths() {
        assert_eq!(GpuId::new("").unwrap_err(), IdError::Empty { kind: "GPU id" });
        assert!(JobId::new("a b").unwrap_err().to_string().contains("`a b`"));
        assert!(JobId::new("a\nb").is_err());
        assert!(JobId::new(&"x".repeat(300)).is_err());
        assert_eq!(GpuId::new("GPU-5a3c").unwrap().as_str(), "GPU-5a3c");
    }
}
