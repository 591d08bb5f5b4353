//! The driver as real processes see it.

mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::fault::Fault;
use muxflow_emulated_gpu::launcher::Running;
use support::{built, client, compiled, node, on, output};

/// Bytes in use on the first GPU, asked of the device itself.
fn used_bytes(node: &Running) -> u64 {
    use muxflow_emulated_gpu::facts::Stats;
    use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};
    let socket = Socket::connect(&node.node().socket(0)).expect("the device listens");
    let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).expect("it answers");
    Stats::from_bytes(&answer.tail).expect("statistics").used_bytes
}

#[test]
fn a_client_gets_right_answers_and_leaves_nothing() {
    let node = node("t4", 1.0);
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
    assert_eq!(used_bytes(&node), 0);
}

#[test]
fn odd_uses_get_the_answers_that_the_interface_promises() {
    let node = node("t4x2", 1.0);
    assert_eq!(output(on(&node, compiled("odd")).arg("all")), "ok");
    assert_eq!(used_bytes(&node), 0);
}

/// More of them, one after the other, than a device has places for streams.
#[test]
fn streams_of_threads_and_streams_that_are_destroyed_give_their_places_back() {
    let node = node("t4", 1.0);
    assert_eq!(output(on(&node, compiled("odd")).arg("threads")), "ok");
}

/// The files hold `vadd` of `tests/c/client.c`, as NVIDIA's `fatbinary` 13.4 writes it with
/// `--compress-mode` none, default (Zstandard) and speed (LZ4).
#[test]
fn kernels_of_packed_fat_binaries_compute() {
    let node = node("t4", 1.0);
    for name in ["plain", "zstd", "lz4"] {
        let path = format!("{}/tests/fatbin/{name}.fatbin", env!("CARGO_MANIFEST_DIR"));
        let mut command = on(&node, compiled("odd"));
        command.args(["fatbin", &path]).env("MUXFLOW_EMULATED_LOG", node.node().root().join("log"));
        assert_eq!(output(&mut command), "ok", "{name}");
    }
}

#[test]
fn urgent_streams_go_first_within_a_process() {
    let node = node("t4", 1.0);
    // 20 ms of kernels on all SMs beside 60 ms of another stream.
    let beside = |mine: &str, other: &str| -> f64 {
        output(on(&node, compiled("odd")).args(["beside", mine, other])).parse().expect("a time")
    };
    let (urgent, equal, patient) = (beside("-5", "0"), beside("0", "0"), beside("0", "-5"));
    // Alone it would be 20, behind all of the other 80; power may cost the T4 some clock.
    assert!((19.9..30.0).contains(&urgent), "{urgent} ms as the urgent one");
    assert!(urgent < equal && equal < 60.0, "{equal} ms as one of two, {urgent} as the urgent one");
    assert!(patient > 65.0, "{patient} ms as the patient one");
}

#[test]
fn processes_share_memory_and_an_event() {
    let node = node("t4", 1.0);
    let mut lender = on(&node, compiled("odd"));
    lender.arg("lend").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut lender = lender.spawn().expect("it starts");
    let mut borrower = on(&node, compiled("odd"));
    borrower.arg("borrow").stdin(lender.stdout.take().expect("a pipe"));
    borrower.stdout(lender.stdin.take().expect("a pipe"));
    let mut borrower = borrower.spawn().expect("it starts");
    let lent = lender.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&lent.stderr).trim(), "ok");
    assert!(borrower.wait().expect("it ends").success());
    assert_eq!(used_bytes(&node), 0);
    let left = std::fs::read_dir(node.node().gpu(0)).expect("its directory");
    let left = left.filter(|f| {
        f.as_ref().is_ok_and(|f| f.file_name().as_encoded_bytes().starts_with(b"event"))
    });
    assert_eq!(left.count(), 0, "the event's page is gone");
}

#[test]
fn all_profiles_run_the_same_client() {
    for gpu in ["a10", "v100", "a100", "h100"] {
        let node = node(gpu, 1.0);
        assert_eq!(output(on(&node, client()).arg("check")), "ok", "{gpu}");
    }
}

#[test]
fn an_access_outside_memory_is_an_illegal_address_and_an_xid() {
    let node = node("t4", 1.0);
    assert_eq!(output(on(&node, client()).arg("wild")), "700");
    let log = std::fs::read_to_string(node.node().kernel_log()).expect("a kernel log");
    assert!(log.contains("NVRM: Xid (PCI:0000:3b:00): 31, pid="), "{log}");
}

#[test]
fn time_may_run_faster_and_stays_faithful() {
    let node = node("t4", 20.0);
    let began = Instant::now();
    let ms: f64 = output(on(&node, client()).args(["busy", "1000"])).parse().expect("a time");
    // A second of kernels at a fixed cost; power may cost the T4 some clock.
    assert!((1000.0..1500.0).contains(&ms), "{ms} ms of device time");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

#[test]
fn two_processes_without_mps_take_turns() {
    let node = node("t4", 1.0);
    let mut clients: Vec<_> = (0..2)
        .map(|_| {
            let mut command = on(&node, client());
            command.args(["busy", "600"]).stdout(Stdio::piped()).spawn().expect("it starts")
        })
        .collect();
    let mut longest = 0.0_f64;
    for child in clients.drain(..) {
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout);
        longest = longest.max(text.trim().parse().expect("a time"));
    }
    // Alone it would be 600; together each waits for the other's slices while both are there.
    assert!(longest > 780.0, "{longest} ms");
}

