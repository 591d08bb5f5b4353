//! Pods that run and leave: a kubelet that restarts, a pod that is deleted, a job that is evicted.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::Gpu;
use muxflow_test_cluster::scenarios::wait;
use serde_json::json;

use crate::pods::{annotation, phase};
use crate::stage::{GPUS, Stage, offered};

/// A job whose first process is a shell, with a worker that records what it does.
const SHELL: &str = r#""$WORKER" 500 8 "$OUT/$NAME.pause" "$OUT/$NAME.record" hold=128; exit 9"#;

/// The same, which writes down when it was told to end, and passes that on to nobody.
const TOLD: &str = r#"trap 'date +%s%N > "$OUT/$NAME.told"' TERM; "$WORKER" 500 8 "$OUT/$NAME.pause" "$OUT/$NAME.record" hold=128 & wait $!; wait $!; exit 9"#;

/// A kubelet that starts again forgets its plugins and deletes their sockets. The plugin comes back
/// by itself, and who runs goes on.
pub(crate) async fn restart(stage: &mut Stage) {
    stage.healthy_gpus().await;
    stage.pause("before", 5_000);
    stage.create("before", stage.spec(names::OFFLINE_RESOURCE, SHELL)).await;
    stage.running("before").await;
    stage.works("before", 20).await;
    let registered =
        |stage: &Stage| stage.agent_log().matches("registered with the kubelet").count();
    let earlier = registered(stage);
    stage.node.kill_kubelet();
    stage.works("before", 20).await;
    stage.node.start_kubelet().unwrap();
    let this = &*stage;
    wait("the plugins registered again", || async {
        (registered(this) >= earlier + 2).then_some(())
    })
    .await;
    wait("both resources offered again", || async {
        (offered(&this.client).await == (vec![2, 2], vec![2, 2])).then_some(())
    })
    .await;
    stage.create("after", stage.spec(names::OFFLINE_RESOURCE, "exec sleep 600")).await;
    let after = stage.running("after").await;
    assert_eq!(
        stage.environment("after").await["CUDA_VISIBLE_DEVICES"],
        annotation(&after, names::GPU)
    );
    let before = stage.pods().get("before").await.unwrap();
    assert_eq!(phase(&before), "Running");
    let restarts = before.status.and_then(|s| Some(s.container_statuses?[0].restart_count));
    assert_eq!(restarts, Some(0), "a pod was restarted with the kubelet");
    stage.works("before", 20).await;
}

