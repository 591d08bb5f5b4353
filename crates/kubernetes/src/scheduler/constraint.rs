//! What a pod asks of a node, and what stands against it.
//!
//! The rules are those of Kubernetes: selectors, required node affinity, taints, cordons, resource
//! requests, and the anti-affinity of pods that are there already. A hard rule that is not understood here is named, and the pod waits: to place it anyway
//! would break a promise that its owner relies on. Preferences (soft affinity, soft spreading) are
//! not looked at.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    Container, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Taint,
    Toleration,
};

use super::apart::{Rule, Rules};
use crate::names;
use crate::quantity::{self, Amounts};

/// All that a pod asks of a node. Pods that ask for the same are planned as one kind.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Requirement {
    selector: BTreeMap<String, String>,
    affinity: Option<NodeSelector>,
    tolerations: Vec<Toleration>,
    /// Rules of other pods that keep it away from where they are.
    apart: Vec<Arc<Rule>>,
    /// Resources, a place among the node's pods included.
    pub(crate) requests: Amounts,
}

/// What stands against a pod on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Obstacle {
    Cordoned,
    Selector,
    Affinity,
    Taint(String),
    AntiAffinity,
    Lacks(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Cordoned => write!(f, "cordoned"),
            Obstacle::Selector => write!(f, "outside its node selector"),
            Obstacle::Affinity => write!(f, "outside its node affinity"),
            Obstacle::Taint(taint) => write!(f, "with the untolerated taint {taint}"),
            Obstacle::AntiAffinity => write!(f, "with a pod whose anti-affinity keeps it away"),
            Obstacle::Lacks(resource) => write!(f, "with too little {resource}"),
        }
    }
}

impl Requirement {
    /// Reads a pod; `rules` are those of the pods that are on nodes.
    pub(crate) fn of(pod: &Pod, rules: &Rules) -> Self {
        let Some(spec) = &pod.spec else {
            return Requirement {
                selector: BTreeMap::new(),
                affinity: None,
                tolerations: Vec::new(),
                apart: rules.against(pod),
                requests: requests(pod),
            };
        };
        Requirement {
            selector: spec.node_selector.clone().unwrap_or_default(),
            affinity: spec
                .affinity
                .as_ref()
                .and_then(|a| a.node_affinity.as_ref())
                .and_then(|a| a.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            apart: rules.against(pod),
            requests: requests(pod),
        }
    }

    /// What stands against it on a node with this much free; `None` when nothing does.
    pub(crate) fn obstacle(&self, node: &Node, free: &Amounts) -> Option<Obstacle> {
        let spec = node.spec.as_ref();
        if spec.and_then(|s| s.unschedulable).unwrap_or(false) {
            return Some(Obstacle::Cordoned);
        }
        let labels = node.metadata.labels.as_ref();
        let label = |key: &str| labels.and_then(|l| l.get(key)).map(String::as_str);
        if self.selector.iter().any(|(key, value)| label(key) != Some(value)) {
            return Some(Obstacle::Selector);
        }
        let name = node.metadata.name.as_deref().unwrap_or_default();
        if let Some(affinity) = &self.affinity
            && !affinity.node_selector_terms.iter().any(|t| term_holds(t, &label, name))
        {
            return Some(Obstacle::Affinity);
        }
        let taints = spec.and_then(|s| s.taints.as_deref()).unwrap_or_default();
        if let Some(taint) = taints.iter().find(|t| !self.tolerates(t)) {
            return Some(Obstacle::Taint(taint.key.clone()));
        }
        if self.apart.iter().any(|rule| rule.covers(node)) {
            return Some(Obstacle::AntiAffinity);
        }
        quantity::first_lacking(&self.requests, free).map(|r| Obstacle::Lacks(r.to_owned()))
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        if taint.effect == "PreferNoSchedule" {
            return true;
        }
        self.tolerations.iter().any(|t| {
            let effect = t.effect.as_deref().unwrap_or_default();
            let key = t.key.as_deref().unwrap_or_default();
            let exists = t.operator.as_deref() == Some("Exists");
            (effect.is_empty() || effect == taint.effect)
                && (key == taint.key || (key.is_empty() && exists))
                && (exists
                    || t.value.as_deref().unwrap_or_default()
                        == taint.value.as_deref().unwrap_or_default())
        })
    }
}

fn term_holds<'a>(
    term: &NodeSelectorTerm,
    label: &impl Fn(&str) -> Option<&'a str>,
    name: &str,
) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // An empty term selects nothing.
    (!expressions.is_empty() || !fields.is_empty())
        && expressions.iter().all(|e| expression_holds(e, label(&e.key)))
        && fields.iter().all(|f| f.key == "metadata.name" && expression_holds(f, Some(name)))
}

