//! The smallest server that a Prometheus can read: one page, one connection at a time.
//!
//! Written here because the need is one GET of one text, on a thread of its own, and every HTTP crate
//! brings more code and more threads than the agent itself has. Requests are read up to a limit and a
//! deadline, so a slow or hostile client costs a second and no memory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{AgentError, Result};

const DEADLINE: Duration = Duration::from_secs(1);
const MOST_BYTES: usize = 8 << 10;

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct PageServer {
    address: std::net::SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl PageServer {
    /// Serves `/metrics` from `page`, and `/healthz`.
    pub fn start(address: &str, page: impl Fn() -> String + Send + 'static) -> Result<Self> {
        let failed =
            |source| AgentError::File { operation: "listen on", path: address.into(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let stop = Arc::new(AtomicBool::new(false));
        let inside = Arc::clone(&stop);
        let body = move || {
            while !inside.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((stream, _)) => drop(answer(stream, &page)),
                    Err(_) => std::thread::sleep(Duration::from_millis(25)),
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("metrics".into()).spawn(body).map_err(failed)?;
        Ok(PageServer { address: bound, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn answer(mut stream: TcpStream, page: &impl Fn() -> String) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    let deadline = Instant::now() + DEADLINE;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut buffer)?;
        request.extend_from_slice(buffer.get(..count).unwrap_or_default());
        if count == 0 || request.len() > MOST_BYTES || Instant::now() > deadline {
            return Ok(());
        }
    }
    let line = String::from_utf8_lossy(&request);
    let mut words = line.lines().next().unwrap_or_default().split(' ');
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", page())
        }
        (Some("GET"), Some("/healthz")) => ("200 OK", "text/plain", "ok\n".to_owned()),
        (Some("GET"), _) => {
            ("404 Not Found", "text/plain", "there are /metrics and /healthz\n".to_owned())
        }
        _ => ("405 Method Not Allowed", "text/plain", "only GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(server: &PageServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn pages_are_served_and_nonsense_is_not() {
        let server = PageServer::start("127.0.0.1:0", || "x 1\n".into()).unwrap();
        let page = ask(&server, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("\r\n\r\nx 1\n"), "{page}");
        assert!(ask(&server, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(&server, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(ask(&server, "GET /healthz HTTP/1.1\r\n\r\n").ends_with("ok\n"));
        let began = Instant::now();
        assert_eq!(ask(&server, "GET /met"), "", "a slow client is hung up on");
        assert!(began.elapsed() < Duration::from_secs(5));
        let taken = PageServer::start(&server.address().to_string(), String::new).unwrap_err();
        assert!(taken.to_string().contains("listen on"));
    }
}
