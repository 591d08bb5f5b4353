//! The commands of the MPS control daemon, of both versions, as their users see them.

#[path = "support/mps_control.rs"]
mod mps_control;
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use mps_control::{control, daemon, failure, holder, pushed, waited, within};
use muxflow_emulated_gpu::fault::Fault;
use muxflow_emulated_gpu::launcher::Running;
use support::{built, client, compiled, node, on, output};

fn daemon_pid(node: &Running) -> std::path::PathBuf {
    let path = node.node().root().join("mps/nvidia-cuda-mps-control.pid");
    let pid = std::fs::read_to_string(path).expect("its process id");
    std::path::Path::new("/proc").join(pid.trim())
}

#[test]
fn quit_waits_for_the_clients_unless_it_is_told_how_long() {
    let node = node("t4", 1.0);
    daemon(&node);
    let process = daemon_pid(&node);
    let client_of_it = pushed(&mut on(&node, client()), "0");
    let mut quit = on(&node, built().join("nvidia-cuda-mps-control"));
    let mut quit = quit.stdin(Stdio::piped()).spawn().expect("it starts");
    writeln!(quit.stdin.take().expect("a pipe"), "quit").expect("it reads");
    within("new clients are refused", || {
        let late = on(&node, client()).arg("version").status();
        assert!(late.expect("it runs").success(), "asking for the version needs no MPS");
        let late = on(&node, client()).args(["take", "1"]).stderr(Stdio::null()).status();
        !late.expect("it runs").success()
    });
    assert!(quit.try_wait().expect("a status").is_none() && process.exists(), "it waits");
    assert_eq!(waited(client_of_it), "0", "who was there goes on to its end");
    assert!(quit.wait().expect("it ends").success());
    assert!(!node.node().root().join("mps/control").exists());
    within("the daemon is gone", || !process.exists());

    daemon(&node);
    let process = daemon_pid(&node);
    let struck = holder(&node);
    assert!(!control(&node, "quit -t soon").0);
    assert!(process.exists());
    assert!(control(&node, "quit -t 1").0);
    within("the daemon is gone", || !process.exists());
    assert_eq!(failure(struck), "failed 806");
}

#[test]
fn a_server_that_shuts_down_ends_with_its_last_client() {
    let node = node("t4", 1.0);
    daemon(&node);
    let first = pushed(&mut on(&node, client()), "0");
    let server = control(&node, "get_server_list").1;
    assert_eq!(control(&node, &format!("shutdown_server {server}")), (true, String::new()));
    // SAFETY: only asks.
    let uid = unsafe { libc::geteuid() };
    assert!(!control(&node, &format!("start_server -uid {uid}")).0, "it is shutting down");
    let mut next = on(&node, client());
    let mut next = next.arg("check").stdout(Stdio::piped()).spawn().expect("it starts");
    std::thread::sleep(Duration::from_millis(500));
    assert!(next.try_wait().expect("a status").is_none(), "it waits for the next server");
    assert_eq!(waited(first), "0");
    assert!(next.wait().expect("it ends").success());
    let other = control(&node, "get_server_list").1;
    assert_ne!(other, server);
    assert_eq!(control(&node, &format!("start_server -uid {uid}")).1, other, "it is there");
    let struck = holder(&node);
    assert!(control(&node, &format!("shutdown_server {other} -f")).0);
    assert_eq!(failure(struck), "failed 806");
    assert!(control(&node, "quit").0);
}

#[test]
fn a_daemon_tells_which_client_is_on_which_gpu() {
    let node = node("t4x2", 1.0);
    daemon(&node);
    let first = pushed(on(&node, client()).env("CUDA_VISIBLE_DEVICES", "1"), "0");
    let second = pushed(on(&node, client()).env("CUDA_VISIBLE_DEVICES", "0"), "0");
    let server = control(&node, "get_server_list").1;
    let said = control(&node, "get_device_client_list").1;
    let lines: Vec<&str> = said.lines().collect();
    let [gpu0, one, gpu1, other] = lines[..] else { panic!("two GPUs, a client on each: {said}") };
    assert!(gpu0.starts_with("GPU-") && gpu1.starts_with("GPU-") && gpu0 != gpu1, "{said}");
    assert_eq!([one, other], [second.id().to_string(), first.id().to_string()], "{said}");
    assert_eq!(control(&node, &format!("get_device_client_list {server}")).1, said);
    assert!(!control(&node, "get_device_client_list 1").0, "no such server");
    let table = control(&node, "ps").1;
    let row = table.lines().find(|l| l.starts_with(&first.id().to_string())).expect("its line");
    assert!(row.contains(&gpu1[..12]) && !row.contains(&gpu0[..12]), "{table}");
    assert!(control(&node, "device_query").1.contains(gpu1));
    // NVML shows the server where processes stand, and its clients apart.
    let nvml = output(on(&node, compiled("nvml")).arg("processes"));
    assert_eq!(nvml, format!("{server} | {}", second.id()));
    assert_eq!((waited(first), waited(second)), ("0".to_owned(), "0".to_owned()));
    assert!(control(&node, "quit").0);
}

