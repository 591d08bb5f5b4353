//! The directory of an emulated node: where devices, libraries and logs find each other.
//!
//! ```text
//! DIR/gpu0/profile.toml   what the GPU is
//! DIR/gpu0/device.sock    where its device process answers
//! DIR/lib/libcuda.so.1    and the other libraries
//! DIR/bin/                nvidia-cuda-mps-control and friends
//! DIR/kernel.log          what the kernel would log: XIDs
//! ```

use std::path::{Path, PathBuf};

use crate::EmulationError;
use crate::wire::Socket;

/// Names the directory; libraries loaded from `DIR/lib` find it without.
pub const DIRECTORY_VARIABLE: &str = "MUXFLOW_EMULATED_DIR";

/// An emulated node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    root: PathBuf,
}

impl Node {
    /// The node in this directory.
    pub fn at(root: impl Into<PathBuf>) -> Node {
        Node { root: root.into() }
    }

    /// The node that the environment names, or that the library at `library` belongs to.
    pub fn find(library: Option<&Path>) -> Option<Node> {
        if let Some(root) = std::env::var_os(DIRECTORY_VARIABLE) {
            return Some(Node::at(root));
        }
        let root = library?.parent()?.parent()?;
        root.join("gpu0").is_dir().then(|| Node::at(root))
    }

    /// Its directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directory of one GPU.
    pub fn gpu(&self, index: usize) -> PathBuf {
        self.root.join(format!("gpu{index}"))
    }

    /// The page of an event that several processes share: the client at the device that made it, and
    /// its number there.
    pub fn shared_event(&self, index: usize, [client, number]: [u64; 2]) -> PathBuf {
        self.gpu(index).join(format!("event-{client}-{number}"))
    }

    /// Removes the pages of a client that is gone. Who has one open keeps it.
    pub(crate) fn remove_shared_events(&self, index: usize, client: u32) {
        let prefix = format!("event-{client}-");
        let Ok(files) = std::fs::read_dir(self.gpu(index)) else { return };
        for file in files.flatten() {
            let own = file.file_name().as_encoded_bytes().starts_with(prefix.as_bytes());
            if own && std::fs::remove_file(file.path()).is_err() {
                // Somebody has cleaned up already.
            }
        }
    }

    /// Socket of one GPU's device process.
    pub fn socket(&self, index: usize) -> PathBuf {
        self.gpu(index).join("device.sock")
    }

    /// Profile of one GPU.
    pub fn profile(&self, index: usize) -> PathBuf {
        self.gpu(index).join("profile.toml")
    }

    /// What the kernel would log.
    pub fn kernel_log(&self) -> PathBuf {
        self.root.join("kernel.log")
    }

    /// How many GPUs it has.
    pub fn gpu_count(&self) -> usize {
        (0..).take_while(|i| self.gpu(*i).is_dir()).count()
    }

    /// Makes the directories and profiles for these GPUs. What an earlier node has left there goes;
    /// one that still runs is left alone, and the directory refused.
    pub fn create(&self, gpus: &[GpuSource]) -> Result<(), EmulationError> {
        self.clear()?;
        for (index, gpu) in gpus.iter().enumerate() {
            let dir = self.gpu(index);
            let write = |path: PathBuf| move |source| EmulationError::Write { path, source };
            std::fs::create_dir_all(&dir).map_err(write(dir.clone()))?;
            let path = self.profile(index);
            std::fs::write(&path, &gpu.text).map_err(write(path.clone()))?;
        }
        Ok(())
    }
}

