//! The sensor of a real node: NVML for everything that it knows, and the best source of SM activity
//! that there is.
//!
//! A call that fails makes its own counter missing and no other: a value is never invented. Only a
//! device that is lost, or a library that is gone, fails the whole read.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::{Bytes, GpuSample, GpuType, MegaHertz, Micros, Percent, Watts};
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};

use super::dcgm::{Activity, Dcgm, DcgmLink};
use super::reliance::Reliance;
use super::{ActivitySource, Sensor, SensorFailure};
use crate::error::{AgentError, Result};

/// GPM needs two samples this far apart.
const GPM_EVERY: Micros = Micros::from_millis(100);

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, which drivers know from R565 on.
const RECOVERY_ACTION: FieldId = FieldId(230);

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its UUID.
    pub uuid: String,
    /// Its kind, as short as the laws name it: `T4`, `A10`.
    pub gpu_type: GpuType,
    /// The name that the driver gives it.
    pub name: String,
    /// PCI address as the kernel log writes it, without the function: `0000:3b:00`.
    pub pci: String,
    /// All its memory.
    pub memory: Bytes,
    /// Highest SM clock, when the driver tells.
    pub highest_clock: Option<MegaHertz>,
}

fn nvml_error(operation: &'static str) -> impl FnOnce(NvmlError) -> AgentError {
    move |error| AgentError::Nvml { operation, reason: error.to_string() }
}

/// Opens NVML where the loader finds it.
pub fn open() -> Result<Arc<Nvml>> {
    open_library("libnvidia-ml.so.1")
}

fn open_library(name: &str) -> Result<Arc<Nvml>> {
    let opened = Nvml::builder().lib_path(name.as_ref()).init();
    opened.map(Arc::new).map_err(nvml_error("open libnvidia-ml.so.1"))
}

/// `NVIDIA A10` and `Tesla T4` are `A10` and `T4` to the laws.
pub fn short_name(name: &str) -> String {
    let words = name.split_whitespace().filter(|word| {
        !["NVIDIA", "Tesla", "GeForce", "Quadro", "RTX"].contains(word) || name == *word
    });
    let short: Vec<&str> = words.collect();
    if short.is_empty() { name.replace(' ', "-") } else { short.join("-") }
}

/// `00000000:3B:00.0` of NVML is `0000:3b:00` in the kernel log.
pub fn kernel_pci(bus_id: &str) -> String {
    let lower = bus_id.to_ascii_lowercase();
    let without_function = lower.split('.').next().unwrap_or_default();
    let skip = without_function.len().saturating_sub("0000:3b:00".len());
    without_function.get(skip..).unwrap_or(without_function).to_owned()
}

/// All GPUs that NVML shows, in its order; one that cannot be read does not hide the others.
pub fn list(nvml: &Nvml) -> Result<Vec<Result<GpuFacts>>> {
    let count = nvml.device_count().map_err(nvml_error("count the GPUs"))?;
    Ok((0..count).map(|index| facts(nvml, index)).collect())
}

/// What the GPU with this number of NVML's is.
pub fn facts(nvml: &Nvml, index: u32) -> Result<GpuFacts> {
    let device = nvml.device_by_index(index).map_err(nvml_error("open a GPU"))?;
    let name = device.name().map_err(nvml_error("read the name of a GPU"))?;
    let invalid = |error: muxflow_types::IdError| AgentError::Nvml {
        operation: "name the kind of a GPU",
        reason: error.to_string(),
    };
    let pci = device.pci_info().map_err(nvml_error("read the PCI address of a GPU"))?;
    Ok(GpuFacts {
        uuid: device.uuid().map_err(nvml_error("read the UUID of a GPU"))?,
        gpu_type: GpuType::new(&short_name(&name)).map_err(invalid)?,
        name,
        pci: kernel_pci(&pci.bus_id),
        memory: Bytes(device.memory_info().map_err(nvml_error("read the memory of a GPU"))?.total),
        highest_clock: device.max_clock_info(Clock::SM).ok().map(MegaHertz),
    })
}

/// What the driver asks for before a GPU is whole again, where it says.
pub fn recovery_of(device: &Device<'_>) -> Option<RecoveryAction> {
    let mut values = device.field_values_for(&[RECOVERY_ACTION]).ok()?;
    match values.pop()?.ok()?.value.ok()? {
        SampleValue::U32(number) => Some(RecoveryAction::from_number(number)),
        _ => None,
    }
}

