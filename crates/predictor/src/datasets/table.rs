//! The documented CSV of measured pairs: one row each, empty where unknown.

use std::fmt::Write as _;

use muxflow_types::{Bytes, GpuType, Micros, Percent, ProfileRecord, WorkloadName};

use crate::error::PredictorError;
use crate::sample::{Dataset, SpeedSample};

/// All columns, in the order in which they are written. The first three must be there.
pub const COLUMNS: [&str; 18] = [
    "online",
    "offline",
    "speed",
    "share_pct",
    "gpu_type",
    "at_s",
    "online_gpu_util_pct",
    "online_sm_activity_pct",
    "online_sm_occupancy_pct",
    "online_dram_activity_pct",
    "online_solo_time_s",
    "online_memory_bytes",
    "offline_gpu_util_pct",
    "offline_sm_activity_pct",
    "offline_sm_occupancy_pct",
    "offline_dram_activity_pct",
    "offline_solo_time_s",
    "offline_memory_bytes",
];
const REQUIRED: usize = 3;

/// Where each column is in the file.
struct Layout {
    places: [Option<usize>; COLUMNS.len()],
}

impl Layout {
    fn new(header: &csv::StringRecord) -> Result<Self, String> {
        let mut places = [None; COLUMNS.len()];
        for (place, name) in header.iter().enumerate() {
            let known = COLUMNS.iter().position(|c| *c == name.trim()).ok_or_else(|| {
                format!("unknown column `{name}`; known ones are {}", COLUMNS.join(", "))
            })?;
            if places[known].replace(place).is_some() {
                return Err(format!("column `{name}` is there twice"));
            }
        }
        for (name, place) in COLUMNS.iter().zip(&places).take(REQUIRED) {
            if place.is_none() {
                return Err(format!("column `{name}` is missing; it must be there"));
            }
        }
        Ok(Layout { places })
    }

    /// The text of a column; `None` when the column is not there or the field is empty.
    fn text<'a>(&self, row: &'a csv::StringRecord, column: usize) -> Option<&'a str> {
        row.get(self.places[column]?).map(str::trim).filter(|text| !text.is_empty())
    }

    fn number(&self, row: &csv::StringRecord, column: usize) -> Result<Option<f64>, String> {
        let Some(text) = self.text(row, column) else { return Ok(None) };
        let name = COLUMNS[column];
        let value: f64 = text
            .parse()
            .map_err(|_| format!("{name}: `{text}` is not a number (leave it empty if unknown)"))?;
        if value.is_finite() {
            Ok(Some(value))
        } else {
            Err(format!("{name}: `{text}` is not finite"))
        }
    }

    fn percent(&self, row: &csv::StringRecord, column: usize) -> Result<Option<Percent>, String> {
        let value = self.number(row, column)?;
        value.map(Percent::new).transpose().map_err(|e| format!("{}: {e}", COLUMNS[column]))
    }

    fn seconds(&self, row: &csv::StringRecord, column: usize) -> Result<Option<Micros>, String> {
        let value = self.number(row, column)?;
        let time = value.map(Micros::from_secs_f64).transpose();
        time.map_err(|e| format!("{}: {e}", COLUMNS[column]))
    }

    fn profile(
        &self,
        row: &csv::StringRecord,
        name_column: usize,
        first: usize,
        gpu_type: &GpuType,
    ) -> Result<ProfileRecord, String> {
        let name = self.text(row, name_column).unwrap_or("");
        let workload =
            WorkloadName::new(name).map_err(|e| format!("{}: {e}", COLUMNS[name_column]))?;
        let memory = match self.number(row, first + 5)? {
            Some(value) if value < 0.0 => {
                return Err(format!("{}: {value} is negative", COLUMNS[first + 5]));
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "not negative; a size past 2^64 saturates"
            )]
            Some(value) => Some(Bytes(value as u64)),
            None => None,
        };
        Ok(ProfileRecord {
            workload,
            gpu_type: gpu_type.clone(),
            gpu_util: self.percent(row, first)?,
            sm_activity: self.percent(row, first + 1)?,
            sm_occupancy: self.percent(row, first + 2)?,
            dram_activity: self.percent(row, first + 3)?,
            solo_time: self.seconds(row, first + 4)?,
            memory,
        })
    }

    fn sample(
        &self,
        row: &csv::StringRecord,
        gpu_type: &GpuType,
    ) -> Result<Option<SpeedSample>, String> {
        if self.text(row, 4).is_some_and(|other| other != gpu_type.as_str()) {
            return Ok(None);
        }
        let speed = self.number(row, 2)?.ok_or("speed: it is empty; a sample needs one")?;
        if !(0.0..=MAX_SPEED).contains(&speed) {
            return Err(format!(
                "speed: {speed} is not the speed when sharing divided by the speed alone (0 to 1; up to {MAX_SPEED} is taken as noise)"
            ));
        }
        Ok(Some(SpeedSample {
            online: self.profile(row, 0, 6, gpu_type)?,
            offline: self.profile(row, 1, 12, gpu_type)?,
            share: self.percent(row, 3)?,
            speed: speed.min(1.0),
            at: self.seconds(row, 5)?.unwrap_or(Micros::ZERO),
        }))
    }
}

