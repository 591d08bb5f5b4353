//! Traces of offline jobs. The kind of a file is told by its header.
//!
//! | kind | told by | time | duration |
//! |---|---|---|---|
//! | own | `job_id,submit_s,duration_s,gpus,workload` (the last two optional) | s | s |
//! | Philly, flattened | `timestamp,duration,num_gpus,…,cluster` | date | s |
//! | Philly, raw | a JSON array of jobs (`cluster_job_log`) | date | attempts, summed |
//! | Muri | `job_id,num_gpu,submit_time,…,model_name,…,duration` | ms | ms |
//! | Helios | `job_id,…,gpu_num,…,submit_time,…,duration` | date | s |
//! | openb | `name,…,num_gpu,…,creation_time,deletion_time` | s | difference |

use std::io::Write;
use std::path::Path;

use super::{lines, philly_json, when};
use crate::error::SimError;

/// One job of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRow {
    /// Its name in the trace.
    pub id: String,
    /// Seconds from the first job of the trace.
    pub submit_s: f64,
    /// Seconds it runs alone.
    pub duration_s: f64,
    /// GPUs it asks for.
    pub gpus: u32,
    /// What it runs, where the trace says.
    pub workload: Option<String>,
}

/// A trace of jobs, in the order of submission.
#[derive(Debug, Clone, PartialEq)]
pub struct JobTrace {
    /// The kind of file it came from.
    pub kind: &'static str,
    /// The jobs.
    pub jobs: Vec<JobRow>,
    /// Rows that describe no job that ran (no GPU, no duration), left out.
    pub skipped: usize,
}

/// What to do with a row of several GPUs, because an offline job of MuxFlow uses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MultiGpu {
    /// Count the row as one job of one GPU (the paper's job counts are those of rows).
    One,
    /// Make as many jobs of it as it has GPUs.
    Split,
    /// Leave the row out.
    Drop,
}

pub(super) struct RawRow {
    pub(super) id: String,
    pub(super) submit_s: f64,
    pub(super) duration_s: f64,
    pub(super) gpus: u32,
    pub(super) workload: Option<String>,
}

/// Where the columns of one kind of file are.
struct Columns {
    kind: &'static str,
    id: Option<usize>,
    submit: usize,
    duration: Option<usize>,
    end: Option<usize>,
    gpus: Option<usize>,
    workload: Option<usize>,
    group: Option<usize>,
    dates: bool,
    unit: f64,
}

fn columns(header: &str) -> Result<Columns, String> {
    let names: Vec<String> = header
        .split(',')
        .map(|c| c.trim().trim_start_matches('\u{feff}').to_ascii_lowercase())
        .collect();
    let at = |name: &str| names.iter().position(|n| n == name);
    let need = |kind: &str, name: &'static str| {
        at(name).ok_or_else(|| {
            format!("a {kind} trace needs the column `{name}`; the header is `{}`", shorten(header))
        })
    };
    if at("submit_s").is_some() || at("duration_s").is_some() {
        return Ok(Columns {
            kind: "own",
            id: at("job_id"),
            submit: need("job", "submit_s")?,
            duration: Some(need("job", "duration_s")?),
            end: None,
            gpus: at("gpus"),
            workload: at("workload"),
            group: None,
            dates: false,
            unit: 1.0,
        });
    }
    if at("creation_time").is_some() && at("num_gpu").is_some() {
        return Ok(Columns {
            kind: "openb",
            id: at("name"),
            submit: need("openb", "creation_time")?,
            duration: None,
            end: Some(need("openb", "deletion_time")?),
            gpus: at("num_gpu"),
            workload: None,
            group: at("qos"),
            dates: false,
            unit: 1.0,
        });
    }
    if at("model_name").is_some() || at("iteration_time").is_some() {
        return Ok(Columns {
            kind: "Muri",
            id: at("job_id"),
            submit: need("Muri", "submit_time")?,
            duration: Some(need("Muri", "duration")?),
            end: None,
            gpus: Some(need("Muri", "num_gpu")?),
            workload: at("model_name"),
            group: None,
            dates: false,
            unit: 1e-3,
        });
    }
    if at("gpu_num").is_some() {
        return Ok(Columns {
            kind: "Helios",
            id: at("job_id"),
            submit: need("Helios", "submit_time")?,
            duration: Some(need("Helios", "duration")?),
            end: None,
            gpus: at("gpu_num"),
            workload: None,
            group: at("vc"),
            dates: true,
            unit: 1.0,
        });
    }
    if at("timestamp").is_some() && at("num_gpus").is_some() {
        return Ok(Columns {
            kind: "Philly",
            id: None,
            submit: need("Philly", "timestamp")?,
            duration: Some(need("Philly", "duration")?),
            end: None,
            gpus: at("num_gpus"),
            workload: None,
            group: at("cluster"),
            dates: true,
            unit: 1.0,
        });
    }
    Err(format!(
        "the header `{}` is of no known kind of job trace; the own format is `job_id,submit_s,duration_s,gpus,workload`",
        shorten(header)
    ))
}

fn shorten(text: &str) -> String {
    let cut: String = text.chars().take(80).collect();
    if cut.len() < text.len() { format!("{cut}…") } else { cut }
}

/// Reads a trace of jobs of any known kind. `group` keeps only one virtual cluster (Philly, Helios)
/// or quality class (openb).
pub fn read_jobs(path: &Path, group: Option<&str>, multi: MultiGpu) -> Result<JobTrace, SimError> {
    let (mut input, gzip) = lines::open(path)?;
    let first = std::io::BufRead::fill_buf(&mut input)
        .map(|b| b.iter().copied().find(|c| !c.is_ascii_whitespace()))
        .unwrap_or(None);
    let mut rows = Vec::new();
    let mut skipped = 0;
    let kind = if matches!(first, Some(b'[' | b'{')) {
        philly_json::read(path, input, group, &mut rows, &mut skipped)?;
        "Philly, raw"
    } else {
        let lines = lines::Lines::over(path, input, gzip);
        read_csv(lines, group, &mut rows, &mut skipped)?
    };
    finish(path, kind, rows, skipped, multi)
}