/// A handle of NVML, valid while the library is.
#[derive(Debug, Clone, Copy)]
struct RawDevice(nvml_wrapper_handle::Handle);

mod nvml_wrapper_handle {
    /// NVML's device handle: an address inside the library.
    pub(super) type Handle = *mut std::ffi::c_void;
}

// SAFETY: NVML is thread-safe and its handles belong to the library, not to a thread.
unsafe impl Send for RawDevice {}

enum ActivityReader {
    Gpm(GpmReader),
    Process(ProcessReader),
    None,
}

/// The sensor of one GPU.
pub struct NvmlSensor {
    nvml: Arc<Nvml>,
    device: RawDevice,
    uuid: String,
    dcgm: Option<DcgmReader>,
    /// What is read where DCGM is not there or tells nothing.
    activity: ActivityReader,
}

/// DCGM's values of this GPU, while they come.
struct DcgmReader {
    link: Arc<DcgmLink>,
    dcgm: Arc<Dcgm>,
    device: Option<u32>,
    reliance: Reliance,
}

impl DcgmReader {
    /// What it says now; none when it says nothing.
    fn read(&mut self, uuid: &str, now: Micros) -> Option<Activity> {
        if self.reliance.is_given_up() {
            self.dcgm = self.link.renew(&self.dcgm);
            self.device = self.dcgm.find(uuid);
        }
        let read = self.device.and_then(|device| self.dcgm.read(device, now, epoch_us()).ok());
        let read = read.filter(|read| read.sm.is_some());
        let before = self.reliance.is_given_up();
        self.reliance.tried(now, read.is_some());
        let after = self.reliance.is_given_up();
        if before != after {
            tracing::warn!(gpu = uuid, silent = after, "DCGM");
        }
        read
    }
}

impl std::fmt::Debug for NvmlSensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmlSensor").field("source", &self.source()).finish_non_exhaustive()
    }
}

impl NvmlSensor {
    /// For the GPU with this UUID; takes the best source of activity that works.
    pub fn new(nvml: Arc<Nvml>, dcgm: Option<Arc<DcgmLink>>, uuid: &str) -> Result<Self> {
        let device = nvml.device_by_uuid(uuid).map_err(nvml_error("find a GPU by its UUID"))?;
        let gpm = device.gpm_support().unwrap_or(false);
        let process = device.process_utilization_stats(None);
        let process = !matches!(process, Err(NvmlError::NotSupported));
        // SAFETY: kept beside the library that it belongs to, and used only while that is loaded.
        let raw = RawDevice(unsafe { device.handle() }.cast());
        let dcgm = dcgm.and_then(|link| {
            let dcgm = link.get();
            let device = Some(dcgm.find(uuid)?);
            Some(DcgmReader { link, dcgm, device, reliance: Reliance::default() })
        });
        let activity = match (gpm, process) {
            (true, _) => ActivityReader::Gpm(GpmReader::default()),
            (false, true) => ActivityReader::Process(ProcessReader::default()),
            (false, false) => ActivityReader::None,
        };
        Ok(NvmlSensor { nvml, device: raw, uuid: uuid.to_owned(), dcgm, activity })
    }

    fn device(&self) -> Device<'_> {
        // SAFETY: the handle came from this library, which `self` keeps loaded.
        unsafe { Device::new(self.device.0.cast(), &self.nvml) }
    }

    fn activity(&mut self, now: Micros, sample: &mut GpuSample) -> Option<Micros> {
        // SAFETY: as in `device`; apart from it because `activity` is borrowed for writing.
        let device = unsafe { Device::new(self.device.0.cast(), &self.nvml) };
        if let Some(dcgm) = self.dcgm.as_mut().filter(|dcgm| dcgm.reliance.wants_try(now)) {
            if let Some(read) = dcgm.read(&self.uuid, now) {
                sample.sm_activity = read.sm;
                sample.sm_occupancy = read.occupancy;
                sample.dram_activity = read.dram;
                return Some(read.at);
            }
            if !dcgm.reliance.is_given_up() {
                return None;
            }
        }
        match &mut self.activity {
            ActivityReader::Gpm(reader) => {
                let value = reader.read(&self.nvml, &device, now)?;
                sample.sm_activity = value.sm;
                sample.sm_occupancy = value.occupancy;
                sample.dram_activity = value.dram;
                value.sm.map(|_| value.at)
            }
            ActivityReader::Process(reader) => {
                let read = match device.process_utilization_stats(reader.last_seen_us) {
                    Ok(read) => Some(read.iter().map(|s| (s.timestamp, s.sm_util)).collect()),
                    Err(NvmlError::NotFound) => Some(Vec::new()),
                    Err(_) => None,
                };
                let (at, activity) = reader.take(now, read.as_deref(), sample.gpu_util)?;
                sample.sm_activity = Some(activity);
                Some(at)
            }
            ActivityReader::None => None,
        }
    }
}

