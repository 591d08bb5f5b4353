//! Who is on a GPU already: what its agent says or no longer says, and what its owner is told.

use super::*;
use crate::scheduler::pods::Hold;

#[test]
fn an_agent_that_starts_evicts_nobody_and_takes_nobody() {
    for reschedule in [false, true] {
        let mut world = settled(|s| s.state = State::Init);
        world.reschedule = reschedule;
        assert_eq!(world.leaving(), [], "Init");
        world.gpus[0] = {
            let mut bare = gpu("GPU-a", "n1");
            bare.status = None;
            Arc::new(bare)
        };
        assert_eq!(world.leaving(), [], "without a status");
    }
    let mut world = settled(|s| s.state = State::Init);
    world.pods = vec![waiting("new")];
    assert_eq!(world.bound(), []);
}

#[test]
fn an_agent_that_lives_evicts_by_itself() {
    for state in [State::Overlimit, State::Disabled] {
        for reschedule in [false, true] {
            let mut world = settled(|s| s.state = state);
            world.reschedule = reschedule;
            assert_eq!(world.leaving(), [], "{state:?}");
            world.pods.push(waiting("new"));
            assert_eq!(world.bound(), [], "{state:?}");
        }
        let silent = settled(|s| {
            s.state = state;
            s.observed_at.0 = at(NOW_S - 301);
        });
        assert_eq!(silent.leaving(), [("job".to_owned(), "GpuOverlimit")]);
    }
    let silent = settled(|s| s.observed_at.0 = at(NOW_S - 301));
    assert_eq!(silent.leaving(), [], "a healthy GPU whose agent is silent");
}

#[test]
fn a_move_off_an_ill_gpu_says_so() {
    let mut world = settled(|s| {
        s.state = State::Overlimit;
        s.observed_at.0 = at(NOW_S - 301);
    });
    world.gpus.push(Arc::new(gpu("GPU-b", "n1")));
    let actions = world.actions();
    let [Action::Evict { reason, note, forced: true, .. }] = actions.as_slice() else {
        panic!("{actions:?}")
    };
    assert_eq!(*reason, "GpuOverlimit");
    assert!(note.contains("GPU-a") && note.contains("GPU-b is free"), "{note}");
}

#[test]
fn a_gpu_that_nobody_reports_is_gone_only_after_minutes() {
    let mut world = settled(|_| {}).rescheduled();
    world.gpus.clear();
    assert_eq!(world.leaving(), []);
    let gone = GpuId::new("GPU-a").unwrap();
    assert_eq!(world.assemble().missing, BTreeSet::from([gone.clone()]));
    world.missing.insert(gone.clone(), Micros(pods::micros(at(NOW_S - 299)).0));
    assert_eq!(world.leaving(), []);
    world.missing.insert(gone, pods::micros(at(NOW_S - 300)));
    assert_eq!(world.leaving(), [("job".to_owned(), "GpuGone")]);
}

#[test]
fn an_old_status_takes_nothing_new() {
    let world = settled(|s| s.observed_at.0 = at(NOW_S - 301)).rescheduled();
    assert_eq!(world.assemble().snapshot.gpus[0].health, HealthState::Unhealthy);
}

#[test]
fn silence_is_no_reason_to_evict_for_a_leader_that_has_just_begun() {
    let mut world = settled(|s| {
        s.state = State::Overlimit;
        s.observed_at.0 = at(NOW_S - 3600);
    });
    world.watched = Micros::from_secs(299);
    assert_eq!(world.leaving(), [], "agents may have had nobody to tell");
    world.pods.push(waiting("new"));
    assert_eq!(world.bound(), [], "yet it is no place for a pod");
    world.watched = Micros::from_secs(300);
    assert_eq!(world.leaving(), [("job".to_owned(), "GpuOverlimit")]);
}

/// A pod of a Job without a podFailurePolicy, on the GPU.
fn punished() -> World {
    let mut world = settled(|_| {});
    let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j",
        "controller": true}]);
    let pod = Arc::make_mut(&mut world.pods[0]);
    pod.metadata.owner_references = Some(serde_json::from_value(owner).unwrap());
    let job = json!({"metadata": {"name": "train", "uid": "j"}, "spec": {"template": {}}});
    world.jobs.push(Arc::new(serde_json::from_value(job).unwrap()));
    world
}

#[test]
fn an_owner_is_told_that_its_pod_stays_until_the_pod_says_so() {
    for reschedule in [false, true] {
        let mut world = punished();
        world.reschedule = reschedule;
        // In each cycle: nobody knows whether the word of the one before has arrived.
        for _ in 0..2 {
            assert!(!world.assemble().is_idle());
            let actions = world.actions();
            let [Action::Held { pod, hold: Hold::CountsAsFailure, note }] = actions.as_slice()
            else {
                panic!("{actions:?}")
            };
            assert_eq!(pod.name, "job");
            assert!(note.contains("podFailurePolicy"), "{note}");
        }
        let said = json!({"phase": "Running", "conditions":
            [{"type": names::MOVABLE_CONDITION, "status": "False"}]});
        let pod = Arc::make_mut(&mut world.pods[0]);
        pod.status = Some(serde_json::from_value(said).unwrap());
        assert!(world.assemble().is_idle());
    }
    let forgiven = settled(|_| {});
    assert!(forgiven.assemble().is_idle(), "one that may be moved is told nothing");
}
