//! `cargo xtask screenshots`: pictures of the dashboard in `docs/`, taken in headless Chromium.

use crate::ci::cargo;

/// Runs the part of the browser test that takes pictures.
pub(crate) fn run() -> anyhow::Result<()> {
    let words = ["test", "--locked", "-p", "muxflow-e2e", "--test", "dashboard", "--"];
    cargo(&[&words[..], &["--ignored", "--exact", "screenshots", "--nocapture"]].concat())
}
