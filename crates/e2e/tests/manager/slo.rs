//! A declared service whose requests take too long: the job beside it leaves. And `up` that is told to
//! leave while a request is under way: the request is answered.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use muxflow_api::events::EventList;
use muxflow_api::jobs::{JobDetail, JobState};

use crate::replica::{ask, declare, held, hold, look, release};
use crate::world::{World, inside};

#[test]
fn a_job_leaves_when_requests_take_longer_than_the_slo() {
    inside("slo::inner_slo", "t4");
}

#[test]
#[ignore = "run inside an emulated node by a_job_leaves_when_requests_take_longer_than_the_slo"]
fn inner_slo() {
    let mut world = World::start("[profiler]\nenabled = false\n");
    world.wait_healthy(1);
    // Far more than an answer takes on a machine that has too much to do.
    let front = declare(&world, 3_000);
    let worker = world.worker(1_000);
    let mut words = vec!["submit", "--"];
    words.extend(worker.iter().map(String::as_str));
    let id = world.must(&words).trim().to_owned();
    world.wait(&id, "it runs beside the service", |job| {
        job.state == JobState::Running
            && world.gpus()[0].online.is_some()
            && world.gpus()[0].offline.as_ref().is_some_and(|on| on.launches > 50)
    });
    // Many clients, and nobody answers them.
    hold(&world);
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let (stop, front) = (Arc::clone(&stop), front.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    drop(ask(&front));
                }
            })
        })
        .collect();
    world.wait(&id, "it has left", |job| job.state == JobState::Queued);
    let detail: JobDetail = world.client.get(&format!("/v1/jobs/{id}/detail")).unwrap();
    let outcome = &detail.runs[0].outcome;
    assert_eq!(outcome, "stopped: health: GPU is Overlimit");
    let events =
        |kind: &str| -> EventList { world.client.get(&format!("/v1/events?kind={kind}")).unwrap() };
    let evicted = events("eviction").items;
    assert!(evicted.iter().any(|event| event.job.as_deref() == Some(id.as_str())), "{evicted:#?}");
    let turned = events("health").items;
    let by_latency = |text: &str| text.contains("→ Overlimit: ") && text.contains("latency");
    assert!(turned.iter().any(|event| by_latency(&event.text)), "{turned:#?}");
    let over = look(&world).latency.p99_ms;
    println!("MEASURED job left {outcome:?}, latency at the front {over:?} ms");
    world.must(&["cancel", &id]);
    stop.store(true, Ordering::Relaxed);
    release(&world);
    clients.into_iter().for_each(|client| client.join().unwrap());
    under_way(&mut world, &front);
    world.must(&["service", "remove", "web"]);
    world.end();
}

/// A request that is under way when the manager is told to leave is answered before the port is gone.
fn under_way(world: &mut World, front: &str) {
    world.until("no request is left", || look(world).replicas[0].outstanding == 0);
    hold(world);
    let (send, answered) = mpsc::channel();
    let address = front.to_owned();
    let client = std::thread::spawn(move || send.send(ask(&address).map_err(|e| e.to_string())));
    world.until("it is under way", || look(world).replicas[0].outstanding == 1);
    let (flag, address) = (held(world), front.to_owned());
    let releaser = std::thread::spawn(move || {
        // Once nobody else is let in, the manager is leaving.
        while TcpStream::connect(&address).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_file(flag).unwrap();
    });
    let took = world.leave();
    releaser.join().unwrap();
    let status = answered.recv().unwrap();
    client.join().unwrap().unwrap();
    assert_eq!(status, Ok(200), "the manager left within {took:?}\n{}", world.log());
    world.up();
    world.until("the same port answers again", || matches!(ask(front), Ok(200)));
}