fn epoch_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

impl Sensor for NvmlSensor {
    fn read(&mut self, now: Micros) -> std::result::Result<GpuSample, SensorFailure> {
        let mut sample = GpuSample::empty(now);
        // Memory first: it cannot be missing on a GPU that is there.
        match self.device().memory_info() {
            Ok(memory) => {
                sample.memory_used = Some(Bytes(memory.used));
                sample.memory_total = Some(Bytes(memory.total));
            }
            Err(error) if is_lost(&error) => return Err(SensorFailure::DeviceLost),
            Err(error) => return Err(SensorFailure::Call(format!("memory: {error}"))),
        }
        let device = self.device();
        sample.sm_clock = device.clock_info(Clock::SM).ok().map(MegaHertz);
        let power = device.power_usage().ok();
        sample.power = power.and_then(|mw| Watts::new(f64::from(mw) / 1000.0).ok());
        sample.temperature_c = device.temperature(TemperatureSensor::Gpu).ok().map(f64::from);
        let util = device.utilization_rates().ok();
        sample.gpu_util = util.and_then(|util| Percent::clamped(f64::from(util.gpu)));
        let refreshed = self.activity(now, &mut sample);
        // NVML does not say when it refreshed the rest; activity is the slowest that counts.
        sample.refreshed_at = refreshed.unwrap_or(now).min(now);
        Ok(sample)
    }

    fn source(&self) -> ActivitySource {
        if self.dcgm.as_ref().is_some_and(|dcgm| !dcgm.reliance.is_given_up()) {
            return ActivitySource::Dcgm;
        }
        match self.activity {
            ActivityReader::Gpm(_) => ActivitySource::Gpm,
            ActivityReader::Process(_) => ActivitySource::ProcessUtilisation,
            ActivityReader::None => ActivitySource::None,
        }
    }