#[test]
fn a_client_killed_at_any_time_leaves_no_memory_and_no_lock() {
    let node = node("t4", 1.0);
    let mut state = 12345_u64;
    let rounds = std::env::var("MUXFLOW_KILLS").ok().and_then(|v| v.parse().ok()).unwrap_or(50);
    for round in 0..rounds {
        let mut child =
            on(&node, client()).arg("hold").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("it says that it is up");
        assert_eq!(line.trim(), "up");
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(state >> 52));
        child.kill().expect("it lives");
        child.wait().expect("it ends");
        let deadline = Instant::now() + Duration::from_secs(5);
        while used_bytes(&node) != 0 {
            assert!(Instant::now() < deadline, "round {round}: {} bytes", used_bytes(&node));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
}

/// In the middle of `cuInit`, of making a context, of loading code; with MPS too.
#[test]
fn a_client_killed_while_it_starts_leaves_nothing_either() {
    for mps in [false, true] {
        let node = node("t4", 1.0);
        if mps {
            let daemon = on(&node, built().join("nvidia-cuda-mps-control")).arg("-d").status();
            assert!(daemon.expect("it starts").success());
        }
        for round in 0..40_u64 {
            let mut command = on(&node, client());
            let mut child = command.arg("hold").stdout(Stdio::null()).spawn().expect("it starts");
            std::thread::sleep(Duration::from_micros(round * 700));
            child.kill().expect("it lives");
            child.wait().expect("it ends");
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while used_bytes(&node) != 0 {
            assert!(Instant::now() < deadline, "MPS {mps}: {} bytes", used_bytes(&node));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(output(on(&node, client()).arg("check")), "ok", "MPS {mps}");
    }
}

/// A child that was forked has the sockets of its parent open, and nothing else of it.
#[test]
fn a_forked_child_does_not_keep_what_its_dead_parent_held() {
    let node = node("t4", 1.0);
    let mut command = on(&node, client());
    let mut parent = command.arg("heir").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    let stdout = parent.stdout.take().expect("a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("it says who its child is");
    assert!(used_bytes(&node) >= 64 << 20);
    parent.kill().expect("it lives");
    parent.wait().expect("it ends");
    let deadline = Instant::now() + Duration::from_secs(20);
    while used_bytes(&node) != 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = used_bytes(&node);
    // SAFETY: the child that was named, which nobody waits for but the system.
    unsafe { libc::kill(line.trim().parse().expect("an id"), libc::SIGKILL) };
    assert_eq!(left, 0);
}

#[test]
fn a_throttled_clock_makes_kernels_slower() {
    let node = node("t4", 1.0);
    let busy = || -> f64 { output(on(&node, client()).args(["busy", "50"])).parse().expect("ms") };
    let free = busy();
    Fault::Throttle(600).inject(node.node(), 0, 0, 0).expect("slow");
    let throttled = busy();
    Fault::Throttle(0).inject(node.node(), 0, 0, 0).expect("as before");
    let after = busy();
    // 1590 MHz at most, and less where power allows less.
    assert!(throttled > 1.3 * free && after < 1.2 * free, "{free}, {throttled}, {after} ms");
}

/// A kernel that is only timed says so to who asks; one that computes does not.
#[test]
fn kernels_that_only_take_time_say_so_in_the_log() {
    let node = node("t4", 1.0);
    let path = node.node().root().join("log");
    assert_eq!(output(on(&node, client()).arg("check").env("MUXFLOW_EMULATED_LOG", &path)), "ok");
    let log = std::fs::read_to_string(&path).expect("a log");
    let says = |kernel: &str| log.contains(&format!("kernel {kernel} is timed only"));
    assert!(says("work_muxflow_us1000_f40_o50_i60_b30"), "{log}");
    assert!(!says("vadd") && !says("blocksum"), "they compute: {log}");
}

#[test]
fn an_idle_device_uses_no_processor_time() {
    let node = node("t4", 1.0);
    let pid = node.device_pids()[0];
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
        let number = |i: usize| fields[i].parse::<u64>().expect("a number");
        number(11) + number(12)
    };
    let mut holder = on(&node, client()).args(["hold"]).spawn().expect("it starts");
    std::thread::sleep(Duration::from_millis(300));
    holder.kill().expect("it lives");
    holder.wait().expect("it ends");
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    assert!(ticks() - before <= 1, "{} ticks of 10 ms in 2 s", ticks() - before);
}

#[test]
fn a_gpu_that_fell_off_the_bus_is_gone_until_it_is_reset() {
    let node = node("t4x2", 1.0);
    Fault::Xid(79).inject(node.node(), 0, 0, 0).expect("it falls");
    let out = on(&node, client()).arg("check").env("CUDA_VISIBLE_DEVICES", "0").output();
    assert_eq!(String::from_utf8_lossy(&out.expect("it runs").stdout).trim(), "ok", "GPU 1 stays");
    Fault::Reset.inject(node.node(), 0, 0, 0).expect("it comes back");
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
}

#[test]
fn eight_gpus_with_two_processes_each_do_not_slow_one_another() {
    let node = node("t4x8", 1.0);
    let mut all = Vec::new();
    for gpu in 0..8 {
        for _ in 0..2 {
            let mut command = on(&node, client());
            command.args(["busy", "100"]).env("CUDA_VISIBLE_DEVICES", gpu.to_string());
            all.push(command.stdout(Stdio::piped()).spawn().expect("it starts"));
        }
    }
    for child in all {
        let output = child.wait_with_output().expect("it ends");
        let ms: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a time");
        // 100 ms alone, 200 and the switches when both were there all the time.
        assert!((99.0..260.0).contains(&ms), "{ms} ms of device time");
    }
}