impl Node {
    /// Directories of GPUs of an earlier node: those with a profile.
    fn left_over(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let is_gpu = |path: &PathBuf| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let number = name.strip_prefix("gpu").is_some_and(|n| n.parse::<usize>().is_ok());
            number && path.join("profile.toml").is_file()
        };
        entries.map(|entry| entry.path()).filter(is_gpu).collect()
    }

    fn clear(&self) -> Result<(), EmulationError> {
        let left = self.left_over();
        if left.iter().any(|gpu| Socket::connect(&gpu.join("device.sock")).is_ok()) {
            return Err(EmulationError::InUse { path: self.root.clone() });
        }
        let failed = |path: PathBuf| move |source| EmulationError::Write { path, source };
        for gpu in left {
            std::fs::remove_dir_all(&gpu).map_err(failed(gpu))?;
        }
        let log = self.kernel_log();
        if log.exists() {
            std::fs::remove_file(&log).map_err(failed(log))?;
        }
        Ok(())
    }
}

/// A profile text and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSource {
    /// Built-in name or file.
    pub name: String,
    /// The TOML text.
    pub text: String,
}

/// Reads `t4x4`, `t4x2,a10`, `./my.toml x2`: names of built-in profiles or files, with counts.
pub fn parse_gpus(text: &str) -> Result<Vec<GpuSource>, EmulationError> {
    let bad = |reason: String| EmulationError::Gpus { text: text.to_owned(), reason };
    let mut gpus = Vec::new();
    for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let (name, count) = match part.rsplit_once('x') {
            Some((name, digits)) if !name.is_empty() && digits.parse::<usize>().is_ok() => {
                (name.trim(), digits.parse().unwrap_or(1))
            }
            _ => (part, 1),
        };
        let profile = match crate::profile::Profile::built_in_text(name) {
            Some(profile) => profile.to_owned(),
            None if name.ends_with(".toml") => {
                let path = PathBuf::from(name);
                std::fs::read_to_string(&path)
                    .map_err(|source| EmulationError::Read { path, source })?
            }
            None => {
                let known = crate::profile::Profile::built_in_names().join(", ");
                return Err(bad(format!(
                    "there is no profile `{name}`; built in are {known}, or name a .toml file"
                )));
            }
        };
        if !(1..=64).contains(&count) {
            return Err(bad(format!("{count} of `{name}`: a node has 1 to 64 GPUs")));
        }
        let source = GpuSource { name: name.to_owned(), text: profile };
        gpus.extend(std::iter::repeat_n(source, count));
    }
    if gpus.is_empty() || gpus.len() > 64 {
        return Err(bad(format!("{} GPUs: a node has 1 to 64", gpus.len())));
    }
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_gpus() {
        let names = |t: &str| -> Vec<String> {
            parse_gpus(t).unwrap().into_iter().map(|g| g.name).collect()
        };
        assert_eq!(names("t4x2,a10"), ["t4", "t4", "a10"]);
        assert_eq!(names("H100"), ["H100"]);
        for (bad, says) in [("", "0 GPUs"), ("t5", "t5"), ("t4x0", "1 to 64"), ("t4x99", "64")] {
            let error = parse_gpus(bad).unwrap_err().to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
        assert!(parse_gpus("no-such.toml").unwrap_err().to_string().contains("no-such.toml"));
    }

    #[test]
    fn a_directory_that_was_used_before_keeps_nothing_of_it_and_nothing_else_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let node = Node::at(dir.path());
        node.create(&parse_gpus("t4x3").unwrap()).unwrap();
        std::fs::write(node.kernel_log(), "old").unwrap();
        let others = ["gpu7/notes", "gpus/profile.toml"].map(|name| dir.path().join(name));
        for path in &others {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "mine").unwrap();
        }
        node.create(&parse_gpus("a10").unwrap()).unwrap();
        assert_eq!(node.gpu_count(), 1);
        assert!(!node.kernel_log().exists());
        assert!(others.iter().all(|path| path.exists()));
        // One that answers is left alone.
        let device = crate::wire::listen(&node.socket(0)).unwrap();
        let refused = node.create(&parse_gpus("t4").unwrap()).unwrap_err();
        assert!(refused.to_string().contains("runs in"), "{refused}");
        drop(device);
        node.create(&parse_gpus("t4").unwrap()).unwrap();
    }
}
