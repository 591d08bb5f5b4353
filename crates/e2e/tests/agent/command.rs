//! The programs as they are typed: `muxflow agent` with a file, and `muxflow doctor` on a good and on
//! a broken node.

use std::fs::{self, File};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use muxflow_agent::gpu::Event;
use muxflow_e2e::build::{must, products};

use crate::world::{LONG, World, inside, page, variable};

/// Builds the `muxflow` program and runs an ignored test inside an emulated node.
fn with_program(name: &str) {
    products();
    inside(name);
}

fn muxflow() -> Command {
    Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"))
}

#[test]
fn the_agent_runs_what_its_file_says() {
    with_program("command::inner_agent");
}

#[test]
#[ignore = "run inside an emulated node by the_agent_runs_what_its_file_says"]
fn inner_agent() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path();
    let built = variable("MUXFLOW_TEST_BUILT");
    fs::write(base.join("pause"), "20000").unwrap();
    // A rule of our own: this XID is only counted otherwise.
    fs::write(
        base.join("laws.toml"),
        "[errors]\n\"xid.63\" = [\"stop-offline\", \"restart-job\"]\n",
    )
    .unwrap();
    let more = format!(
        "laws = 'laws.toml'\n[breaker]\nalways = 4\n\
         [[online]]\nservice = 'service'\ngpu = '0'\nargv = ['{worker}', '2000', '16', '{base}/pause', '{base}/service.record']\n\
         [[offline]]\njob = 'train'\nargv = ['{built}/muxflow-example-training', '--network', 'vgg16', '--batch', '1', '--iterations', '150', '--checkpoint', '{base}/checkpoint']\n",
        worker = variable("MUXFLOW_TEST_WORKER").display(),
        base = base.display(),
        built = built.display()
    );
    let (file, ..) = World::settings(base, &more);
    let log = base.join("agent.log");
    let mut agent = muxflow()
        .args(["agent", "--until-done", "--config"])
        .arg(&file)
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let said = |words: &str| fs::read_to_string(&log).unwrap_or_default().contains(words);
    let deadline = Instant::now() + LONG * 2;
    let mut struck = false;
    let status = loop {
        if let Some(status) = agent.try_wait().unwrap() {
            break status;
        }
        if !struck && said("job runs") {
            must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(["xid", "63"]));
            struck = true;
        }
        if Instant::now() > deadline {
            agent.kill().unwrap();
            agent.wait().unwrap();
            panic!("the job never ends: {}", fs::read_to_string(&log).unwrap());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = fs::read_to_string(&log).unwrap();
    assert!(status.success(), "{status}: {text}");
    assert!(text.contains("fault xid.63"), "the rule of the file: {text}");
    assert!(text.contains("Evicted") && text.contains("Finished"), "{text}");
    let output = fs::read_to_string(base.join("state/workloads/offline-train/stdout.log")).unwrap();
    assert!(output.contains("iterations, "), "{output}");
    // The service outlives the command; the next agent finds it.
    let world = World::start_in(base, "");
    let found = world.event("it is found", |event| matches!(event, Event::OnlineStarted { .. }));
    assert!(matches!(found, Event::OnlineStarted { adopted: true, .. }), "{found:?}");
    world.serve(5);
    world.end();
}

#[test]
fn jobs_that_are_done_are_not_begun_again_and_those_that_break_something_wait() {
    with_program("command::inner_jobs");
}

