//! Signs of distress of the whole machine: memory short, the kernel's page daemon busy, pressure.
//!
//! Offline work is evicted for the host's sake too, because a machine that pages serves nobody. The
//! decision is a pure machine over readings; [`HostReader`] reads them from `/proc`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use muxflow_types::{Micros, Percent};

/// When the host counts as being in distress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostParams {
    /// Memory in use, as a share of all.
    pub memory_used: Percent,
    /// Share of one processor that kswapd uses.
    pub kswapd_busy: Percent,
    /// For how long kswapd must have been busy.
    pub kswapd_for: Micros,
    /// Share of time in which all tasks waited for memory (PSI `full avg10`).
    pub pressure_full: Percent,
    /// For how long the pressure must last.
    pub pressure_for: Micros,
    /// A sign is over when it has been absent this long; no job is placed until then.
    pub calm_for: Micros,
}

impl Default for HostParams {
    fn default() -> Self {
        let percent = |value| Percent::new(value).unwrap_or(Percent::FULL);
        HostParams {
            memory_used: percent(92.0),
            kswapd_busy: percent(40.0),
            kswapd_for: Micros::from_secs(5),
            pressure_full: percent(20.0),
            pressure_for: Micros::from_secs(5),
            calm_for: Micros::from_secs(30),
        }
    }
}

/// One reading of the machine. What the kernel does not tell is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HostReading {
    /// When.
    pub at: Micros,
    /// All memory and what is available, in bytes.
    pub memory: Option<(u64, u64)>,
    /// Processor time of all kswapd threads since boot.
    pub kswapd_time: Option<Micros>,
    /// PSI `full avg10` of memory.
    pub pressure_full: Option<Percent>,
}

/// Why offline work must leave the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HostDistress {
    /// Memory in use is above its threshold.
    Memory(Percent),
    /// kswapd has been busy for too long.
    Kswapd(Percent),
    /// Tasks wait for memory.
    Pressure(Percent),
}

impl fmt::Display for HostDistress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostDistress::Memory(used) => write!(f, "host memory {:.1} % in use", used.value()),
            HostDistress::Kswapd(busy) => write!(f, "kswapd {:.0} % busy", busy.value()),
            HostDistress::Pressure(share) => {
                write!(f, "memory pressure: all tasks wait {:.0} % of the time", share.value())
            }
        }
    }
}

/// The machine.
#[derive(Debug, Clone)]
pub struct HostWatch {
    params: HostParams,
    last: Option<HostReading>,
    kswapd_since: Option<Micros>,
    pressure_since: Option<Micros>,
    last_sign: Option<Micros>,
}

impl HostWatch {
    /// Knows nothing yet.
    pub fn new(params: HostParams) -> Self {
        HostWatch { params, last: None, kswapd_since: None, pressure_since: None, last_sign: None }
    }

    /// Whether offline work may be placed on this machine: no distress, and none lately.
    pub fn is_calm(&self, now: Micros) -> bool {
        self.last_sign.is_none_or(|sign| now.since(sign) >= self.params.calm_for)
    }

    /// Takes a reading; says whether offline work must leave.
    pub fn observe(&mut self, reading: HostReading) -> Option<HostDistress> {
        let distress = self.memory(reading).or_else(|| self.kswapd(reading));
        let distress = distress.or_else(|| self.pressure(reading));
        if distress.is_some() {
            self.last_sign = Some(reading.at);
        }
        self.last = Some(reading);
        distress
    }

    fn memory(&self, reading: HostReading) -> Option<HostDistress> {
        let (total, available) = reading.memory?;
        // More available than there is means that the reading is broken, not that all is well.
        let used = total.checked_sub(available)?;
        #[expect(clippy::cast_precision_loss, reason = "a share needs no 53 bits")]
        let used = Percent::clamped(used as f64 / total.max(1) as f64 * 100.0)?;
        (used > self.params.memory_used).then_some(HostDistress::Memory(used))
    }