/// One daemon, and so one server, for each GPU: what strikes one leaves the other alone.
#[test]
fn a_fault_stays_on_its_gpu_where_each_has_a_server_of_its_own() {
    let node = node("t4x2", 1.0);
    let own = |gpu: &str, program: &std::path::Path| {
        let pipe = node.node().root().join(format!("mps-{gpu}"));
        let mut command = on(&node, program);
        command.env("CUDA_MPS_PIPE_DIRECTORY", pipe);
        command
    };
    let program = built().join("nvidia-cuda-mps-control");
    for gpu in ["0", "1"] {
        let mut daemon = own(gpu, &program);
        let started = daemon.arg("-d").env("CUDA_VISIBLE_DEVICES", gpu).status();
        assert!(started.expect("it starts").success());
    }
    let [one, other] = ["0", "1"].map(|gpu| pushed(&mut own(gpu, client()), "0"));
    let ask = |gpu: &str, line: &str| {
        let mut child = own(gpu, &program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let child = child.as_mut().expect("it starts");
        writeln!(child.stdin.take().expect("a pipe"), "{line}").expect("it reads");
        let mut said = String::new();
        child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("it speaks");
        child.wait().expect("it ends");
        said.trim().to_owned()
    };
    let servers = ["0", "1"].map(|gpu| ask(gpu, "get_server_list"));
    assert_ne!(servers[0], servers[1]);
    Fault::Xid(31).inject(node.node(), 0, 0, 0).expect("it strikes");
    within("the struck server says so", || {
        ask("0", &format!("get_server_status {}", servers[0])) == "FAULT"
    });
    assert_eq!(ask("1", &format!("get_server_status {}", servers[1])), "ACTIVE");
    assert_eq!(ask("1", &format!("get_client_list {}", servers[1])), other.id().to_string());
    assert_eq!((waited(one), waited(other)), ("700".to_owned(), "0".to_owned()));
    for gpu in ["0", "1"] {
        ask(gpu, "quit");
    }
}

#[test]
fn a_daemon_serves_the_gpus_that_it_is_given_and_its_clients_see_no_others() {
    let node = node("t4x3", 1.0);
    let start = |gpus: &str| {
        let mut daemon = on(&node, built().join("nvidia-cuda-mps-control"));
        daemon.arg("-d").env("CUDA_VISIBLE_DEVICES", gpus).stderr(Stdio::null());
        daemon.env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=300M").status()
    };
    for unknown in ["GPU-00000000", "7", "", "GPU-", "GPU-00000000,0"] {
        assert!(!start(unknown).expect("it starts").success(), "{unknown:?} is no device");
    }
    let seen = |gpus: Option<&str>, what: &[&str]| {
        let mut command = on(&node, client());
        if let Some(gpus) = gpus {
            command.env("CUDA_VISIBLE_DEVICES", gpus);
        }
        output(command.args(what))
    };
    let all = seen(None, &["devices"]);
    let all: Vec<&str> = all.split(' ').collect();
    assert!(start("2,1").expect("it starts").success());
    assert_eq!(seen(None, &["devices"]), format!("0 {} {}", all[3], all[2]), "in its order");
    assert_eq!(seen(Some("1"), &["devices"]), format!("0 {}", all[2]), "counted among them");
    assert_eq!(seen(Some(&format!("GPU-{}", all[2])), &["devices"]), format!("0 {}", all[2]));
    assert_eq!(seen(Some("2"), &["devices"]), "100");
    assert_eq!(seen(Some(&format!("GPU-{}", all[1])), &["devices"]), "100");
    // The first of its GPUs is the one with the limit.
    assert_eq!(seen(Some("0"), &["take", "64", "512"]), "0 2");
    assert_eq!(seen(Some("1"), &["take", "64", "512"]), "0 0");
    assert!(control(&node, "quit").0);
}

#[test]
fn a_client_is_gone_when_its_process_is_though_a_child_lives_on() {
    let node = node("t4", 1.0);
    daemon(&node);
    let mut heir = on(&node, client());
    let mut heir = heir.arg("heir").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(heir.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("it speaks");
    let child: i32 = line.trim().parse().expect("its child");
    let server = control(&node, "get_server_list").1;
    let clients = || control(&node, &format!("get_client_list {server}")).1;
    assert_eq!(clients(), heir.id().to_string());
    // Nobody else's server is started beside it.
    assert!(!control(&node, "start_server -uid 65534").0);
    assert_eq!(control(&node, "get_server_list").1, server);
    Fault::Xid(31).inject(node.node(), 0, 0, 0).expect("it strikes");
    let status = || control(&node, &format!("get_server_status {server}")).1;
    within("the server says so", || status() == "FAULT");
    heir.kill().expect("it lives");
    heir.wait().expect("it ends");
    within("the client is gone", || clients().is_empty());
    within("the server serves again", || status() == "ACTIVE");
    assert!(control(&node, "start_server -uid 65534").0, "nobody is there any more");
    assert!(control(&node, "quit").0);
    // SAFETY: the child that the client named; it waits for nothing else.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

#[test]
fn a_limit_of_pinned_memory_refuses_what_is_beyond_it() {
    let node = node("t4", 1.0);
    daemon(&node);
    let take = |limit: Option<&str>| {
        let mut command = on(&node, client());
        if let Some(limit) = limit {
            command.env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit);
        }
        output(command.args(["take", "64", "512", "16"]))
    };
    // The context counts too: 180 MiB on a T4.
    assert!(control(&node, "set_default_device_pinned_mem_limit 0 300M").0);
    assert_eq!(take(None), "0 2 0");
    assert_eq!(take(Some("0=250M")), "0 2 2", "a client may tighten it");
    assert_eq!(take(Some("0=4G")), "0 2 0", "and not loosen it");
    let none =
        on(&node, client()).arg("take").env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=0M").output();
    assert!(!none.expect("it runs").status.success(), "no context fits into nothing");
    assert!(!control(&node, "set_default_device_pinned_mem_limit 0 17179869184G").0);
    let server = control(&node, "get_server_list").1;
    let get = format!("get_device_pinned_mem_limit {server} 0");
    assert_eq!(control(&node, &get).1, "300M");
    assert!(control(&node, &format!("set_device_pinned_mem_limit {server} 0 2G")).0);
    assert_eq!(take(None), "0 0 0", "for clients to come");
    assert!(!control(&node, "set_default_device_pinned_mem_limit 0 lots").0);
    assert!(control(&node, "quit").0);
}

#[test]
fn version_3_lists_and_terminates() {
    let node = node("t4x2", 1.0);
    let ask = |words: &[&str]| {
        let command = &mut on(&node, built().join("nvidia-cuda-mps-control"));
        let output = command.args(words).stdin(Stdio::null()).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (output.status.success(), said)
    };
    assert!(!ask(&["-d", "-p", "4"]).0, "there is no such version");
    daemon(&node);
    assert!(!ask(&["server", "list"]).0, "a daemon of version 2 does not know it");
    assert_eq!(ask(&["-q"]), (true, String::new()));
    // The environment goes before the command line.
    let mut command = on(&node, built().join("nvidia-cuda-mps-control"));
    command.args(["-d", "-p", "2"]).env("CUDA_MPS_PROTOCOL_VERSION", "3");
    assert!(command.status().expect("it starts").success());
    assert!(!control(&node, "get_server_list").0, "nor the other way round");
    let first = pushed(on(&node, client()).env("CUDA_VISIBLE_DEVICES", "1"), "0");
    let csv = "--format=csv,noheader";
    let servers = ask(&["server", "list", csv]).1;
    // SAFETY: only asks.
    let uid = unsafe { libc::geteuid() }.to_string();
    let [server, of, status] = servers.split(',').collect::<Vec<_>>()[..] else {
        panic!("one server: {servers}")
    };
    assert_eq!((of, status), (uid.as_str(), "ACTIVE"));
    assert!(ask(&["server", "list"]).1.starts_with("PID"), "a table with a head");
    assert_eq!(ask(&["server", "create", &format!("--uid={uid}")]).1, server);
    let clients = ask(&["client", "list", "--all", csv]).1;
    assert_eq!(clients, format!("{},{server},emulated-client", first.id()));
    assert_eq!(ask(&["client", "list", &format!("--server={server}"), csv]).1, clients);
    assert!(!ask(&["client", "list", "--server=1"]).0);
    let devices = ask(&["device", "list", csv]).1;
    let on_each: Vec<&str> = devices.lines().map(|l| l.rsplit(',').next().expect("one")).collect();
    assert_eq!(on_each, ["0", "1"], "{devices}");
    assert!(!ask(&["client", "terminate", "1"]).0);
    assert!(!ask(&["namespace", "create"]).0, "what is absent says so");
    assert_eq!(ask(&["client", "terminate", &first.id().to_string()]), (true, String::new()));
    within("it is thrown out", || {
        ask(&["device", "list", csv]).1.lines().all(|l| l.ends_with(",0"))
    });
    assert_eq!(waited(first), "810");
    assert_eq!(ask(&["-q"]), (true, String::new()));
}
