//! The raw Philly trace: one JSON array with a job in each element, more than a gigabyte long, read
//! element by element. An element without end is refused, so that garbage cannot fill the memory.

use std::cell::Cell;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;
use std::rc::Rc;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};

use super::jobs::RawRow;
use super::{lines, when};
use crate::error::SimError;

#[derive(Deserialize)]
struct Job {
    #[serde(default)]
    vc: Option<String>,
    #[serde(default)]
    jobid: Option<String>,
    submitted_time: Option<String>,
    #[serde(default)]
    attempts: Vec<Attempt>,
}

#[derive(Deserialize)]
struct Attempt {
    #[serde(default)]
    start_time: Option<String>,
    #[serde(default)]
    end_time: Option<String>,
    #[serde(default)]
    detail: Vec<Detail>,
}

#[derive(Deserialize)]
struct Detail {
    #[serde(default)]
    gpus: Vec<serde::de::IgnoredAny>,
}

/// Far beyond what a real job takes (a few kilobytes for each attempt); parsed, an element of this
/// length takes tens of megabytes at most.
const MAX_ELEMENT: u64 = 2 << 20;

/// Where the reader stands.
#[derive(Default)]
struct Place {
    line: Cell<u64>,
    /// Bytes since the last element began.
    element: Cell<u64>,
}

/// Counts lines and bytes, and ends when one element takes too many.
struct Counted {
    input: Box<dyn BufRead>,
    place: Rc<Place>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.place.element.get() > MAX_ELEMENT {
            return Err(std::io::Error::other(format!(
                "a job longer than {MAX_ELEMENT} bytes; this is no Philly job log"
            )));
        }
        let n = self.input.read(out)?;
        let lines = out[..n].iter().filter(|b| **b == b'\n').count();
        self.place.line.set(self.place.line.get() + lines as u64);
        self.place.element.set(self.place.element.get() + n as u64);
        Ok(n)
    }
}

struct Jobs<'a> {
    place: Rc<Place>,
    group: Option<&'a str>,
    rows: &'a mut Vec<RawRow>,
    skipped: &'a mut usize,
}

impl<'de> Visitor<'de> for Jobs<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of Philly jobs")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(job) = seq.next_element::<Job>()? {
            self.place.element.set(0);
            if self.group.is_some_and(|g| job.vc.as_deref() != Some(g)) {
                continue;
            }
            match row(&job, self.rows.len()) {
                Ok(Some(row)) => self.rows.push(row),
                Ok(None) => *self.skipped += 1,
                Err(reason) => return Err(serde::de::Error::custom(reason)),
            }
            if self.rows.len() > lines::MAX_ROWS {
                return Err(serde::de::Error::custom("too many jobs"));
            }
        }
        Ok(())
    }
}

fn row(job: &Job, count: usize) -> Result<Option<RawRow>, String> {
    let Some(submitted) = job.submitted_time.as_deref() else { return Ok(None) };
    let submit_s = when::parse(submitted)
        .ok_or_else(|| format!("`{submitted}` is no submitted_time: write YYYY-MM-DD HH:MM:SS"))?;
    let mut duration_s = 0.0;
    let mut gpus = 0usize;
    for a in &job.attempts {
        let (Some(start), Some(end)) = (
            a.start_time.as_deref().and_then(when::parse),
            a.end_time.as_deref().and_then(when::parse),
        ) else {
            continue;
        };
        if end < start {
            return Err(format!("an attempt of {} s; it must not be negative", end - start));
        }
        duration_s += end - start;
        gpus = gpus.max(a.detail.iter().map(|d| d.gpus.len()).sum());
    }
    if duration_s <= 0.0 || gpus == 0 {
        return Ok(None);
    }
    Ok(Some(RawRow {
        id: job.jobid.clone().unwrap_or_else(|| format!("row-{count}")),
        submit_s,
        duration_s,
        gpus: u32::try_from(gpus).unwrap_or(u32::MAX),
        workload: None,
    }))
}

pub(super) fn read(
    path: &Path,
    input: Box<dyn BufRead>,
    group: Option<&str>,
    rows: &mut Vec<RawRow>,
    skipped: &mut usize,
) -> Result<(), SimError> {
    let place = Rc::new(Place::default());
    let counted = Counted { input, place: Rc::clone(&place) };
    let mut json = serde_json::Deserializer::from_reader(counted);
    let jobs = Jobs { place: Rc::clone(&place), group, rows, skipped };
    let result = json.deserialize_seq(jobs).and_then(|()| json.end());
    result.map_err(|e| SimError::Line {
        path: path.to_owned(),
        // The parser does not know the line when the file itself breaks off.
        line: (e.line() as u64).max(place.line.get() + 1),
        reason: format!("not a Philly job log: {e}"),
    })
}
