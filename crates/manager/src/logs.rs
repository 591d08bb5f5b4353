//! Pieces of a job's output, by offset from the very beginning of it: over rotations and over its runs.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use muxflow_agent::logs::Held;
use muxflow_api::jobs::LogPiece;

use crate::error::{ManagerError, Result};

/// Reads a piece. Where the output of that offset was thrown away, the piece begins with the oldest
/// that is kept; where there never was any, with what is written now. A character is never cut in two,
/// unless the output ends there or is rotated in the middle of it; so a limit under four bytes may
/// never be enough for the next one.
pub fn read(path: &Path, offset: u64, limit: usize, ended: bool) -> Result<LogPiece> {
    let failed = |source| ManagerError::File { operation: "read", path: path.to_owned(), source };
    let held = Held::take(path).map_err(failed)?;
    let kept: u64 = held.files.iter().map(|(_, length)| *length).sum();
    let all = held.cut.saturating_add(kept);
    // Somebody who counts on more than there is has read what was counted wrong: it begins anew.
    let live = held.files.last().map_or(0, |(_, length)| *length);
    let mut at = if offset > all { all.saturating_sub(live) } else { offset.max(held.cut) };
    let from = at;
    let mut bytes = Vec::new();
    let mut begins = held.cut;
    for (file, length) in &held.files {
        let ends = begins.saturating_add(*length);
        if at >= begins && at < ends && bytes.len() < limit {
            let most = (ends - at).min((limit - bytes.len()) as u64);
            at += read_file(file, at - begins, most, &mut bytes).map_err(failed)?;
        }
        begins = ends;
    }
    let at_end = at >= all;
    if !(ended && at_end) {
        bytes.truncate(whole_characters(&bytes));
    }
    Ok(LogPiece {
        offset: from,
        next_offset: from + bytes.len() as u64,
        text: String::from_utf8_lossy(&bytes).into_owned(),
        end: ended && at_end,
    })
}

/// Adds a piece of a file; says how long it is.
fn read_file(path: &Path, from: u64, most: u64, bytes: &mut Vec<u8>) -> std::io::Result<u64> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    file.seek(SeekFrom::Start(from))?;
    Ok(file.take(most).read_to_end(bytes)? as u64)
}

/// How many bytes there are before a character that is cut off at the end.
fn whole_characters(bytes: &[u8]) -> usize {
    let tail = bytes.len().saturating_sub(3);
    match std::str::from_utf8(bytes.get(tail..).unwrap_or_default()) {
        Err(error) if error.error_len().is_none() => {
            let cut = tail + error.valid_up_to();
            // A lone piece that could never become whole must not be waited for for ever.
            if cut == 0 && bytes.len() > 3 { bytes.len() } else { cut }
        }
        Err(_) => {
            // Bytes that are no UTF-8, or a cut at the front of the tail: look at the whole.
            match std::str::from_utf8(bytes) {
                Err(error) if error.error_len().is_none() => error.valid_up_to(),
                _ => bytes.len(),
            }
        }
        Ok(_) => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_agent::logs::{LogLimits, open, rotate};
    use std::io::Write;

    #[test]
    fn pieces_join_to_the_whole_and_characters_stay_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout.log");
        let nothing = read(&path, 0, 100, false).unwrap();
        assert_eq!((nothing.text.as_str(), nothing.end), ("", false));
        let text = "naïve – 漢字 and more\n".repeat(50);
        std::fs::write(&path, &text).unwrap();
        for limit in [4, 5, 7, 100, 5000] {
            let (mut joined, mut at) = (String::new(), 0);
            loop {
                let piece = read(&path, at, limit, true).unwrap();
                assert_eq!(piece.offset, at);
                joined.push_str(&piece.text);
                at = piece.next_offset;
                if piece.end {
                    break;
                }
            }
            assert_eq!(joined, text, "limit {limit}");
        }
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&[b'x', 0xe6]).unwrap();
        let at = text.len() as u64;
        assert_eq!(read(&path, at, 100, false).unwrap().text, "x", "waits for the rest");
        let last = read(&path, at, 100, true).unwrap();
        assert!(last.end && last.text.starts_with('x') && last.text.len() > 1);
    }

    /// A reader who comes back after any number of rotations goes on where it was, also when more has
    /// been written since than it had read, and sees by the offset what it has missed.
    #[test]
    fn a_reader_goes_on_over_rotations() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout.log");
        let limits = LogLimits { bytes: 40, files: 2 };
        let mut writer = open(&path).unwrap();
        let mut line = 0;
        let mut write = |lines: u32| {
            for _ in 0..lines {
                line += 1;
                writeln!(writer, "line {line:04}").unwrap();
            }
        };
        write(3);
        let first = read(&path, 0, 1000, false).unwrap();
        assert_eq!(first.next_offset, 30);
        write(2);
        assert!(rotate(&path, limits).unwrap());
        write(5);
        let next = read(&path, first.next_offset, 1000, false).unwrap();
        assert_eq!(next.text, text(4, 10), "over the rotation, all of it");
        assert!(rotate(&path, limits).unwrap());
        write(6);
        assert!(rotate(&path, limits).unwrap());
        write(1);
        // The first five lines are gone.
        let late = read(&path, 30, 1000, true).unwrap();
        assert_eq!((late.offset, late.text.as_str(), late.end), (50, text(6, 17).as_str(), true));
        let small = read(&path, 105, 10, false).unwrap();
        assert_eq!((small.offset, small.text.len()), (105, 10), "in the middle of an older file");
        let beyond = read(&path, 9_000, 1000, true).unwrap();
        assert_eq!((beyond.offset, beyond.text.as_str()), (160, text(17, 17).as_str()));
    }

    fn text(first: u32, last: u32) -> String {
        (first..=last).map(|line| format!("line {line:04}\n")).collect()
    }
}
