//! A way to the API server that can be cut: what a network between the two does.

use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Passes bytes on until it is cut; new connections are taken at once.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    connections: Arc<Mutex<JoinSet<()>>>,
    acceptor: tokio::task::JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn start(to: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let held = Arc::clone(&connections);
        let acceptor = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let to = to.clone();
                held.lock().unwrap().spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(to).await {
                        drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
                    }
                });
            }
        });
        Proxy { port, connections, acceptor }
    }

    /// Cuts every connection; how many there were.
    pub(crate) fn cut(&self) -> usize {
        let mut connections = self.connections.lock().unwrap();
        while connections.try_join_next().is_some() {}
        let count = connections.len();
        connections.abort_all();
        count
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}
