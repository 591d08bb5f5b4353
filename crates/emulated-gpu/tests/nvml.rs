//! NVML as a library of others sees it: nvml-wrapper, unmodified.
//!
//! One node and one test: the library is loaded once into a process, with the node beside it.

mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::fault::Fault;
use muxflow_emulated_gpu::launcher::Running;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{GpmSample, Nvml};
use support::{client, node, on, output};

fn open(node: &Running) -> Nvml {
    let path = node.node().root().join("lib/libnvidia-ml.so.1");
    // The wrapper loads it by path; the library finds its node beside itself.
    Nvml::builder().lib_path(path.as_os_str()).init().expect("NVML starts")
}

/// Sooner or later: counters show a value once per period, and this machine may be busy.
fn within(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn nvml_wrapper_sees_a_node() {
    let node = node("t4,a10,h100", 1.0);
    let nvml = open(&node);
    a_busy_gpu_shows_work_memory_and_processes(&node, &nvml);
    gpm_measures_between_two_samples_where_the_gpu_has_it(&node, &nvml);
    a_power_limit_makes_hot_kernels_slower(&node, &nvml);
    events_and_failures_reach_who_asks(&node, &nvml);
}

fn a_power_limit_makes_hot_kernels_slower(node: &Running, nvml: &Nvml) {
    // The least of three: what this machine is away counts, too.
    let once = || -> f64 { output(on(node, client()).args(["hot", "300"])).parse().expect("ms") };
    let hot = || (0..3).map(|_| once()).fold(f64::INFINITY, f64::min);
    let mut device = nvml.device_by_index(0).expect("a device");
    let free = hot();
    device.set_power_management_limit(42_000).expect("42 W of 70");
    let held = hot();
    assert_eq!(device.power_management_limit().expect("a limit"), 42_000);
    device.set_power_management_limit(70_000).expect("as before");
    assert!(held > 1.15 * free, "{free} ms at 70 W, {held} ms at 42 W");
    assert!(device.set_power_management_limit(90_000).is_err(), "more than it may have");
}

fn a_busy_gpu_shows_work_memory_and_processes(node: &Running, nvml: &Nvml) {
    let version = output(on(node, client()).arg("version"));
    assert_eq!(nvml.device_count().expect("a count"), 3);
    assert_eq!(nvml.sys_cuda_driver_version().expect("a version").to_string(), version);
    let device = nvml.device_by_index(0).expect("a device");
    assert_eq!(device.name().expect("a name"), "Tesla T4");
    let uuid = device.uuid().expect("a UUID");
    assert_eq!(nvml.device_by_uuid(uuid).expect("the same").index().expect("0"), 0);
    let idle = device.memory_info().expect("memory").used;
    let mut busy =
        on(node, client()).args(["busy", "30000"]).stdout(Stdio::null()).spawn().expect("it runs");
    let used_pct = || device.utilization_rates().expect("utilisation").gpu;
    within("it gets busy", || used_pct() > 90);
    assert!(device.memory_info().expect("memory").used > idle + (100 << 20));
    let pids: Vec<u32> =
        device.running_compute_processes().expect("processes").into_iter().map(|p| p.pid).collect();
    assert_eq!(pids, [busy.id()]);
    assert!(device.power_usage().expect("power") > 20_000);
    assert!(device.clock_info(Clock::SM).expect("a clock") <= 1590);
    assert!(device.temperature(TemperatureSensor::Gpu).expect("degrees") >= 30);
    busy.kill().expect("it lives");
    busy.wait().expect("it ends");
    within("it rests", || used_pct() == 0);
    within("its memory is free", || device.memory_info().expect("memory").used == idle);
    let other = nvml.device_by_index(1).expect("a device");
    assert_eq!(other.utilization_rates().expect("utilisation").gpu, 0);
}

fn gpm_measures_between_two_samples_where_the_gpu_has_it(node: &Running, nvml: &Nvml) {
    let old = nvml.device_by_index(0).expect("a T4");
    assert!(!old.gpm_support().expect("an answer"));
    assert!(matches!(old.gpm_sample(), Err(NvmlError::NotSupported)));
    let device = nvml.device_by_index(2).expect("an H100");
    assert!(device.gpm_support().expect("an answer"));
    let wanted = [GpmMetricId::SmUtil, GpmMetricId::SmOccupancy, GpmMetricId::DramBwUtil];
    let between = |first: &GpmSample<'_>, second: &GpmSample<'_>| {
        let all = gpm_metrics_get(nvml, first, second, &wanted).expect("metrics");
        all.into_iter().map(|m| m.expect("a metric").value).collect::<Vec<f64>>()
    };
    let first = device.gpm_sample().expect("a sample");
    std::thread::sleep(Duration::from_millis(100));
    let idle = device.gpm_sample().expect("a sample");
    assert_eq!(between(&first, &idle), [0.0; 3]);
    // A kernel on 40 SMs, half of their warps, a third of the bandwidth.
    let mut command = on(node, client());
    command.args(["busy", "30000"]).env("CUDA_VISIBLE_DEVICES", "2").stdout(Stdio::null());
    let mut busy = command.spawn().expect("it runs");
    within("it gets busy", || device.utilization_rates().expect("utilisation").gpu >= 90);
    let before = device.gpm_sample().expect("a sample");
    std::thread::sleep(Duration::from_millis(300));
    let after = device.gpm_sample().expect("a sample");
    busy.kill().expect("it lives");
    busy.wait().expect("it ends");
    let [active, occupancy, bandwidth] = between(&before, &after)[..] else { panic!("three") };
    assert!((20.0..45.0).contains(&active), "SM activity: {active} % with 40 of 132 SMs");
    assert!(occupancy > 5.0 && occupancy < active, "SM occupancy: {occupancy} %");
    assert!((5.0..60.0).contains(&bandwidth), "DRAM: {bandwidth} %");
}

fn events_and_failures_reach_who_asks(node: &Running, nvml: &Nvml) {
    let device = nvml.device_by_index(0).expect("a device");
    let set = nvml.create_event_set().expect("a set");
    let set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).expect("registered");
    assert!(matches!(set.wait(50), Err(NvmlError::Timeout)));
    Fault::Xid(63).inject(node.node(), 0, 0, 20).expect("later");
    let event = set.wait(3000).expect("it comes");
    assert!(format!("{event:?}").contains("63"), "{event:?}");
    Fault::NvmlError(999).inject(node.node(), 0, 0, 0).expect("it fails");
    assert!(matches!(device.utilization_rates(), Err(NvmlError::Unknown)));
    Fault::NvmlError(0).inject(node.node(), 0, 0, 0).expect("it works");
    assert!(device.utilization_rates().is_ok());
    Fault::Throttle(600).inject(node.node(), 0, 0, 0).expect("slow");
    within("the clock is throttled", || device.clock_info(Clock::SM).expect("a clock") == 600);
    Fault::MemoryBurst(1024).inject(node.node(), 0, 0, 0).expect("taken");
    assert!(device.memory_info().expect("memory").used >= 1 << 30);
    Fault::Xid(79).inject(node.node(), 0, 0, 0).expect("gone");
    assert!(matches!(device.utilization_rates(), Err(NvmlError::GpuLost)));
}
