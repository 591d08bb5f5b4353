//! Room that jobs take which have ended: what they were submitted with, and their output.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_manager::clock;
use muxflow_manager::manager::Settings;
use muxflow_manager::node::NodePort;
use muxflow_types::JobId;

use crate::{World, world};

/// Jobs that ended one after another, each with a command and output of these lengths.
fn ended(world: &World, lengths: [(usize, usize); 4]) -> [JobId; 4] {
    lengths.map(|(command, output)| {
        let id = world.submit(|submit| submit.command.push("x".repeat(command)));
        std::fs::write(world.node.log_file(&id, "stdout"), "x".repeat(output)).unwrap();
        world.manager.cancel(&world.caller, id.as_str()).unwrap();
        world.wait(&id, "cancelled", |job| job.state.is_final());
        id
    })
}

fn left(world: &World, ids: &[JobId]) -> Vec<bool> {
    let is_there = |id: &JobId| {
        let is_kept = world.manager.row(id.as_str()).is_ok();
        assert_eq!(is_kept, world.node.log_file(id, "stdout").exists(), "both or neither: {id}");
        is_kept
    };
    ids.iter().map(is_there).collect()
}

#[test]
fn ended_jobs_of_a_user_take_only_so_much_room() {
    let limits = Settings {
        keep_bytes_per_user: 10_000,
        keep_output_bytes_per_user: 5_000,
        ..Settings::default()
    };
    // The only GPU is taken: what is cancelled never began.
    let world = world(1, limits);
    let open = world.submit(|submit| submit.command.push("x".repeat(20_000)));
    world.runs(&open);
    let stay = AtomicBool::new(false);
    let sweep = || world.manager.sweep(clock::now(), &stay).unwrap();
    let small = ended(&world, [(10, 10), (10, 10), (10, 10), (10, 10)]);
    assert_eq!((sweep(), left(&world, &small)), (0, vec![true; 4]));
    // The last two commands fit, and what ended before them does not.
    let long = ended(&world, [(4_000, 10), (4_000, 10), (4_000, 10), (4_000, 10)]);
    assert_eq!((sweep(), left(&world, &small)), (6, vec![false; 4]));
    assert_eq!(left(&world, &long), [false, false, true, true]);
    // So it is with output.
    let loud = ended(&world, [(10, 3_000), (10, 2_000), (10, 2_000), (10, 900)]);
    assert_eq!((sweep(), left(&world, &long)), (3, vec![false; 4]));
    assert_eq!(left(&world, &loud), [false, true, true, true]);
    assert_eq!(sweep(), 0);
    assert!(world.manager.row(open.as_str()).is_ok(), "open jobs are not counted");
}

/// Who submits and cancels without end is faster than the next sweep.
#[test]
fn a_sweep_comes_early_when_much_was_taken_in() {
    let world = world(1, Settings { keep_bytes_per_user: 1, ..Settings::default() });
    let open = world.submit(|_| {});
    world.runs(&open);
    let ids = ended(&world, [(10, 10), (10, 10), (10, 10), (10, 10)]);
    let taken = world.manager.taken_in.load(Ordering::Relaxed);
    assert!((200..2_000).contains(&taken), "{taken}");
    assert_eq!(left(&world, &ids), [true; 4]);
    world.manager.taken_in.fetch_add(64 << 20, Ordering::Relaxed);
    let deadline = Instant::now() + Duration::from_secs(40);
    while ids.iter().any(|id| world.manager.row(id.as_str()).is_ok()) {
        assert!(Instant::now() < deadline, "nothing is removed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(world.manager.taken_in.load(Ordering::Relaxed) < 64 << 20, "it counts anew");
}
