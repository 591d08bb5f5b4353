//! Who comes and who goes, with an executor that only remembers.

use std::sync::atomic::Ordering;

use muxflow_types::{Bytes, GpuId, SmCount, SmShare};
use serde_json::json;

use super::*;
use crate::dra::claims::Claimed;
use crate::node::fake::{Fake, OTHER, OWN, Scene, process_of};
use crate::node::ground::Wish;
use crate::node::placed::Grant;

fn local(scene: &Scene, proc: &std::path::Path) -> Local {
    let mut local = Local::new(Arc::clone(&scene.ground), Vec::new(), Arc::default(), |_, _| {});
    local.proc = proc.to_owned();
    local
}

/// What comes of processes of a pod in the namespace: who was drained, and who must leave.
fn verified_among(pod: &str, other_is_guest: bool) -> (Vec<String>, Vec<Wish>) {
    let dir = tempfile::tempdir().unwrap();
    process_of(&dir.path().join("proc"), pod);
    let executor = Fake { namespaces: vec![11], ..Fake::default() };
    let mut scene = Scene::with(executor, dir.path());
    scene.guest("p", OWN, "GPU-a");
    scene.pod("p", OTHER, "GPU-b", json!({}));
    if other_is_guest {
        scene.guest("q", OTHER, "GPU-b");
    }
    let mut local = local(&scene, &dir.path().join("proc"));
    local.verify();
    let told = scene.executor.told();
    local.verify();
    assert_eq!(scene.executor.told(), told, "seen to once");
    let wishes = std::iter::from_fn(|| scene.wishes.try_recv().ok());
    (told, wishes.collect())
}

#[test]
fn a_pod_that_uses_the_control_block_of_another_is_found_by_its_control_group() {
    assert_eq!(verified_among(OWN, false), (Vec::new(), Vec::new()));
    let (drained, wishes) = verified_among(OTHER, false);
    let leave: Vec<&str> = wishes.iter().map(|wish| wish.job.as_str()).collect();
    assert_eq!(leave, [OWN, OTHER], "neither is where it was planned");
    let wish = &wishes[0];
    assert_eq!((wish.reason, wish.while_ill), ("WrongGpu", false));
    assert!(wish.why.contains(OTHER) && wish.why.contains("d/p"), "{}", wish.why);
    assert_eq!(drained, [format!("drain {OWN}: {}", wish.why)]);
}

/// The numbers by which it is found are what the job itself says.
#[test]
fn a_job_cannot_have_a_guest_on_its_own_gpu_evicted() {
    let (_, wishes) = verified_among(OTHER, true);
    let leave: Vec<&str> = wishes.iter().map(|wish| wish.job.as_str()).collect();
    assert!(leave.contains(&OWN) && !leave[1..].contains(&OTHER), "{leave:?}");
}

#[test]
fn a_pod_that_is_over_still_has_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    let (own, other) = (JobId::new(OWN).unwrap(), JobId::new(OTHER).unwrap());
    scene.failed("p", OWN);
    assert!(scene.ground.pod_of(&own).is_none(), "it is over");
    assert_eq!(scene.ground.name_of(&own).map(|name| name.path()), Some("d/p".to_owned()));
    assert_eq!(scene.ground.name_of(&other), None);
    scene.guest("q", OTHER, "GPU-b");
    assert_eq!(scene.ground.name_of(&other).map(|name| name.path()), Some("d/q".to_owned()));
}

