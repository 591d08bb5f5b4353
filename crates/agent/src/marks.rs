//! What only a person knows, told to the agent through its state directory: that a GPU was reset, and
//! that the sensors are right.
//!
//! A mark is an empty file. It needs no connection, waits for an agent that is not there yet, and only
//! who may write into the state directory can leave one. The agent removes what it has taken note of.

use std::path::{Path, PathBuf};

use crate::cgroup::encode;

/// Something that a person says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark<'a> {
    /// The GPU with this UUID was reset.
    GpuWasReset(&'a str),
    /// Evictions that are held back may go on.
    SensorsAreRight,
}

impl Mark<'_> {
    /// Its file in the state directory of an agent.
    pub fn file(self, state_dir: &Path) -> PathBuf {
        match self {
            Mark::GpuWasReset(uuid) => gpu_dir(state_dir, uuid).join("gpu-was-reset"),
            Mark::SensorsAreRight => state_dir.join("sensors-are-right"),
        }
    }

    /// Takes the mark, if it is there: for one taker only.
    pub(crate) fn take(self, state_dir: &Path) -> bool {
        std::fs::remove_file(self.file(state_dir)).is_ok()
    }
}

/// Where an agent keeps what it remembers of a GPU.
pub fn gpu_dir(state_dir: &Path, uuid: &str) -> PathBuf {
    state_dir.join("gpus").join(encode(uuid))
}

/// GPUs that an agent with this state directory remembers, by UUID.
pub fn known_gpus(state_dir: &Path) -> Vec<String> {
    let dirs = std::fs::read_dir(state_dir.join("gpus")).into_iter().flatten().flatten();
    let mut all: Vec<String> = dirs.filter_map(|dir| dir.file_name().into_string().ok()).collect();
    // A UUID holds nothing that would have to be encoded.
    all.sort();
    all
}

/// What a GPU is disabled for, in words; none when the agent uses it.
pub fn disabled_for(state_dir: &Path, uuid: &str) -> Option<String> {
    crate::gpu::disabled_for(&gpu_dir(state_dir, uuid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        std::fs::create_dir_all(gpu_dir(dir.path(), uuid)).unwrap();
        assert_eq!(known_gpus(dir.path()), [uuid]);
        assert_eq!(disabled_for(dir.path(), uuid), None);
        for mark in [Mark::GpuWasReset(uuid), Mark::SensorsAreRight] {
            assert!(!mark.take(dir.path()), "{mark:?} was not left yet");
            std::fs::write(mark.file(dir.path()), "").unwrap();
            assert!(mark.take(dir.path()));
            assert!(!mark.take(dir.path()), "{mark:?} is gone");
        }
    }
}
