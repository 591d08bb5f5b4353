//! Whole programs on a node: the inference server and the trainer of the examples, and a client of
//! DCGM.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::launcher::Running;
use support::{built, client, compiled, node, on, output};

fn inference(node: &Running) -> Command {
    on(node, built().join("muxflow-example-inference"))
}

fn training(node: &Running) -> Command {
    on(node, built().join("muxflow-example-training"))
}

/// Lines of a program, until one fits.
fn line_with(lines: &mut BufReader<ChildStdout>, fits: impl Fn(&str) -> bool) -> String {
    loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).expect("it speaks") > 0, "it ended without saying so");
        if fits(line.trim()) {
            return line.trim().to_owned();
        }
    }
}

fn started(command: &mut Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let lines = BufReader::new(child.stdout.take().expect("a pipe"));
    (child, lines)
}

/// The number in front of a word.
fn before(text: &str, word: &str) -> f64 {
    let (front, _) = text.split_once(word).unwrap_or_else(|| panic!("no {word} in {text}"));
    front.split_whitespace().last().expect("a number").parse().expect("a number")
}

#[test]
fn the_inference_server_serves_networks_of_four_sizes() {
    let node = node("t4", 1.0);
    let mut device_us = Vec::new();
    for network in ["resnet50", "densenet201", "inception-v3", "vgg16"] {
        let record = node.node().root().join("requests");
        let mut command = inference(&node);
        // Four at once: the kernels take longer than their launches on a busy machine.
        command.args(["--network", network, "--batch", "4"]);
        command.args(["--rate", "20", "--seconds", "1.5", "--record"]);
        let said = output(command.arg(&record));
        let last = said.lines().last().expect("a summary");
        let recorded = std::fs::read_to_string(&record).expect("a record");
        let column = |i: usize| -> Vec<f64> {
            let of =
                |line: &str| line.split(' ').nth(i).expect("a column").parse().expect("a number");
            let mut all: Vec<f64> = recorded.lines().map(of).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let latencies = column(1);
        assert!(latencies.len() > 10, "{network}: {said}");
        assert_eq!(before(last, "requests,"), latencies.len() as f64, "{network}");
        // Half of them stay below what is shown: the end of a bucket, which are a twentieth wide.
        let middle = latencies[(latencies.len() - 1) / 2] / 1e3;
        let shown = before(last, "ms, p90");
        let bucket = middle - 0.01..middle * 1.05 + 0.01;
        assert!(bucket.contains(&shown), "{network}: {shown} ms shown, {middle} measured");
        let rate = before(last, "requests per second");
        assert!(rate > 5.0 && rate < 80.0, "{network}: {last}");
        let device = column(2);
        device_us.push((network, device[device.len() / 2]));
    }
    // By their multiply-adds: 4.1, 4.3, 5.7 and 15.5 billion.
    let ordered = device_us.windows(2).all(|pair| pair[0].1 < pair[1].1);
    assert!(ordered, "{device_us:?}");
    let (small, large) = (device_us[0].1, device_us[3].1);
    assert!((2.5..5.0).contains(&(large / small)), "{device_us:?}");
}

#[test]
fn the_inference_server_answers_over_http() {
    let node = node("t4", 1.0);
    let mut command = inference(&node);
    command.args(["--rate", "0", "--seconds", "0", "--listen", "127.0.0.1:0"]);
    let (mut child, mut lines) = started(&mut command);
    let line = line_with(&mut lines, |l| l.starts_with("listening on "));
    let address = line.trim_start_matches("listening on ").to_owned();
    let get = |path: &str| {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        write!(stream, "GET {path} HTTP/1.1\r\n\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        answer.rsplit("\r\n").next().expect("a body").trim().to_owned()
    };
    for _ in 0..3 {
        assert!(get("/infer").parse::<f64>().expect("a latency") > 100.0);
    }
    assert!(get("/stats").starts_with("3 requests, p50 "));
    child.kill().expect("it lives");
    child.wait().expect("it ends");
}

#[test]
fn the_trainer_goes_on_from_its_checkpoint_after_any_end() {
    let node = node("t4", 4.0);
    let checkpoint = node.node().root().join("weights");
    let train = |iterations: &str| {
        let mut command = training(&node);
        command.args(["--network", "resnet50", "--batch", "1", "--iterations", iterations]);
        command.args(["--save-every", "5", "--checkpoint"]).arg(&checkpoint);
        command
    };
    // Killed without a word.
    let (mut child, mut lines) = started(&mut train("0"));
    line_with(&mut lines, |l| l == "saved at iteration 10");
    child.kill().expect("it lives");
    child.wait().expect("it ends");
    // Asked to stop.
    let (mut child, mut lines) = started(&mut train("0"));
    let from = line_with(&mut lines, |l| l.starts_with("going on from iteration "));
    let from: u64 = from.rsplit(' ').next().expect("a number").parse().expect("a number");
    assert!(from >= 10 && from.is_multiple_of(5), "{from}");
    let pid = i32::try_from(child.id()).expect("a process id");
    line_with(&mut lines, |l| l.starts_with("saved"));
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let mut said = String::new();
    lines.read_to_string(&mut said).expect("it says what it did");
    assert!(child.wait().expect("it ends").success(), "{said}");
    let at = said.lines().rfind(|l| l.starts_with("saved at iteration ")).expect("it saved");
    let at: u64 = at.rsplit(' ').next().expect("a number").parse().expect("a number");
    assert!(at > from, "{at} after {from}");
    // To its end.
    let said = output(&mut train(&(at + 3).to_string()));
    assert!(said.starts_with(&format!("going on from iteration {at}\n")), "{said}");
    assert!(said.contains("\n3 iterations, "), "{said}");
    // Spoiled, or of another network: it says so and names the file.
    let refused = |command: &mut Command| {
        let output = command.output().expect("it runs");
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("weights is not a checkpoint of"), "{said}");
    };
    refused(training(&node).args(["--network", "inception-v3", "--checkpoint"]).arg(&checkpoint));
    let whole = std::fs::read(&checkpoint).expect("a checkpoint");
    std::fs::write(&checkpoint, &whole[..whole.len() / 2]).expect("cut in half");
    refused(&mut train("1"));
}

#[test]
fn a_client_of_dcgm_reads_the_profiling_fields() {
    let node = node("t4,a10", 1.0);
    let read = || output(&mut on(&node, compiled("dcgm")));
    let field = |line: &str, number: &str| -> f64 {
        let key = format!(" {number}=");
        let (_, rest) = line.split_once(&key).unwrap_or_else(|| panic!("no {number} in {line}"));
        rest.split(' ').next().expect("a value").parse().expect("a number")
    };
    let said = read();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4, "a count, two GPUs, and the group of one: {said}");
    assert_eq!(lines[0], "2 GPUs");
    assert!(lines[1].starts_with("0 50=Tesla T4 ") && lines[2].starts_with("1 50=NVIDIA A10 "));
    assert!(lines[1].ends_with(" 9999=!-16"), "a field that nobody knows: {said}");
    let mut busy = on(&node, client());
    let mut busy = busy.args(["busy", "30000"]).stdout(Stdio::null()).spawn().expect("it starts");
    let deadline = Instant::now() + Duration::from_secs(20);
    let line = loop {
        let said = read();
        let line = said.lines().nth(1).expect("the first GPU").to_owned();
        if field(&line, "203") > 90.0 && field(&line, "1002") > 0.9 {
            assert_eq!(field(said.lines().nth(2).expect("the second"), "203"), 0.0);
            break line;
        }
        assert!(Instant::now() < deadline, "it does not get busy: {said}");
        std::thread::sleep(Duration::from_millis(100));
    };
    busy.kill().expect("it lives");
    busy.wait().expect("it ends");
    // 40 of 40 SMs, half of the warps, no tensor cores, a third of the bandwidth.
    assert!(field(&line, "1001") > 0.9, "{line}");
    assert!((0.3..0.7).contains(&field(&line, "1003")), "{line}");
    assert!((0.1..0.6).contains(&field(&line, "1005")), "{line}");
    assert!(field(&line, "252") > 100.0 && field(&line, "155") > 20.0, "{line}");
}
