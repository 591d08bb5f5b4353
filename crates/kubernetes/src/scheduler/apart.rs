//! Pods that keep others away: required anti-affinity of those that are on a node already.
//!
//! In Kubernetes it counts both ways: who comes must not be where a pod will not have it, though it
//! asks for nothing itself. Such rules are gathered from all pods, once for all that say the same, with
//! the places where they hold. A waiting pod then carries only the rules that select it: hardly any
//! selects offline jobs, so pods stay of one kind though their labels differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, PodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::pods;

/// One rule, of one pod or of many.
#[derive(PartialEq)]
pub(crate) struct Rule {
    number: usize,
    selector: LabelSelector,
    /// None means all.
    namespaces: Option<Vec<String>>,
    /// The label by which places are told apart.
    key: String,
    /// The places where a pod with this rule is.
    places: BTreeSet<String>,
}

/// By its number: pods are compared by what they ask for, and a rule may have thousands of places.
impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rule {}", self.number)
    }
}

impl Rule {
    fn of(number: usize, owner: &Pod, term: &PodAffinityTerm) -> Self {
        let listed = term.namespaces.clone().unwrap_or_default();
        // What a namespace is labelled with is not known here; whoever may be meant is kept away.
        let namespaces = match (&term.namespace_selector, listed.is_empty()) {
            (Some(_), _) => None,
            (None, false) => Some(listed),
            (None, true) => Some(owner.metadata.namespace.iter().cloned().collect()),
        };
        Rule {
            number,
            // No selector selects nothing; its rule was passed over.
            selector: term.label_selector.clone().unwrap_or_default(),
            namespaces,
            key: term.topology_key.clone(),
            places: BTreeSet::new(),
        }
    }

    fn selects(&self, pod: &Pod) -> bool {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let labels = pod.metadata.labels.as_ref();
        let label = |key: &str| labels.and_then(|l| l.get(key)).map(String::as_str);
        let exact = self.selector.match_labels.iter().flatten();
        self.namespaces.as_ref().is_none_or(|all| all.iter().any(|n| n == namespace))
            && exact.into_iter().all(|(key, value)| label(key) == Some(value))
            && self
                .selector
                .match_expressions
                .iter()
                .flatten()
                .all(|expression| holds(expression, label(&expression.key)))
    }

    /// Whether a pod with this rule is where the node is.
    pub(crate) fn covers(&self, node: &Node) -> bool {
        place(node, &self.key).is_some_and(|place| self.places.contains(place))
    }
}

fn holds(expression: &LabelSelectorRequirement, value: Option<&str>) -> bool {
    let listed = || {
        let values = expression.values.as_deref().unwrap_or_default();
        value.is_some_and(|v| values.iter().any(|x| x == v))
    };
    match expression.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        // Not known: whoever may be meant is kept away.
        _ => true,
    }
}

fn place<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// The rules of all pods on all nodes.
#[derive(Debug, Default)]
pub(crate) struct Rules(Vec<Arc<Rule>>);

impl Rules {
    /// Of the pods that are not over; `nodes` are those of the cluster.
    pub(crate) fn of(pods: &[Arc<Pod>], nodes: &[Arc<Node>]) -> Self {
        let mut strict = pods
            .iter()
            .filter(|pod| !pods::is_finished(pod) && !terms(pod).is_empty())
            .filter_map(|pod| Some((pod, pods::node(pod)?)))
            .peekable();
        if strict.peek().is_none() {
            return Rules::default(); // As it is in most clusters.
        }
        let by_name: BTreeMap<&str, &Arc<Node>> =
            nodes.iter().filter_map(|n| Some((n.metadata.name.as_deref()?, n))).collect();
        let mut rules: BTreeMap<String, Rule> = BTreeMap::new();
        for (pod, node) in strict {
            let Some(node) = by_name.get(node) else { continue };
            for term in terms(pod).iter().filter(|term| term.label_selector.is_some()) {
                let Some(place) = place(node, &term.topology_key) else { continue };
                let number = rules.len();
                let rule = Rule::of(number, pod, term);
                let same = format!("{:?} {:?} {}", rule.selector, rule.namespaces, rule.key);
                rules.entry(same).or_insert(rule).places.insert(place.to_owned());
            }
        }
        Rules(rules.into_values().map(Arc::new).collect())
    }

