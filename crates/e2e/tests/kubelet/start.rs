//! Pods that come: what the kubelet offers, and what their containers get.

use muxflow_kubernetes::names;
use muxflow_test_cluster::scenarios::wait;
use serde_json::json;

use crate::pods::{annotation, phase};
use crate::stage::{GPUS, NODE, Stage, offered};

const ALL: i64 = GPUS as i64;

/// The device plugin registers, and the node offers both resources.
pub(crate) async fn capacity(stage: &mut Stage) {
    stage.healthy_gpus().await;
    wait("both resources offered", || async {
        (offered(&stage.client).await == (vec![ALL, ALL], vec![ALL, ALL])).then_some(())
    })
    .await;
}

/// A service finds its GPU, its MPS daemon and shared memory in its container, and works. With none
/// left, the scheduler of Kubernetes says so.
pub(crate) async fn service(stage: &mut Stage) {
    let gpus = stage.healthy_gpus().await;
    let mut given = Vec::new();
    for name in ["first", "second"] {
        stage.start_service(name).await;
        stage.running(name).await;
        let env = stage.environment(name).await;
        assert!(!env.contains_key("LD_PRELOAD"), "a service is under no restraint");
        assert_eq!(env["CUDA_MPS_PIPE_DIRECTORY"], "/run/muxflow/mps");
        let mounts = stage.mounts(name);
        for at in ["/run/muxflow/mps", "/dev/shm"] {
            assert!(mounts.iter().any(|mount| mount == at), "{at} not in {mounts:?}");
        }
        given.push(env["CUDA_VISIBLE_DEVICES"].clone());
        stage.works(name, 20).await;
    }
    given.sort_unstable();
    let mut all = gpus;
    all.sort_unstable();
    assert_eq!(given, all, "each service has a GPU of its own");
    // What an autoscaler can use: by pod, of both services.
    for metric in ["muxflow_service_sm_activity_ratio", "muxflow_service_sm_demand_ratio"] {
        for pod in ["first", "second"] {
            let of = format!("{metric}{{namespace=\"default\",pod=\"{pod}\"");
            wait(&of, || async { (stage.metric(&of).await > 0.0).then_some(()) }).await;
        }
    }
    stage.start_service("third").await;
    let said = stage.event("third", "FailedScheduling").await;
    assert!(said.contains("Insufficient muxflow.dev/online"), "{said}");
}

/// Jobs that are created at the same moment: each finds the GPU that its binding names, though the
/// kubelet says to nobody for whom it asks. With none left, everybody says so.
pub(crate) async fn together(stage: &mut Stage) {
    for round in 0..2 {
        stage.healthy_gpus().await;
        let names = [format!("left{round}"), format!("right{round}")];
        let spec = || stage.spec(names::OFFLINE_RESOURCE, "exec sleep 600");
        futures::join!(stage.create(&names[0], spec()), stage.create(&names[1], spec()));
        let mut given = Vec::new();
        for name in &names {
            let planned = annotation(&stage.running(name).await, names::GPU);
            let env = stage.environment(name).await;
            assert_eq!(env["CUDA_VISIBLE_DEVICES"], planned, "{name} has another GPU");
            assert_eq!(env["LD_PRELOAD"], "/run/muxflow/libxcuda.so");
            assert_eq!(env["MUXFLOW_CONTROL"], "/run/muxflow/control");
            assert!(env.contains_key("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "{env:?}");
            let mounts = stage.mounts(name);
            for at in ["/run/muxflow/control", "/run/muxflow/libxcuda.so", "/run/muxflow/mps"] {
                assert!(mounts.iter().any(|mount| mount == at), "{at} not in {mounts:?}");
            }
            given.push(planned);
        }
        assert_ne!(given[0], given[1]);
        let said = stage.event(&names[0], "NoPreStop").await;
        assert!(said.contains("container c has no preStop"), "{said}");
        if round == 0 {
            nothing_left(stage).await;
        }
        stage.clean().await;
    }
}

/// All places are taken: our scheduler lets a pod wait, and the kubelet refuses one that was put on
/// its node without asking.
async fn nothing_left(stage: &Stage) {
    stage.create("late", stage.spec(names::OFFLINE_RESOURCE, "true")).await;
    stage.event("late", "FailedScheduling").await;
    let mut spec = stage.spec(names::OFFLINE_RESOURCE, "true");
    spec["nodeName"] = json!(NODE);
    stage.create("forced", spec).await;
    let (reason, message) = wait("the forced pod refused", || async {
        let pod = stage.pods().get("forced").await.unwrap();
        let status = pod.status.clone()?;
        (phase(&pod) == "Failed").then_some((status.reason, status.message))
    })
    .await;
    let said = format!("{} {}", reason.unwrap_or_default(), message.unwrap_or_default());
    assert!(said.contains(names::OFFLINE_RESOURCE), "{said}");
    assert!(stage.pods().get("late").await.unwrap().spec.unwrap().node_name.is_none());
}
