//! The rights of the chart are enough, and each of them is needed.
//!
//! For every right that an account has, there is a program here whose account lacks just this one, and
//! it must come to be refused for it. All of them act out the same story at the same time, each on a
//! node of its own. Beside them, one has exactly what the chart grants, and must get to the story's end.

use std::cell::Cell;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use futures::future::{LocalBoxFuture, join_all};
use futures::{FutureExt as _, TryFutureExt as _};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::dra::driver::Sockets;
use muxflow_kubernetes::dra::wire::Claim;
use muxflow_kubernetes::node::Node;
use muxflow_kubernetes::resource::State;
use muxflow_kubernetes::scheduler;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use crate::node::{self, FakeExecutor, overlimit};
use crate::world::{NAMESPACE, World, settings};
use crate::{Stage, dra, install};

/// How long a refusal may take to come; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the log is watched after a story is over without a refusal.
const GRACE: Duration = Duration::from_secs(3);

/// One verb on one resource.
#[derive(Debug, Clone, PartialEq)]
struct Right {
    verb: String,
    group: String,
    resource: String,
    names: Option<Vec<String>>,
    /// In the namespace of the installation only.
    local: bool,
}

impl Right {
    fn all_of(rules: &[PolicyRule], local: bool) -> Vec<Self> {
        let mut rights = Vec::new();
        for rule in rules {
            for group in rule.api_groups.iter().flatten() {
                for resource in rule.resources.iter().flatten() {
                    for verb in &rule.verbs {
                        rights.push(Right {
                            verb: verb.clone(),
                            group: group.clone(),
                            resource: resource.clone(),
                            names: rule.resource_names.clone(),
                            local,
                        });
                    }
                }
            }
        }
        rights
    }

    fn rule(&self) -> Value {
        json!({"apiGroups": [self.group], "resources": [self.resource], "verbs": [self.verb],
            "resourceNames": self.names})
    }

    /// Whether a line of the API server's log says that it was missed: for a whole request, for what
    /// an apply has to create, or for a change to some fields.
    fn is_refused(&self, line: &str) -> bool {
        let Right { verb, group, resource, .. } = self;
        let entry: Value = serde_json::from_str(line).unwrap();
        let object = &entry["objectRef"];
        let asked = match object["subresource"].as_str() {
            Some(sub) => format!("{}/{sub}", object["resource"].as_str().unwrap_or_default()),
            None => object["resource"].as_str().unwrap_or_default().to_owned(),
        };
        let same = entry["verb"] == verb.as_str()
            && object["apiGroup"].as_str().unwrap_or_default() == group
            && asked == *resource;
        let message = entry["responseStatus"]["message"].as_str().unwrap_or_default();
        same && is_forbidden(line)
            || message.contains(&format!(
                "cannot {verb} resource \"{resource}\" in API group \"{group}\""
            ))
            || message.contains(&format!("requires resource=\"{resource}\", verb=\"{verb}\""))
    }
}

/// Whether a whole request was refused.
fn is_forbidden(line: &str) -> bool {
    line.contains("\"authorization.k8s.io/decision\":\"forbid\"") || line.contains("\"code\":403")
}

/// What became of a program that lacked a right.
#[derive(Debug, PartialEq)]
enum Verdict {
    Refused,
    /// It got to the end of its story without it.
    NotNeeded,
    /// Neither.
    Stuck,
}

/// An account with some rights, and what acts in its name.
struct Actor {
    name: String,
    client: Client,
    lacks: Right,
}

type Story = for<'a> fn(&'a Stage, &'a Actor) -> LocalBoxFuture<'a, ()>;

