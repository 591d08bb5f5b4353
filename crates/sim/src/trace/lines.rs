//! Lines of a text file, plain or gzipped, with a bound on their length.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::SimError;

/// No row of any known trace is longer.
const MAX_LINE: u64 = 64 * 1024;
/// More rows than this are refused: they would not fit the memory of a small machine. The largest
/// public set of jobs, Helios, has 3.4 million in all its clusters.
pub(crate) const MAX_ROWS: usize = 5_000_000;

/// A file being read line by line.
pub(crate) struct Lines {
    path: PathBuf,
    input: Box<dyn BufRead>,
    line: u64,
    buffer: Vec<u8>,
    gzip: bool,
}

/// Opens a file; gzip is told by its first two bytes, not by its name.
pub(crate) fn open(path: &Path) -> Result<(Box<dyn BufRead>, bool), SimError> {
    let fail = |source| SimError::Open { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(fail)?;
    let mut magic = [0u8; 2];
    let mut got = 0;
    while got < 2 {
        match file.read(&mut magic[got..]).map_err(fail)? {
            0 => break,
            n => got += n,
        }
    }
    let gzip = got == 2 && magic == [0x1f, 0x8b];
    let whole = std::io::Cursor::new(magic[..got].to_vec()).chain(file);
    Ok(if gzip {
        (
            Box::new(BufReader::with_capacity(1 << 16, flate2::read::MultiGzDecoder::new(whole))),
            true,
        )
    } else {
        (Box::new(BufReader::with_capacity(1 << 16, whole)), false)
    })
}

impl Lines {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<Self, SimError> {
        let (input, gzip) = open(path)?;
        Ok(Lines::over(path, input, gzip))
    }

    /// The lines of a file that is open already: a pipe cannot be opened twice.
    pub(crate) fn over(path: &Path, input: Box<dyn BufRead>, gzip: bool) -> Self {
        Lines { path: path.to_owned(), input, line: 0, buffer: Vec::new(), gzip }
    }

    /// The number of the line that was read last.
    pub(crate) fn number(&self) -> u64 {
        self.line
    }

    /// An error at the line that was read last.
    pub(crate) fn error(&self, reason: impl Into<String>) -> SimError {
        SimError::Line { path: self.path.clone(), line: self.line, reason: reason.into() }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The next line that is not empty, without its end; `None` at the end of the file.
    pub(crate) fn next(&mut self) -> Result<Option<&str>, SimError> {
        loop {
            self.buffer.clear();
            let mut limited = (&mut self.input).take(MAX_LINE);
            let got =
                limited.read_until(b'\n', &mut self.buffer).map_err(|source| SimError::Read {
                    path: self.path.clone(),
                    line: self.line + 1,
                    hint: if self.gzip {
                        "the gzip file is truncated or damaged"
                    } else {
                        "the file broke off"
                    },
                    source,
                })?;
            if got == 0 {
                return Ok(None);
            }
            self.line += 1;
            if got as u64 == MAX_LINE && !self.buffer.ends_with(b"\n") {
                return Err(self.error(format!(
                    "longer than {MAX_LINE} bytes; this is not a trace of jobs or requests"
                )));
            }
            while self.buffer.last().is_some_and(|b| *b == b'\n' || *b == b'\r') {
                self.buffer.pop();
            }
            if self.buffer.iter().any(|b| !b.is_ascii_whitespace()) {
                break;
            }
        }
        if std::str::from_utf8(&self.buffer).is_err() {
            return Err(self.error("not text (not UTF-8); this is not a trace of jobs or requests"));
        }
        Ok(std::str::from_utf8(&self.buffer).ok())
    }
}
