//! Traces of requests, as rates over time.
//!
//! | kind | told by | what is made of it |
//! |---|---|---|
//! | own | `service,time_s,rate` | one curve for each service |
//! | ServeGen | `client,timestamp,rate,…` | one curve for each client |
//! | Azure LLM | `TIMESTAMP,ContextTokens,GeneratedTokens` | one curve, requests counted by the minute |

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use super::{lines, when};
use crate::error::SimError;
use crate::number::{float, index};

/// The request rate of one service over time: steps of equal length, repeated for ever.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestCurve {
    /// Its name.
    pub name: String,
    /// Length of a step.
    pub step_s: f64,
    /// Requests per second in each step.
    pub rates: Vec<f64>,
}

impl RequestCurve {
    /// The rate at a time: straight lines between the middles of steps.
    pub fn at(&self, time_s: f64) -> f64 {
        let n = self.rates.len();
        if n == 0 {
            return 0.0;
        }
        let place = (time_s / self.step_s - 0.5).rem_euclid(float(n));
        let low = index(place.floor()) % n;
        let part = place - place.floor();
        self.rates[low] * (1.0 - part) + self.rates[(low + 1) % n] * part
    }

    /// The largest rate.
    pub fn peak(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// The mean rate.
    pub fn mean(&self) -> f64 {
        crate::number::mean(&self.rates)
    }

    /// The same shape stretched to lie between two rates.
    pub fn scaled_between(&self, low: f64, high: f64) -> RequestCurve {
        let least = self.rates.iter().copied().fold(f64::INFINITY, f64::min);
        let span = (self.peak() - least).max(1e-12);
        let rates = self.rates.iter().map(|r| low + (r - least) / span * (high - low)).collect();
        RequestCurve { rates, ..self.clone() }
    }
}

/// Reads a trace of requests of any known kind.
pub fn read_requests(path: &Path) -> Result<Vec<RequestCurve>, SimError> {
    let mut lines = lines::Lines::open(path)?;
    let header = match lines.next()? {
        Some(header) => header.to_owned(),
        None => return Err(SimError::Empty { path: path.to_owned() }),
    };
    let names: Vec<String> = header.split(',').map(|c| c.trim().to_ascii_lowercase()).collect();
    let at = |name: &str| names.iter().position(|n| n == name);
    let curves = match (at("rate"), at("contexttokens")) {
        (Some(rate), _) => {
            let key = at("service").or_else(|| at("client"));
            let time = at("time_s").or_else(|| at("timestamp"));
            let (Some(key), Some(time)) = (key, time) else {
                return Err(lines.error(
                    "a trace of rates needs the columns `service,time_s,rate` (own) or `client,timestamp,rate` (ServeGen)",
                ));
            };
            rates(&mut lines, names.len(), key, time, rate)?
        }
        (None, Some(_)) => arrivals(&mut lines, at("timestamp").unwrap_or(0))?,
        _ => {
            return Err(lines.error(
                "the header is of no known kind of request trace; the own format is `service,time_s,rate`",
            ));
        }
    };
    if curves.is_empty() {
        return Err(SimError::Empty { path: path.to_owned() });
    }
    Ok(curves)
}

fn rates(
    lines: &mut lines::Lines,
    width: usize,
    key: usize,
    time: usize,
    rate: usize,
) -> Result<Vec<RequestCurve>, SimError> {
    let mut all: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut count = 0usize;
    while let Some(line) = lines.next()? {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != width {
            let reason = format!("{} cells where the header has {width}", cells.len());
            return Err(lines.error(reason));
        }
        let number = |what: &str, cell: &str| match cell.parse::<f64>() {
            Ok(v) if v.is_finite() && v >= 0.0 => Ok(v),
            _ => Err(format!("`{cell}` is no {what}: write a number that is not negative")),
        };
        let parsed = number("time", cells[time])
            .and_then(|t| Ok((cells[key].to_owned(), t, number("rate", cells[rate])?)));
        let (name, t, r) = parsed.map_err(|reason| lines.error(reason))?;
        all.entry(name).or_default().push((t, r));
        count += 1;
        if count > lines::MAX_ROWS {
            return Err(lines.error("too many rows"));
        }
    }
    let mut out = Vec::new();
    for (name, mut points) in all {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let step_s = points.windows(2).map(|w| w[1].0 - w[0].0).find(|s| *s > 0.0).unwrap_or(600.0);
        let uneven = points.windows(2).any(|w| ((w[1].0 - w[0].0) / step_s - 1.0).abs() > 0.01);
        if uneven {
            return Err(SimError::Line {
                path: lines.path().to_owned(),
                line: lines.number(),
                reason: format!(
                    "the steps of `{name}` are not equally long (the first is {step_s} s)"
                ),
            });
        }
        out.push(RequestCurve { name, step_s, rates: points.into_iter().map(|p| p.1).collect() });
    }
    Ok(out)
}

fn arrivals(lines: &mut lines::Lines, column: usize) -> Result<Vec<RequestCurve>, SimError> {
    let mut minutes: Vec<f64> = Vec::new();
    let mut first: Option<f64> = None;
    while let Some(line) = lines.next()? {
        let cell = line.split(',').nth(column).unwrap_or("").to_owned();
        let Some(t) = when::parse(&cell) else {
            return Err(lines.error(format!("`{cell}` is no time: write YYYY-MM-DD HH:MM:SS")));
        };
        let start = *first.get_or_insert(t);
        if t < start {
            return Err(lines.error("before the first request; the trace must be sorted by time"));
        }
        let minute = index((t - start) / 60.0);
        if minute > 60 * 24 * 366 {
            return Err(lines.error("more than a year after the first request"));
        }
        if minutes.len() <= minute {
            minutes.resize(minute + 1, 0.0);
        }
        minutes[minute] += 1.0 / 60.0;
    }
    if minutes.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![RequestCurve { name: "azure".to_owned(), step_s: 60.0, rates: minutes }])
}

/// Writes curves in the own format.
pub fn write_requests(curves: &[RequestCurve], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "service,time_s,rate")?;
    for c in curves {
        for (i, rate) in c.rates.iter().enumerate() {
            writeln!(out, "{},{:.0},{rate:.4}", c.name, float(i) * c.step_s)?;
        }
    }
    Ok(())
}
