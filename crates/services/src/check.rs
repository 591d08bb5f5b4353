//! Health checks: a replica is asked again and again, over a connection of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::pool::{Pool, Replica, ReplicaState};
use crate::spec::HealthCheck;

/// While a replica starts or is out, it is asked this often at least: a request may be waiting.
const EAGER: Duration = Duration::from_millis(50);

/// A replica closes the connection within this time after its answer.
const CLOSES_WITHIN: Duration = Duration::from_millis(20);

/// Whether the answer to one check is good.
async fn passes(address: SocketAddr, path: &str) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    // The rest is read, so that the replica does not see a reset; but one that keeps the connection
    // open although it was asked to close it is not waited for.
    let rest = async {
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {}
    };
    drop(tokio::time::timeout(CLOSES_WITHIN, rest).await);
    Ok(head.starts_with(b"HTTP/1.") && head[9] == b'2')
}

/// Asks until the replica is told to leave.
pub async fn watch(pool: Arc<Pool>, replica: Arc<Replica>, check: HealthCheck) {
    let mut failures = 0_u32;
    loop {
        let (state, _) = replica.state();
        if state == ReplicaState::Stopping {
            return;
        }
        let answer = tokio::time::timeout(check.within, passes(replica.address, &check.path)).await;
        if matches!(answer, Ok(Ok(true))) {
            failures = 0;
            pool.passed(&replica);
        } else {
            failures = failures.saturating_add(1);
            if failures >= check.down_after {
                pool.failed(&replica);
            }
        }
        let (state, _) = replica.state();
        let eager = matches!(state, ReplicaState::Starting | ReplicaState::Down);
        tokio::time::sleep(if eager { check.every.min(EAGER) } else { check.every }).await;
    }
}