    fn kswapd(&mut self, reading: HostReading) -> Option<HostDistress> {
        let last = self.last?;
        let (before, now) = (last.kswapd_time?, reading.kswapd_time?);
        let passed = reading.at.since(last.at);
        if passed.0 == 0 {
            return None;
        }
        let busy = now.since(before).as_secs_f64() / passed.as_secs_f64() * 100.0;
        let busy = Percent::clamped(busy)?;
        if busy < self.params.kswapd_busy {
            self.kswapd_since = None;
            return None;
        }
        let since = *self.kswapd_since.get_or_insert(last.at);
        (reading.at.since(since) >= self.params.kswapd_for).then_some(HostDistress::Kswapd(busy))
    }

    fn pressure(&mut self, reading: HostReading) -> Option<HostDistress> {
        let share = reading.pressure_full?;
        if share < self.params.pressure_full {
            self.pressure_since = None;
            return None;
        }
        let since = *self.pressure_since.get_or_insert(reading.at);
        let long = reading.at.since(since) >= self.params.pressure_for;
        long.then_some(HostDistress::Pressure(share))
    }
}

/// Total and available memory in bytes, from the text of `/proc/meminfo`.
pub fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some((field("MemTotal")?, field("MemAvailable")?))
}

/// `full avg10`, from the text of `/proc/pressure/memory`.
pub fn parse_pressure(text: &str) -> Option<Percent> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let value = line.split_ascii_whitespace().find_map(|part| part.strip_prefix("avg10="))?;
    Percent::clamped(value.parse().ok()?)
}

/// Reads the signs from `/proc`.
#[derive(Debug)]
pub struct HostReader {
    proc: PathBuf,
    ticks_per_s: u64,
    kswapd: Vec<u32>,
}

impl HostReader {
    /// From this `/proc`.
    pub fn new(proc: &Path) -> Self {
        // SAFETY: asks for a constant of the system.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let ticks_per_s = u64::try_from(ticks).unwrap_or(100).max(1);
        HostReader { proc: proc.to_owned(), ticks_per_s, kswapd: find_kswapd(proc) }
    }

    /// One reading.
    pub fn read(&self, at: Micros) -> HostReading {
        let text = |name: &str| fs::read_to_string(self.proc.join(name)).ok();
        let ticks =
            |pid: &u32| Some(crate::process::parse_stat(&text(&format!("{pid}/stat"))?)?.cpu_ticks);
        let all: Vec<u64> = self.kswapd.iter().filter_map(ticks).collect();
        let busy_us =
            all.iter().sum::<u64>().saturating_mul(1_000_000 / self.ticks_per_s.min(1_000_000));
        HostReading {
            at,
            memory: text("meminfo").and_then(|text| parse_meminfo(&text)),
            kswapd_time: (!all.is_empty()).then_some(Micros(busy_us)),
            pressure_full: text("pressure/memory").and_then(|text| parse_pressure(&text)),
        }
    }

    /// Which signs this machine gives.
    pub fn describe(&self) -> String {
        let reading = self.read(Micros(0));
        let word = |there: bool| if there { "yes" } else { "no" };
        format!(
            "memory {}, kswapd {}, pressure {}",
            word(reading.memory.is_some()),
            word(reading.kswapd_time.is_some()),
            word(reading.pressure_full.is_some())
        )
    }
}

