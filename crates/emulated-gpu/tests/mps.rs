//! The MPS daemon, its server, and what happens when they break.

#![expect(clippy::print_stderr, reason = "a skipped test must say so")]

#[path = "support/mps_control.rs"]
mod mps_control;
mod support;

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mps_control::{control, daemon, failure, holder, pushed, waited, within};
use muxflow_emulated_gpu::fault::Fault;
use muxflow_emulated_gpu::launcher::Running;
use support::{built, client, node, on, output};

#[test]
fn commands_limits_termination_faults_and_recovery() {
    let node = node("t4", 1.0);
    let (ok, _) = control(&node, "get_server_list");
    assert!(!ok, "there is no daemon yet");
    daemon(&node);
    assert_eq!(control(&node, "get_server_list"), (true, String::new()));
    // Limits hold for clients to come: who is there keeps what it had.
    let mut old = on(&node, client());
    let mut old = old.args(["again", "50"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let old = old.as_mut().expect("it starts");
    let mut times = BufReader::new(old.stdout.take().expect("a pipe")).lines();
    let mut input = old.stdin.take().expect("a pipe");
    // It starts with one that nobody asked for.
    times.next().expect("a line").expect("text");
    // The least of three: what this machine is away counts, too.
    let mut time = || -> f64 {
        let mut once = || -> f64 {
            writeln!(input, "again").expect("it reads");
            times.next().expect("a line").expect("text").parse().expect("ms")
        };
        (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
    };
    let whole = time();
    assert_eq!(control(&node, "set_default_active_thread_percentage 50").1, "50.0");
    let server = control(&node, "get_server_list").1;
    assert_eq!(control(&node, &format!("set_active_thread_percentage {server} 50")).1, "50.0");
    let busy = || -> f64 { output(on(&node, client()).args(["busy", "50"])).parse().expect("ms") };
    let half = (0..3).map(|_| busy()).fold(f64::INFINITY, f64::min);
    let still = time();
    let all = format!("{whole} ms, {half} ms with half of the SMs, {still} ms as before");
    assert!(half > 1.1 * whole && still < 1.05 * whole, "{all}");
    old.kill().expect("it lives");
    old.wait().expect("it ends");
    let first = holder(&node);
    let server = control(&node, "get_server_list").1;
    assert_eq!(control(&node, &format!("get_server_status {server}")).1, "ACTIVE");
    assert_eq!(control(&node, &format!("get_client_list {server}")).1, first.id().to_string());
    assert!(control(&node, "ps").1.contains(&first.id().to_string()));
    assert!(!control(&node, "no_such_command").0);
    assert_eq!(control(&node, &format!("get_active_thread_percentage {server}")).1, "50.0");
    // Termination reaches the client as an error of its own.
    assert!(control(&node, &format!("terminate_client {server} {}", first.id())).0);
    assert_eq!(failure(first), "failed 810");
    // A fault of one strikes all, and the server refuses until they have left.
    let (a, b) = (holder(&node), holder(&node));
    Fault::Xid(31).inject(node.node(), 0, 0, 0).expect("it strikes");
    assert_eq!((failure(a), failure(b)), ("failed 700".to_owned(), "failed 700".to_owned()));
    // From the moment at which it says so, the devices take clients too.
    recovered(&node, &server);
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
    assert!(control(&node, "quit").0);
}

/// Waits until a server that met a fault says that it takes clients again.
fn recovered(node: &Running, server: &str) {
    let log = node.node().root().join("mps-log/control.log");
    within("the server recovers", || {
        let log = std::fs::read_to_string(&log).expect("the daemon's log");
        log.contains(&format!("Server {server} recovered"))
    });
    assert_eq!(control(node, &format!("get_server_status {server}")).1, "ACTIVE");
}

/// Of one server on three GPUs: a fault on the first reaches the second, where one of its clients is
/// too, and not the third; clients are taken again as soon as those that it struck are gone.
#[test]
fn a_fault_reaches_the_gpus_that_share_a_client_and_no_others() {
    let node = node("t4x3", 1.0);
    daemon(&node);
    let seeing = |gpus: &str| {
        let mut command = on(&node, client());
        command.env("CUDA_VISIBLE_DEVICES", gpus);
        command
    };
    for round in 0..3 {
        let first = pushed(&mut seeing("0"), "0");
        let both = pushed(seeing("0,1").arg("pair"), "0");
        let second = pushed(&mut seeing("1"), "0");
        let third = pushed(&mut seeing("2"), "0");
        let server = control(&node, "get_server_list").1;
        Fault::Xid(31).inject(node.node(), 0, 0, 0).expect("it strikes");
        within("the server is in a fault", || {
            control(&node, &format!("get_server_status {server}")).1 == "FAULT"
        });
        // The one in the middle goes first: what it linked stays struck.
        assert_eq!(waited(both), "700", "round {round}: on both GPUs");
        let refused = output(seeing("2").arg("devices"));
        assert!(refused.starts_with("807"), "new clients stay out: {refused}");
        assert_eq!(waited(first), "700", "round {round}: on the same GPU");
        assert_eq!(waited(second), "700", "round {round}: beside one that was there");
        within("the server recovers", || {
            control(&node, &format!("get_server_status {server}")).1 == "ACTIVE"
        });
        assert_eq!(output(seeing("1").arg("check")), "ok", "while the third is still there");
        assert_eq!(waited(third), "0", "round {round}: nobody is shared with it");
    }
    assert!(control(&node, "quit").0);
}

#[test]
fn static_partitions_cut_the_sms_where_the_gpu_has_them() {
    let started = |node: &Running| {
        let mut command = on(node, built().join("nvidia-cuda-mps-control"));
        assert!(command.args(["-d", "-S"]).status().expect("it starts").success());
    };
    let old = node("t4", 1.0);
    started(&old);
    let (ok, said) = control(&old, "sm_partition add GPU- 2");
    assert!(!ok && said.contains("does not support"), "{said}");
    control(&old, "quit");

    let node = node("a10", 1.0);
    started(&node);
    let (ok, said) = control(&node, "sm_partition add GPU- 19");
    assert!(!ok && said.contains("18 chunks are free"), "72 SMs in chunks of 4: {said}");
    let (_, said) = control(&node, "sm_partition add GPU- 6");
    let name = said.strip_prefix("Partition ").and_then(|s| s.strip_suffix(" created"));
    let name = name.expect("its name").to_owned();
    let check = |partition: Option<&str>| {
        let mut command = on(&node, client());
        command.args(["busy", "50"]).env_remove("CUDA_MPS_SM_PARTITION");
        if let Some(partition) = partition {
            command.env("CUDA_MPS_SM_PARTITION", partition);
        }
        command.stdout(Stdio::null()).status().expect("it ends").success()
    };
    assert!(check(Some(&name)), "who names a partition is let in");
    assert!(!check(None) && !check(Some("GPU-/D99")), "who does not stays out");
    assert!(control(&node, &format!("sm_partition rm {name}")).0);
    assert!(control(&node, "sm_partition add GPU- 18").0, "all are free again");
    control(&node, "quit");
}

#[test]
fn killing_a_client_with_work_in_flight_takes_the_others_along_when_told_to() {
    let node = node("t4", 1.0);
    daemon(&node);
    let kill = |victim: &mut Child| {
        victim.kill().expect("it lives");
        victim.wait().expect("it ends");
    };
    // The device is asked: it has buried the dead when it names them no more.
    let only = |child: &Child| {
        let list = control(&node, "get_device_client_list").1;
        list.lines().skip(1).eq([child.id().to_string()])
    };
    let neighbour = || pushed(&mut on(&node, client()), "0");
    // Not unless it is told to.
    let beside = neighbour();
    kill(&mut pushed(&mut on(&node, client()), "900"));
    within("the dead one is forgotten", || only(&beside));
    assert_eq!(waited(beside), "0");
    // Nor one that was thrown out first, with work that the device had not even taken.
    Fault::KillPropagates(100).inject(node.node(), 0, 0, 0).expect("it is set");
    let beside = neighbour();
    let mut thrown_out = pushed(&mut on(&node, client()), "900");
    let server = control(&node, "get_server_list").1;
    assert!(control(&node, &format!("terminate_client {server} {}", thrown_out.id())).0);
    within("it is thrown out", || only(&beside));
    kill(&mut thrown_out);
    within("the daemon forgets it", || {
        control(&node, &format!("get_client_list {server}")).1 == beside.id().to_string()
    });
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(waited(beside), "0", "its work was gone");
    // 900 ms of kernels are queued; another try where the machine was too slow.
    for _ in 0..10 {
        let beside = neighbour();
        kill(&mut pushed(&mut on(&node, client()), "900"));
        within("the dead one is forgotten", || only(&beside));
        let met = waited(beside);
        if met == "700" {
            assert!(control(&node, "quit").0);
            return;
        }
        assert_eq!(met, "0");
    }
    panic!("the neighbour goes on");
}

#[test]
fn a_server_that_crashes_fails_its_clients_and_one_that_hangs_lets_nobody_in() {
    let node = node("t4", 1.0);
    daemon(&node);
    let client_of_crash = holder(&node);
    // One that was let in and makes its context only when the server is gone.
    let mut late = on(&node, client());
    let late = late.arg("late").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut late = late.expect("it starts");
    let mut said = BufReader::new(late.stdout.take().expect("a pipe")).lines();
    assert_eq!(said.next().expect("a line").expect("text"), "waits");
    Fault::MpsCrash.inject(node.node(), 0, 0, 0).expect("it crashes");
    assert_eq!(failure(client_of_crash), "failed 806");
    writeln!(late.stdin.take().expect("a pipe"), "go").expect("it reads");
    assert_eq!(said.next().expect("a line").expect("text"), "806");
    late.wait().expect("it ends");
    within("a new server takes clients", || {
        on(&node, client()).arg("check").status().is_ok_and(|s| s.success())
    });
    Fault::MpsHang.inject(node.node(), 0, 0, 0).expect("it hangs");
    // Those that came before the daemon heard of it still get in.
    let mut stuck = None;
    within("a client is not let in", || {
        let mut child = on(&node, client()).arg("check").spawn().expect("it starts");
        std::thread::sleep(Duration::from_secs(2));
        if child.try_wait().expect("a status").is_none() {
            stuck = Some(child);
        }
        stuck.is_some()
    });
    let mut stuck = stuck.expect("one that waits");
    let server = control(&node, "get_server_list").1;
    assert_eq!(control(&node, &format!("get_server_status {server}")).1, "ACTIVE");
    assert!(stuck.try_wait().expect("a status").is_none(), "it got in");
    stuck.kill().expect("it lives");
    stuck.wait().expect("it ends");
    control(&node, "quit");
}

/// Commands of another user: the client and the driver are copied to where everybody may read.
fn foreign(node: &Running) -> Option<Command> {
    // SAFETY: only asks.
    if unsafe { libc::geteuid() } != 0 {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "only root can be somebody else");
        eprintln!("SKIPPED the rule for users: run the tests as root to be two users");
        return None;
    }
    let root = node.node().root();
    std::fs::set_permissions(root, Permissions::from_mode(0o755)).expect("it is ours");
    let home = root.join("foreign");
    std::fs::create_dir_all(&home).expect("a directory");
    let program = home.join("client");
    std::fs::copy(client(), &program).expect("a copy");
    let driver = built().join("libmuxflow_emulated_cuda.so");
    std::fs::copy(driver, home.join("libcuda.so.1")).expect("a copy");
    let mut command = on(node, program);
    // The user `nobody`.
    command.uid(65_534).env("LD_LIBRARY_PATH", home).stdout(Stdio::piped());
    Some(command)
}

#[test]
fn one_user_at_a_time_unless_the_server_is_for_all() {
    let first = node("t4", 1.0);
    let Some(mut theirs) = foreign(&first) else { return };
    daemon(&first);
    let mut ours = holder(&first);
    let server = control(&first, "get_server_list").1;
    let mut waiting = theirs.arg("hold").spawn().expect("it starts");
    std::thread::sleep(Duration::from_secs(1));
    assert!(waiting.try_wait().expect("a status").is_none());
    assert_eq!(control(&first, &format!("get_client_list {server}")).1, ours.id().to_string());
    // It gets in when the clients of the other user have left, with a server of its own.
    ours.kill().expect("it lives");
    ours.wait().expect("it ends");
    let mut line = String::new();
    let stdout = waiting.stdout.as_mut().expect("a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("it speaks");
    assert_eq!(line.trim(), "up");
    let other = control(&first, "get_server_list").1;
    assert_ne!(other, server);
    assert_eq!(control(&first, &format!("get_client_list {other}")).1, waiting.id().to_string());
    waiting.kill().expect("it lives");
    waiting.wait().expect("it ends");
    control(&first, "quit");

    let second = node("t4", 1.0);
    let mut command = on(&second, built().join("nvidia-cuda-mps-control"));
    assert!(command.args(["-d", "-multiuser-server"]).status().expect("it starts").success());
    let Some(mut theirs) = foreign(&second) else { return };
    let mut ours = holder(&second);
    let mut beside = theirs.arg("hold").spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(beside.stdout.as_mut().expect("a pipe"))
        .read_line(&mut line)
        .expect("it speaks");
    assert_eq!(line.trim(), "up", "both at once");
    let server = control(&second, "get_server_list").1;
    let clients = control(&second, &format!("get_client_list {server}")).1;
    let both = [ours.id().to_string(), beside.id().to_string()];
    assert!(both.iter().all(|pid| clients.lines().any(|l| l == pid)), "{clients}");
    for child in [&mut ours, &mut beside] {
        child.kill().expect("it lives");
        child.wait().expect("it ends");
    }
    control(&second, "quit");
}

/// A daemon whose servers take their time to start.
fn slow_daemon(node: &Running) {
    let home = node.node().root().join("slow");
    std::fs::create_dir_all(&home).expect("a directory");
    let program = home.join("nvidia-cuda-mps-control");
    std::fs::copy(built().join("nvidia-cuda-mps-control"), &program).expect("a copy");
    let real = built().join("nvidia-cuda-mps-server");
    let script = format!("#!/bin/sh\nsleep 1\nexec {} \"$@\"\n", real.display());
    let server = home.join("nvidia-cuda-mps-server");
    std::fs::write(&server, script).expect("a script");
    std::fs::set_permissions(&server, Permissions::from_mode(0o755)).expect("it is ours");
    assert!(on(node, program).arg("-d").status().expect("it starts").success());
}

/// Two users wait and there is no server yet: one is served after the other, and no server that starts
/// is stopped for the other user.
#[test]
fn users_that_wait_together_are_served_in_turn() {
    let node = node("t4", 1.0);
    let Some(mut theirs) = foreign(&node) else { return };
    slow_daemon(&node);
    let mut ours = on(&node, client());
    let both = [&mut ours, &mut theirs];
    let mut all =
        both.map(|it| it.args(["busy", "20"]).stdout(Stdio::null()).spawn().expect("it starts"));
    within("both were served", || {
        all.iter_mut().all(|it| it.try_wait().expect("a status").is_some())
    });
    assert!(all.iter_mut().all(|it| it.wait().expect("it ends").success()));
    let log = std::fs::read_to_string(node.node().root().join("mps-log/control.log"));
    let log = log.expect("the daemon's log");
    assert_eq!(log.matches("Starting new server").count(), 2, "{log}");
    assert!(control(&node, "quit").0);
}

#[test]
fn a_daemon_ends_with_its_directory() {
    let node = node("t4", 1.0);
    daemon(&node);
    let path = node.node().root().join("mps/nvidia-cuda-mps-control.pid");
    let pid = std::fs::read_to_string(path).expect("its process id");
    let process = std::path::Path::new("/proc").join(pid.trim());
    assert!(process.exists());
    drop(node);
    within("the daemon ends", || !process.exists());
}

#[test]
fn a_daemon_ends_with_its_node_also_where_its_directory_stays() {
    let node = node("t4", 1.0);
    let own = tempfile::tempdir().expect("a directory");
    let mut command = on(&node, built().join("nvidia-cuda-mps-control"));
    command.env("CUDA_MPS_PIPE_DIRECTORY", own.path()).arg("-d");
    assert!(command.status().expect("it starts").success());
    let mut client = on(&node, client());
    client.env("CUDA_MPS_PIPE_DIRECTORY", own.path()).arg("check");
    assert!(client.status().expect("it starts").success());
    let pid = std::fs::read_to_string(own.path().join("nvidia-cuda-mps-control.pid"));
    let daemon = pid.expect("its process id").trim().to_owned();
    let children = format!("/proc/{daemon}/task/{daemon}/children");
    let server = std::fs::read_to_string(children).expect("its server").trim().to_owned();
    assert!(!server.is_empty(), "the client had a server");
    let gone = |pid: &str| !std::path::Path::new("/proc").join(pid).exists();
    assert!(!gone(&daemon) && !gone(&server));
    drop(node);
    within("daemon and server end", || gone(&daemon) && gone(&server));
    assert!(!own.path().join("control").exists(), "nothing is left to connect to");
}
