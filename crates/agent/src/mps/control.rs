//! Talking to one MPS control daemon through its control program.
//!
//! The program reads commands from its standard input and can hang when the server does, so every
//! call has a time limit after which it is killed. What it prints is read leniently: the layout of
//! its lists differs between releases.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{AgentError, Result};
use crate::stuck;
use crate::sys;

/// The state of an MPS server, as the daemon tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStatus {
    /// Coming up.
    Initializing,
    /// Serving.
    Active,
    /// A fatal fault happened; it refuses clients until all have left.
    Fault,
    /// Something this program does not know.
    Unknown,
}

impl ServerStatus {
    /// Reads the answer to `get_server_status`.
    pub fn parse(text: &str) -> Self {
        let text = text.to_ascii_uppercase();
        if text.contains("FAULT") {
            ServerStatus::Fault
        } else if text.contains("INITIALIZING") {
            ServerStatus::Initializing
        } else if text.contains("ACTIVE") {
            ServerStatus::Active
        } else {
            ServerStatus::Unknown
        }
    }
}

/// The control program against one pipe directory.
#[derive(Debug, Clone)]
pub struct MpsControl {
    program: PathBuf,
    pipe_dir: PathBuf,
    limit: Duration,
}

/// The numbers that lines begin with: process ids, in every list of every release.
pub fn parse_pids(text: &str) -> Vec<u32> {
    let first = |line: &str| line.split_ascii_whitespace().next()?.parse().ok();
    text.lines().filter_map(first).collect()
}

impl MpsControl {
    /// For the daemon that listens in `pipe_dir`; each call may take `limit`.
    pub fn new(program: PathBuf, pipe_dir: PathBuf, limit: Duration) -> Self {
        MpsControl { program, pipe_dir, limit }
    }

    /// Where the daemon listens.
    pub fn pipe_dir(&self) -> &Path {
        &self.pipe_dir
    }

    fn failed(&self, command: &str, reason: impl Into<String>) -> AgentError {
        AgentError::Mps {
            pipe_dir: self.pipe_dir.clone(),
            command: command.to_owned(),
            reason: reason.into(),
        }
    }

    /// Sends one command and gives back what was printed.
    pub fn ask(&self, command: &str) -> Result<String> {
        let mut child = Command::new(&self.program)
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| self.failed(command, format!("{}: {e}", self.program.display())))?;
        let answer = self.converse(&mut child, command);
        // It may hang with the server; it must not outlive the question.
        let status = stuck::end(child, command);
        let (printed, complained) = answer?;
        // Killed after it has closed its output is how a good answer ends, too.
        match status {
            Some(status) if status.code().is_some_and(|code| code != 0) => {
                let said = if complained.trim().is_empty() { &printed } else { &complained };
                Err(self.failed(command, format!("{status}: {}", said.trim())))
            }
            _ => Ok(printed),
        }
    }

    fn converse(&self, child: &mut std::process::Child, command: &str) -> Result<(String, String)> {
        let lost = || self.failed(command, "its pipes are gone");
        let mut input = child.stdin.take().ok_or_else(lost)?;
        let sent = input.write_all(format!("{command}\n").as_bytes());
        drop(input);
        sent.map_err(|e| self.failed(command, e.to_string()))?;
        let deadline = Instant::now() + self.limit;
        let mut out = child.stdout.take().ok_or_else(lost)?;
        let mut err = child.stderr.take().ok_or_else(lost)?;
        let printed = read_until(&mut out, deadline).ok_or_else(|| {
            self.failed(command, format!("no answer within {} ms", self.limit.as_millis()))
        })?;
        let complained = read_until(&mut err, deadline).unwrap_or_default();
        // Its exit code decides; give it the moment it needs to leave.
        while Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok((printed, complained))
    }

    /// The servers of this daemon.
    pub fn servers(&self) -> Result<Vec<u32>> {
        self.ask("get_server_list").map(|text| parse_pids(&text))
    }

    /// The state of a server.
    pub fn status(&self, server: u32) -> Result<ServerStatus> {
        self.ask(&format!("get_server_status {server}")).map(|text| ServerStatus::parse(&text))
    }

    /// The clients of a server.
    pub fn clients(&self, server: u32) -> Result<Vec<u32>> {
        self.ask(&format!("get_client_list {server}")).map(|text| parse_pids(&text))
    }

    /// Whether the driver can cap the memory of clients: found by asking for a cap. None when no answer
    /// came, which says nothing.
    pub fn caps_memory(&self) -> Option<bool> {
        let answer = self.ask("get_default_device_pinned_mem_limit 0").ok()?;
        let answer = answer.trim().to_ascii_lowercase();
        let refused = ["unknown", "invalid", "error"].iter().any(|no| answer.contains(no));
        Some(!answer.is_empty() && !refused)
    }

    /// Starts the server for a user now, and not when its first client comes.
    pub fn start_server(&self, uid: u32) -> Result<()> {
        self.ask(&format!("start_server -uid {uid}")).map(drop)
    }

    /// Cuts off those of `mine` that are clients; says how many it asked for.
    pub fn terminate_clients(&self, mine: &[u32]) -> Result<usize> {
        let mut asked = 0;
        for server in self.servers()? {
            for client in self.clients(server)?.into_iter().filter(|pid| mine.contains(pid)) {
                self.ask(&format!("terminate_client {server} {client}"))?;
                asked += 1;
            }
        }
        Ok(asked)
    }

    /// Ends the daemon and its servers.
    pub fn quit(&self) -> Result<()> {
        self.ask("quit").map(drop)
    }
}

