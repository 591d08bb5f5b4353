//! Tests of control groups: mount tables as text, and real groups with real processes.

use super::*;
use proptest::prelude::*;
use std::process::Command;

const HYBRID: &str = "\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
33 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
35 30 0:32 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset
36 30 0:33 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
";

#[test]
fn mount_tables_are_read() {
    let mounts = parse_mounts(HYBRID);
    assert_eq!(mounts.v2.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
    let names: Vec<_> = mounts.v1.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["memory", "cpuset", "freezer"]);
    assert_eq!(mounts.unused, [Path::new("/sys/fs/cgroup/cpu,cpuacct")]);
    let only_v2 = "29 22 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    assert_eq!(parse_mounts(only_v2).v2.as_deref(), Some(Path::new("/sys/fs/cgroup")));
    assert!(parse_mounts(only_v2).v1.is_empty());
    assert_eq!(parse_mounts("nonsense\n- - -\n"), Mounts::default());
}

#[test]
fn cpu_lists_are_read() {
    assert_eq!(parse_cpus("0-2,5\n"), Some(vec![0, 1, 2, 5]));
    for bad in ["", "a", "3-1", "1-", "0-99999999"] {
        assert_eq!(parse_cpus(bad), None, "{bad}");
    }
    assert_eq!(parse_cpus("3,0-3,2"), Some(vec![0, 1, 2, 3]), "each once");
    assert_eq!(parse_cpus("0-65535").map(|all| all.len()), Some(65_536));
    // Written out, this would be many times the memory of the machine.
    assert_eq!(parse_cpus(&"0-65535,".repeat(100_000)), None);
}

proptest! {
    #[test]
    fn encoded_names_are_one_component_and_differ(a in "\\PC{1,20}", b in "\\PC{1,20}") {
        let name = encode(&a);
        prop_assert!(!name.contains('/') && name != "." && name != ".." && !name.starts_with('.'));
        prop_assert_eq!(a == b, encode(&a) == encode(&b));
    }
}

/// A group of its own for a test, or a loud reason why there is none.
fn real_groups(name: &str) -> Option<(Cgroups, String)> {
    let groups = Cgroups::detect("muxflow-test");
    if groups.shortcomings().is_empty() {
        return Some((groups, format!("{name}-{}", std::process::id())));
    }
    let why = groups.shortcomings().join("; ");
    assert!(std::env::var_os("CI").is_none(), "cgroups are needed here: {why}");
    println!("SKIPPED {name}: {why}; run as root with cgroups mounted");
    None
}

#[test]
fn a_group_limits_counts_and_kills_as_one() {
    let Some((groups, name)) = real_groups("kills-as-one") else { return };
    limits_counts_and_kills(&groups, &name);
}

fn limits_counts_and_kills(groups: &Cgroups, name: &str) {
    let limits = Limits { cpus: Some("0".into()), memory_bytes: Some(64 << 20) };
    let group = groups.create(name, &limits).unwrap();
    let (fds, affinity) = group.entrance().unwrap();
    let setup =
        sys::ChildSetup { groups: fds, affinity, new_session: true, ..sys::ChildSetup::default() };
    // A child that leaves its session and its parent: only the group still knows it.
    let script =
        "cat /proc/self/status; setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & wait";
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdout(std::process::Stdio::piped());
    let mut child = sys::with_setup(&mut command, setup).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while group.processes().len() < 5 && Instant::now() < deadline {
        sleep(Duration::from_millis(5));
    }
    assert!(group.processes().len() >= 5, "{:?}", group.processes());
    if groups.memory != Controller::Missing {
        assert!(group.memory_bytes().unwrap() > 0);
    }
    // In no hierarchy is anybody left in the group of who has started them: who ends that one by its
    // group would end them too.
    for at in &groups.unused {
        let listed = at.join(&groups.parent).join(encode(name)).join("cgroup.procs");
        let listed = fs::read_to_string(&listed).unwrap();
        let own = child.id().to_string();
        assert!(listed.lines().any(|id| id == own), "{}: {listed}", at.display());
    }
    assert!(group.kill_all(|| Ok(Vec::new()), Duration::from_secs(30)));
    let mut status = String::new();
    io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut status).unwrap();
    let allowed = status.lines().find(|l| l.starts_with("Cpus_allowed_list")).unwrap();
    assert!(allowed.trim_end().ends_with("\t0"), "{allowed}");
    child.wait().unwrap();
    group.remove().unwrap();
    assert!(group.processes().is_empty());
}

/// Takes version 2 away, for the process that follows and nobody else. What version 1 holds of memory
/// and processors stays where it is mounted; its freezer, which version 2 does not know, can be had
/// beside it.
const ONLY_VERSION_1: &str = r#"
for at in $(sed -n 's/^[^ ]* \([^ ]*\) cgroup2 .*/\1/p' /proc/mounts); do umount -l "$at"; done
if ! grep -q ' cgroup [^ ]*\bfreezer\b' /proc/mounts; then
    mount -t tmpfs none /mnt && mkdir /mnt/freezer && mount -t cgroup -o freezer none /mnt/freezer