fn expression_holds(expression: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = expression.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|v| values.iter().any(|x| x == v));
    let number = |text: Option<&str>| text.and_then(|t| t.parse::<i64>().ok());
    let bound = || number(values.first().map(String::as_str));
    match expression.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number(value).zip(bound()).is_some_and(|(v, b)| v > b),
        "Lt" => number(value).zip(bound()).is_some_and(|(v, b)| v < b),
        _ => false,
    }
}

/// What a pod takes from a node: all its containers at once, or its largest init container, if that
/// is more, with sidecars beside both; and one place.
pub(crate) fn requests(pod: &Pod) -> Amounts {
    let mut total = Amounts::new();
    let mut initial = Amounts::new();
    if let Some(spec) = &pod.spec {
        let mut sidecars = Amounts::new();
        for container in spec.init_containers.iter().flatten() {
            let own = container_requests(container);
            if container.restart_policy.as_deref() == Some("Always") {
                quantity::add(&mut sidecars, &own);
                quantity::maximum(&mut initial, &sidecars);
            } else {
                let mut beside = sidecars.clone();
                quantity::add(&mut beside, &own);
                quantity::maximum(&mut initial, &beside);
            }
        }
        quantity::add(&mut total, &sidecars);
        for container in &spec.containers {
            quantity::add(&mut total, &container_requests(container));
        }
        quantity::maximum(&mut total, &initial);
        // What is asked for the pod as a whole counts instead of what its containers ask for.
        total.extend(quantity::amounts(spec.resources.as_ref().and_then(|r| r.requests.as_ref())));
        quantity::add(&mut total, &quantity::amounts(spec.overhead.as_ref()));
    }
    total.insert("pods".to_owned(), 1000);
    total
}

fn container_requests(container: &Container) -> Amounts {
    quantity::amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref()))
}

/// The first thing about a pod that this scheduler does not do, by its field; such a pod waits.
pub(crate) fn unsupported(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let asked = requests(pod).get(names::OFFLINE_RESOURCE).copied().unwrap_or(0);
    let claims = spec.resource_claims.as_ref().map_or(0, Vec::len);
    if !matches!((asked, claims), (1000, 0) | (0, 1)) {
        if claims > 0 {
            return Some(format!(
                "it has {claims} resource claims and requests {} {}; an offline job has exactly one of either",
                asked / 1000,
                names::OFFLINE_RESOURCE
            ));
        }
        let asked = asked / 1000;
        return Some(format!(
            "it requests {asked} {}; an offline job has exactly 1, other pods belong to another scheduler",
            names::OFFLINE_RESOURCE
        ));
    }
    unsupported_field(spec).map(|field| format!("`{field}` is not supported by this scheduler"))
}