/// The chart is removed and installed again, and the agent is away for longer than a job of one machine
/// would wait for it: services and MPS go on, a job's pod is held at its gate, and works on when the
/// next agent has taken it over, as the same pod. Then its service bursts,
/// and a budget keeps the pod: nothing is launched while the eviction is refused, and when the service is
/// calm again the pod works on.
pub(crate) async fn agent_updated(stage: &mut Stage) {
    two_services(stage).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(stage.client.clone(), "default");
    let budget = json!({"metadata": {"name": "kept"}, "spec":
        {"minAvailable": 1, "selector": {"matchLabels": {"keep": "me"}}}});
    budgets.create(&PostParams::default(), &serde_json::from_value(budget).unwrap()).await.unwrap();
    stage.pause("kept", 5_000);
    let metadata = json!({"name": "kept", "labels": {"keep": "me"}});
    stage.create_with(metadata, stage.spec(names::OFFLINE_RESOURCE, SHELL)).await;
    let before = stage.running("kept").await;
    stage.works("kept", 20).await;

    let daemons = stage.mps_daemons();
    assert_eq!(daemons.len(), GPUS, "one for each GPU");
    stage.chart.remove().await;
    for service in ["first", "second"] {
        stage.works(service, 20).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    stays_still(stage, "kept").await;
    // By itself the interposer would end the process 33 s after the last heartbeat.
    tokio::time::sleep(Duration::from_secs(30)).await;
    stage.chart.install().await;
    stage.works("kept", 20).await;
    unharmed(stage, &before).await;
    assert_eq!(stage.mps_daemons(), daemons, "MPS did not outlive the agent's pod");
    for service in ["first", "second"] {
        stage.works(service, 5).await;
        let errors = stage.record(service).iter().filter(|line| line.contains("error")).count();
        assert_eq!(errors, 0, "{service} saw errors while there was no agent");
    }

    let planned = annotation(&before, names::GPU);
    let mut busy = String::new();
    for service in ["first", "second"] {
        if stage.environment(service).await["CUDA_VISIBLE_DEVICES"] == planned {
            service.clone_into(&mut busy);
        }
    }
    stage.burst(&busy);
    let said = stage.event("kept", "EvictionRefused").await;
    assert!(said.contains("held at its gate"), "{said}");
    stays_still(stage, "kept").await;
    stage.calm(&busy);
    stage.works("kept", 20).await;
    unharmed(stage, &before).await;
    budgets.delete("kept", &DeleteParams::default()).await.unwrap();
}

/// A worker launches nothing: what it had launched already is recorded within a moment.
async fn stays_still(stage: &Stage, who: &str) {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = stage.record(who).len();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(stage.record(who).len(), before, "{who} went on beside the service");
}

/// The pod is the same as before, and its container too.
pub(crate) async fn unharmed(stage: &Stage, before: &Pod) {
    let now = stage.pods().get(before.metadata.name.as_deref().unwrap()).await.unwrap();
    assert_eq!(now.metadata.uid, before.metadata.uid);
    assert_eq!((phase(&now), now.metadata.deletion_timestamp.is_none()), ("Running", true));
    let restarts = now.status.and_then(|s| Some(s.container_statuses?[0].restart_count));
    assert_eq!(restarts, Some(0), "its container was started again");
}

/// A pod is deleted whose first process is a shell, which passes no signal on: its work is drained
/// at once, it may save its state while `preStop` sleeps and after, and its worker has let go of the
/// GPU before the grace period ends and the kubelet would kill it. The services beside it notice
/// nothing.
pub(crate) async fn deleted(stage: &mut Stage) {
    two_services(stage).await;
    stage.pause("shell", 5_000);
    let mut spec = stage.spec(names::OFFLINE_RESOURCE, TOLD);
    spec["terminationGracePeriodSeconds"] = json!(15);
    spec["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 3}}});
    // The finalizer keeps the pod's object for as long as the test looks.
    stage.create_with(json!({"name": "shell", "finalizers": ["muxflow.dev/test"]}), spec).await;
    let pod = stage.running("shell").await;
    stage.works("shell", 20).await;
    stage.pods().delete("shell", &DeleteParams::default()).await.unwrap();
    let line = format!("guest is drained job={}", pod.metadata.uid.unwrap());
    let this = &*stage;
    let drained = wait("the guest drained", || async {
        let log = this.agent_log();
        log.lines().map(plain).find(|l| l.contains(&line))
    })
    .await;
    let told = stage.out.join("shell.told");
    let told = wait("the first signal", || async { std::fs::read_to_string(&told).ok() });
    let told: i128 = told.await.trim().parse().unwrap();
    let at: Timestamp = drained.split_whitespace().next().unwrap().parse().unwrap();
    assert!(at.as_nanosecond() < told, "told to end at {told} before: {drained}");
    let (pod, end) = wait("the container ended", || async {
        let pod = this.pods().get("shell").await.unwrap();
        let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
        let end = containers[0].state.as_ref()?.terminated.clone()?;
        Some((pod, end))
    })
    .await;
    assert_eq!(end.exit_code, 9, "it was killed and did not end by itself: {end:?}");
    let (killed_at, ended_at) = (pod.metadata.deletion_timestamp, end.finished_at);
    assert!(ended_at < killed_at, "ended at {ended_at:?}, to be killed at {killed_at:?}");
    let free = json!({"metadata": {"finalizers": null}});
    stage.pods().patch("shell", &PatchParams::default(), &Patch::Merge(free)).await.unwrap();
    stage.gone("shell").await;
    for name in ["first", "second"] {
        stage.works(name, 20).await;
        let errors = stage.record(name).iter().filter(|line| line.contains("error")).count();
        assert_eq!(errors, 0, "{name} saw errors");
    }
}

/// A service on each GPU.
async fn two_services(stage: &Stage) {
    stage.healthy_gpus().await;
    for name in ["first", "second"] {
        stage.start_service(name).await;
        stage.running(name).await;
        stage.works(name, 5).await;
    }
}

/// A line of a log without the codes of colours.
pub(crate) fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut code = false;
    for letter in line.chars() {
        match letter {
            '\u{1b}' => code = true,
            'm' if code => code = false,
            _ if code => {}
            other => text.push(other),
        }
    }
    text
}

/// A job in a container is a client of the driver under the interposer: its memory is capped and
/// charged, its launches are counted, and when the service bursts it leaves, goes on elsewhere and
/// finishes.
pub(crate) async fn evicted(stage: &mut Stage) {
    two_services(stage).await;
    // It begins where the pod before it has left off, and saves how far it came when it is told to leave.
    let script = r#"from=$(cat "$OUT/job.saved" || echo 0); echo "$from" > "$OUT/$NAME.from"
        trap 'kill $!; wait; echo $((from + $(wc -l < "$OUT/$NAME.record"))) > "$OUT/job.saved"; exit 143' TERM
        "$WORKER" 500 8 "$OUT/job.pause" "$OUT/$NAME.record" hold=most > "$OUT/$NAME.log" & while [ ! -e "$OUT/done" ]; do sleep 0.2; done; kill $!; wait; exit 0"#;
    stage.pause("job", 2_000);
    let mut spec = stage.spec(names::OFFLINE_RESOURCE, script);
    // Long enough for what draining takes, and for a window to save its state in.
    spec["terminationGracePeriodSeconds"] = json!(20);
    spec["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 1}}});
    stage.create_job("job", spec).await;
    let this = &*stage;
    let first = wait("the job's pod runs", || async {
        this.pods_of("job").await.into_iter().find(|pod| phase(pod) == "Running")
    })
    .await;
    let name = first.metadata.name.clone().unwrap();
    stage.works(&name, 50).await;
    charged(stage, &name, annotation(&first, names::QUOTA).parse().unwrap()).await;
    let planned = annotation(&first, names::GPU);
    let mut busy = String::new();
    for service in ["first", "second"] {
        if stage.environment(service).await["CUDA_VISIBLE_DEVICES"] == planned {
            service.clone_into(&mut busy);
        }
    }
    stage.burst(&busy);
    let said = stage.event(&name, "GpuOverlimit").await;
    assert!(said.contains(&planned), "{said}");
    stage.gone(&name).await;
    let this = &*stage;
    let next = wait("another pod of the job runs", || async {
        this.pods_of("job").await.into_iter().find(|pod| phase(pod) == "Running")
    })
    .await;
    assert_ne!(annotation(&next, names::GPU), planned, "not beside the burst");
    wait("the place of the busy GPU withdrawn", || async {
        (offered(&this.client).await == (vec![2, 2], vec![2, 1])).then_some(())
    })
    .await;
    let next = next.metadata.name.clone().unwrap();
    stage.works(&next, 50).await;
    let from = std::fs::read_to_string(stage.out.join(format!("{next}.from"))).unwrap();
    let done: usize = from.trim().parse().unwrap();
    assert!(done >= 50, "it began anew and not where the pod before it had left off: {done}");
    std::fs::write(stage.out.join("done"), "").unwrap();
    wait("the job finished", || async {
        let job = this.jobs().get("job").await.unwrap();
        (job.status.and_then(|s| s.succeeded) == Some(1)).then_some(())
    })
    .await;
    stage.calm(&busy);
    wait("the place offered again", || async {
        (offered(&this.client).await == (vec![2, 2], vec![2, 2])).then_some(())
    })
    .await;
}

/// The memory that the job got is its quota, all of it is charged, and its launches are counted.
async fn charged(stage: &Stage, pod: &str, quota_bytes: u64) {
    let told = std::fs::read_to_string(stage.out.join(format!("{pod}.log"))).unwrap();
    let held_mib: u64 =
        told.trim().trim_start_matches("ready, ").trim_end_matches(" MiB").parse().unwrap();
    let held_bytes = held_mib << 20;
    assert!(held_bytes > 0 && held_bytes <= quota_bytes, "{held_bytes} of {quota_bytes}");
    let charge = stage.metric("muxflow_job_memory_bytes").await;
    #[expect(clippy::cast_precision_loss, reason = "gigabytes")]
    let wanted = held_bytes as f64;
    assert!(charge >= wanted, "{charge} charged for {held_bytes}");
    assert!(stage.metric("muxflow_job_launches_total").await >= 50.0);
    assert!(stage.metric("muxflow_job_refused_total").await >= 1.0, "the quota was never met");
    let gpus: Api<Gpu> = Api::all(stage.client.clone());
    let wanted = format!("default/{pod}");
    wait("the GPU's object names the job", || async {
        let all = gpus.list(&Default::default()).await.unwrap().items;
        let names = |gpu: &Gpu| gpu.status.as_ref().and_then(|s| s.job.clone());
        all.iter().any(|gpu| names(gpu).as_deref() == Some(&wanted)).then_some(())
    })
    .await;
}
