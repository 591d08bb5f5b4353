//! Evictions while the API server cannot be asked.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::node::fake::{Fake, OWN, Scene};

/// An evictor whose requests all fail.
fn alone(scene: &Scene) -> Evictor {
    let nobody = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let client = crate::connect::client(nobody).unwrap();
    let teller = Arc::new(Teller::new(client.clone(), "test", "n1"));
    Evictor::new(client, Arc::clone(&scene.ground), teller)
}

fn wish(job: &JobId, while_ill: bool) -> Wish {
    Wish { job: job.clone(), reason: "GpuOverlimit", why: "GPU is Overlimit".into(), while_ill }
}

#[tokio::test]
async fn a_pod_stays_when_its_gpu_recovers_while_nobody_could_be_asked() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    scene.pod("p", OWN, "GPU-a", json!({}));
    let job = scene.guest("p", OWN, "GPU-a");
    let mut evictor = alone(&scene);
    *scene.executor.state.lock().unwrap() = State::Overlimit;
    evictor.want(wish(&job, true));
    evictor.pursue(&job).await;
    assert!(evictor.wanted.contains_key(&job), "asked for in vain, and to be asked for again");
    *scene.executor.state.lock().unwrap() = State::Healthy;
    evictor.pursue(&job).await;
    assert!(!evictor.wanted.contains_key(&job));
    assert_eq!(scene.executor.told(), ["relent GPU-a"]);
    // Who must leave whatever becomes of the GPU is asked for all the same.
    evictor.want(wish(&job, false));
    evictor.pursue(&job).await;
    evictor.pursue(&job).await;
    assert!(evictor.wanted.contains_key(&job));
}

#[tokio::test]
async fn a_guest_without_its_annotations_leaves_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    scene.pod("p", OWN, "GPU-a", json!({"annotations": {}}));
    let job = scene.guest("p", OWN, "GPU-a");
    let mut evictor = alone(&scene);
    evictor.want(wish(&job, false));
    evictor.pursue(&job).await;
    assert!(evictor.wanted.contains_key(&job), "the wish was dropped");
    // One that leaves by itself need not be asked.
    scene.pod("p", OWN, "GPU-a", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
    evictor.pursue(&job).await;
    assert!(!evictor.wanted.contains_key(&job));
}
