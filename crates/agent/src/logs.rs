//! Output of workloads: plain files that the process writes itself, kept short by the keeper.
//!
//! The process holds the file, not a pipe: nothing that dies can take the service's output away or
//! make it block. So a file cannot be swapped under it; when it is full, it is copied away and cut
//! to nothing. What is written in the instant between the copy and the cut is lost; at most one
//! buffer of a busy writer.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use crate::error::{Result, file};

/// How much output is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogLimits {
    /// A file longer than this is rotated.
    pub bytes: u64,
    /// How many rotated files are kept beside the live one.
    pub files: u32,
}

impl Default for LogLimits {
    fn default() -> Self {
        LogLimits { bytes: 16 << 20, files: 3 }
    }
}

/// Opens a file to be the output of a process. Each write goes to the end, also after a cut.
pub fn open(path: &Path) -> Result<File> {
    OpenOptions::new().create(true).append(true).open(path).map_err(file("open", path))
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    PathBuf::from(name)
}

/// Rotates a file that has grown too long; says whether it did.
pub fn rotate(path: &Path, limits: LogLimits) -> Result<bool> {
    let length = fs::metadata(path).map_err(file("look at", path))?.len();
    if length <= limits.bytes {
        return Ok(false);
    }
    for number in (1..limits.files).rev() {
        let (from, to) = (numbered(path, number), numbered(path, number + 1));
        if from.exists() {
            fs::rename(&from, &to).map_err(file("rename", &from))?;
        }
    }
    if limits.files > 0 {
        let first = numbered(path, 1);
        fs::copy(path, &first).map_err(file("write", &first))?;
    }
    let live = OpenOptions::new().write(true).open(path).map_err(file("open", path))?;
    live.set_len(0).map_err(file("cut", path))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_writer_goes_on_through_rotations() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout.log");
        let mut writer = open(&path).unwrap();
        let limits = LogLimits { bytes: 10, files: 2 };
        for round in 0..5 {
            write!(writer, "round {round} of five").unwrap();
            assert!(rotate(&path, limits).unwrap());
        }
        write!(writer, "end").unwrap();
        assert!(!rotate(&path, limits).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "end", "no hole at the start");
        assert_eq!(fs::read_to_string(numbered(&path, 1)).unwrap(), "round 4 of five");
        assert_eq!(fs::read_to_string(numbered(&path, 2)).unwrap(), "round 3 of five");
        assert!(!numbered(&path, 3).exists());
        assert!(rotate(&dir.path().join("none"), limits).is_err());
    }
}
