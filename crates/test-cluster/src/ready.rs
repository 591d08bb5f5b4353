//! Whether a part answers. The API server is asked over TLS, and only believed with the right
//! certificate: another program may have taken its port.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

const PATIENCE: Duration = Duration::from_secs(2);

/// Whether something listens on a port of this machine.
pub(crate) fn listens(port: u16) -> bool {
    connect(port).is_some()
}

/// Whether the API server says that it is ready.
pub(crate) fn says_ok(port: u16, authority: &Path) -> bool {
    ask(port, authority).is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

fn connect(port: u16) -> Option<TcpStream> {
    let socket =
        TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), PATIENCE).ok()?;
    socket.set_read_timeout(Some(PATIENCE)).ok()?;
    socket.set_write_timeout(Some(PATIENCE)).ok()?;
    Some(socket)
}

fn ask(port: u16, authority: &Path) -> Option<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority).ok()?).ok()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .ok()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").ok()?;
    let mut connection = ClientConnection::new(Arc::new(config), name).ok()?;
    let mut socket = connect(port)?;
    let mut stream = Stream::new(&mut connection, &mut socket);
    stream
        .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .ok()?;
    let mut answer = [0; 256];
    let read = stream.read(&mut answer).ok()?;
    Some(String::from_utf8_lossy(&answer[..read]).into_owned())
}
