//! Which pod a process belongs to, by its control group: what the kernel says, whatever anybody else
//! believes.

use std::collections::BTreeSet;
use std::path::Path;

/// The uid of the pod in a process's `cgroup` file; `None` for a process of no pod.
pub fn pod_of(cgroup: &str) -> Option<String> {
    cgroup.lines().filter_map(|line| line.rsplit_once(':')).find_map(|(_, path)| {
        path.split('/').find_map(|part| {
            let part = part.strip_suffix(".slice").unwrap_or(part);
            let (before, uid) = part.rsplit_once("pod")?;
            let uid = uid.replace('_', "-");
            let is_name = before.is_empty() || before.ends_with('-');
            (is_name && is_uid(&uid)).then_some(uid)
        })
    })
}

/// 8-4-4-4-12 digits, or the 32 of a pod from a file.
fn is_uid(text: &str) -> bool {
    let digits = text.chars().filter(char::is_ascii_hexdigit).count();
    let dashes = text.chars().filter(|c| *c == '-').count();
    digits == 32 && digits + dashes == text.len() && (dashes == 4 || dashes == 0)
}

/// The pods that have a process in a namespace of process ids; `proc` is the host's `/proc`.
pub fn pods_in(proc: &Path, namespace: u64) -> BTreeSet<String> {
    let wanted = format!("pid:[{namespace}]");
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|dir| {
            let link = std::fs::read_link(dir.join("ns/pid"));
            link.is_ok_and(|link| link.as_os_str() == wanted.as_str())
        })
        .filter_map(|dir| pod_of(&std::fs::read_to_string(dir.join("cgroup")).ok()?))
        .collect()
}

/// Whether a process of a pod is there, whoever else still knows of the pod.
pub fn is_there(proc: &Path, uid: &str) -> bool {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("cgroup")).ok())
        .any(|cgroup| pod_of(&cgroup).as_deref() == Some(uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "2d9a6c1e-0f2b-4c3d-9e8f-001122334455";

    #[test]
    fn a_pod_is_found_under_every_driver_of_control_groups() {
        for path in [
            "0::/kubepods/burstable/pod2d9a6c1e-0f2b-4c3d-9e8f-001122334455/abc",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2d9a6c1e_0f2b_4c3d_9e8f_001122334455.slice/cri-containerd-abc.scope",
            "12:devices:/other\n11:memory:/kubepods/pod2d9a6c1e-0f2b-4c3d-9e8f-001122334455/abc",
        ] {
            assert_eq!(pod_of(path).as_deref(), Some(UID), "{path}");
        }
        for none in ["0::/system.slice/podman.service", "0::/user/pod-of-mine", "", "0::/podabc"] {
            assert_eq!(pod_of(none), None, "{none}");
        }
    }

    #[test]
    fn processes_of_a_namespace_are_found() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, namespace, group) in
            [("7", 11, format!("0::/kubepods/pod{UID}/c")), ("8", 12, "0::/".into())]
        {
            let dir = proc.path().join(pid);
            std::fs::create_dir_all(dir.join("ns")).unwrap();
            std::os::unix::fs::symlink(format!("pid:[{namespace}]"), dir.join("ns/pid")).unwrap();
            std::fs::write(dir.join("cgroup"), group).unwrap();
        }
        assert_eq!(pods_in(proc.path(), 11), BTreeSet::from([UID.to_owned()]));
        assert!(pods_in(proc.path(), 12).is_empty());
        assert!(pods_in(proc.path(), 13).is_empty());
        assert!(is_there(proc.path(), UID));
        assert!(!is_there(proc.path(), "2d9a6c1e-0f2b-4c3d-9e8f-001122334456"));
    }
}
