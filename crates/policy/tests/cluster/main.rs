//! Cluster planning from outside: by example, and against brute force.

#![expect(clippy::unwrap_used, reason = "a test that cannot build its input has failed")]

mod examples;
mod properties;
mod support;
