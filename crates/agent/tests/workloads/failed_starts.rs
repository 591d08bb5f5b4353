//! Starts that fail late leave nothing running.

use super::*;

/// The number that a script wrote.
fn written(path: &Path) -> ProcessKey {
    let read = || fs::read_to_string(path).ok()?.trim().parse().ok();
    until("a number is written", || read().is_some());
    let pid = read().unwrap();
    ProcessKey::of(pid).unwrap_or(ProcessKey { pid, start_ticks: 0 })
}

#[test]
fn a_start_that_fails_late_leaves_nothing_running() {
    for kind in [Kind::Online, Kind::Offline] {
        let dir = tempfile::tempdir().unwrap();
        let runner = Runner::open(dir.path(), Cgroups::none(), child_program()).unwrap();
        let pid = dir.path().join("pid");
        // Signals from a dying parent do not end it.
        let script =
            format!("trap '' TERM; echo $$ > {}; while :; do sleep 0.05; done", pid.display());
        let launch = shell(&runner, kind, "unwritten", &script);
        let files = dir.path().join("workloads").join(format!("{}-{}", kind.as_str(), launch.name));
        // The keeper starts it and cannot write down whom it has started.
        fs::create_dir_all(files.join("run.new")).unwrap();
        let error = runner.start(launch).unwrap_err().to_string();
        assert!(error.contains("run.new"), "{error}");
        // It may have been too young to write its number.
        if pid.exists() {
            assert!(!written(&pid).is_alive(), "{kind:?} goes on");
        }
    }
}

#[test]
fn what_a_failed_keeper_had_started_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let script = format!(
        "setsid sh -c 'echo $$ > {0}; exec sleep 300' & while [ ! -s {0} ]; do sleep 0.01; done; echo it cannot be; sleep 300",
        pid.display()
    );
    let child = (PathBuf::from("sh"), vec!["-c".into(), script]);
    let runner = Runner::open(dir.path(), Cgroups::none(), child).unwrap();
    let launch = shell(&runner, Kind::Online, "mute", "true");
    let error = runner.start(launch).unwrap_err().to_string();
    assert!(error.contains("it cannot be"), "{error}");
    assert!(!written(&pid).is_alive(), "the keeper was killed first and its child got away");
}
