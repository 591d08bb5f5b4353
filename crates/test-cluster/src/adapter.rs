//! A server that answers a group of the API for the API server (API aggregation), as adapters of metrics
//! do: over TLS, each request by a function.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};

use crate::Error;

const PATIENCE: Duration = Duration::from_secs(5);
/// The head of a request is not longer.
const MOST_BYTES: usize = 64 << 10;

/// What is answered to the path and query of a GET; none is not found.
pub type Answer = dyn Fn(&str) -> Option<String> + Send + Sync;

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Adapter {
    port: u16,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Adapter {
    /// Serves on a free port of this machine, with the certificate and the key in a folder.
    pub fn start(pki: &Path, answer: Box<Answer>) -> Result<Self, Error> {
        let refused = |why: String| Error::Refused { why: format!("an adapter: {why}") };
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| refused(e.to_string()))?;
        let port = listener.local_addr().map_err(|e| refused(e.to_string()))?.port();
        let certificate = CertificateDer::from_pem_file(pki.join("server.crt"));
        let certificate = certificate.map_err(|e| refused(e.to_string()))?;
        let key = PrivateKeyDer::from_pem_file(pki.join("server.key"));
        let key = key.map_err(|e| refused(e.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|c| c.with_no_client_auth().with_single_cert(vec![certificate], key))
            .map_err(|e| refused(e.to_string()))?;
        let config = Arc::new(config);
        let answer: Arc<Answer> = answer.into();
        let stop = Arc::new(AtomicBool::new(false));
        let inside = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                if inside.load(Ordering::Acquire) {
                    return;
                }
                let (config, answer) = (Arc::clone(&config), Arc::clone(&answer));
                // A client that breaks off asks again.
                std::thread::spawn(move || drop(serve(socket, config, &*answer)));
            }
        });
        Ok(Adapter { port, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes it up.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn serve(
    mut socket: TcpStream,
    config: Arc<ServerConfig>,
    answer: &Answer,
) -> Result<(), Box<dyn std::error::Error>> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let mut connection = ServerConnection::new(config)?;
    let mut stream = Stream::new(&mut connection, &mut socket);
    let (mut head, mut buffer) = (Vec::new(), [0; 4096]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < MOST_BYTES {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        head.extend_from_slice(&buffer[..count]);
    }
    let text = String::from_utf8_lossy(&head);
    let path = text.split(' ').nth(1).unwrap_or_default();
    let (status, body) = match answer(path) {
        Some(body) => ("200 OK", body),
        None => ("404 Not Found", "{}".to_owned()),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    stream.conn.send_close_notify();
    stream.flush()?;
    Ok(())
}
