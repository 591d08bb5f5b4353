//! SM activity from DCGM, opened at run time.
//!
//! Used of `libdcgm.so.4`: `dcgmInit`, `dcgmConnect` (to a host engine that runs), else
//! `dcgmStartEmbedded`; `dcgmGetAllDevices`, `dcgmFieldGroupCreate`, `dcgmWatchFields` on all GPUs,
//! `dcgmUpdateAllFields` and `dcgmGetLatestValuesForFields`. Fields by number, for their names changed:
//! 54 (UUID), 1001 graphics engine, 1002 SM activity, 1003 SM occupancy, 1005 DRAM activity.
//! Each value comes with its time, so the age of these counters is known and not guessed.

use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_uint, c_ushort, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muxflow_types::{Micros, Percent};

/// The library that is tried.
pub const LIBRARY: &str = "libdcgm.so.4";

const FIELD_UUID: c_ushort = 54;
/// Graphics engine, SM activity, SM occupancy, DRAM activity.
const FIELDS: [c_ushort; 4] = [1001, 1002, 1003, 1005];
const ALL_GPUS: usize = 0x7fff_ffff;
const MOST_DEVICES: usize = 64;
const OPERATION_MODE_AUTO: c_int = 1;
const OK: c_int = 0;
/// Field groups that this process has made.
static GROUPS_MADE: AtomicU64 = AtomicU64::new(0);
/// Two clocks that are read one after the other may differ by this much.
const MOST_AHEAD_US: i64 = 1_000_000;

#[repr(C)]
#[derive(Clone, Copy)]
struct FieldValue {
    version: c_uint,
    field: c_ushort,
    kind: c_ushort,
    status: c_int,
    at_us: i64,
    value: [u8; 4096],
}

const FIELD_VALUE_VERSION: c_uint = {
    #[expect(clippy::cast_possible_truncation, reason = "the size of one struct")]
    let size = size_of::<FieldValue>() as c_uint;
    size | (1 << 24)
};

impl FieldValue {
    const EMPTY: FieldValue = FieldValue {
        version: FIELD_VALUE_VERSION,
        field: 0,
        kind: 0,
        status: -1,
        at_us: 0,
        value: [0; 4096],
    };

    fn number(&self) -> Option<f64> {
        let bytes: [u8; 8] = self.value.get(..8)?.try_into().ok()?;
        let number = f64::from_ne_bytes(bytes);
        // Blank values are huge numbers; activity is a fraction.
        (self.status == OK && (0.0..=1.0 + 1e-6).contains(&number)).then_some(number)
    }

    fn text(&self) -> Option<String> {
        let until = self.value.iter().position(|&byte| byte == 0)?;
        let text = std::str::from_utf8(self.value.get(..until)?).ok()?;
        (self.status == OK && !text.is_empty()).then(|| text.to_owned())
    }
}

type Handle = usize;
type GetValues =
    unsafe extern "C" fn(Handle, c_int, *mut c_ushort, c_uint, *mut FieldValue) -> c_int;

/// What DCGM says of one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Activity {
    /// When the oldest of the values was taken, in the agent's time.
    pub at: Micros,
    /// Graphics engine active.
    pub engine: Option<Percent>,
    /// SM activity.
    pub sm: Option<Percent>,
    /// SM occupancy.
    pub occupancy: Option<Percent>,
    /// DRAM activity.
    pub dram: Option<Percent>,
}

/// A connection to DCGM, for all GPUs of the machine.
#[derive(Debug)]
pub struct Dcgm {
    handle: Handle,
    get_values: GetValues,
    update: Option<unsafe extern "C" fn(Handle, c_int) -> c_int>,
    devices: Vec<c_uint>,
    close: Option<Close>,
    /// The engine runs inside this process, and there is only one.
    embedded: bool,
}

type Close = unsafe extern "C" fn(Handle) -> c_int;

impl Drop for Dcgm {
    fn drop(&mut self) {
        // An embedded engine is the successor's too, by the same handle.
        if !self.embedded {
            self.close();
        }
    }
}

impl Dcgm {
    fn close(&self) {
        if let Some(close) = self.close {
            // SAFETY: the handle is this connection's; calls that come later with it are refused.
            unsafe { close(self.handle) };
        }
    }
}

/// The connection of a node, made anew when it is of no use any more.
#[derive(Debug)]
pub struct DcgmLink {
    every: Micros,
    now: Mutex<(Arc<Dcgm>, Instant)>,
}

/// A connection that is younger than this is not made anew.
const RENEW_AFTER: Duration = Duration::from_secs(4);

impl DcgmLink {
    /// Connects, and watches the fields every `every`.
    pub fn open(every: Micros) -> Result<Self, String> {
        let dcgm = Arc::new(Dcgm::open(every)?);
        Ok(DcgmLink { every, now: Mutex::new((dcgm, Instant::now())) })
    }

