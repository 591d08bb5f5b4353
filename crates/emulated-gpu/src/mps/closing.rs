//! How servers and the daemon end: no new clients, and the end with the last of those that are there,
//! unless somebody does not want to wait.

use std::time::{Duration, Instant};

use super::code;
use super::daemon::Daemon;
use crate::wire::Message;

/// How long the daemon sleeps at most: servers that end by themselves do not ring.
const NAP: Duration = Duration::from_millis(500);

/// A `quit` that waits.
#[derive(Debug, Default)]
pub(super) struct Quit {
    /// When it waits no longer.
    deadline: Option<Instant>,
    /// Connections of those who asked; the answer comes when all is over.
    askers: Vec<u64>,
}

/// Whether a command is for the end of the daemon.
pub(super) fn is_quit(line: &str) -> bool {
    line.split_whitespace().next() == Some("quit")
}

/// `quit` waits for ever, `quit -t SECONDS` not longer than that.
fn timeout(line: &str) -> Result<Option<Duration>, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        ["quit"] => Ok(None),
        ["quit", "-t", seconds] => {
            let seconds = seconds.parse().map_err(|_| format!("{seconds} is not a number"))?;
            Ok(Some(Duration::from_secs(seconds)))
        }
        _ => Err("quit [-t SECONDS]".to_owned()),
    }
}

impl Daemon {
    pub(super) fn begin_quit(&mut self, key: u64, line: &str) {
        let timeout = match timeout(line) {
            Ok(timeout) => timeout,
            Err(text) => {
                self.reply(key, &Message::reply(1, &[]), (text + "\n").as_bytes());
                return;
            }
        };
        self.log("Quitting: no new clients");
        let quit = self.quit.get_or_insert_default();
        let deadline = timeout.and_then(|wait| Instant::now().checked_add(wait));
        quit.deadline = [quit.deadline, deadline].into_iter().flatten().min();
        quit.askers.push(key);
    }

    /// How long to wait for something to happen.
    pub(super) fn patience(&self) -> Duration {
        let deadline = self.quit.as_ref().and_then(|quit| quit.deadline);
        deadline.map_or(NAP, |at| at.saturating_duration_since(Instant::now()).min(NAP))
    }

    /// Ends servers that close and have no clients left, and with the last one a daemon that quits.
    pub(super) fn close_down(&mut self) {
        let deadline = self.quit.as_ref().map(|quit| quit.deadline);
        if deadline.is_some() {
            self.servers.values_mut().for_each(|server| server.closing = true);
            for (key, _) in self.waiting() {
                self.reply(key, &Message::reply(code::CONNECTION_FAILED, &[]), &[]);
                self.lost(key);
            }
        }
        let closing = self.servers.iter().filter(|(_, server)| server.closing);
        let closing: Vec<u32> = closing.map(|(pid, _)| *pid).collect();
        for pid in closing {
            if self.clients_of(pid).is_empty() {
                self.stop_server(pid);
                self.log(&format!("Server {pid} exited"));
            }
        }
        let Some(deadline) = deadline else { return };
        let late = deadline.is_some_and(|at| at <= Instant::now());
        self.quitting |= late || self.servers.is_empty();
    }

    /// Tells those who asked for it that the daemon is gone.
    pub(super) fn answer_quit(&mut self) {
        for key in self.quit.take().unwrap_or_default().askers {
            self.reply(key, &Message::reply(0, &[]), &[]);
        }
    }
}
