//! What the driver itself can hold a job to: parts of the SMs and caps on memory, found at run time.

use std::collections::BTreeMap;
use std::fs;

use muxflow_types::Bytes;

use crate::world::{World, inside, inside_with, now_us};

const PARTITION: &str = "CUDA_MPS_SM_PARTITION";
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The environment that a process was started with.
fn environment(pid: u32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Runs a service and a job where the operator wants a third of the SMs cut off; their environments,
/// and the SMs that the job got and those that the GPU has.
fn cut() -> (BTreeMap<String, String>, BTreeMap<String, String>, (u32, u32)) {
    let world = World::start("[mps]\noffline_partition_pct = 33.0\n");
    world.start_service();
    world.start_worker_job();
    world.serve(10);
    let shared = world.agent().shared(&world.gpu).unwrap();
    let share = shared.job().unwrap().share;
    let online = world.agent().status(&world.gpu).unwrap().online.unwrap().1;
    let both = (environment(online), environment(world.job_pid()));
    world.end();
    (both.0, both.1, (share.sms().0, share.total().0))
}

#[test]
fn sms_are_cut_where_the_driver_can() {
    inside_with("a10", "driver_side::inner_cut");
}

#[test]
#[ignore = "run inside an emulated node by sms_are_cut_where_the_driver_can"]
fn inner_cut() {
    let (service, job, sms) = cut();
    assert!(service[PARTITION].starts_with("GPU-") && job[PARTITION].starts_with("GPU-"));
    assert_ne!(service[PARTITION], job[PARTITION]);
    assert!(!job.contains_key(PERCENTAGE), "percentages do not count there");
    // 18 chunks of 4 SMs, of which a third is 6.
    assert_eq!(sms, (24, 72));
}

#[test]
fn where_the_driver_cannot_the_share_is_a_percentage() {
    inside("driver_side::inner_fall_back");
}

#[test]
#[ignore = "run inside an emulated node by where_the_driver_cannot_the_share_is_a_percentage"]
fn inner_fall_back() {
    let (service, job, (_, sms)) = cut();
    assert!(!service.contains_key(PARTITION) && !job.contains_key(PARTITION));
    assert!(job.contains_key(PERCENTAGE) && !service.contains_key(PERCENTAGE));
    assert_eq!(sms, 40);
}

#[test]
fn the_driver_caps_the_memory_of_a_job_that_slips_the_interposer() {
    inside("driver_side::inner_memory");
}

#[test]
#[ignore = "run inside an emulated node by the_driver_caps_the_memory_of_a_job_that_slips_the_interposer"]
fn inner_memory() {
    // Nothing but the driver's cap is to help.
    let off = "[defences]\neviction = false\nungated_stop = false\n";
    let got = |settings: &str| {
        let world = World::start(&format!("{settings}{off}"));
        let mut service = world.argv("service", 2_000, "16", 20_000);
        service.push("scratch=2048".into());
        world.start_service_as(service);
        let mut argv = vec!["env".to_owned(), "-u".into(), "LD_PRELOAD".into()];
        argv.extend(world.argv("job", 500, "8", 1_000));
        argv.push("hold=all".into());
        let mut spec = World::spec(argv);
        spec.quota = Some(Bytes::from_gib(2));
        world.start_job_as(spec);
        world.until("it has all it gets", || world.job_output().contains("ready"));
        let (text, from) = (world.job_output(), now_us());
        world.until("the service has tried often", || {
            let served = world.served_since(from);
            served.count() + served.out_of_memory > 50
        });
        let served = world.served_since(from);
        world.end();
        let number = text.split(' ').find_map(|word| word.parse::<u64>().ok());
        (number.unwrap(), served)
    };
    let (capped, safe) = got("");
    assert!((1024..=2048 + 512).contains(&capped), "{capped} MiB: the quota and a little more");
    assert_eq!(safe.out_of_memory, 0, "the service finds its memory: {safe:?}");
    let (free, harmed) = got("[mps]\ndriver_memory_limit = false\n");
    assert!(free > 8192, "{free} MiB: nothing holds it back");
    assert!(harmed.out_of_memory > 0, "without it the service must be harmed: {harmed:?}");
    println!(
        "MEASURED | cap on memory in the driver | requests that found no memory, beside a job without the interposer that takes all it gets (MiB, of a quota of 2048) | {} of {} ({capped}) | {} of {} ({free}) |",
        safe.out_of_memory,
        safe.out_of_memory + safe.count(),
        harmed.out_of_memory,
        harmed.out_of_memory + harmed.count(),
    );
}
