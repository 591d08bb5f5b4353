//! The emulated MPS control program: daemon with `-d` or `-f`, else it sends commands from its
//! standard input.

use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::mps::{daemon, pipe_directory, topic};
use muxflow_emulated_gpu::node::Node;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};

fn log_directory() -> PathBuf {
    std::env::var_os("CUDA_MPS_LOG_DIRECTORY")
        .map_or_else(|| PathBuf::from("/var/log/nvidia-mps"), PathBuf::from)
}

/// GPUs that `CUDA_VISIBLE_DEVICES` names, by index or UUID; what is not understood ends the list.
fn visible(node: &Node) -> Vec<usize> {
    let all: Vec<usize> = (0..node.gpu_count()).collect();
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else { return all };
    let uuid = |gpu: usize| {
        let socket = Socket::connect(&node.socket(gpu)).ok()?;
        let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).ok()?;
        let at = size_of::<muxflow_emulated_gpu::facts::Stats>();
        let facts = muxflow_emulated_gpu::facts::Facts::from_bytes(answer.tail.get(at..)?)?;
        Some(facts.uuid.iter().map(|b| format!("{b:02x}")).collect::<String>())
    };
    let find = |word: &str| match word.trim().strip_prefix("GPU-") {
        Some(wanted) => {
            let wanted = wanted.replace('-', "").to_ascii_lowercase();
            let is = |gpu: &usize| uuid(*gpu).is_some_and(|u| u.starts_with(&wanted));
            all.iter().copied().find(|gpu| !wanted.is_empty() && is(gpu))
        }
        None => word.trim().parse().ok().filter(|g| all.contains(g)),
    };
    let mut seen = Vec::new();
    for gpu in list.split(',').map_while(find) {
        if seen.contains(&gpu) {
            break;
        }
        seen.push(gpu);
    }
    seen
}

/// What the command line asks for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    multi_user: bool,
    static_partitions: bool,
    protocol: u32,
}

fn options(wanted: Wanted) -> Result<daemon::Options, String> {
    let own = std::env::args_os().next().map(PathBuf::from);
    let node = Node::find(own.as_deref())
        .ok_or("no emulated node: set MUXFLOW_EMULATED_DIR or run under `muxflow emulate`")?;
    let gpus = visible(&node);
    if gpus.is_empty() {
        let list = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        return Err(format!("no device to serve: CUDA_VISIBLE_DEVICES is `{list}`"));
    }
    let built = std::env::current_exe().map_err(|e| e.to_string())?;
    let server_program = built.with_file_name("nvidia-cuda-mps-server");
    Ok(daemon::Options {
        gpus,
        node,
        pipe_directory: pipe_directory(),
        log_directory: log_directory(),
        server_program,
        multi_user: wanted.multi_user,
        static_partitions: wanted.static_partitions,
        protocol: wanted.protocol,
    })
}

/// Starts itself again without a terminal, and waits until it listens.
fn background(wanted: Wanted) -> Result<(), String> {
    let path = pipe_directory().join("control");
    if Socket::connect(&path).is_ok() {
        return Err("An instance of this daemon is already running".to_owned());
    }
    let own = std::env::args_os().next().unwrap_or_default();
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.arg0(own).arg("-f");
    if wanted.multi_user {
        command.arg("-multiuser-server");
    }
    if wanted.static_partitions {
        command.arg("-S");
    }
    command.args(["-p", &wanted.protocol.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.process_group(0);
    let mut child = command.spawn().map_err(|e| e.to_string())?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while Socket::connect(&path).is_err() {
        if child.try_wait().ok().flatten().is_some() || Instant::now() > deadline {
            return Err("Cannot start the MPS control daemon: see its control.log".to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn send(line: &str) -> Result<(bool, Vec<u8>), String> {
    let path = pipe_directory().join("control");
    let lost = |_| "Cannot find MPS control daemon process".to_owned();
    let socket = Socket::connect(&path).map_err(lost)?;
    let message = Message::new(Kind::Ping, &[topic::COMMAND]);
    match socket.ask(&message, line.as_bytes(), &[]) {
        Ok(answer) => Ok((answer.message.status == 0, answer.tail)),
        // A daemon that is gone is what this command is for.
        Err(_) if line.trim_start().starts_with("quit") => Ok((true, Vec::new())),
        Err(error) => Err(lost(error)),
    }
}

/// Version of the commands; the environment goes before the command line.
fn protocol(arguments: &[String]) -> Result<u32, String> {
    let flag = arguments.iter().position(|a| a == "-p" || a == "--protocol");
    let flag = flag.map(|at| arguments.get(at + 1).cloned().unwrap_or_default());
    let given = std::env::var("CUDA_MPS_PROTOCOL_VERSION").ok().or(flag);
    match given.as_deref() {
        None | Some("2") => Ok(2),
        Some("3") => Ok(3),
        Some(other) => Err(format!("{other} is not a protocol version: 2 or 3")),
    }
}

/// A command of version 3 stands on the command line: a module comes first.
fn module_verb(arguments: &[String]) -> Option<String> {
    let modules = ["server", "namespace", "client", "device", "sm-partition", "feature", "memacct"];
    let at = arguments.iter().position(|a| modules.contains(&a.as_str()))?;
    Some(arguments[at..].join(" "))
}

fn run() -> Result<bool, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let wanted = Wanted {
        multi_user: has("-multiuser-server") || has("-m") || has("--multiuser"),
        static_partitions: has("-S") || has("--static-partitioning"),
        protocol: protocol(&arguments)?,
    };
    if has("-v") {
        print("MPS control (emulated) 13.4\n".as_bytes());
        return Ok(true);
    }
    if has("-d") || has("--daemon") {
        return background(wanted).map(|()| true);
    }
    if has("-f") || has("--foreground") {
        return daemon::run(options(wanted)?).map(|()| true).map_err(|e| {
            let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
            format!("{e}{cause}")
        });
    }
    let quits = has("-q") || has("--quit");
    if let Some(line) = quits.then(|| "quit".to_owned()).or_else(|| module_verb(&arguments)) {
        let (ok, answer) = send(&line)?;
        print(&answer);
        return Ok(ok);
    }
    let mut all_well = true;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        if line.trim().is_empty() {
            continue;
        }
        let (ok, answer) = send(&line)?;
        all_well &= ok;
        print(&answer);
    }
    Ok(all_well)
}

fn print(bytes: &[u8]) {
    if std::io::stdout().write_all(bytes).is_err() {
        // Nobody listens.
    }
}

#[expect(clippy::print_stderr, reason = "this is where errors reach the person who typed")]
fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