/// Turns until something has been told.
async fn until_told(local: &mut Local, scene: &Scene, words: &str) {
    let told = |scene: &Scene| scene.executor.told().iter().any(|told| told.contains(words));
    let turning = async {
        while !told(scene) {
            local.turn().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let within = tokio::time::timeout(Duration::from_secs(20), turning).await;
    assert!(within.is_ok(), "never: {words}: {:?}", scene.executor.told());
}

#[tokio::test]
async fn a_gpu_that_does_not_answer_keeps_no_other_pod_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    scene.executor.stuck.store(true, Ordering::Release);
    scene.pod("a", OWN, "GPU-a", json!({}));
    scene.pod("b", OTHER, "GPU-b", json!({}));
    let mut local = local(&scene, dir.path());
    until_told(&mut local, &scene, &format!("attach {OTHER}")).await;
    scene.pod("b", OTHER, "GPU-b", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
    until_told(&mut local, &scene, &format!("drain {OTHER}")).await;
    assert!(scene.executor.stuck.load(Ordering::Acquire));
    // A GPU that does not answer is no reason to leave; the pod is taken over when it does.
    scene.executor.stuck.store(false, Ordering::Release);
    until_told(&mut local, &scene, &format!("attach {OWN}")).await;
    assert_eq!(scene.wishes.try_recv().ok(), None);
}

#[tokio::test]
async fn a_running_pod_that_its_gpu_refuses_must_leave() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    scene.executor.refuses.store(true, Ordering::Release);
    scene.pod("a", OWN, "GPU-a", json!({}));
    let mut local = local(&scene, dir.path());
    let heard = async {
        loop {
            local.turn().await;
            if let Ok(wish) = scene.wishes.try_recv() {
                return wish;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let wish = tokio::time::timeout(Duration::from_secs(20), heard).await.unwrap();
    assert_eq!((wish.reason, wish.why.as_str()), ("NotTakenOver", "the GPU is disabled"));
}

#[tokio::test]
async fn a_guest_without_a_pre_stop_is_told_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut scene = Scene::with(Fake::default(), dir.path());
    let pre_stop = json!({"preStop": {"sleep": {"seconds": 3}}});
    let device = json!({"limits": {"muxflow.dev/offline": "1"}});
    let side = json!({"name": "side"});
    let hasty = json!({"name": "train", "resources": device});
    let calm = json!({"name": "train", "resources": device, "lifecycle": pre_stop});
    let claims = json!({"name": "train", "resources": {"claims": [{"name": "gpu"}]}});
    scene.pod_with("p", OWN, "GPU-a", json!({}), json!([side, hasty]));
    scene.pod_with("q", OTHER, "GPU-b", json!({}), json!([side, calm]));
    scene.guest("p", OWN, "GPU-a");
    scene.guest("q", OTHER, "GPU-b");
    let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let advise = move |pod: PodName, what: String| told.send((pod.name, what)).unwrap();
    let mut local = Local::new(Arc::clone(&scene.ground), Vec::new(), Arc::default(), advise);
    local.proc = dir.path().to_owned();
    local.turn().await;
    local.turn().await;
    let (name, what) = heard.try_recv().unwrap();
    assert_eq!(name, "p");
    assert!(what.contains("container train has no preStop"), "{what}");
    assert!(heard.try_recv().is_err(), "told twice, or told who needs no advice");
    // By a claim it is the same.
    scene.pod_with("q", OTHER, "GPU-b", json!({}), json!([claims]));
    let pod = scene.ground.pod_of(&JobId::new(OTHER).unwrap()).unwrap();
    assert!(placed::without_pre_stop(&pod).is_some());
}

#[tokio::test]
async fn a_gpu_is_free_only_when_the_processes_of_a_pod_that_is_gone_are() {
    let dir = tempfile::tempdir().unwrap();
    let proc = dir.path().join("proc");
    process_of(&proc, OWN);
    let scene = Scene::with(Fake::default(), dir.path());
    let job = scene.guest("forced", OWN, "GPU-a");
    let mut local = local(&scene, &proc);
    local.turn().await;
    local.turn().await;
    let drained = format!("drain {OWN}: the pod is gone, and its processes are not");
    assert_eq!(scene.executor.told(), std::slice::from_ref(&drained));
    assert!(scene.ground.guests().contains_key(&job), "the GPU's object still names it");
    std::fs::remove_dir_all(&proc).unwrap();
    local.turn().await;
    assert_eq!(scene.executor.told(), [drained, format!("detach {OWN}")]);
    assert!(!scene.ground.guests().contains_key(&job));
}

/// A claim of a service on `GPU-a`.
fn served(pod: &str) -> Claimed {
    let grant = Grant {
        gpu: GpuId::new("GPU-a").unwrap(),
        share: SmShare::new(SmCount(40), SmCount(40)).unwrap(),
        quota: Bytes(0),
    };
    Claimed { pod: JobId::new(pod).unwrap(), kind: Kind::Online, grant }
}

#[tokio::test]
async fn a_claim_does_not_outlive_its_pod() {
    let dir = tempfile::tempdir().unwrap();
    let proc = dir.path().join("proc");
    process_of(&proc, OTHER);
    let mut scene = Scene::with(Fake::default(), dir.path());
    scene.pod("here", OWN, "GPU-a", json!({}));
    let mut local = local(&scene, &proc);
    let claims = &scene.ground.claims;
    claims.insert("here", served(OWN)).unwrap();
    claims.insert("forced", served(OTHER)).unwrap();
    claims.insert("gone", served("33333333-0f2b-4c3d-9e8f-001122334455")).unwrap();
    let file = |uid: &str| dir.path().join(format!("cdi/muxflow.dev-claim-{uid}.json"));
    std::fs::create_dir(dir.path().join("cdi")).unwrap();
    for uid in ["here", "forced", "gone"] {
        std::fs::write(file(uid), "{}").unwrap();
    }
    local.turn().await;
    assert!(file("forced").exists() && !file("gone").exists());
    assert!(claims.get("here").is_some(), "its pod runs");
    assert!(claims.get("forced").is_some(), "its processes run, though the pod is gone");
    assert!(claims.get("gone").is_none());
    std::fs::remove_dir_all(&proc).unwrap();
    local.turn().await;
    assert_eq!(claims.online(), [("GPU-a".to_owned(), JobId::new(OWN).unwrap())]);
    let again = crate::dra::claims::Store::open(dir.path().join("claims"));
    assert_eq!(again.online().len(), 1, "nor does its file");
    assert!(!file("forced").exists() && file("here").exists(), "nor what the runtime was told");
}

#[test]
fn a_gpu_that_a_service_holds_by_a_claim_is_no_device_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let scene = Scene::with(Fake::default(), dir.path());
    let (ground, executor) = (&scene.ground, &*scene.ground.executor);
    let offered = |kind, held: &BTreeSet<String>| -> Vec<bool> {
        devices(executor, kind, held).iter().map(|device| device.health == HEALTHY).collect()
    };
    assert_eq!(offered(Kind::Online, &ground.claimed_by_services()), [true, true]);
    ground.claims.insert("claim", served(OWN)).unwrap();
    assert_eq!(offered(Kind::Online, &ground.claimed_by_services()), [false, true]);
    assert_eq!(offered(Kind::Offline, &ground.claimed_by_services()), [true, true], "for jobs");
    // And the other way round, for the slice.
    ground.given_to_services().insert("GPU-b".to_owned());
    assert_eq!(offered(Kind::Online, &ground.given_to_services()), [true, false]);
}