fn unsupported_field(spec: &PodSpec) -> Option<&'static str> {
    let affinity = spec.affinity.as_ref();
    if affinity
        .and_then(|a| a.pod_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref())
        .is_some_and(|terms| !terms.is_empty())
    {
        return Some("affinity.podAffinity.required…");
    }
    if affinity
        .and_then(|a| a.pod_anti_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref())
        .is_some_and(|terms| !terms.is_empty())
    {
        return Some("affinity.podAntiAffinity.required…");
    }
    if spec
        .topology_spread_constraints
        .iter()
        .flatten()
        .any(|c| c.when_unsatisfiable == "DoNotSchedule")
    {
        return Some("topologySpreadConstraints with DoNotSchedule");
    }
    if spec
        .volumes
        .iter()
        .flatten()
        .any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some())
    {
        return Some("volumes with a persistentVolumeClaim");
    }
    if spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .flat_map(|c| c.ports.iter().flatten())
        .any(|p| p.host_port.is_some_and(|port| port != 0))
    {
        return Some("ports.hostPort");
    }
    // The kubelet would give its device to the next container too, under a name that is promised once.
    let ends = |c: &&Container| c.restart_policy.as_deref() != Some("Always");
    if spec
        .init_containers
        .iter()
        .flatten()
        .filter(ends)
        .any(|c| container_requests(c).get(names::OFFLINE_RESOURCE).is_some_and(|n| *n > 0))
    {
        return Some("initContainers.resources with muxflow.dev/offline");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn node(labels: Value, spec: Value) -> Node {
        let metadata = json!({"name": "n1", "labels": labels});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    fn container(requests: Value) -> Value {
        json!({"name": "c", "resources": {"requests": requests}})
    }

    fn obstacle(pod_spec: Value, node: &Node) -> Option<Obstacle> {
        let free = Amounts::from([("cpu".into(), 1000), ("pods".into(), 1000)]);
        Requirement::of(&pod(pod_spec), &Rules::default()).obstacle(node, &free)
    }

    #[test]
    fn selectors_and_affinity_choose_nodes_by_label() {
        let n = node(json!({"zone": "a", "cores": "8"}), json!({}));
        let with = |operator: &str, key: &str, values: Value| {
            json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]}}}})
        };
        assert_eq!(obstacle(json!({"containers": [], "nodeSelector": {"zone": "a"}}), &n), None);
        assert_eq!(
            obstacle(json!({"containers": [], "nodeSelector": {"zone": "b"}}), &n),
            Some(Obstacle::Selector)
        );
        for (operator, key, values, fits) in [
            ("In", "zone", json!(["a", "b"]), true),
            ("In", "zone", json!(["b"]), false),
            ("In", "gone", json!(["b"]), false),
            ("NotIn", "zone", json!(["b"]), true),
            ("NotIn", "gone", json!(["b"]), true),
            ("Exists", "zone", json!([]), true),
            ("DoesNotExist", "zone", json!([]), false),
            ("Gt", "cores", json!(["7"]), true),
            ("Lt", "cores", json!(["8"]), false),
            ("Gt", "zone", json!(["7"]), false),
        ] {
            let got = obstacle(with(operator, key, values), &n);
            assert_eq!(got.is_none(), fits, "{operator} {key}: {got:?}");
        }
        let by_name = json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{}, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}}}});
        assert_eq!(obstacle(by_name, &n), None);
        let nothing = json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{}]}}}});
        assert_eq!(obstacle(nothing, &n), Some(Obstacle::Affinity));
    }

    #[test]
    fn taints_need_their_tolerations() {
        let taint = |effect: &str| {
            node(json!({}), json!({"taints": [{"key": "k", "value": "v", "effect": effect}]}))
        };
        let tolerating = |t: Value| json!({"containers": [], "tolerations": [t]});
        let refused = Some(Obstacle::Taint("k".into()));
        assert_eq!(obstacle(json!({"containers": []}), &taint("NoSchedule")), refused);
        assert_eq!(obstacle(json!({"containers": []}), &taint("PreferNoSchedule")), None);
        for (toleration, fits) in [
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "operator": "Equal", "value": "w"}), false),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), false),
        ] {
            let got = obstacle(tolerating(toleration.clone()), &taint("NoSchedule"));
            assert_eq!(got.is_none(), fits, "{toleration}");
        }
        let cordoned = node(json!({}), json!({"unschedulable": true}));
        assert_eq!(obstacle(json!({"containers": []}), &cordoned), Some(Obstacle::Cordoned));
    }

    #[test]
    fn a_pod_takes_what_its_hungriest_moment_takes() {
        let p = pod(json!({
            "containers": [container(json!({"cpu": "300m"})), container(json!({"cpu": "200m"}))],
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
                {"name": "i", "resources": {"requests": {"cpu": "700m"}}},
            ],
            "overhead": {"cpu": "50m"},
        }));
        assert_eq!(requests(&p)["cpu"], 850);
        assert_eq!(requests(&p)["pods"], 1000);
        let whole = pod(json!({"containers": [container(json!({"cpu": "1", "x": "2"}))],
            "resources": {"requests": {"cpu": "3"}}, "overhead": {"cpu": "50m"}}));
        assert_eq!((requests(&whole)["cpu"], requests(&whole)["x"]), (3050, 2000));
        let n = node(json!({}), json!({}));
        let big = json!({"containers": [container(json!({"cpu": "1001m"}))]});
        assert_eq!(obstacle(big, &n), Some(Obstacle::Lacks("cpu".into())));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let ask = |n: &str| container(json!({"muxflow.dev/offline": n}));
        assert_eq!(unsupported(&pod(json!({"containers": [ask("1")]}))), None);
        let claims = json!({"containers": [{"name": "c"}], "resourceClaims": [{"name": "x"}]});
        assert_eq!(unsupported(&pod(claims)), None);
        assert!(
            unsupported(&pod(json!({"containers": [ask("2")]}))).unwrap().contains("requests 2")
        );
        for (field, spec) in [
            (
                "podAntiAffinity",
                json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "x"}]}}}),
            ),
            (
                "podAffinity",
                json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "x"}]}}}),
            ),
            (
                "topologySpread",
                json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "x", "whenUnsatisfiable": "DoNotSchedule"}]}),
            ),
            ("resource claims", json!({"resourceClaims": [{"name": "x"}]})),
            (
                "persistentVolumeClaim",
                json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}),
            ),
            ("initContainers.resources", json!({"initContainers": [ask("1")]})),
        ] {
            let mut spec = spec;
            spec["containers"] = json!([ask("1")]);
            let said = unsupported(&pod(spec)).unwrap();
            assert!(said.contains(field), "{said}");
        }
        let first = json!({"containers": [{"name": "c"}], "initContainers": [ask("1")]});
        assert!(unsupported(&pod(first)).unwrap().contains("initContainers.resources"));
        let mut beside = ask("1");
        beside["restartPolicy"] = json!("Always");
        let sidecar = json!({"containers": [{"name": "c"}], "initContainers": [beside]});
        assert_eq!(unsupported(&pod(sidecar)), None);
    }
}