    /// The connection of now.
    pub fn get(&self) -> Arc<Dcgm> {
        Arc::clone(&self.now.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// This connection tells nothing: the one of now, which may be another one since.
    pub fn renew(&self, silent: &Arc<Dcgm>) -> Arc<Dcgm> {
        // All GPUs find out at once; the first of them connects.
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&now.0, silent) && now.1.elapsed() >= RENEW_AFTER {
            if now.0.embedded {
                now.0.close();
            }
            match Dcgm::open(self.every) {
                Ok(dcgm) => now.0 = Arc::new(dcgm),
                Err(reason) => tracing::warn!(reason, "DCGM is not to be had"),
            }
            now.1 = Instant::now();
        }
        Arc::clone(&now.0)
    }
}

struct Library(*mut c_void);

impl Library {
    fn open(name: &str) -> Result<Self, String> {
        let c_name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: a zero-ended name; the library's initialisers are trusted as the driver's are.
        let library = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(format!("{name} cannot be opened"));
        }
        Ok(Library(library))
    }

    fn symbol(&self, name: &CStr) -> Result<*mut c_void, String> {
        // SAFETY: the library is open and never closed; the name ends in zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return Err(format!("it lacks {}", name.to_string_lossy()));
        }
        Ok(symbol)
    }
}

/// A function of the library by name and type.
macro_rules! function {
    ($library:expr, $name:literal, $type:ty) => {{
        let symbol = $library.symbol($name)?;
        // SAFETY: the type is the one that dcgm_agent.h declares for this name.
        unsafe { std::mem::transmute::<*mut c_void, $type>(symbol) }
    }};
}

fn checked(what: &str, result: c_int) -> Result<(), String> {
    if result == OK { Ok(()) } else { Err(format!("{what} failed with {result}")) }
}

impl Dcgm {
    /// Connects, and watches the fields every `every`.
    pub fn open(every: Micros) -> Result<Self, String> {
        let library = Library::open(LIBRARY)?;
        let init = function!(library, c"dcgmInit", unsafe extern "C" fn() -> c_int);
        // SAFETY: takes nothing.
        checked("dcgmInit", unsafe { init() })?;
        let get_values = function!(library, c"dcgmGetLatestValuesForFields", GetValues);
        let update = library.symbol(c"dcgmUpdateAllFields").ok().map(|symbol| {
            // SAFETY: the type that dcgm_agent.h declares.
            unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Handle, c_int) -> c_int>(
                    symbol,
                )
            }
        });
        let (handle, close, embedded) = connect(&library)?;
        // Whole from here on: dropped, it gives the connection back, whatever fails below.
        let mut dcgm = Dcgm { handle, get_values, update, devices: Vec::new(), close, embedded };
        if let Err(error) = dcgm.begin(&library, every) {
            if embedded {
                dcgm.close();
            }
            return Err(error);
        }
        Ok(dcgm)
    }

    /// Finds the devices and has their fields watched.
    fn begin(&mut self, library: &Library, every: Micros) -> Result<(), String> {
        let list = function!(
            library,
            c"dcgmGetAllDevices",
            unsafe extern "C" fn(Handle, *mut c_uint, *mut c_int) -> c_int
        );
        let (mut devices, mut count) = ([0; MOST_DEVICES], 0);
        // SAFETY: room for more devices than DCGM knows (32).
        checked("dcgmGetAllDevices", unsafe {
            list(self.handle, devices.as_mut_ptr(), &raw mut count)
        })?;
        let count = usize::try_from(count).unwrap_or(0).min(MOST_DEVICES);
        self.devices = devices.get(..count).unwrap_or_default().to_vec();
        watch(library, self.handle, every)?;
        match self.update {
            // SAFETY: the handle is connected; waits for the first values.
            Some(update) => checked("dcgmUpdateAllFields", unsafe { update(self.handle, 1) }),
            None => Ok(()),
        }
    }

    fn values<const N: usize>(
        &self,
        device: c_uint,
        mut fields: [c_ushort; N],
    ) -> Result<Vec<FieldValue>, String> {
        let mut values = vec![FieldValue::EMPTY; N];
        let count = c_uint::try_from(N).unwrap_or(0);
        let device = c_int::try_from(device).map_err(|error| error.to_string())?;
        // SAFETY: both arrays have `count` entries and live through the call.
        checked("dcgmGetLatestValuesForFields", unsafe {
            (self.get_values)(self.handle, device, fields.as_mut_ptr(), count, values.as_mut_ptr())
        })?;
        Ok(values)
    }

    /// DCGM's number of the GPU with this UUID.
    pub fn find(&self, uuid: &str) -> Option<u32> {
        let has = |device: &&c_uint| {
            let values = self.values(**device, [FIELD_UUID]).ok();
            values.and_then(|values| values.first()?.text()).as_deref() == Some(uuid)
        };
        self.devices.iter().find(has).copied()
    }

    /// What it says of a GPU; `now` and `now_epoch_us` are the same moment on two clocks.
    pub fn read(&self, device: u32, now: Micros, now_epoch_us: i64) -> Result<Activity, String> {
        let values = self.values(device, FIELDS)?;
        let percent = |index: usize| {
            values.get(index)?.number().and_then(|share| Percent::clamped(share * 100.0))
        };
        let oldest = values.iter().filter(|v| v.number().is_some()).map(|v| v.at_us).min();
        let oldest = oldest.ok_or("no value is there yet")?;
        let age = age_us(oldest, now_epoch_us)?;
        Ok(Activity {
            at: Micros(now.0.saturating_sub(age)),
            engine: percent(0),
            sm: percent(1),
            occupancy: percent(2),
            dram: percent(3),
        })
    }
}

