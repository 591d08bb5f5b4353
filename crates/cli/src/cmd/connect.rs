//! How commands reach the manager.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use muxflow_manager::client::{Client, Place, find_socket};

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

/// A job's id in the path of a request.
pub(crate) fn path_of(id: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let escaped: String = id
        .chars()
        .map(|c| {
            if plain(c) {
                return c.to_string();
            }
            let mut bytes = [0; 4];
            c.encode_utf8(&mut bytes).bytes().map(|b| format!("%{b:02X}")).collect()
        })
        .collect();
    format!("/v1/jobs/{escaped}")
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
