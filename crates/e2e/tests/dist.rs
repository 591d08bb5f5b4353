//! The tarball, unpacked elsewhere: everything is in it, and it works with no setting that says where
//! things are.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it skips"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use muxflow_agent::cgroup::Cgroups;
use muxflow_e2e::build::{self, must};

const LONG: Duration = Duration::from_secs(120);

/// Packs in the dev profile, which the other tests have built anyway, and unpacks below `dir`.
fn unpacked(dir: &Path) -> PathBuf {
    let (packed, elsewhere) = (dir.join("packed"), dir.join("elsewhere"));
    fs::create_dir_all(&elsewhere).unwrap();
    must(
        build::cargo()
            .args(["run", "--quiet", "-p", "xtask", "--", "dist", "--profile", "dev", "--out"])
            .arg(&packed)
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    );
    let files = || fs::read_dir(&packed).unwrap().flatten().map(|entry| entry.path());
    let tarball = files().find(|path| path.extension().is_some_and(|end| end == "gz")).unwrap();
    must(Command::new("tar").arg("-xzf").arg(&tarball).arg("-C").arg(&elsewhere));
    fs::remove_dir_all(&packed).unwrap();
    fs::read_dir(&elsewhere).unwrap().flatten().next().unwrap().path()
}

fn muxflow(tree: &Path, run: &Path, words: &[&str]) -> Output {
    Command::new(tree.join("bin/muxflow"))
        .args(words)
        .env_remove("MUXFLOW_XCUDA")
        .env("MUXFLOW_SOCKET", run.join("manager.sock"))
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    let both = [&output.stdout, &output.stderr];
    both.map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// `muxflow up` on an emulated GPU, both from the tarball.
struct Up {
    node: Child,
    run: PathBuf,
    label: String,
}

impl Up {
    fn start(tree: &Path, dir: &Path) -> Self {
        let label = format!("muxflow-dist-{}", std::process::id());
        let run = Path::new("/dev/shm").join(&label);
        let config = format!(
            "state_dir = '{0}/state'\nrun_dir = '{1}'\n[profiler]\nenabled = false\n\
             [agent]\nmetrics = ''\nkernel_log = ''\ncgroup_parent = '{label}'\n\
             pass_env = ['MUXFLOW_EMULATED_DIR']\n",
            dir.display(),
            run.display(),
        );
        fs::write(dir.join("up.toml"), config).unwrap();
        let program = tree.join("bin/muxflow");
        let node = Command::new(&program)
            .args(["emulate", "--gpus", "t4", "--"])
            .arg(&program)
            .args(["up", "--config"])
            .arg(dir.join("up.toml"))
            .env_remove("MUXFLOW_XCUDA")
            .env("MUXFLOW_TEST_LABEL", &label)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.join("up.log")).unwrap())
            .spawn()
            .unwrap();
        Up { node, run, label }
    }

    /// Processes that carry the label of this test.
    fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let pid = entry.file_name().to_str().and_then(|text| text.parse::<i32>().ok());
            let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
            let has = String::from_utf8_lossy(&environ).contains(&self.label);
            found.extend(pid.filter(|_| has));
        }
        found
    }
}

impl Drop for Up {
    /// MPS outlives a manager by design; the test ends everything that has its label.
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let left = self.processes();
            for pid in &left {
                // SAFETY: a plain system call; the process carries this test's label.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
            }
            drop(self.node.try_wait());
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(self.node.wait());
        drop(fs::remove_dir_all(&self.run));
        Cgroups::detect(&self.label).remove_empty();
    }
}

#[test]
fn the_tarball_works_where_it_is_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let tree = unpacked(dir.path());
    for part in [
        "lib/muxflow/libxcuda.so",
        "lib/systemd/system/muxflow.service",
        "share/man/man1/muxflow.1",
        "share/man/man1/muxflow-submit.1",
        "share/bash-completion/completions/muxflow",
        "share/zsh/site-functions/_muxflow",
        "share/fish/vendor_completions.d/muxflow.fish",
        "share/doc/muxflow/LICENSE",
        "share/doc/muxflow/up.toml",
    ] {
        let size = fs::metadata(tree.join(part)).map(|meta| meta.len());
        assert!(size.as_ref().is_ok_and(|size| *size > 0), "{part}: {size:?}");
    }
    assert!(!tree.join("bin/nvidia-cuda-mps-control").exists(), "it would hide the real one");
    check_files(&tree, dir.path());

    let nowhere = dir.path().join("nowhere");
    let help = text(&muxflow(&tree, &nowhere, &["demo", "--help"]));
    assert!(help.contains("--seconds"), "{help}");
    let doctor = text(&muxflow(&tree, &nowhere, &["doctor"]));
    let line = doctor.lines().find(|line| line.contains("interposer:")).unwrap_or(&doctor);
    let library = tree.join("lib/muxflow/libxcuda.so").canonicalize().unwrap();
    assert!(line.starts_with("ok ") && line.contains(library.to_str().unwrap()), "{line}");

    let up = Up::start(&tree, dir.path());
    let deadline = Instant::now() + LONG;
    let log = || fs::read_to_string(dir.path().join("up.log")).unwrap_or_default();
    let trainer = tree.join("lib/muxflow/muxflow-example-training").display().to_string();
    let words = ["submit", "--", &trainer, "--iterations", "5", "--batch", "1"];
    let id = loop {
        let made = muxflow(&tree, &up.run, &words);
        if made.status.success() {
            break String::from_utf8_lossy(&made.stdout).trim().to_owned();
        }
        assert!(Instant::now() < deadline, "{}\n{}", text(&made), log());
        std::thread::sleep(Duration::from_millis(100));
    };
    let waited = muxflow(&tree, &up.run, &["wait", &id]);
    assert!(waited.status.success(), "{}\n{}", text(&waited), log());
    let described = text(&muxflow(&tree, &up.run, &["describe", &id]));
    assert!(described.contains("done"), "{described}");
    drop(up);
    without_root(&tree, dir.path());
}

