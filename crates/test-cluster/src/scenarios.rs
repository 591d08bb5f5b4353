//! What test programs with scenarios share: one cluster serves many, so these are programs of their
//! own and not sets of `#[test]`s, and they choose, wait and report in the same way.

use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The scenarios run only when this is `1`: the first build of the control plane takes minutes. With
/// `later`, somebody has promised to run them.
const OPT_IN: &str = "MUXFLOW_KUBERNETES_TESTS";

/// The scenarios that these arguments of a test program ask for: those whose name contains one of
/// the words, or all. With `--list` they are named and none is chosen.
#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
pub fn chosen<'a, S>(
    all: &'a [(&'static str, S)],
    arguments: &[String],
) -> Vec<&'a (&'static str, S)> {
    if arguments.iter().any(|a| a == "--list") {
        for (name, _) in all {
            println!("{name}: test");
        }
        return Vec::new();
    }
    let words: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|w| name.contains(w.as_str()));
    all.iter().filter(|(name, _)| wanted(name)).collect()
}

/// Whether scenarios are to run now. A plain `cargo test` does not: it says so, and with `CI=true`
/// that is a failure, unless they are a later step.
///
/// # Errors
/// How the test program ends when they are not.
#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
pub fn now(scenarios: usize, what: &str, command: &str) -> Result<(), ExitCode> {
    let word = std::env::var(OPT_IN).unwrap_or_default();
    if word == "1" {
        return Ok(());
    }
    if word == "later" {
        println!("\n{scenarios} scenarios {what}: a later step\n");
        return Err(ExitCode::SUCCESS);
    }
    println!(
        "\n*** NOT RUN: {scenarios} scenarios {what}; run them with `{command}` or set {OPT_IN}=1\n"
    );
    let ci = std::env::var("CI").is_ok_and(|word| word == "true");
    Err(if ci { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Says how one ended that began then.
#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
pub fn told(name: &str, ok: bool, started: Instant) {
    let word = if ok { "ok" } else { "FAILED" };
    println!("test {name} ... {word} ({:.1} s)", started.elapsed().as_secs_f64());
}

/// Says how all ended.
#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
pub fn ended(scenarios: usize, failed: &[&str]) -> ExitCode {
    println!("{scenarios} scenarios, {} failed: {failed:?}", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Asks again and again.
///
/// # Panics
/// With what was waited for, when it takes too long.
pub async fn wait<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(started.elapsed() < Duration::from_secs(120), "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