/// How old a value is. The wall clock may have been set back since: a value from the future would
/// count as fresh until the clock has come there again, however long that takes.
fn age_us(at_us: i64, now_epoch_us: i64) -> Result<u64, String> {
    let age = now_epoch_us.saturating_sub(at_us);
    if age < -MOST_AHEAD_US {
        return Err(format!("its last value is {} ms ahead of the clock", age / -1000));
    }
    Ok(u64::try_from(age).unwrap_or(0))
}

/// A handle, how it is given back, and whether it is that of an engine inside this process.
fn connect(library: &Library) -> Result<(Handle, Option<Close>, bool), String> {
    let mut handle: Handle = 0;
    let close = |name: &CStr| {
        // SAFETY: the type that dcgm_agent.h declares for both names.
        library
            .symbol(name)
            .ok()
            .map(|symbol| unsafe { std::mem::transmute::<*mut c_void, Close>(symbol) })
    };
    if let Ok(symbol) = library.symbol(c"dcgmConnect") {
        // SAFETY: the type that dcgm_agent.h declares.
        let connect = unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int,
            >(symbol)
        };
        // SAFETY: a zero-ended address and a place for the handle.
        if unsafe { connect(c"127.0.0.1".as_ptr(), &raw mut handle) } == OK {
            return Ok((handle, close(c"dcgmDisconnect"), false));
        }
    }
    let start =
        function!(library, c"dcgmStartEmbedded", unsafe extern "C" fn(c_int, *mut Handle) -> c_int);
    // SAFETY: a place for the handle.
    checked("dcgmStartEmbedded", unsafe { start(OPERATION_MODE_AUTO, &raw mut handle) })?;
    Ok((handle, close(c"dcgmStopEmbedded"), true))
}

fn watch(library: &Library, handle: Handle, every: Micros) -> Result<(), String> {
    let create = function!(
        library,
        c"dcgmFieldGroupCreate",
        unsafe extern "C" fn(Handle, c_int, *const c_ushort, *const c_char, *mut usize) -> c_int
    );
    let watch = function!(
        library,
        c"dcgmWatchFields",
        unsafe extern "C" fn(Handle, usize, usize, c_longlong, f64, c_int) -> c_int
    );
    let mut fields = FIELDS.to_vec();
    fields.push(FIELD_UUID);
    let count = c_int::try_from(fields.len()).unwrap_or(0);
    // The connection before may still have its group: names are taken once.
    let number = GROUPS_MADE.fetch_add(1, Ordering::Relaxed);
    let name = CString::new(format!("muxflow-{}-{number}", std::process::id()))
        .map_err(|error| error.to_string())?;
    let mut group = 0;
    // SAFETY: `count` fields, a zero-ended name, and a place for the number of the group.
    checked("dcgmFieldGroupCreate", unsafe {
        create(handle, count, fields.as_ptr(), name.as_ptr(), &raw mut group)
    })?;
    let every_us = c_longlong::try_from(every.0).unwrap_or(100_000);
    // SAFETY: plain numbers. Keeps ten seconds and at most 100 samples inside DCGM.
    checked("dcgmWatchFields", unsafe { watch(handle, ALL_GPUS, group, every_us, 10.0, 100) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_the_future_are_not_fresh() {
        assert_eq!(age_us(1_000_000, 1_250_000), Ok(250_000));
        assert_eq!(age_us(1_250_000, 1_000_000), Ok(0), "two clocks, read one after the other");
        assert!(age_us(3_600_000_000, 1_000_000).unwrap_err().contains("ahead"));
        assert!(age_us(i64::MAX, i64::MIN).is_err());
        assert!(age_us(i64::MIN, i64::MAX).is_ok());
    }

    #[test]
    fn values_are_read_as_dcgm_lays_them_out() {
        assert_eq!(size_of::<FieldValue>(), 4120);
        assert_eq!(std::mem::offset_of!(FieldValue, at_us), 16);
        assert_eq!(std::mem::offset_of!(FieldValue, value), 24);
        let mut value = FieldValue { status: OK, ..FieldValue::EMPTY };
        value.value[..8].copy_from_slice(&0.25_f64.to_ne_bytes());
        assert_eq!(value.number(), Some(0.25));
        value.value[..8].copy_from_slice(&140_737_488_355_328.0_f64.to_ne_bytes());
        assert_eq!(value.number(), None, "blank");
        value.value[..8].copy_from_slice(&f64::NAN.to_ne_bytes());
        assert_eq!(value.number(), None);
        value.value[..6].copy_from_slice(b"GPU-1\0");
        assert_eq!(value.text().as_deref(), Some("GPU-1"));
        value.status = -5;
        assert_eq!(value.text(), None);
    }
}
