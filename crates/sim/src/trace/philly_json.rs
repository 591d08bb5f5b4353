//! The raw Philly trace: one JSON array with a job in each element, more than a gigabyte long, read
//! element by element.

use std::fmt;
use std::io::BufRead;
use std::path::Path;

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

struct Jobs<'a> {
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
    let mut json = serde_json::Deserializer::from_reader(input);
    let result = json.deserialize_seq(Jobs { group, rows, skipped }).and_then(|()| json.end());
    result.map_err(|e| SimError::Line {
        path: path.to_owned(),
        line: e.line() as u64,
        reason: format!("not a Philly job log: {e}"),
    })
}