#[test]
#[ignore = "run inside an emulated node by jobs_that_are_done_are_not_begun_again_and_those_that_break_something_wait"]
fn inner_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path();
    let (runs, go) = (base.join("runs"), base.join("go"));
    let job = |name: &str, script: &str| {
        format!("[[offline]]\njob = '{name}'\nargv = ['sh', '-c', '{script}']\n")
    };
    let first = job("one", &format!("echo one >> {}", runs.display()));
    let wait = format!("while [ ! -e {} ]; do sleep 0.1; done", go.display());
    let second = job("two", &format!("{wait}; echo two >> {}", runs.display()));
    let (file, ..) = World::settings(base, &format!("{first}{second}"));
    let log = base.join("agent.log");
    let start = || {
        let log = File::options().create(true).append(true).open(&log).unwrap();
        let mut agent = muxflow();
        agent.args(["agent", "--until-done", "--config"]).arg(&file).stderr(log).spawn().unwrap()
    };
    let said = |words: &str| fs::read_to_string(&log).unwrap_or_default().contains(words);
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let deadline = Instant::now() + LONG;
        while !holds() {
            let log = fs::read_to_string(&log).unwrap_or_default();
            assert!(Instant::now() < deadline, "never: {what}: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let mut agent = start();
    until("the second job runs", &|| said("job runs gpu") && said("job=\"two\""));
    agent.kill().unwrap();
    agent.wait().unwrap();
    fs::write(&go, "").unwrap();
    let mut agent = start();
    until("the first job is left out", &|| said("finished before"));
    let deadline = Instant::now() + LONG;
    let ended = loop {
        if let Some(status) = agent.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() > deadline {
            agent.kill().unwrap();
            agent.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = fs::read_to_string(&log).unwrap();
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}: {text}");
    assert_eq!(fs::read_to_string(&runs).unwrap(), "one\ntwo\n", "{text}");

    // A program that is not there is given up, and one that breaks the GPU waits.
    let worker = variable("MUXFLOW_TEST_WORKER").display().to_string();
    fs::write(base.join("pause"), "0").unwrap();
    let breaks = format!(
        "[[offline]]\njob = 'none'\nargv = ['/no/such/program']\n\
         [[offline]]\njob = 'bad'\nargv = ['{worker}', '500', '8', '{}/pause', '-', 'stubborn']\n",
        base.display()
    );
    World::settings(base, &breaks);
    fs::write(&log, "").unwrap();
    let mut agent = start();
    until("the missing program is given up", &|| said("job given up"));
    let pid = || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let line = text.lines().find(|line| line.contains("job runs") && line.contains("bad"))?;
        field(line, "pid").map(str::to_owned)
    };
    until("the other runs", &|| pid().is_some());
    // As soon as it has a context.
    until("it breaks the GPU", &|| {
        let words = ["--pid", &pid().unwrap(), "xid", "31"];
        let broken = Command::new(variable("MUXFLOW_TEST_FAULT")).args(words).output().unwrap();
        broken.status.success()
    });
    until("it has left", &|| said("job left"));
    let text = fs::read_to_string(&log).unwrap();
    let line = text.lines().find(|line| line.contains("job left")).unwrap();
    assert!(line.contains("Failed"), "{line}");
    muxflow_agent::sys::kill(agent.id(), libc::SIGTERM).unwrap();
    assert!(!agent.wait().unwrap().success(), "a job was given up");
    World::start_in(base, "").end();
}

#[test]
fn the_doctor_says_what_is_wrong_and_how_to_mend_it() {
    with_program("command::inner_doctor");
}

#[test]
#[ignore = "run inside an emulated node by the_doctor_says_what_is_wrong_and_how_to_mend_it"]
fn inner_doctor() {
    let dir = tempfile::tempdir().unwrap();
    let doctor = |more: &str| -> Output {
        let (file, ..) = World::settings(dir.path(), more);
        muxflow().args(["doctor", "--config"]).arg(file).output().unwrap()
    };
    let text = |output: &Output| {
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        text
    };
    let good = doctor("");
    assert!(good.status.success() && text(&good).contains("0 bad"), "{}", text(&good));
    let broken = doctor("[mps]\nprogram = 'no-such-program'\n[defences]\ngate = false\n");
    let said = text(&broken);
    assert!(!broken.status.success(), "{said}");
    for words in ["BAD", "no-such-program", "gate", "      -> "] {
        assert!(said.contains(words), "{words} is missing: {said}");
    }
    assert!(said.contains("2 bad"), "{said}");
    // A GPU that is gone.
    must(Command::new(variable("MUXFLOW_TEST_FAULT")).arg("off-bus"));
    let lost = doctor("");
    assert!(!lost.status.success() && text(&lost).contains("GPU"), "{}", text(&lost));
    // A file that is wrong names the place.
    let wrong = doctor("[breaker]\nshare_pct = 900\n");
    let said = text(&wrong);
    assert!(!wrong.status.success() && said.contains("breaker.share_pct"), "{said}");
}

#[test]
fn every_change_of_health_is_logged_and_counted() {
    with_program("command::inner_transitions");
}

/// The value of `KEY=` in a line of the log.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split(&format!(" {key}=")).nth(1)?.split(' ').next()
}

#[test]
#[ignore = "run inside an emulated node by every_change_of_health_is_logged_and_counted"]
fn inner_transitions() {
    let dir = tempfile::tempdir().unwrap();
    let (file, ..) = World::settings(dir.path(), "");
    let path = dir.path().join("agent.log");
    let mut agent = muxflow()
        .args(["agent", "--config"])
        .arg(&file)
        .stderr(File::create(&path).unwrap())
        .spawn()
        .unwrap();
    let log = || fs::read_to_string(&path).unwrap_or_default();
    let deadline = Instant::now() + LONG;
    let wait = |what: &str, holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(Instant::now() < deadline, "never: {what}: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let address = || {
        let text = log();
        let line = text.lines().find(|line| line.contains(" metrics address="))?;
        field(line, "address")?.parse::<std::net::SocketAddr>().ok()
    };
    wait("its metrics are served", &|| address().is_some());
    let address = address().unwrap();
    let number = |name: &str, state: &str| {
        let (text, state) = (page(address), format!("state=\"{state}\""));
        let is_it = |line: &&str| line.starts_with(name) && line.contains(&state);
        let line = text.lines().find(is_it).map(str::to_owned).unwrap_or_default();
        line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).unwrap_or(-1.0)
    };
    let is = |state: &str| number("muxflow_gpu_health{", state) > 0.5;
    wait("healthy", &|| is("Healthy"));
    must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(["xid", "154"]));
    wait("disabled", &|| is("Disabled"));
    std::thread::sleep(Duration::from_secs(1));
    must(Command::new(variable("MUXFLOW_TEST_FAULT")).arg("reset"));
    wait("healthy again", &|| is("Healthy"));
    let states = ["Init", "Healthy", "Unhealthy", "Overlimit", "Disabled"];
    let logged = || {
        let text = log();
        let changes: Vec<String> =
            text.lines().filter(|l| l.contains("health changed")).map(str::to_owned).collect();
        for line in &changes {
            assert!(
                ["gpu", "from", "to", "cause"].iter().all(|key| field(line, key).is_some()),
                "{line}"
            );
        }
        states.map(|state| changes.iter().filter(|l| field(l, "to") == Some(state)).count())
    };
    let counted = || states.map(|state| number("muxflow_gpu_health_transitions_total{", state));
    let as_counts = |counts: [usize; 5]| counts.map(|n| f64::from(u32::try_from(n).unwrap()));
    wait("log and metrics agree", &|| as_counts(logged()) == counted());
    let [_, healthy, _, _, disabled] = logged();
    assert!(healthy >= 2 && disabled == 1, "{:?}: {}", logged(), log());
    muxflow_agent::sys::kill(agent.id(), libc::SIGTERM).unwrap();
    assert!(agent.wait().unwrap().success(), "{}", log());
    // What it left running goes.
    World::start_in(dir.path(), "").end();
}