pub(crate) async fn needed(stage: &mut Stage) {
    dra::install_dra(stage).await;
    let stage = &*stage;
    let scheduler: Story = |stage, actor| place(stage, actor).boxed_local();
    let agent: Story = |stage, actor| serve(stage, actor).boxed_local();
    let both = ["muxflow-scheduler", "muxflow-scheduler-dra"];
    try_all(stage, "scheduler", &both, &["muxflow-scheduler"], scheduler).await;
    stage.world.clean().await;
    try_all(stage, "agent", &["muxflow-agent", "muxflow-agent-dra"], &[], agent).await;
    // Nor was anything refused in the other scenarios, of the accounts that are there: the scenario of
    // the chart takes the rights of those before them away while a scheduler runs.
    let log = std::fs::read_to_string(stage.cluster.audit_log()).unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(stage.client.clone(), install::NAMESPACE);
    for account in ["muxflow-scheduler", "muxflow-agent"] {
        let uid = accounts.get(account).await.unwrap().metadata.uid.unwrap();
        let user = format!("\"uid\":\"{uid}\"");
        let refused: Vec<&str> =
            log.lines().filter(|line| line.contains(&user) && is_forbidden(line)).collect();
        assert!(refused.is_empty(), "{account} was refused: {refused:?}");
    }
}

/// Every right of some roles, taken away in turn.
async fn try_all(stage: &Stage, prefix: &str, cluster: &[&str], local: &[&str], story: Story) {
    let mut rights = Vec::new();
    let roles: Api<ClusterRole> = Api::all(stage.client.clone());
    for name in cluster {
        let role = roles.get(name).await.unwrap();
        rights.extend(Right::all_of(&role.rules.unwrap(), false));
    }
    let roles: Api<Role> = Api::namespaced(stage.client.clone(), install::NAMESPACE);
    for name in local {
        rights.extend(Right::all_of(&roles.get(name).await.unwrap().rules.unwrap(), true));
    }
    // One that nobody was granted and nobody needs: who lacks only this has exactly the chart's rights,
    // and is how a right would look that is not needed.
    let none = Right {
        verb: "get".to_owned(),
        group: String::new(),
        resource: "configmaps".to_owned(),
        names: None,
        local: false,
    };
    let mut actors = Vec::new();
    for (number, lacks) in rights.iter().chain([&none]).enumerate() {
        let kept: Vec<&Right> = rights.iter().filter(|right| *right != lacks).collect();
        let name = format!("{prefix}-{number}");
        account(stage, &name, &kept).await;
        actors.push((name, lacks.clone()));
    }
    // The last one's rights are known to the API server after those of all others.
    let last = &actors[actors.len() - 1].0;
    until(|| async { allowed(stage, last, &rights).await.then_some(()) }).await;
    let trials = actors.into_iter().map(|(name, lacks)| async {
        let client = install::limited_in(stage, &name, &name).await;
        let actor = Actor { name, client, lacks };
        let verdict = trial(stage, &actor, story).await;
        (actor.lacks, verdict)
    });
    let verdicts = join_all(trials).await;
    let (enough, needed) = verdicts.split_last().unwrap();
    assert_eq!(enough.1, Verdict::NotNeeded, "the chart's rights for the {prefix} are not enough");
    let idle: Vec<_> = needed.iter().filter(|(_, v)| *v != Verdict::Refused).collect();
    assert!(idle.is_empty(), "rights of the {prefix} that are not needed: {idle:#?}");
    assert!(needed.len() > 8, "{}", needed.len());
}

async fn trial(stage: &Stage, actor: &Actor, story: Story) -> Verdict {
    let log = Log::from_now(stage);
    let user = format!("system:serviceaccount:{0}:{0}\"", actor.name);
    let refused = until(|| async {
        let news = log.news();
        let mut own = news.lines().filter(|line| line.contains(&user));
        own.any(|line| actor.lacks.is_refused(line)).then_some(())
    });
    tokio::pin!(refused);
    let over = tokio::select! {
        () = &mut refused => return Verdict::Refused,
        () = story(stage, actor) => true,
        () = tokio::time::sleep(PATIENCE) => false,
    };
    match tokio::time::timeout(GRACE, refused).await {
        Ok(()) => Verdict::Refused,
        Err(_) if over => Verdict::NotNeeded,
        Err(_) => Verdict::Stuck,
    }
}

