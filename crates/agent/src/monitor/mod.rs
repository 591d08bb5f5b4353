//! The monitor of a GPU: a thread that reads its sensors every few milliseconds and keeps some
//! minutes of history.
//!
//! Calls into a driver can block for seconds or for ever. So nobody who decides anything calls the
//! driver: the monitor's thread does, and publishes; the control loop takes what is published and
//! sees how old it is. A blocked call then looks like what it is, silence, and closes the gate.

pub mod dcgm;
pub mod nvml;
mod reliance;
pub mod ring;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::{GpuSample, Micros};

use crate::sys;
use ring::Ring;

/// Where SM activity comes from, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActivitySource {
    /// DCGM's profiling fields.
    Dcgm,
    /// NVML's GPM samples (Hopper and later).
    Gpm,
    /// NVML's per-process SM figure: coarser, and time rather than SMs.
    ProcessUtilisation,
    /// Nothing tells it: no offline work can run here.
    None,
}

impl ActivitySource {
    /// The word used in logs, metrics and `doctor`.
    pub fn as_str(self) -> &'static str {
        match self {
            ActivitySource::Dcgm => "dcgm",
            ActivitySource::Gpm => "gpm",
            ActivitySource::ProcessUtilisation => "nvml-process",
            ActivitySource::None => "none",
        }
    }
}

/// Why a sensor gave nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SensorFailure {
    /// The device is gone.
    DeviceLost,
    /// A call failed, in words.
    Call(String),
}

impl std::fmt::Display for SensorFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SensorFailure::DeviceLost => f.write_str("the device is lost"),
            SensorFailure::Call(text) => f.write_str(text),
        }
    }
}

/// What reads one GPU. It lives in the monitor's thread and may block there.
pub trait Sensor: Send + 'static {
    /// One sample.
    fn read(&mut self, now: Micros) -> Result<GpuSample, SensorFailure>;
    /// Where its SM activity comes from at present.
    fn source(&self) -> ActivitySource;
    /// Processes that hold a context on the GPU, when that can be told.
    fn processes(&mut self) -> Result<Vec<u32>, SensorFailure>;
    /// What the driver asks for before the GPU is whole again, where it says.
    fn recovery(&mut self) -> Option<RecoveryAction> {
        None
    }
}

/// The time that all of the agent uses: the monotonic clock.
pub fn now() -> Micros {
    Micros(sys::monotonic_ns() / 1_000)
}

/// What the monitor publishes.
#[derive(Debug, Clone)]
pub struct Published {
    /// The newest sample.
    pub sample: Option<GpuSample>,
    /// How many samples there have been.
    pub count: u64,
    /// Where SM activity comes from.
    pub source: ActivitySource,
    /// The newest failure and when it was, when it is newer than the sample.
    pub failure: Option<(Micros, SensorFailure)>,
    /// How many reads failed.
    pub failures: u64,
    /// Processes on the GPU, and when that was read.
    pub processes: Option<(Micros, Vec<u32>)>,
    /// What the driver asks for before the GPU is whole again, where it says.
    pub recovery: Option<RecoveryAction>,
    /// How long the last read took.
    pub took: Micros,
}

#[derive(Debug)]
struct Shared {
    published: Mutex<Published>,
    history: Mutex<Ring<GpuSample>>,
    /// When the call that is under way began; 0 when none is.
    calling_since: AtomicU64,
    stop: AtomicBool,
}

/// A monitor that runs.
#[derive(Debug)]
pub struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// How often the list of processes is read: it is slower than the counters, and two seconds are
/// allowed.
const PROCESSES_EVERY: Micros = Micros::from_millis(250);

/// What is read less often than the counters.
struct Listed {
    processes: Result<Vec<u32>, SensorFailure>,
    recovery: Option<RecoveryAction>,
}

fn unpoisoned<T>(result: Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

impl Monitor {
    /// Starts a thread that reads `sensor` every `period` and keeps `keep` of history.
    pub fn start(
        name: &str,
        mut sensor: impl Sensor,
        period: Duration,
        keep: Duration,
    ) -> std::io::Result<Self> {
        let slots = keep.as_micros() / period.as_micros().max(1);
        let slots = usize::try_from(slots).unwrap_or(1).clamp(1, 1 << 20);
        let published = Published {
            sample: None,
            count: 0,
            source: sensor.source(),
            failure: None,
            failures: 0,
            processes: None,
            recovery: None,
            took: Micros::ZERO,
        };
        let shared = Arc::new(Shared {
            published: Mutex::new(published),
            history: Mutex::new(Ring::new(slots)),
            calling_since: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let inside = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("monitor-{name}"))
            .spawn(move || inside.run(&mut sensor, period))?;
        Ok(Monitor { shared, thread: Some(thread) })
    }

    /// What is known now.
    pub fn published(&self) -> Published {
        unpoisoned(self.shared.published.lock()).clone()
    }

    /// How long the call that is under way has taken so far; `None` when none is.
    pub fn blocked_for(&self, now: Micros) -> Option<Micros> {
        let since = self.shared.calling_since.load(Ordering::Acquire);
        (since != 0).then(|| now.since(Micros(since)))
    }

    /// The samples of the last `span`, oldest first.
    pub fn history(&self, now: Micros, span: Micros) -> Vec<GpuSample> {
        let ring = unpoisoned(self.shared.history.lock());
        ring.iter().filter(|sample| now.since(sample.at) <= span).copied().collect()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // A thread that is blocked in the driver cannot be waited for; it ends with the process.
        if self.shared.calling_since.load(Ordering::Acquire) == 0
            && let Some(thread) = self.thread.take()
        {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn run(&self, sensor: &mut impl Sensor, period: Duration) {
        let mut processes_at = Micros::ZERO;
        let mut next = std::time::Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let began = now();
            self.calling_since.store(began.0.max(1), Ordering::Release);
            let read = sensor.read(began);
            let listed = (began.since(processes_at) >= PROCESSES_EVERY).then(|| {
                processes_at = began;
                Listed { processes: sensor.processes(), recovery: sensor.recovery() }
            });
            self.calling_since.store(0, Ordering::Release);
            self.publish(sensor.source(), began, read, listed);
            next += period;
            let current = std::time::Instant::now();
            if next < current {
                // Behind after a blocked call: go on from here, do not catch up in a burst.
                next = current;
            }
            std::thread::sleep(next.saturating_duration_since(current));
        }
    }

    fn publish(
        &self,
        source: ActivitySource,
        began: Micros,
        read: Result<GpuSample, SensorFailure>,
        listed: Option<Listed>,
    ) {
        if let Ok(sample) = &read {
            unpoisoned(self.history.lock()).push(*sample);
        }
        let mut published = unpoisoned(self.published.lock());
        published.source = source;
        published.took = now().since(began);
        match read {
            Ok(sample) => {
                published.sample = Some(sample);
                published.count += 1;
                published.failure = None;
            }
            Err(failure) => {
                published.failures += 1;
                published.failure = Some((began, failure));
            }
        }
        if let Some(Listed { processes, recovery }) = listed {
            published.recovery = recovery;
            if let Ok(processes) = processes {
                published.processes = Some((began, processes));
            }
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
