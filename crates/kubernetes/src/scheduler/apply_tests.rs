//! What a cycle believes when the API server does not answer: only what it has sent may have happened.

use std::sync::Mutex;

use kube::Config;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const PATIENCE: Duration = Duration::from_millis(500);

/// Requests by verb and path.
type Asked = Arc<Mutex<Vec<String>>>;

/// An API server that knows one free claim and binds any pod, but never answers a request whose first
/// line contains a word.
async fn server(silent: &'static str) -> (Client, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Asked::default();
    let log = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(answer_all(socket, silent, Arc::clone(&log)));
        }
    });
    let config = Config::new(format!("http://{address}").parse().unwrap());
    (Client::try_from(config).unwrap(), asked)
}

async fn answer_all(socket: TcpStream, silent: &str, asked: Asked) -> Option<()> {
    let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "d", "resourceVersion": "1"},
        "spec": {"devices": {"requests":
            [{"name": "gpu", "exactly": {"deviceClassName": "offline.muxflow.dev"}}]}}});
    let bound = json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201});
    let mut socket = BufReader::new(socket);
    loop {
        let (first, body) = request(&mut socket).await?;
        asked.lock().unwrap().push(first.clone());
        if first.contains(silent) {
            std::future::pending::<()>().await;
        }
        let is_claim = first.contains("/resourceclaims/");
        let mut answer = if is_claim { claim.clone() } else { bound.clone() };
        if let (true, Some(finalizers)) = (is_claim, body["metadata"].get("finalizers")) {
            answer["metadata"]["finalizers"] = finalizers.clone();
        }
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        socket.write_all((head + &answer).as_bytes()).await.ok()?;
    }
}

/// The first line of a request, and its body.
async fn request(socket: &mut BufReader<TcpStream>) -> Option<(String, Value)> {
    let (mut first, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if socket.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let line = line.trim();
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        match line {
            "" => break,
            _ if first.is_empty() => line.clone_into(&mut first),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await.ok()?;
    Some((first, serde_json::from_slice(&body).unwrap_or_default()))
}

/// A pod with a claim is bound by a leader in good standing.
async fn bind_by_claim(client: Client) -> Outcome {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "d", "uid": "u"},
        "spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]},
    }))
    .unwrap();
    let action = Action::Bind {
        pod: PodName::of(&pod),
        node: "n".to_owned(),
        gpu: GpuId::new("GPU-a").unwrap(),
        annotations: BTreeMap::new(),
    };
    let until = Instant::now() + Duration::from_secs(60);
    let (_tell, valid) = watch::channel(Some(Valid { until, term: 1 }));
    let permit = Permit { valid, term: 1, until };
    Hands::new(client, "test").apply(vec![action], &[Arc::new(pod)], &permit, PATIENCE).await
}

#[tokio::test]
async fn a_claim_that_is_not_answered_leaves_no_doubt_about_the_binding() {
    let (client, asked) = server("PATCH ").await;
    let outcome = bind_by_claim(client).await;
    assert_eq!((outcome.failed, outcome.unsure, outcome.bound), (1, vec![], vec![]));
    let asked = asked.lock().unwrap();
    assert!(!asked.iter().any(|line| line.contains("/binding")), "{asked:?}");
}

#[tokio::test]
async fn a_binding_that_is_not_answered_may_have_been_made() {
    let (client, asked) = server("/binding").await;
    let outcome = bind_by_claim(client).await;
    assert_eq!((outcome.failed, outcome.unsure.len(), outcome.bound), (1, 1, vec![]));
    assert!(asked.lock().unwrap().iter().any(|line| line.contains("/status")), "{asked:?}");
}

#[tokio::test]
async fn a_pod_with_a_claim_is_bound_when_all_is_answered() {
    let (client, _) = server("nothing").await;
    let outcome = bind_by_claim(client).await;
    assert_eq!((outcome.failed, outcome.unsure, outcome.bound.len()), (0, vec![], 1));
}
