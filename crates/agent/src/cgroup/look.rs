//! What the control groups of a machine would be, found without touching them: for `doctor`.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Cgroups, Controller, Mounts, parse_mounts};

impl Cgroups {
    /// What [`Cgroups::detect`] would find. Nothing is made and no controller is switched on.
    pub fn look(parent: &str) -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self::look_at(&parse_mounts(&mounts), parent)
    }

    pub(super) fn look_at(mounts: &Mounts, parent: &str) -> Self {
        let of = |name: &str| {
            let v2 = mounts.v2.as_ref().filter(|root| name == "freezer" || may_offer(root, name));
            let v1 = mounts.v1.iter().find(|(controller, _)| controller == name);
            let found = match (v2, v1) {
                (Some(at), _) => Controller::V2(at.clone()),
                (None, Some((_, at))) => Controller::V1(at.clone()),
                (None, None) => Controller::Missing,
            };
            match &found {
                Controller::V1(at) | Controller::V2(at) if !may_hold(at, parent) => {
                    Controller::Missing
                }
                _ => found,
            }
        };
        Cgroups {
            parent: parent.to_owned(),
            // Every hierarchy of version 2 tracks processes.
            tracking: of("freezer"),
            memory: of("memory"),
            cpuset: of("cpuset"),
            unused: Vec::new(),
        }
    }
}

fn may_write(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a zero-ended path; nothing is written.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// Groups may be made below `parent`, which may have to be made first.
fn may_hold(root: &Path, parent: &str) -> bool {
    let below = root.join(parent);
    may_write(below.ancestors().find(|dir| dir.exists()).unwrap_or(root))
}

/// Whether version 2 has the controller below its top, or it could be switched on.
fn may_offer(root: &Path, name: &str) -> bool {
    let has = |file: &str| {
        let text = fs::read_to_string(root.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().any(|word| word == name)
    };
    // A group that is not the top of all may hold processes or give controllers on, not both.
    let top_of_all = !root.join("cgroup.type").exists();
    let procs = fs::read_to_string(root.join("cgroup.procs")).unwrap_or_default();
    let may_switch =
        may_write(&root.join("cgroup.subtree_control")) && (top_of_all || procs.trim().is_empty());
    has("cgroup.controllers") && (has("cgroup.subtree_control") || may_switch)
}
