//! The API against its own description: schemathesis makes requests from it, and no answer may be a
//! failure of the server or take for ever.

use std::fs::File;
use std::process::Command;

use muxflow_api::cluster::HealthView;
use muxflow_e2e::build::target;

use crate::world::{TOKEN, World, inside, variable};

/// Pinned: another version makes other requests.
const PACKAGES: [&str; 2] = ["schemathesis==4.32.5", "hypothesis==6.170.15"];

/// Says that something could not be had; with CI=true that is a failure.
fn skip(why: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "schemathesis: {why}");
    println!("SKIPPED schemathesis: {why}");
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

/// The program, installed once under the target directory.
fn install() -> Result<(), String> {
    let root = target().join("schemathesis");
    std::fs::create_dir_all(&root).map_err(|e| e.to_string())?;
    let lock = File::create(root.join("lock")).map_err(|e| e.to_string())?;
    lock.lock().map_err(|e| e.to_string())?;
    let (venv, marker) = (root.join("venv"), root.join("installed"));
    let wanted = PACKAGES.join("\n");
    if !std::fs::read_to_string(&marker).is_ok_and(|have| have == wanted) {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        run(pip.args(["install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES))?;
        std::fs::write(&marker, wanted).map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[test]
fn the_api_stands_requests_made_from_its_description() {
    match install() {
        Ok(()) => inside("fuzz::inner_fuzz", "t4"),
        Err(why) => skip(&why),
    }
}

#[test]
#[ignore = "run inside an emulated node by the_api_stands_requests_made_from_its_description"]
fn inner_fuzz() {
    let program = target().join("schemathesis/venv/bin/schemathesis");
    // In shadow mode, so that nothing of what is made up is ever started.
    let world = World::start("shadow = true\njobs_per_user = 200\n[profiler]\nenabled = false\n");
    let address = world.address();
    let output = Command::new(program)
        .args(["run", "--header"])
        .arg(format!("Authorization: Bearer {TOKEN}"))
        .args([
            "--checks",
            "not_a_server_error,status_code_conformance,response_schema_conformance",
        ])
        .args(["--exclude-path", "/v1/events/stream"])
        .args([
            "--max-examples",
            "25",
            "--request-timeout",
            "30",
            "--seed",
            "7",
            "--no-color",
            "--no-shrink",
        ])
        .args(["--phases", "examples,coverage,fuzzing"])
        .arg(format!("http://{address}/v1/openapi.json"))
        .current_dir(world.base())
        .env("HOME", world.base())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}\n{}", world.log());
    let line = text.lines().find(|line| line.contains(" generated, ")).unwrap_or_default();
    println!("MEASURED schemathesis: {}", line.trim());
    let cases = line.split_ascii_whitespace().find_map(|word| word.parse::<u32>().ok());
    assert!(cases.is_some_and(|cases| cases >= 100), "hardly anything was tried: {text}");
    // It still answers.
    let health: HealthView = world.client.get("/v1/health").unwrap();
    assert_eq!(health.status, "ok");
    assert!(variable("MUXFLOW_TEST_BUILT").exists());
    world.end();
}