/// A program that reads files of the tarball; none where it is not installed, which CI does not allow.
fn reader(program: &str, package: &str) -> Option<Command> {
    if Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()) {
        return Some(Command::new(program));
    }
    println!("SKIPPED: install {package} to see what {program} says");
    assert!(std::env::var_os("CI").is_none(), "CI has {package}");
    None
}

/// What reads them must be content: the shell with the completions, `man` with every page, systemd with
/// the unit.
fn check_files(tree: &Path, dir: &Path) {
    let says_nothing = |command: &mut Command| {
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && errors.is_empty(), "{command:?}: {errors}");
        output.stdout
    };
    if let Some(mut bash) = reader("bash", "bash") {
        says_nothing(bash.arg("-n").arg(tree.join("share/bash-completion/completions/muxflow")));
        // Loaded, it completes the commands of the program.
        let script = "source \"$1\"; COMP_WORDS=(muxflow desc); COMP_CWORD=1; _muxflow muxflow desc muxflow; echo \"${COMPREPLY[@]}\"";
        let completed = Command::new("bash")
            .args(["-c", script, "bash"])
            .arg(tree.join("share/bash-completion/completions/muxflow"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&completed.stdout).trim(), "describe", "{completed:?}");
    }
    if reader("man", "man-db").is_some() {
        for page in fs::read_dir(tree.join("share/man/man1")).unwrap().flatten() {
            let mut man = Command::new("man");
            man.args(["--warnings", "-l"])
                .arg(page.path())
                .env("MANWIDTH", "80")
                .env("LC_ALL", "C.UTF-8");
            let text = String::from_utf8_lossy(&says_nothing(&mut man)).into_owned();
            assert!(text.contains("SYNOPSIS"), "{}: {text}", page.path().display());
        }
    }
    if let Some(mut systemd) = reader("systemd-analyze", "systemd") {
        // The program is where this tarball is, not where a person would install it.
        let unit = fs::read_to_string(tree.join("lib/systemd/system/muxflow.service")).unwrap();
        let program = tree.join("bin/muxflow");
        let unit = unit.replace("/usr/local/bin/muxflow", program.to_str().unwrap());
        let copy = dir.join("muxflow.service");
        fs::write(&copy, unit).unwrap();
        says_nothing(systemd.args(["verify", "--man=no"]).arg(&copy));
    }
}

/// A user that no machine gives anything to.
const SOMEBODY: u32 = 65_534;

/// The demo of somebody who is not root and may make no control groups: it says what it does without,
/// and shows all it has to show.
fn without_root(tree: &Path, dir: &Path) {
    if muxflow_agent::sys::own_uid() != 0 {
        println!("SKIPPED: run the tests as root to see the demo run as another user");
        assert!(std::env::var_os("CI").is_none(), "CI runs as root");
        return;
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    let theirs = dir.join("theirs");
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    let result = theirs.join("result.json");
    let output = Command::new(tree.join("bin/muxflow"))
        .args(["demo", "--seconds", "5", "--json"])
        .arg(&result)
        .env_remove("MUXFLOW_XCUDA")
        .env("TMPDIR", &theirs)
        .env("HOME", &theirs)
        .current_dir(&theirs)
        .uid(SOMEBODY)
        .gid(SOMEBODY)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{}: {said}", output.status);
    for lacking in ["no cgroup to track processes", "no memory cgroup", "no cpuset cgroup"] {
        assert!(said.contains(&format!("NOTE: {lacking}")), "{said}");
    }
    assert!(said.contains("by affinity") && said.contains("walking its descendants"), "{said}");
    assert!(said.contains("errors contained"), "{said}");
    let phases: serde_json::Value = serde_json::from_slice(&fs::read(&result).unwrap()).unwrap();
    assert!(phases[1]["iterations"].as_f64().unwrap() > 0.0, "jobs ran all the same: {phases}");
    fs::remove_file(&result).unwrap();
    let left: Vec<PathBuf> = fs::read_dir(&theirs).unwrap().flatten().map(|e| e.path()).collect();
    assert_eq!(left, Vec::<PathBuf>::new(), "it left something behind");
}
