//! Pieces of a job's output, by offset.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use muxflow_api::jobs::LogPiece;

use crate::error::{ManagerError, Result};

/// Reads a piece. A file that is not there yet is empty; one that has become shorter than `offset`
/// was rotated and is read from its beginning. A character is never cut in two, unless the output
/// ends there.
pub fn read(path: &Path, offset: u64, limit: usize, ended: bool) -> Result<LogPiece> {
    let failed = |source| ManagerError::File { operation: "read", path: path.to_owned(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let text = String::new();
            let next_offset = 0;
            return Ok(LogPiece { offset: 0, next_offset, text, end: ended, rotated: offset > 0 });
        }
        Err(error) => return Err(failed(error)),
    };
    let length = file.metadata().map_err(failed)?.len();
    let rotated = offset > length;
    let from = if rotated { 0 } else { offset };
    file.seek(SeekFrom::Start(from)).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(limit as u64).read_to_end(&mut bytes).map_err(failed)?;
    let at_end = from + bytes.len() as u64 >= length;
    if !(ended && at_end) {
        bytes.truncate(whole_characters(&bytes));
    }
    Ok(LogPiece {
        offset: from,
        next_offset: from + bytes.len() as u64,
        text: String::from_utf8_lossy(&bytes).into_owned(),
        end: ended && at_end,
        rotated,
    })
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
        std::fs::write(&path, "new").unwrap();
        let rotated = read(&path, at, 100, true).unwrap();
        assert!(rotated.rotated && rotated.text == "new" && rotated.offset == 0);
    }
}