/// Reads to the end; `None` when it does not come in time.
fn read_until(from: &mut (impl Read + std::os::fd::AsRawFd), deadline: Instant) -> Option<String> {
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = sys::poll_readable(&[from.as_raw_fd()], left).ok()?;
        if ready.first() == Some(&true) {
            match from.read(&mut buffer) {
                Ok(0) | Err(_) => return Some(String::from_utf8_lossy(&text).into_owned()),
                Ok(count) => text.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            }
        } else if left.is_zero() {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A control program that is a script: what it prints is what the test says.
    fn scripted(body: &str) -> (tempfile::TempDir, MpsControl) {
        scripted_within(Duration::from_secs(20), body)
    }

    fn scripted_within(limit: Duration, body: &str) -> (tempfile::TempDir, MpsControl) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("control");
        std::fs::write(&program, format!("#!/bin/sh\nread line\n{body}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let control = MpsControl::new(program, dir.path().into(), limit);
        (dir, control)
    }

    #[test]
    fn lists_and_states_are_read_in_all_their_dresses() {
        assert_eq!(parse_pids("4711\n4712\n"), [4711, 4712]);
        let table = "PID       ID    SERVER    DEVICE    NAMESPACE    COMMAND\n9741 0 6472 GPU-cb1213a3 4026531836 ./nbody\n\n";
        assert_eq!(parse_pids(table), [9741]);
        assert_eq!(parse_pids("Server not found\n"), [0; 0]);
        assert_eq!(ServerStatus::parse("ACTIVE\n"), ServerStatus::Active);
        assert_eq!(ServerStatus::parse("Fault"), ServerStatus::Fault);
        assert_eq!(ServerStatus::parse("INITIALIZING"), ServerStatus::Initializing);
        assert_eq!(ServerStatus::parse("?"), ServerStatus::Unknown);
    }

    #[test]
    fn only_our_clients_are_cut_off() {
        let (dir, control) = scripted(
            "echo \"$line\" >> $CUDA_MPS_PIPE_DIRECTORY/asked; case \"$line\" in get_server_list) echo 10;; get_client_list*) echo 21; echo 22;; esac",
        );
        assert_eq!(control.terminate_clients(&[22, 99]).unwrap(), 1);
        let asked = std::fs::read_to_string(dir.path().join("asked")).unwrap();
        assert_eq!(asked, "get_server_list\nget_client_list 10\nterminate_client 10 22\n");
    }

    #[test]
    fn a_cap_on_memory_is_found_by_asking() {
        for (body, has) in [
            ("echo 'Value for device 0 : unlimited'", Some(true)),
            ("echo 4G", Some(true)),
            ("echo 'Unknown command: get_default_device_pinned_mem_limit'", Some(false)),
            ("exit 1", None),
            ("", Some(false)),
        ] {
            let (_dir, control) = scripted(body);
            assert_eq!(control.caps_memory(), has, "{body}");
        }
    }

    #[test]
    fn a_program_that_hangs_fails_or_is_missing_is_an_error_that_says_so() {
        let (_dir, control) = scripted_within(Duration::from_millis(700), "sleep 100");
        let began = Instant::now();
        let error = control.servers().unwrap_err().to_string();
        assert!(error.contains("get_server_list") && error.contains("700 ms"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30));
        let (_dir, control) = scripted("echo 'Cannot find MPS control daemon process' >&2; exit 1");
        let error = control.servers().unwrap_err().to_string();
        assert!(error.contains("Cannot find MPS control daemon"), "{error}");
        let missing = MpsControl::new("/no/such/program".into(), "/x".into(), Duration::ZERO);
        assert!(missing.quit().unwrap_err().to_string().contains("/no/such/program"));
    }
}