/// What is new in the API server's log.
pub(crate) struct Log {
    file: PathBuf,
    read: Cell<u64>,
}

impl Log {
    pub(crate) fn from_now(stage: &Stage) -> Self {
        let file = stage.cluster.audit_log();
        let read = Cell::new(std::fs::metadata(&file).unwrap().len());
        Log { file, read }
    }

    /// Whole lines since the last time.
    pub(crate) fn news(&self) -> String {
        let mut file = std::fs::File::open(&self.file).unwrap();
        file.seek(SeekFrom::Start(self.read.get())).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        self.read.set(self.read.get() + text.len() as u64);
        text
    }
}

/// Asks again for as long as it takes; who calls it has a limit.
async fn until<T, F: Future<Output = Option<T>>>(ask: impl Fn() -> F) -> T {
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// A namespace with an account of the same name, with these rights.
async fn account(stage: &Stage, name: &str, rights: &[&Right]) {
    let rules = |local: bool| -> Vec<Value> {
        rights.iter().filter(|right| right.local == local).map(|right| right.rule()).collect()
    };
    let subjects = json!([{"kind": "ServiceAccount", "name": name, "namespace": name}]);
    let rbac = "rbac.authorization.k8s.io";
    let reference = |kind: &str| json!({"apiGroup": rbac, "kind": kind, "name": name});
    let here = json!({"name": name, "namespace": name});
    let version = format!("{rbac}/v1");
    for object in [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": here}),
        json!({"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": name},
            "rules": rules(false)}),
        json!({"apiVersion": version, "kind": "Role", "metadata": here, "rules": rules(true)}),
        json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": reference("ClusterRole"), "subjects": subjects}),
        json!({"apiVersion": version, "kind": "RoleBinding", "metadata": here,
            "roleRef": reference("Role"), "subjects": subjects}),
    ] {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let apply = PatchParams::apply("rights").force();
        let api = install::api(&stage.client, &object);
        api.patch(name, &apply, &Patch::Apply(&object)).await.unwrap();
    }
}

/// Whether the API server knows all rights of an account by now.
async fn allowed(stage: &Stage, name: &str, rights: &[Right]) -> bool {
    for right in rights {
        let object = right.names.as_ref().and_then(|names| names.first());
        let words = [&right.verb, &right.group, &right.resource].map(String::as_str);
        let namespace = if right.local { name } else { "" };
        if !install::may(stage, [name, name], words, namespace, object).await {
            return false;
        }
    }
    true
}

/// A budget that keeps the pods of one actor.
async fn budget(stage: &Stage, name: &str) -> Api<PodDisruptionBudget> {
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(stage.client.clone(), NAMESPACE);
    let budget = json!({"metadata": {"name": name}, "spec":
        {"minAvailable": 1, "selector": {"matchLabels": {"of": name}}}});
    budgets.create(&PostParams::default(), &serde_json::from_value(budget).unwrap()).await.unwrap();
    budgets
}

async fn budget_counts(budgets: &Api<PodDisruptionBudget>, name: &str) {
    until(|| async {
        let status = budgets.get(name).await.unwrap().status?;
        (status.current_healthy == 1).then_some(())
    })
    .await;
}

/// Waits until something was said about a pod.
async fn said(world: &World, pod: &str, reason: &str) {
    let events: Api<Event> = Api::namespaced(world.client.clone(), NAMESPACE);
    let of = ListParams::default().fields(&format!("regarding.name={pod}"));
    until(|| async {
        let all = events.list(&of).await.unwrap().items;
        all.iter().any(|event| event.reason.as_deref() == Some(reason)).then_some(())
    })
    .await;
}

