//! Jobs and services of other users than the manager's.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use muxflow_api::jobs::{JobState, JobView};
use muxflow_api::service::ServiceView;
use muxflow_manager::client::{Client, Place};

use crate::world::{World, inside, root};

/// Users that no machine gives anything to.
const SOMEBODY: u32 = 65_534;
const SOMEBODY_ELSE: u32 = 65_533;
const THEIR_TOKEN: &str = "a-token-of-somebody";

#[test]
fn jobs_and_services_run_as_their_users_and_never_as_the_daemon() {
    if root("jobs of several users") {
        inside("users::inner_users", "t4x2");
    }
}

/// Processes with this variable in their environment: pid to user.
fn owners(variable: &str) -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        let has = environ.split(|byte| *byte == 0).any(|word| word == variable.as_bytes());
        if let (true, Ok(meta)) = (has, fs::metadata(entry.path())) {
            found.insert(pid, meta.uid());
        }
    }
    found
}

/// What a process may do beyond its user's rights, and the groups it is in.
fn rights(pid: u32) -> (String, String) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name));
        found.unwrap_or_default().trim().to_owned()
    };
    (line("CapEff:"), line("Groups:"))
}

#[test]
#[ignore = "run inside an emulated node by jobs_and_services_run_as_their_users_and_never_as_the_daemon"]
fn inner_users() {
    let token = format!("[[token]]\nuser = '{SOMEBODY}'\ntoken = '{THEIR_TOKEN}'\n");
    let world = World::start(&format!("jobs_per_user = 3\n[profiler]\nenabled = false\n{token}"));
    fs::set_permissions(world.base(), fs::Permissions::from_mode(0o755)).unwrap();
    world.wait_healthy(2);

    // Over the socket, where the kernel tells who calls.
    let made = world.muxflow_as(SOMEBODY, &["submit", "--", "sh", "-c", "sleep 1000; true"]);
    let id = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    assert!(made.status.success(), "{made:?}\n{}", world.log());
    let job = world.wait(&id, "it runs", |job| job.state == JobState::Running);
    assert_eq!(job.uid, SOMEBODY);
    let mine = || owners(&format!("MUXFLOW_JOB={id}"));
    world.until("shell and sleep run", || mine().len() == 2);
    let mine = mine();
    assert!(mine.values().all(|uid| *uid == SOMEBODY), "{mine:?}");
    for pid in mine.keys() {
        let (capabilities, groups) = rights(*pid);
        assert!(capabilities.chars().all(|c| c == '0'), "capabilities {capabilities} are left");
        assert!(!groups.split_whitespace().any(|group| group == "0"), "still in root's group");
    }
    // Others neither end it nor read what it writes.
    for words in [["cancel", &id], ["logs", &id]] {
        let refused = world.muxflow_as(SOMEBODY_ELSE, &words);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && text.contains("belongs to"), "{words:?}: {text}");
    }
    assert!(world.muxflow_as(SOMEBODY, &["cancel", &id]).status.success());
    world.wait(&id, "cancelled by its owner", |job| job.state == JobState::Cancelled);

    // Over TCP, where a token stands for a user.
    let place = Place::Tcp { address: world.address(), token: THEIR_TOKEN.to_owned() };
    let client = Client::new(place).unwrap();
    let submit = serde_json::json!({ "command": ["sh", "-c", "id -u; id -g; pwd"], "cwd": "/" });
    let made: serde_json::Value = client.post("/v1/jobs", &submit).unwrap();
    let id = made["jobs"][0].as_str().unwrap().to_owned();
    let ended: JobView = world.wait(&id, "over", |job| job.state.is_final());
    assert_eq!(ended.state, JobState::Done, "{ended:#?}");
    assert_eq!(world.must(&["logs", &id]), format!("{SOMEBODY}\n{SOMEBODY}\n/\n"));

    limits(&world);
    services(&world);
    world.end();
}

/// Two users submit at once, each as fast as they can: each gets as many jobs as one may have, and
/// nobody takes the other's.
fn limits(world: &World) {
    world.must(&["pause"]);
    let submit = |uid| world.muxflow_as(uid, &["submit", "--", "true"]);
    let many = |uid| {
        let made: Vec<_> = (0..5).map(|_| submit(uid)).collect();
        let kept = made.iter().filter(|output| output.status.success()).count();
        (kept, String::from_utf8_lossy(&made[4].stderr).into_owned())
    };
    std::thread::scope(|scope| {
        let both = [SOMEBODY, SOMEBODY_ELSE].map(|uid| scope.spawn(move || (uid, many(uid))));
        for thread in both {
            let (uid, (kept, last)) = thread.join().unwrap();
            assert_eq!(kept, 3, "user {uid}");
            assert!(last.contains("has 3 jobs that have not ended and may have 3"), "{last}");
        }
    });
    for uid in [SOMEBODY, SOMEBODY_ELSE] {
        let mine = world.muxflow_as(uid, &["jobs", "--mine", "--state", "open", "--json"]);
        let mine: Vec<JobView> = serde_json::from_slice(&mine.stdout).unwrap();
        assert!(mine.len() == 3 && mine.iter().all(|job| job.uid == uid), "{mine:#?}");
        let words: Vec<&str> = mine.iter().map(|job| job.id.as_str()).collect();
        assert!(world.muxflow_as(uid, &[&["cancel"], &words[..]].concat()).status.success());
        assert!(submit(uid).status.success(), "there is room again");
    }
    world.must(&["resume"]);
}