/// A speed a little over 1 is noise and is taken as 1; more is a mistake in the data.
const MAX_SPEED: f64 = 1.2;

/// Reads a table; rows of another GPU type (where the column is there) are left out.
pub fn read(text: &str, gpu_type: &GpuType, source_name: &str) -> Result<Dataset, PredictorError> {
    let mut reader =
        csv::ReaderBuilder::new().comment(Some(b'#')).flexible(false).from_reader(text.as_bytes());
    let bad_row = |line: u64, problem: String| PredictorError::Measurement {
        source_name: source_name.to_owned(),
        line,
        problem,
    };
    let header = reader.headers().map_err(|e| bad_row(1, e.to_string()))?.clone();
    let layout = Layout::new(&header).map_err(|problem| bad_row(1, problem))?;
    let mut samples = Vec::new();
    let mut others = 0;
    for row in reader.records() {
        let row = row.map_err(|e| {
            let line = e.position().map_or(0, csv::Position::line);
            bad_row(line, format!("not a row of {} fields: {e}", header.len()))
        })?;
        let line = row.position().map_or(0, csv::Position::line);
        match layout.sample(&row, gpu_type).map_err(|problem| bad_row(line, problem))? {
            Some(sample) => samples.push(sample),
            None => others += 1,
        }
    }
    if samples.is_empty() {
        return Err(PredictorError::Dataset {
            source_name: source_name.to_owned(),
            problem: format!("no samples of GPU type {gpu_type} ({others} of other types)"),
        });
    }
    Ok(Dataset { gpu_type: gpu_type.clone(), origin: source_name.to_owned(), samples })
}

/// Writes a table that [`read`] reads back.
pub fn write(data: &Dataset) -> String {
    let mut out = COLUMNS.join(",");
    out.push('\n');
    for sample in &data.samples {
        let field = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
        let profile = |p: &ProfileRecord| {
            [
                field(p.gpu_util.map(Percent::value)),
                field(p.sm_activity.map(Percent::value)),
                field(p.sm_occupancy.map(Percent::value)),
                field(p.dram_activity.map(Percent::value)),
                field(p.solo_time.map(Micros::as_secs_f64)),
                p.memory.map_or(String::new(), |m| m.0.to_string()),
            ]
            .join(",")
        };
        // Writing to a string cannot fail.
        writeln!(
            out,
            "{},{},{},{},{},{},{},{}",
            sample.online.workload,
            sample.offline.workload,
            sample.speed,
            field(sample.share.map(Percent::value)),
            data.gpu_type,
            if sample.at == Micros::ZERO {
                String::new()
            } else {
                field(Some(sample.at.as_secs_f64()))
            },
            profile(&sample.online),
            profile(&sample.offline),
        )
        .unwrap_or_default();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t4() -> GpuType {
        GpuType::new("T4").unwrap()
    }

    #[test]
    fn a_table_survives_the_round_trip() {
        let text = "online,offline,speed,share_pct,online_gpu_util_pct,offline_solo_time_s\n\
                    # a remark\n\
                    web,train/32,0.75,40,31.5,0.125\nweb,train/64,1.01,,,\n";
        let data = read(text, &t4(), "x.csv").unwrap();
        assert_eq!(data.samples.len(), 2);
        assert_eq!(data.samples[0].offline.solo_time, Some(Micros(125_000)));
        assert_eq!(data.samples[1].speed, 1.0);
        assert_eq!(data.samples[1].share, None);
        let again = read(&write(&data), &t4(), "x.csv").unwrap();
        assert_eq!(again, data);
    }

    #[test]
    fn errors_name_the_line_the_field_and_the_remedy() {
        let cases = [
            ("online,offline\n", "line 1: column `speed` is missing"),
            ("online,offline,speed,colour\n", "unknown column `colour`"),
            ("online,offline,speed,speed\n", "twice"),
            ("online,offline,speed\na,b,fast\n", "line 2: speed: `fast` is not a number"),
            ("online,offline,speed\na,b,\n", "line 2: speed: it is empty"),
            ("online,offline,speed\na,b,7\n", "line 2: speed: 7 is not the speed"),
            ("online,offline,speed\na,b c,0.5\n", "line 2: offline: `b c` is not a workload name"),
            ("online,offline,speed,share_pct\na,b,0.5,140\n", "share_pct: 140 is not a percentage"),
            ("online,offline,speed,at_s\na,b,0.5,-1\n", "at_s"),
            ("online,offline,speed\na,b\n", "not a row of 3 fields"),
            (
                "online,offline,speed,gpu_type\na,b,0.5,A10\n",
                "no samples of GPU type T4 (1 of other",
            ),
        ];
        for (text, want) in cases {
            let error = read(text, &t4(), "x.csv").unwrap_err().to_string();
            assert!(error.starts_with("x.csv") && error.contains(want), "{text:?}: {error}");
        }
    }
}
