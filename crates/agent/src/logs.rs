//! Output of workloads: plain files that the process writes itself, kept short by the keeper.
//!
//! The process holds the file, not a pipe: nothing that dies can take the service's output away or
//! make it block. So a file cannot be swapped under it; when it is full, it is copied away and cut
//! to nothing. What is written in the instant between the copy and the cut is lost; at most one
//! buffer of a busy writer.
//!
//! How much was cut off in all is kept beside the output, so that a reader who comes back knows where
//! it stands. Whoever rotates holds that file alone, whoever reads holds it with other readers.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
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

/// Where it is written down how much was cut off.
fn cut_file(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".cut");
    PathBuf::from(name)
}

fn read_cut(mut held: &File) -> std::io::Result<u64> {
    let mut text = String::new();
    held.seek(SeekFrom::Start(0))?;
    held.read_to_string(&mut text)?;
    Ok(text.trim().parse().unwrap_or(0))
}

/// What is not there is no error.
fn there<T>(opened: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match opened {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Output of which nothing is rotated while this is held.
#[derive(Debug)]
pub struct Held {
    _cut: Option<File>,
    /// Bytes that were there before what is in the files.
    pub cut: u64,
    /// The files with their lengths, the oldest first; the last one is still written to.
    pub files: Vec<(PathBuf, u64)>,
}

impl Held {
    /// Holds the output as it is now. What is not there yet is empty.
    pub fn take(path: &Path) -> std::io::Result<Self> {
        let cut_file = there(File::open(cut_file(path)))?;
        if let Some(file) = &cut_file {
            file.lock_shared()?;
        }
        let before_live = cut_file.as_ref().map_or(Ok(0), read_cut)?;
        let mut files = Vec::new();
        let live = there(fs::metadata(path))?.map_or(0, |meta| meta.len());
        files.push((path.to_owned(), live));
        let mut kept = 0_u64;
        for number in 1.. {
            let older = numbered(path, number);
            let Some(meta) = there(fs::metadata(&older))? else { break };
            kept = kept.saturating_add(meta.len());
            files.push((older, meta.len()));
        }
        files.reverse();
        let cut = before_live.saturating_sub(kept);
        Ok(Held { _cut: cut_file, cut, files })
    }
}

/// Makes ready for rotations: from here on readers can hold the output.
pub fn begin(path: &Path) -> Result<File> {
    let beside = cut_file(path);
    let failed = |operation| file(operation, &beside);
    let mut options = OpenOptions::new();
    let cut = options.create(true).truncate(false).read(true).write(true).open(&beside);
    let cut = cut.map_err(failed("open"))?;
    if cut.metadata().map_err(failed("look at"))?.len() == 0 {
        write_cut(&cut, 0).map_err(failed("write"))?;
    }
    Ok(cut)
}

/// Always as long: on a full disk it needs no room, and nobody reads half a number.
fn write_cut(mut held: &File, bytes: u64) -> std::io::Result<()> {
    held.seek(SeekFrom::Start(0))?;
    held.write_all(format!("{bytes:020}\n").as_bytes())
}

/// Rotates a file that has grown too long; says whether it did. Where there is no room for a copy,
/// nothing is moved.
pub fn rotate(path: &Path, limits: LogLimits) -> Result<bool> {
    let length = fs::metadata(path).map_err(file("look at", path))?.len();
    if length <= limits.bytes {
        return Ok(false);
    }
    let cut = begin(path)?;
    let beside = cut_file(path);
    cut.lock().map_err(file("lock", &beside))?;
    let before = read_cut(&cut).map_err(file("read", &beside))?;
    let mut copied = length;
    if limits.files > 0 {
        let copy = numbered(path, 0);
        copied = fs::copy(path, &copy).map_err(|error| {
            drop(fs::remove_file(&copy));
            file("write", &copy)(error)
        })?;
        for number in (0..limits.files).rev() {
            let (from, to) = (numbered(path, number), numbered(path, number + 1));
            if from.exists() {
                fs::rename(&from, &to).map_err(file("rename", &from))?;
            }
        }
    }
    let live = OpenOptions::new().write(true).open(path).map_err(file("open", path))?;
    live.set_len(0).map_err(file("cut", path))?;
    write_cut(&cut, before.saturating_add(copied)).map_err(file("write", &beside))?;
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
        let held = Held::take(&path).unwrap();
        let lengths: Vec<u64> = held.files.iter().map(|(_, length)| *length).collect();
        assert_eq!((held.cut, lengths), (45, vec![15, 15, 3]), "five rounds, three cut off");
        drop(held);
        let nothing = Held::take(&dir.path().join("none")).unwrap();
        assert_eq!((nothing.cut, nothing.files.len()), (0, 1));
        assert!(rotate(&dir.path().join("none"), limits).is_err());
    }
}