/// The kernel's page daemons: one per memory node, known by name.
fn find_kswapd(proc: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(proc) else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_kswapd = |pid: &u32| {
        fs::read_to_string(proc.join(format!("{pid}/comm")))
            .is_ok_and(|name| name.starts_with("kswapd"))
    };
    pids.filter(is_kswapd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMINFO: &str = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\nMemAvailable:    8192000 kB\nBuffers: 1 kB\n";
    const PRESSURE: &str = "some avg10=12.50 avg60=3.00 avg300=1.00 total=99\nfull avg10=7.25 avg60=2.00 avg300=0.50 total=55\n";

    fn at(ms: u64) -> HostReading {
        HostReading { at: Micros::from_millis(ms), ..HostReading::default() }
    }

    #[test]
    fn the_kernels_files_are_read() {
        assert_eq!(parse_meminfo(MEMINFO), Some((16_384_000 << 10, 8_192_000 << 10)));
        assert_eq!(parse_meminfo("MemTotal: 5 kB\n"), None);
        assert_eq!(parse_pressure(PRESSURE).unwrap().value(), 7.25);
        assert_eq!(parse_pressure("some avg10=1.0\n"), None);
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("61")).unwrap();
        fs::create_dir_all(dir.path().join("pressure")).unwrap();
        fs::write(dir.path().join("meminfo"), MEMINFO).unwrap();
        fs::write(dir.path().join("pressure/memory"), PRESSURE).unwrap();
        fs::write(dir.path().join("61/comm"), "kswapd0\n").unwrap();
        let stat = "61 (kswapd0) S 2 0 0 0 -1 10758208 0 0 0 0 3 97 0 0 20 0 1 0 12 0 0";
        fs::write(dir.path().join("61/stat"), stat).unwrap();
        let mut reader = HostReader::new(dir.path());
        reader.ticks_per_s = 100;
        let reading = reader.read(Micros(5));
        assert_eq!(reading.kswapd_time, Some(Micros::from_secs(1)));
        assert_eq!(reading.memory.unwrap().1, 8_192_000 << 10);
        assert_eq!(reader.describe(), "memory yes, kswapd yes, pressure yes");
    }

    #[test]
    fn this_very_machine_can_be_read() {
        let reading = HostReader::new(Path::new("/proc")).read(Micros(1));
        let (total, available) = reading.memory.unwrap();
        assert!(total > 0 && available <= total);
    }

    #[test]
    fn memory_acts_at_once_and_the_rest_only_when_it_lasts() {
        let mut watch = HostWatch::new(HostParams::default());
        let full = HostReading { memory: Some((1000, 50)), ..at(0) };
        let distress = watch.observe(full).unwrap();
        assert_eq!(distress.to_string(), "host memory 95.0 % in use");
        assert!(!watch.is_calm(Micros::from_secs(10)));
        assert!(watch.is_calm(Micros::from_secs(31)));

        let mut watch = HostWatch::new(HostParams::default());
        for second in 0..10u64 {
            let busy = Micros::from_millis(500 * second);
            let reading = HostReading { kswapd_time: Some(busy), ..at(1000 * second) };
            assert_eq!(watch.observe(reading).is_some(), second >= 5, "after {second} s");
        }
        let idle = HostReading { kswapd_time: Some(Micros::from_millis(4500)), ..at(10_000) };
        assert_eq!(watch.observe(idle), None);

        let mut watch = HostWatch::new(HostParams::default());
        let pressed = |ms| HostReading { pressure_full: Percent::clamped(35.0), ..at(ms) };
        assert_eq!(watch.observe(pressed(0)), None);
        assert_eq!(watch.observe(pressed(4_900)), None);
        assert!(matches!(watch.observe(pressed(5_000)), Some(HostDistress::Pressure(_))));
    }

    proptest! {
        #[test]
        fn broken_readings_are_no_distress(total in any::<u64>(), over in 1u64.., times in proptest::collection::vec(any::<u64>(), 0..20)) {
            let mut watch = HostWatch::new(HostParams::default());
            if let Some(available) = total.checked_add(over) {
                prop_assert_eq!(watch.observe(HostReading { memory: Some((total, available)), ..at(0) }), None);
            }
            for time in times {
                let reading = HostReading { at: Micros(time), ..HostReading::default() };
                prop_assert_eq!(watch.observe(reading), None, "nothing known, nothing evicted");
            }
        }
    }
}