fn read_csv(
    mut lines: lines::Lines,
    group: Option<&str>,
    rows: &mut Vec<RawRow>,
    skipped: &mut usize,
) -> Result<&'static str, SimError> {
    let header = match lines.next()? {
        Some(header) => header.to_owned(),
        None => return Err(SimError::Empty { path: lines.path().to_owned() }),
    };
    let columns = columns(&header).map_err(|reason| lines.error(reason))?;
    let width = header.split(',').count();
    while let Some(line) = lines.next()? {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != width {
            let reason = format!("{} cells where the header has {width}", cells.len());
            return Err(lines.error(reason));
        }
        if let (Some(group), Some(at)) = (group, columns.group)
            && cells[at] != group
        {
            continue;
        }
        match row(&columns, &cells, rows.len()) {
            Ok(Some(row)) => rows.push(row),
            Ok(None) => *skipped += 1,
            Err(reason) => return Err(lines.error(reason)),
        }
        if rows.len() > lines::MAX_ROWS {
            return Err(lines.error(format!("more than {} rows", lines::MAX_ROWS)));
        }
    }
    Ok(columns.kind)
}

fn row(c: &Columns, cells: &[&str], count: usize) -> Result<Option<RawRow>, String> {
    let submit_s = time(c, "submit time", cells[c.submit])?;
    let duration_s = match (c.duration, c.end) {
        (Some(at), _) => number("duration", cells[at])? * c.unit,
        (None, Some(at)) if cells[at].is_empty() => return Ok(None),
        (None, Some(at)) => time(c, "end time", cells[at])? - submit_s,
        (None, None) => return Ok(None),
    };
    if duration_s < 0.0 {
        return Err(format!("a duration of {duration_s} s; it must not be negative"));
    }
    let gpus = match c.gpus {
        Some(at) => {
            let n = number("number of GPUs", cells[at])?;
            if !(0.0..=100_000.0).contains(&n) {
                return Err(format!("{n} GPUs; write a number from 0 to 100000"));
            }
            u32::try_from(crate::number::index(n)).unwrap_or(0)
        }
        None => 1,
    };
    if gpus == 0 || duration_s == 0.0 {
        return Ok(None);
    }
    let id = c.id.map_or_else(|| format!("row-{count}"), |at| cells[at].to_owned());
    let workload = c.workload.map(|at| cells[at].to_owned()).filter(|w| !w.is_empty());
    Ok(Some(RawRow { id, submit_s, duration_s, gpus, workload }))
}

fn time(c: &Columns, what: &str, cell: &str) -> Result<f64, String> {
    if c.dates {
        return when::parse(cell)
            .ok_or_else(|| format!("`{}` is no {what}: write YYYY-MM-DD HH:MM:SS", shorten(cell)));
    }
    let t = number(what, cell)? * c.unit;
    if t < 0.0 { Err(format!("a {what} of {t} s; it must not be negative")) } else { Ok(t) }
}

fn number(what: &str, cell: &str) -> Result<f64, String> {
    match cell.parse::<f64>() {
        Ok(v) if v.is_finite() => Ok(v),
        _ => Err(format!("`{}` is no {what}: write a number", shorten(cell))),
    }
}

fn finish(
    path: &Path,
    kind: &'static str,
    mut rows: Vec<RawRow>,
    mut skipped: usize,
    multi: MultiGpu,
) -> Result<JobTrace, SimError> {
    if rows.is_empty() {
        return Err(SimError::Empty { path: path.to_owned() });
    }
    let split: u64 = rows.iter().map(|r| u64::from(r.gpus)).sum();
    if multi == MultiGpu::Split && split > lines::MAX_ROWS as u64 {
        return Err(SimError::Setting {
            field: "multi-gpu",
            value: format!("split of {}", path.display()),
            reason: "its rows would become more than five million jobs; write one or drop",
        });
    }
    // Public traces are not sorted; a stable sort keeps equal times in the order of the file.
    rows.sort_by(|a, b| a.submit_s.total_cmp(&b.submit_s));
    let first = rows[0].submit_s;
    let mut jobs = Vec::with_capacity(rows.len());
    for r in rows {
        let base = JobRow {
            id: r.id,
            submit_s: r.submit_s - first,
            duration_s: r.duration_s,
            gpus: r.gpus,
            workload: r.workload,
        };
        match multi {
            MultiGpu::Drop if base.gpus > 1 => skipped += 1,
            MultiGpu::Split if base.gpus > 1 => {
                for part in 0..base.gpus {
                    jobs.push(JobRow { id: format!("{}.{part}", base.id), ..base.clone() });
                }
            }
            _ => jobs.push(base),
        }
    }
    if jobs.is_empty() {
        return Err(SimError::Empty { path: path.to_owned() });
    }
    Ok(JobTrace { kind, jobs, skipped })
}

/// Writes a trace in the own format.
pub fn write_jobs(jobs: &[JobRow], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "job_id,submit_s,duration_s,gpus,workload")?;
    for j in jobs {
        let workload = j.workload.as_deref().unwrap_or("");
        writeln!(out, "{},{:.3},{:.3},{},{workload}", j.id, j.submit_s, j.duration_s, j.gpus)?;
    }
    Ok(())
}
