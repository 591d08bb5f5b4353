//! Commands that follow a job for hours outlive a restart of the manager, and a time in which it has too
//! many connections: they ask again for a while.

use std::time::{Duration, Instant};

use muxflow_api::cluster::HealthView;
use muxflow_manager::client::Client;
use muxflow_manager::error::ManagerError;
use serde::de::DeserializeOwned;

/// How long a manager may be away.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two tries.
const PAUSE: Duration = Duration::from_secs(1);

/// The exit code of a command that lost the manager: what became of the job is not known.
pub(crate) const LOST: u8 = 2;

/// The manager is not there, or was away for too long.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Lost(String);

/// Sees that there is a manager before anybody waits for it to come back: a wrong address is told at
/// once.
pub(crate) fn reach(client: &Client) -> anyhow::Result<()> {
    match client.get::<HealthView>("/v1/health") {
        Err(ManagerError::Unreachable(why)) => Err(Lost(why).into()),
        // It is there.
        Err(ManagerError::Busy(_)) => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

/// Asks; a manager that cannot be reached or has no place for us is asked again for two minutes, and
/// one line says so.
pub(crate) fn get<T: DeserializeOwned>(client: &Client, path: &str) -> anyhow::Result<T> {
    get_within(client, path, PATIENCE)
}

#[expect(clippy::print_stderr, reason = "a word to whoever waits, beside the output")]
fn get_within<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    patience: Duration,
) -> anyhow::Result<T> {
    let mut away: Option<Instant> = None;
    loop {
        let why = match client.get(path) {
            Err(ManagerError::Unreachable(why) | ManagerError::Busy(why)) => why,
            answer => return Ok(answer?),
        };
        let since = *away.get_or_insert_with(|| {
            eprintln!("muxflow: {why}; trying again for {} s", patience.as_secs());
            Instant::now()
        });
        if since.elapsed() >= patience {
            let waited = patience.as_secs();
            return Err(Lost(format!("no answer of the manager within {waited} s: {why}")).into());
        }
        std::thread::sleep(PAUSE.min(patience));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_manager::client::Place;
    use muxflow_manager::http::seats::TOO_MANY;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::thread::JoinHandle;

    #[test]
    fn a_manager_that_comes_back_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("manager.sock");
        let client = Client::new(Place::Socket(socket.clone())).unwrap();
        let absent = reach(&client).unwrap_err();
        assert!(absent.is::<Lost>() && absent.to_string().contains("no manager at"), "{absent}");
        let lost = get_within::<u32>(&client, "/v1/x", Duration::from_millis(10)).unwrap_err();
        assert!(lost.is::<Lost>() && lost.to_string().contains("no manager at"), "{lost}");
        let serving = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            let listener = UnixListener::bind(&socket).unwrap();
            // Breaks off at first, as one that is killed does.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            let _head = stream.read(&mut [0; 1024]).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7").unwrap();
        });
        assert_eq!(get_within::<u32>(&client, "/v1/x", PATIENCE).unwrap(), 7);
        serving.join().unwrap();
    }

    /// Answers so many requests, one after another.
    fn serve(socket: &Path, answers: Vec<&'static [u8]>) -> JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let _head = stream.read(&mut [0; 1024]).unwrap();
                stream.write_all(answer).unwrap();
            }
        })
    }

    #[test]
    fn a_manager_with_too_many_connections_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("manager.sock");
        let last = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7";
        let serving = serve(&socket, vec![TOO_MANY, TOO_MANY, TOO_MANY, last]);
        let client = Client::new(Place::Socket(socket)).unwrap();
        reach(&client).unwrap();
        let lost = get_within::<u32>(&client, "/v1/x", Duration::ZERO).unwrap_err();
        assert!(lost.is::<Lost>(), "{lost}");
        assert!(lost.to_string().contains("too many of your connections"), "{lost}");
        assert_eq!(get_within::<u32>(&client, "/v1/x", PATIENCE).unwrap(), 7);
        serving.join().unwrap();
    }

    #[test]
    fn a_refusal_is_told_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("manager.sock");
        let answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno";
        let serving = serve(&socket, vec![answer]);
        let client = Client::new(Place::Socket(socket)).unwrap();
        let refused = get_within::<u32>(&client, "/v1/x", PATIENCE).unwrap_err();
        assert!(!refused.is::<Lost>() && refused.to_string().contains("404"), "{refused}");
        serving.join().unwrap();
    }
}