#[test]
fn jobs_of_other_users_work_on_the_gpu_one_after_another() {
    if root("jobs of several users on one GPU") {
        inside("users::inner_work", "t4");
    }
}

/// The user that the MPS daemon has last started a server for, as its own log tells.
fn served(world: &World) -> Option<u32> {
    let mut texts = fs::read_dir(world.run().join("mps")).unwrap().flatten().map(|gpu| {
        let log = gpu.path().join("log/control.log");
        fs::read_to_string(&log).unwrap_or_else(|error| panic!("{}: {error}", log.display()))
    });
    let text = texts.next()?;
    let started = text.lines().rev().find(|line| line.contains("Starting new server"))?;
    started.rsplit(' ').next()?.parse().ok()
}

/// One MPS server serves one user at a time: with each job the daemon ends the server of the user
/// before and starts one for the next, and nobody takes that for a crash.
#[test]
#[ignore = "run inside an emulated node by jobs_of_other_users_work_on_the_gpu_one_after_another"]
fn inner_work() {
    let world = World::start("[profiler]\nenabled = false\n");
    fs::set_permissions(world.base(), fs::Permissions::from_mode(0o755)).unwrap();
    world.wait_healthy(1);
    let worker = world.worker(500);
    let mut submit = vec!["submit", "--"];
    submit.extend(worker.iter().map(String::as_str));
    let submit_as = |uid: u32| {
        let made = world.muxflow_as(uid, &submit);
        assert!(made.status.success(), "{made:?}\n{}", world.log());
        String::from_utf8_lossy(&made.stdout).trim().to_owned()
    };
    // All wait from the beginning; who comes first among equals is the scheduler's choice.
    let users = [SOMEBODY, 0, SOMEBODY_ELSE];
    let mut waiting: Vec<(String, u32)> = users.map(|user| (submit_as(user), user)).into();
    let jobs: Vec<String> = waiting.iter().map(|(id, _)| id.clone()).collect();
    let running = || world.gpus().remove(0).offline;
    while !waiting.is_empty() {
        let next = || running().and_then(|on| waiting.iter().position(|(id, _)| *id == on.job));
        world.until("the next job is on the GPU", || next().is_some());
        let place = next().unwrap_or_else(|| panic!("gone already: {}", world.log()));
        let (id, user) = &waiting.remove(place);
        let launches = || running().filter(|on| on.job == *id).map_or(0, |on| on.launches);
        world.until("the job launches kernels", || launches() > 200);
        let mine = owners(&format!("MUXFLOW_JOB={id}"));
        assert!(!mine.is_empty() && mine.values().all(|uid| uid == user), "{id}: {mine:?}");
        assert_eq!(served(&world), Some(*user), "the server of {id}");
        let before = launches();
        world.until("it goes on", || launches() > before + 200);
        assert!(world.muxflow_as(*user, &["cancel", id]).status.success());
        world.wait(id, "cancelled by its owner", |job| job.state == JobState::Cancelled);
    }
    let gpu = world.gpus().remove(0);
    assert!(gpu.faults.is_empty() && gpu.health == "Healthy", "{gpu:#?}");
    assert_eq!(gpu.mps_starts, 1, "the daemon stays: {gpu:#?}");
    for id in &jobs {
        assert_eq!(world.job(id).failures, 0, "{:#?}", world.job(id));
    }
    world.end();
}

fn declare(world: &World, name: &str, user: Option<u32>) -> String {
    let mut declared =
        serde_json::json!({ "name": name, "command": ["sleep", "1000"], "critical": true });
    if let Some(user) = user {
        declared["user"] = user.to_string().into();
    }
    let path = world.base().join(format!("{name}.json"));
    fs::write(&path, declared.to_string()).unwrap();
    path.display().to_string()
}

fn services(world: &World) {
    for (name, user, expected) in [("theirs", Some(SOMEBODY), SOMEBODY), ("ours", None, 0)] {
        let file = declare(world, name, user);
        let refused = world.muxflow_as(SOMEBODY, &["service", "declare", &file]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains("may not change services"), "{text}");
        world.must(&["service", "declare", &file]);
        let path = format!("/v1/services/{name}");
        let look = || world.client.get::<ServiceView>(&path).unwrap();
        world.until("its process runs", || look().replicas.iter().any(|r| r.pid.is_some()));
        let gpus = || world.client.get::<serde_json::Value>("/v1/gpus").unwrap();
        world.until("its GPU is known as one of a critical service", || {
            let all = gpus()["items"].as_array().cloned().unwrap_or_default();
            all.iter().any(|gpu| gpu["online"]["critical"] == true)
        });
        let view = look();
        assert_eq!(view.declared.user.as_deref(), Some(expected.to_string().as_str()));
        let pid = view.replicas[0].pid.unwrap();
        let owner = fs::metadata(format!("/proc/{pid}")).unwrap().uid();
        assert_eq!(owner, expected, "{name} runs as {owner}");
        if expected != 0 {
            assert!(rights(pid).0.chars().all(|c| c == '0'), "it has root's capabilities");
        }
        world.must(&["service", "remove", name]);
    }
}
