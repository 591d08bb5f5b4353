//! What the agent starts itself again for: the keeper and the attach probe.
//!
//! `muxflow` reaches these through a hidden subcommand.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::error::AgentError;
use crate::keeper;
use crate::mps::probe;

/// Runs the child that the arguments name: `keep DIR`.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match arguments.iter().map(OsString::as_os_str).collect::<Vec<_>>().as_slice() {
        [verb, dir] if *verb == "keep" => keep(&PathBuf::from(dir)),
        [verb] if *verb == "probe" => match probe::attach() {
            Ok(sms) => {
                drop(writeln!(std::io::stdout(), "attached {sms}"));
                ExitCode::SUCCESS
            }
            Err(reason) => complain(&reason),
        },
        _ => complain("usage: keep DIR | probe"),
    }
}

fn keep(dir: &std::path::Path) -> ExitCode {
    match keeper::run(dir, std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(AgentError::Unstartable { reason, .. }) => {
            complain(&format!("{} {reason}", keeper::UNSTARTABLE))
        }
        Err(error) => {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            complain(&text)
        }
    }
}

fn complain(text: &str) -> ExitCode {
    // To the agent, which reads one line; when it is gone there is nobody to tell.
    drop(writeln!(std::io::stdout(), "{}", text.replace('\n', " ")));
    ExitCode::FAILURE
}