    fn processes(&mut self) -> std::result::Result<Vec<u32>, SensorFailure> {
        let device = self.device();
        let plain = device.running_compute_processes();
        let plain = plain.map_err(|e| SensorFailure::Call(format!("processes: {e}")))?;
        let under_mps = device.mps_running_compute_processes().unwrap_or_default();
        let mut pids: Vec<u32> = plain.iter().chain(&under_mps).map(|info| info.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    fn recovery(&mut self) -> Option<RecoveryAction> {
        recovery_of(&self.device())
    }
}

/// NVML lists a process only when it did something since it was last asked, and looks that often.
const PROCESS_PERIOD: Micros = Micros::from_secs(1);

/// The sum over processes. None that did anything for a whole period is an idle GPU, if NVML counts no
/// busy time either: it may not list clients of MPS.
#[derive(Default)]
struct ProcessReader {
    last_seen_us: u64,
    listed_at: Option<Micros>,
    value: Option<(Micros, Percent)>,
}

impl ProcessReader {
    /// Takes what was listed, as times and per cent; none when the call failed, which says nothing.
    /// `busy` is the part of the time in which any kernel ran.
    fn take(
        &mut self,
        now: Micros,
        read: Option<&[(u64, u32)]>,
        busy: Option<Percent>,
    ) -> Option<(Micros, Percent)> {
        let newest = read.and_then(|read| read.iter().map(|(at, _)| *at).max());
        match (read, newest) {
            (Some(read), Some(newest)) => {
                let sum: u32 = read.iter().filter(|(at, _)| *at == newest).map(|(_, sm)| sm).sum();
                (self.last_seen_us, self.listed_at) = (newest, Some(now));
                self.value = Percent::clamped(f64::from(sum)).map(|sum| (now, sum));
            }
            (Some(_), None) if self.listed_at.is_none_or(|at| now.since(at) > PROCESS_PERIOD) => {
                let idle = busy == Some(Percent::ZERO);
                self.value = idle.then_some((now, Percent::ZERO));
            }
            _ => {}
        }
        self.value
    }
}

#[derive(Clone, Copy)]
struct GpmValue {
    at: Micros,
    sm: Option<Percent>,
    occupancy: Option<Percent>,
    dram: Option<Percent>,
}

/// GPM compares two samples; the older one is kept as a raw handle, because the library and the
/// sample cannot live in one struct as borrow and lender.
#[derive(Default)]
struct GpmReader {
    older: Option<(Micros, RawSample)>,
    value: Option<GpmValue>,
}

struct RawSample(nvml_wrapper_handle::Handle);
// SAFETY: a sample belongs to the library and is used by one thread at a time.
unsafe impl Send for RawSample {}

impl GpmReader {
    fn read(&mut self, nvml: &Nvml, device: &Device<'_>, now: Micros) -> Option<GpmValue> {
        if self.older.as_ref().is_some_and(|(at, _)| now.since(*at) < GPM_EVERY) {
            return self.value;
        }
        let newer = device.gpm_sample().ok()?;
        if let Some((_, raw)) = self.older.take() {
            // SAFETY: the handle came from `into_handle` of a sample of this library, once.
            let older = unsafe { GpmSample::from_handle(nvml, raw.0.cast()) };
            let ids = [GpmMetricId::SmUtil, GpmMetricId::SmOccupancy, GpmMetricId::DramBwUtil];
            if let Ok(results) = gpm_metrics_get(nvml, &older, &newer, &ids) {
                let percent = |index: usize| {
                    let result = results.get(index)?.as_ref().ok()?;
                    (0.0..=100.5).contains(&result.value).then_some(())?;
                    Percent::clamped(result.value)
                };
                self.value = Some(GpmValue {
                    at: now,
                    sm: percent(0),
                    occupancy: percent(1),
                    dram: percent(2),
                });
            }
        }
        self.older = Some((now, RawSample(newer.into_handle().cast())));
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_brought_to_the_laws_form() {
        assert_eq!(short_name("Tesla T4"), "T4");
        assert_eq!(short_name("NVIDIA A10"), "A10");
        assert_eq!(short_name("NVIDIA A100-SXM4-40GB"), "A100-SXM4-40GB");
        assert_eq!(short_name("NVIDIA"), "NVIDIA");
        assert_eq!(kernel_pci("00000000:3B:00.0"), "0000:3b:00");
        assert_eq!(kernel_pci("x"), "x");
    }

    #[test]
    fn a_machine_without_nvml_says_so() {
        let error = open_library("libnvidia-ml.so.of-nobody").unwrap_err().to_string();
        assert!(error.contains("libnvidia-ml.so.1"), "{error}");
    }

    #[test]
    fn a_gpu_that_no_process_uses_is_idle_and_not_unknown() {
        let at = Micros::from_millis;
        let percent = |value| Percent::new(value).unwrap();
        let (idle, some) = (Some(Percent::ZERO), Some(percent(1.0)));
        let mut reader = ProcessReader::default();
        assert_eq!(reader.take(at(10), None, idle), None, "a call that fails says nothing");
        assert_eq!(reader.take(at(20), Some(&[]), idle), Some((at(20), Percent::ZERO)));
        let busy = [(7, 10), (9, 30), (9, 20)];
        assert_eq!(reader.take(at(30), Some(&busy), some), Some((at(30), percent(50.0))));
        assert_eq!(reader.last_seen_us, 9);
        let held = Some((at(30), percent(50.0)));
        assert_eq!(reader.take(at(900), Some(&[]), some), held, "not listed again yet");
        assert_eq!(reader.take(at(5_000), None, some), held, "and it grows old");
        assert_eq!(reader.take(at(5_010), Some(&[]), idle), Some((at(5_010), Percent::ZERO)));
    }

    #[test]
    fn a_gpu_that_is_busy_with_what_is_not_listed_is_unknown_and_not_idle() {
        let at = Micros::from_millis;
        let mut reader = ProcessReader::default();
        let busy = Percent::new(40.0).ok();
        assert_eq!(reader.take(at(20), Some(&[]), busy), None);
        assert_eq!(reader.take(at(30), Some(&[]), None), None, "nobody says that it is idle");
        assert!(reader.take(at(40), Some(&[(7, 10)]), busy).is_some());
        assert_eq!(reader.take(at(5_000), Some(&[]), busy), None, "the old value is not of now");
    }
}
