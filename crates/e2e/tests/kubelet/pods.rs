//! Pods and jobs as a user writes them, and what becomes of them.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::Gpu;
use muxflow_test_cluster::node::IMAGE;
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};

use crate::stage::{Stage, driver_variables, host_side};

/// Every container says what it was given before it does anything.
const FIRST: &str = r#"env > "$OUT/$NAME.env.part"; cat /proc/self/mountinfo > "$OUT/$NAME.mounts"; mv "$OUT/$NAME.env.part" "$OUT/$NAME.env""#;

impl Stage {
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// A pod's specification: one container with a device, which runs a script in a shell.
    pub(crate) fn spec(&self, resource: &str, script: &str) -> Value {
        let (volumes, mounts) = host_side(self);
        let mut env = driver_variables(self);
        let own =
            json!({"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}});
        env.as_array_mut().unwrap().push(own);
        let offline = resource == names::OFFLINE_RESOURCE;
        let scheduler = if offline { names::SCHEDULER } else { "default-scheduler" };
        json!({
            "schedulerName": scheduler,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": false,
            "volumes": volumes,
            "containers": [{"name": "c", "image": IMAGE, "env": env, "volumeMounts": mounts,
                "command": ["sh", "-c", format!("{FIRST}; {script}")],
                "resources": {"limits": {resource: "1"}, "requests": {"cpu": "10m"}}}],
        })
    }

    pub(crate) async fn create(&self, name: &str, spec: Value) -> Pod {
        self.create_with(json!({"name": name}), spec).await
    }

    pub(crate) async fn create_with(&self, metadata: Value, spec: Value) -> Pod {
        let pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap()
    }

    /// A Job with one pod, which survives evictions.
    pub(crate) async fn create_job(&self, name: &str, spec: Value) {
        let ignore = json!({"rules": [{"action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]});
        let job = json!({"metadata": {"name": name}, "spec": {"backoffLimit": 0,
            "podFailurePolicy": ignore, "template": {"spec": spec}}});
        let job = serde_json::from_value(job).unwrap();
        self.jobs().create(&PostParams::default(), &job).await.unwrap();
    }

    /// Waits until a pod runs.
    pub(crate) async fn running(&self, name: &str) -> Pod {
        let what = format!("pod {name} runs");
        wait(&what, || async {
            let pod = self.pods().get_opt(name).await.unwrap()?;
            let phase = phase(&pod);
            let why = pod.status.as_ref().and_then(|s| s.message.clone());
            assert!(!matches!(phase, "Failed" | "Succeeded"), "{name} is {phase}: {why:?}");
            (phase == "Running").then_some(pod)
        })
        .await
    }

    /// What a container found in its environment.
    pub(crate) async fn environment(&self, name: &str) -> BTreeMap<String, String> {
        let file = self.out.join(format!("{name}.env"));
        let what = format!("{name} tells its environment");
        let text = wait(&what, || async { std::fs::read_to_string(&file).ok() }).await;
        let pair = |line: &str| {
            line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        text.lines().filter_map(pair).collect()
    }

    /// Where a container found mounts.
    pub(crate) fn mounts(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.out.join(format!("{name}.mounts"))).unwrap();
        text.lines().filter_map(|line| Some(line.split(' ').nth(4)?.to_owned())).collect()
    }

    /// The message of an event about a pod.
    pub(crate) async fn event(&self, pod: &str, reason: &str) -> String {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let what = format!("event {reason} of {pod}");
        wait(&what, || async {
            let fields = ListParams::default().fields(&format!("involvedObject.name={pod}"));
            let all = events.list(&fields).await.unwrap().items;
            all.into_iter().find(|e| e.reason.as_deref() == Some(reason)).and_then(|e| e.message)
        })
        .await
    }

    /// Waits until a pod is no more.
    pub(crate) async fn gone(&self, name: &str) {
        let what = format!("pod {name} gone");
        wait(&what, || async { self.pods().get_opt(name).await.unwrap().is_none().then_some(()) })
            .await;
    }

    /// Pods of a Job that are not on their way out.
    pub(crate) async fn pods_of(&self, job: &str) -> Vec<Pod> {
        let label = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
        let pods = self.pods().list(&label).await.unwrap().items;
        pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
    }

    /// Removes all pods and waits until the GPUs are free and well. Workers are put to sleep first:
    /// one that is killed in the middle of a kernel takes its neighbours along.
    pub(crate) async fn clean(&self) {
        let all = ListParams::default();
        let mut asleep = true;
        for entry in std::fs::read_dir(&self.out).unwrap().flatten() {
            if entry.path().extension().is_some_and(|end| end == "pause") {
                std::fs::write(entry.path(), "3600000000").unwrap();
                asleep = false;
            }
        }
        if !asleep {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), "default");
        deployments.delete_collection(&DeleteParams::background(), &all).await.unwrap();
        self.jobs().delete_collection(&DeleteParams::background(), &all).await.unwrap();
        wait("all pods gone", || async {
            self.pods().delete_collection(&DeleteParams::default(), &all).await.unwrap();
            self.pods().list(&all).await.unwrap().items.is_empty().then_some(())
        })
        .await;
        let gpus: Api<Gpu> = Api::all(self.client.clone());
        wait("no job on any GPU", || async {
            let gpus = gpus.list(&all).await.unwrap().items;
            let busy = |gpu: &Gpu| gpu.status.as_ref().is_some_and(|s| s.job.is_some());
            (!gpus.iter().any(busy)).then_some(())
        })
        .await;
        for entry in std::fs::read_dir(&self.out).unwrap().flatten() {
            drop(std::fs::remove_file(entry.path()));
        }
    }

    /// The argument of a worker: microseconds between two kernels.
    pub(crate) fn pause(&self, who: &str, us: u64) {
        std::fs::write(self.out.join(format!("{who}.pause")), us.to_string()).unwrap();
    }

    /// Lines that a worker recorded, without the one that is being written.
    pub(crate) fn record(&self, who: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.out.join(format!("{who}.record")));
        let text = text.unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(str::to_owned).collect()
    }

    /// Waits until a worker has recorded so many more kernels.
    pub(crate) async fn works(&self, who: &str, more: usize) {
        let before = self.record(who).len();
        let what = format!("{who} works");
        wait(&what, || async { (self.record(who).len() >= before + more).then_some(()) }).await;
    }

    /// A service with one client, and three more that a burst makes busy: with long kernels, so that
    /// the GPU is full however little of a processor they get.
    pub(crate) async fn start_service(&self, name: &str) {
        self.calm(name);
        let script = r#"for n in 1 2 3; do "$WORKER" 20000 40 "$OUT/$NAME.more.pause" - & done; exec "$WORKER" 2000 16 "$OUT/$NAME.pause" "$OUT/$NAME.record""#;
        self.create(name, self.spec(names::ONLINE_RESOURCE, script)).await;
    }

    /// The service wants as little as at first.
    pub(crate) fn calm(&self, name: &str) {
        self.pause(name, 20_000);
        self.pause(&format!("{name}.more"), 900_000);
    }

    /// The service comes to want more than its whole GPU.
    pub(crate) fn burst(&self, name: &str) {
        self.pause(name, 0);
        self.pause(&format!("{name}.more"), 0);
    }

    /// What the agent's page of metrics says of a measure, summed over its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let port = self.chart.port;
        let ask = async {
            let mut socket = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
            socket
                .write_all(b"GET /metrics HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")
                .await?;
            let mut page = String::new();
            socket.read_to_string(&mut page).await?;
            Ok::<_, std::io::Error>(page)
        };
        let page = tokio::time::timeout(Duration::from_secs(20), ask).await.unwrap().unwrap();
        let of = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ', ',']))
        };
        page.lines().filter(of).filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default()
}

/// An annotation of a pod; empty when it has none.
pub(crate) fn annotation(pod: &Pod, name: &str) -> String {
    let all = pod.metadata.annotations.as_ref();
    all.and_then(|all| all.get(name).cloned()).unwrap_or_default()
}
