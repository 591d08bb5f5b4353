//! Where programs that stay write what happens: standard error, in colour only for a person's eyes.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Starts the log; `RUST_LOG` says what is in it, else `usual`.
pub(crate) fn start(usual: &str) {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|word| !word.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual)),
        )
        .with_writer(std::io::stderr)
        .with_ansi(!plain && std::io::stderr().is_terminal())
        .init();
}