/// The scheduler's story: it allocates a claim and binds its pod, tells another pod why it waits, is refused an eviction by a
/// budget, and evicts.
async fn place(stage: &Stage, actor: &Actor) {
    let (world, name) = (&stage.world, actor.name.as_str());
    world.node(name, json!({"of": name}), json!({})).await;
    let gpu = format!("GPU-{name}");
    world.gpu(&gpu, name, 20).await;
    let budgets = budget(stage, name).await;
    // Dozens of schedulers work at once: none of them is to give a request up early.
    let own = scheduler::Settings {
        scheduler: name.to_owned(),
        namespace: name.to_owned(),
        lease: Duration::from_secs(9),
        ..settings(name)
    };
    let running = tokio::spawn(scheduler::run(actor.client.clone(), own, std::future::pending()));
    let stop = StopAtEnd(running.abort_handle());
    let spec = || json!({"schedulerName": name, "nodeSelector": {"of": name}});
    let (first, second) = (format!("{name}-first"), format!("{name}-second"));
    let mut by_claim = spec();
    by_claim["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": name}]);
    by_claim["containers"] = json!([{"name": "c", "image": "none", "resources":
        {"claims": [{"name": "gpu"}]}}]);
    dra::claim(stage, name).await;
    world.pod(&first, json!({"labels": {"of": name}}), by_claim).await;
    said(world, &first, "Scheduled").await;
    world.pod(&second, json!({}), spec()).await;
    said(world, &second, "FailedScheduling").await;
    budget_counts(&budgets, name).await;
    world.last_word(&gpu, State::Overlimit).await;
    said(world, &first, "EvictionRefused").await;
    budgets.delete(name, &DeleteParams::default()).await.unwrap();
    said(world, &first, "GpuOverlimit").await;
    drop(stop);
}

/// Ends a task, however the story ends.
struct StopAtEnd(tokio::task::AbortHandle);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The agent's story: it reports its GPU and its devices, looks up a claim, lets a pod in, is refused
/// its eviction for a while, and evicts it.
async fn serve(stage: &Stage, actor: &Actor) {
    let (world, name) = (&stage.world, actor.name.as_str());
    world.node(name, json!({}), json!({})).await;
    let gpu = format!("GPU-{name}");
    let executor = FakeExecutor::new(&gpu);
    let folder = stage.cluster.folder().join(name);
    let sockets = Sockets::under(&folder);
    let own = node::settings(&folder, name, Some(sockets.clone()));
    let (wishes, told) = unbounded_channel();
    let started = Node::start(actor.client.clone(), &own, executor.clone(), told);
    // One that cannot start was refused.
    let Ok(agent) = started.map_err(drop).await else { return std::future::pending().await };
    let kubelet = dra::Kubelet::meet(&sockets).await;
    let claim =
        Claim { namespace: NAMESPACE.to_owned(), uid: "none".to_owned(), name: "none".to_owned() };
    kubelet.prepare(&claim).await.unwrap_err();
    until(|| async { world.gpus.get_opt(&gpu.to_lowercase()).await.unwrap()?.status }).await;
    until(|| async { (dra::offered(stage, name).await.len() == 2).then_some(()) }).await;
    let budgets = budget(stage, name).await;
    let pod = format!("{name}-guest");
    let uid = node::bound_to(stage, &pod, json!({"labels": {"of": name}}), name, &gpu).await;
    until(|| async { executor.guest(&uid) }).await;
    budget_counts(&budgets, name).await;
    executor.set(State::Overlimit);
    wishes.send(overlimit(&uid)).unwrap();
    said(world, &pod, "EvictionRefused").await;
    executor.set(State::Healthy);
    until(|| async { executor.has_relented().then_some(()) }).await;
    budgets.delete(name, &DeleteParams::default()).await.unwrap();
    executor.set(State::Overlimit);
    wishes.send(overlimit(&uid)).unwrap();
    said(world, &pod, "GpuOverlimit").await;
    agent.stop().await;
}
