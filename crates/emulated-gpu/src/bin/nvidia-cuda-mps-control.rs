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

/// GPUs that `CUDA_VISIBLE_DEVICES` names, by index or UUID.
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
            all.iter().copied().find(|g| uuid(*g).is_some_and(|u| u.starts_with(&wanted)))
        }
        None => word.trim().parse().ok().filter(|g| all.contains(g)),
    };
    list.split(',').filter_map(find).collect()
}

fn options(multi_user: bool, static_partitions: bool) -> Result<daemon::Options, String> {
    let own = std::env::args_os().next().map(PathBuf::from);
    let node = Node::find(own.as_deref())
        .ok_or("no emulated node: set MUXFLOW_EMULATED_DIR or run under `muxflow emulate`")?;
    let built = std::env::current_exe().map_err(|e| e.to_string())?;
    let server_program = built.with_file_name("nvidia-cuda-mps-server");
    Ok(daemon::Options {
        gpus: visible(&node),
        node,
        pipe_directory: pipe_directory(),
        log_directory: log_directory(),
        server_program,
        multi_user,
        static_partitions,
    })
}

/// Starts itself again without a terminal, and waits until it listens.
fn background(multi_user: bool, static_partitions: bool) -> Result<(), String> {
    let path = pipe_directory().join("control");
    if Socket::connect(&path).is_ok() {
        return Err("An instance of this daemon is already running".to_owned());
    }
    let own = std::env::args_os().next().unwrap_or_default();
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.arg0(own).arg("-f");
    if multi_user {
        command.arg("-multiuser-server");
    }
    if static_partitions {
        command.arg("-S");
    }
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
    let answer = socket.ask(&message, line.as_bytes(), &[]).map_err(lost)?;
    Ok((answer.message.status == 0, answer.tail))
}

fn run() -> Result<bool, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let multi_user = has("-multiuser-server");
    let partitions = has("-S") || has("--static-partitioning");
    if has("-v") {
        print("MPS control (emulated) 13.4\n".as_bytes());
        return Ok(true);
    }
    if has("-d") {
        return background(multi_user, partitions).map(|()| true);
    }
    if has("-f") {
        return daemon::run(options(multi_user, partitions)?).map(|()| true).map_err(|e| {
            let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
            format!("{e}{cause}")
        });
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