fi
exec "$@"
"#;

#[test]
fn version_1_alone_does_the_same() {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", ONLY_VERSION_1, "sh"]);
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "cgroup::tests::inner_version_1", "--ignored", "--nocapture"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if text.contains("test result") {
        assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
        return;
    }
    println!("SKIPPED: no mounts of version 1 here: {errors}; run as root on a kernel that has it");
    assert!(std::env::var_os("CI").is_none(), "version 1 is needed here: {errors}");
}

#[test]
#[ignore = "run by version_1_alone_does_the_same with mounts of its own"]
fn inner_version_1() {
    let mounts = parse_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap());
    assert_eq!(mounts.v2, None);
    let parent = format!("muxflow-test-v1-{}", std::process::id());
    let looked = Cgroups::look(&parent);
    let groups = Cgroups::detect(&parent);
    println!("{}", groups.describe());
    assert_eq!(looked.describe(), groups.describe());
    assert!(groups.describe().starts_with("tracking v1"), "{}", groups.describe());
    limits_counts_and_kills(&groups, "v1");
    groups.remove_empty();
    for (_, at) in mounts.v1 {
        assert!(!at.join(&parent).exists(), "{}", at.display());
    }
}

#[test]
fn a_look_changes_nothing() {
    let parent = format!("muxflow-test-look-{}", std::process::id());
    let looked = Cgroups::look(&parent);
    let mounts = parse_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap());
    let all = mounts.v2.iter().chain(mounts.v1.iter().map(|(_, at)| at));
    for at in all {
        assert!(!at.join(&parent).exists(), "{}", at.display());
    }
    let groups = Cgroups::detect(&parent);
    assert_eq!(looked.describe(), groups.describe(), "and finds what the agent would");
    groups.remove_empty();

    // A version 2 whose controllers are not switched on yet, and one that holds processes.
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::write(root.join("cgroup.controllers"), "cpu memory cpuset\n").unwrap();
    fs::write(root.join("cgroup.subtree_control"), "cpuset\n").unwrap();
    fs::write(root.join("cgroup.procs"), "1\n").unwrap();
    let mounts = Mounts { v2: Some(root.to_owned()), ..Mounts::default() };
    let look = || Cgroups::look_at(&mounts, "muxflow").describe();
    assert_eq!(look(), "tracking v2, memory v2, cpuset v2");
    assert_eq!(fs::read_to_string(root.join("cgroup.subtree_control")).unwrap(), "cpuset\n");
    assert_eq!(fs::read_dir(root).unwrap().count(), 3, "nothing was made");
    fs::write(root.join("cgroup.type"), "domain\n").unwrap();
    assert_eq!(look(), "tracking v2, memory missing, cpuset v2", "it cannot be switched on");
}

#[test]
fn memory_beyond_the_limit_is_an_oom_kill_of_the_group_only() {
    let Some((groups, name)) = real_groups("oom") else { return };
    let limits = Limits { cpus: None, memory_bytes: Some(24 << 20) };
    let group = groups.create(&name, &limits).unwrap();
    let (fds, affinity) = group.entrance().unwrap();
    let setup =
        sys::ChildSetup { groups: fds, affinity, new_session: true, ..sys::ChildSetup::default() };
    let mut command = Command::new("sh");
    command.args(["-c", "x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo ${#x}"]);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let status = sys::with_setup(&mut command, setup).status().unwrap();
    assert!(!status.success(), "{status:?}");
    assert!(group.oom_kills().unwrap() > 0);
    assert!(group.kill_all(|| Ok(Vec::new()), Duration::from_secs(5)));
    group.remove().unwrap();
}

#[test]
fn without_cgroups_descendants_are_walked() {
    let group = Cgroups::none().create("x", &Limits::default()).unwrap();
    assert!(!group.tracks());
    let child = Command::new("sh").args(["-c", "sleep 300 & sleep 300"]).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while process::descendants(child.id()).len() < 2 && Instant::now() < deadline {
        sleep(Duration::from_millis(5));
    }
    let below = process::descendants(child.id());
    assert_eq!(below.len(), 2);
    let root = ProcessKey::of(child.id()).unwrap();
    assert!(group.kill_all(|| process::with_below(root), Duration::from_secs(5)));
    let mut child = child;
    child.wait().unwrap();
    assert!(process::with_below(root).unwrap().is_empty(), "its number may be another's by now");
    for pid in below {
        assert!(!process::is_there(pid));
    }
    assert_eq!(Cgroups::none().shortcomings().len(), 3);
}