    /// Those that keep a pod away.
    pub(crate) fn against(&self, pod: &Pod) -> Vec<Arc<Rule>> {
        self.0.iter().filter(|rule| rule.selects(pod)).cloned().collect()
    }
}

fn terms(pod: &Pod) -> &[PodAffinityTerm] {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.affinity.as_ref())
        .and_then(|affinity| affinity.pod_anti_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_deref())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(name: &str, zone: &str) -> Arc<Node> {
        let labels = json!({"zone": zone, "kubernetes.io/hostname": name});
        let node = json!({"metadata": {"name": name, "labels": labels}});
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn pod(namespace: &str, labels: Value) -> Pod {
        let metadata = json!({"name": "p", "namespace": namespace, "labels": labels});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap()
    }

    /// A pod in `shop` on a node, with one term.
    fn strict(node: &str, term: Value) -> Arc<Pod> {
        let affinity = json!({"podAntiAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
        let pod = json!({"metadata": {"name": "web", "namespace": "shop"},
            "spec": {"containers": [], "nodeName": node, "affinity": affinity}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    /// Which of three nodes are left for a pod; the first two are in one zone.
    fn left(term: Value, pod: &Pod) -> Vec<bool> {
        let nodes = [node("n1", "a"), node("n2", "a"), node("n3", "b")];
        let rules = Rules::of(&[strict("n1", term)], &nodes).against(pod);
        nodes.iter().map(|node| !rules.iter().any(|rule| rule.covers(node))).collect()
    }

    #[test]
    fn who_is_selected_is_kept_out_of_the_place() {
        let batch = pod("shop", json!({"kind": "batch"}));
        let by =
            |key: &str, selector: Value| json!({"topologyKey": key, "labelSelector": selector});
        let all = [true, true, true];
        assert_eq!(left(by("zone", json!({})), &batch), [false, false, true]);
        assert_eq!(left(by("kubernetes.io/hostname", json!({})), &batch), [false, true, true]);
        assert_eq!(left(by("rack", json!({})), &batch), all, "no node has the label");
        assert_eq!(left(json!({"topologyKey": "zone"}), &batch), all, "selects nothing");
        for (labels, selected) in [(json!({"kind": "batch"}), true), (json!({"kind": "x"}), false)]
        {
            let got = left(by("zone", json!({"matchLabels": labels})), &batch);
            assert_eq!(got[0], !selected, "{labels}");
        }
        for (operator, key, values, selected) in [
            ("In", "kind", json!(["batch", "x"]), true),
            ("In", "gone", json!(["x"]), false),
            ("NotIn", "kind", json!(["x"]), true),
            ("NotIn", "gone", json!(["x"]), true),
            ("Exists", "kind", json!(null), true),
            ("DoesNotExist", "kind", json!(null), false),
        ] {
            let one = json!([{"key": key, "operator": operator, "values": values}]);
            let got = left(by("zone", json!({"matchExpressions": one})), &batch);
            assert_eq!(got[0], !selected, "{operator} {key}");
        }
    }

    #[test]
    fn a_rule_is_about_its_own_namespace_unless_it_names_others() {
        let elsewhere = pod("lab", json!({}));
        let mut term = json!({"topologyKey": "zone", "labelSelector": {}});
        assert!(left(term.clone(), &elsewhere)[0]);
        term["namespaces"] = json!(["lab"]);
        assert!(!left(term.clone(), &elsewhere)[0]);
        assert!(left(term.clone(), &pod("shop", json!({})))[0], "its own is not listed");
        term["namespaceSelector"] = json!({"matchLabels": {"team": "x"}});
        assert!(!left(term, &pod("other", json!({})))[0], "who may be meant is kept away");
    }

    #[test]
    fn pods_that_say_the_same_make_one_rule() {
        let term = || json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {}});
        let nodes = [node("n1", "a"), node("n2", "a"), node("n3", "a")];
        let mut over = (*strict("n3", term())).clone();
        over.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
        let pods = [strict("n1", term()), strict("n2", term()), Arc::new(over)];
        let rules = Rules::of(&pods, &nodes).against(&pod("shop", json!({})));
        assert_eq!(rules.len(), 1);
        let covered = nodes.each_ref().map(|node| rules[0].covers(node));
        assert_eq!(covered, [true, true, false]);
    }
}
