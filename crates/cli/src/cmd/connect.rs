//! How commands reach the manager.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use muxflow_api::jobs::JobList;
use muxflow_manager::client::{Client, Place, find_socket};

use super::patience;

/// Where the manager is: by default on this machine.
#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// The manager's local socket.
    #[arg(long, value_name = "FILE", env = "MUXFLOW_SOCKET")]
    socket: Option<PathBuf>,
    /// The manager's TCP address; needs a token.
    #[arg(long, value_name = "HOST:PORT", env = "MUXFLOW_SERVER", conflicts_with = "socket")]
    server: Option<String>,
    /// The token for it.
    #[arg(long, env = "MUXFLOW_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

impl ConnectArgs {
    /// A client for it.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        let place = match (&self.server, &self.token) {
            (None, _) => {
                let uid = muxflow_agent::sys::own_uid();
                Place::Socket(find_socket(self.socket.as_deref(), uid))
            }
            (Some(_), None) => bail!("--server needs --token or MUXFLOW_TOKEN"),
            (Some(address), Some(token)) => {
                Place::Tcp { address: address.clone(), token: token.clone() }
            }
        };
        Ok(Client::new(place)?)
    }
}

/// A job's or array's id as it was typed: `1` is `job-1`, `1.5` is `job-1.5`.
pub(crate) fn job_id(typed: &str) -> String {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (number, index) = typed.split_once('.').map_or((typed, None), |(n, i)| (n, Some(i)));
    if is_number(number) && index.is_none_or(is_number) {
        return format!("job-{typed}");
    }
    typed.to_owned()
}

/// A job in the path of a request.
pub(crate) fn path_of(typed: &str) -> String {
    format!("/v1/jobs/{}", escaped(&job_id(typed)))
}

/// All jobs that an id stands for, for whoever waits for them: those of an array, oldest first, or the
/// one.
pub(crate) fn jobs_of(client: &Client, typed: &str) -> anyhow::Result<Vec<String>> {
    let mut members = Vec::new();
    let array = format!("/v1/jobs?array={}&limit=500", escaped(&job_id(typed)));
    let mut before = String::new();
    loop {
        let page: JobList = patience::get(client, &format!("{array}{before}"))?;
        members.extend(page.items.into_iter().map(|job| job.id));
        match page.next {
            Some(next) => before = format!("&before={next}"),
            None => break,
        }
    }
    if members.is_empty() {
        members.push(job_id(typed));
    }
    members.reverse();
    Ok(members)
}

/// A word as it may stand in a path or a query.
pub(crate) fn escaped(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    word.chars()
        .map(|c| {
            if plain(c) {
                return c.to_string();
            }
            let mut bytes = [0; 4];
            c.encode_utf8(&mut bytes).bytes().map(|b| format!("%{b:02X}")).collect()
        })
        .collect()
}

/// A time as the seconds since it, for tables.
pub(crate) fn ago(at_us: u64) -> String {
    let now = muxflow_manager::clock::now().0;
    span(now.saturating_sub(at_us))
}

/// A length of time, short.
pub(crate) fn span(us: u64) -> String {
    let seconds = us / 1_000_000;
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds / 60),
        6000..=359_999 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_a_job() {
        for (typed, id) in [
            ("1", "job-1"),
            ("12.0", "job-12.0"),
            ("job-1", "job-1"),
            ("job-1.5", "job-1.5"),
            ("1.x", "1.x"),
            ("1.2.3", "1.2.3"),
            (".5", ".5"),
            ("", ""),
        ] {
            assert_eq!(job_id(typed), id);
        }
        assert_eq!(path_of("1"), "/v1/jobs/job-1");
        assert_eq!(path_of("a b/c?"), "/v1/jobs/a%20b%2Fc%3F");
    }
}
