//! A cycle that fails is tried again soon, though nothing happens that would wake the scheduler.

use std::time::Duration;

use muxflow_api::jobs::JobState;
use muxflow_manager::clock;
use muxflow_manager::manager::Settings;
use muxflow_store::events::NewEvent;

use crate::{World, world};

/// The disk is full, down to the last byte that an event would fit into.
fn fill(world: &World) {
    world.manager.store().limit_pages(1).unwrap();
    let told = || {
        world.manager.change(|change| {
            change.tell(NewEvent {
                at: clock::now(),
                kind: "alert",
                gpu: None,
                job: None,
                service: None,
                text: String::new(),
            });
            Ok(())
        })
    };
    while told().is_ok() {}
}

#[test]
fn jobs_do_not_wait_for_the_interval_after_a_full_disk() {
    let world = world(1, Settings::default());
    world.node.change(0, |gpu| gpu.placeable = false);
    let id = world.submit(|_| {});
    world.wait(&id, "queued", |job| job.state == JobState::Queued);
    fill(&world);
    // The one wake that it gets meets the full disk.
    world.node.change(0, |gpu| gpu.placeable = true);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(world.manager.job(id.as_str()).unwrap().state, JobState::Queued);
    assert!(world.node.running().is_empty(), "written down first");
    world.manager.store().limit_pages(1 << 30).unwrap();
    world.runs(&id);
}
