//! Control groups of a test: one at the root of each hierarchy, with everything below it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::Error;

/// How long processes that were killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(20);

/// The groups; removed by [`Groups::remove`].
#[derive(Debug)]
pub(crate) struct Groups {
    name: String,
    folders: Vec<PathBuf>,
}

impl Groups {
    /// Makes a group of this name in every hierarchy that is mounted.
    pub(crate) fn create(name: &str) -> Result<Self, Error> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let folders: Vec<PathBuf> = mounts
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').skip(1);
                let (at, kind) = (words.next()?, words.next()?);
                kind.starts_with("cgroup").then(|| Path::new(at).join(name))
            })
            .collect();
        if folders.is_empty() {
            return Err(Error::Refused { why: "no control groups are mounted".to_owned() });
        }
        let groups = Groups { name: name.to_owned(), folders };
        for folder in &groups.folders {
            if let Err(error) = fs::create_dir_all(folder) {
                groups.remove();
                let why = format!("cannot create the control group {}: {error}", folder.display());
                return Err(Error::Refused { why });
            }
        }
        Ok(groups)
    }

    /// The path of the group in each hierarchy.
    pub(crate) fn root(&self) -> String {
        format!("/{}", self.name)
    }

    /// Removes them, as far as nobody is left in them.
    pub(crate) fn remove(&self) {
        let began = Instant::now();
        for folder in &self.folders {
            while folder.exists() && !remove(folder) && began.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Only folders can be removed there, from the leaves on.
fn remove(folder: &Path) -> bool {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    fs::remove_dir(folder).is_ok()
}
