//! `libdcgm.so.4` of an emulated GPU: the named subset that a monitoring agent uses.
//!
//! Connecting, listing GPUs, field groups, watching, and latest values of these fields: 50 name,
//! 54 UUID, 100 SM clock, 101 memory clock, 150 temperature, 155 power, 203 utilisation, 230 last
//! XID, 250 to 252 memory, and the profiling fields 1001 to 1005, 1009 and 1010. Values are as old
//! as the hardware's would be, and say so; of a GPU that has fallen off the bus there are none.
//!
//! Absent on purpose: the host engine over the network, health checks, policies, job statistics.

#![expect(clippy::cast_possible_truncation, reason = "names and widths are those of dcgm_agent.h")]

mod values;

use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ushort, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use muxflow_emulated_gpu::node::Node;

use values::FieldValue;

const OK: c_int = 0;
const BAD_PARAMETER: c_int = -1;
const UNINITIALISED: c_int = -10;
const NOT_SUPPORTED: c_int = -6;
const CONNECTION_NOT_VALID: c_int = -21;

/// Where a result goes: the caller promises that a pointer that is not null can be written.
fn put<T>(place: *mut T, value: T) -> c_int {
    if place.is_null() {
        return BAD_PARAMETER;
    }
    // SAFETY: not null, and the C caller promises a valid place.
    unsafe { place.write_unaligned(value) };
    OK
}

/// The node that this library belongs to.
fn node() -> Option<&'static Node> {
    static NODE: OnceLock<Option<Node>> = OnceLock::new();
    NODE.get_or_init(|| Node::find(own_path().as_deref())).as_ref()
}

fn own_path() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is of a function here, the place is valid.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader gives a zero-ended name that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

/// A handle that stands for the one engine inside this process.
const HANDLE: usize = 1;

#[unsafe(no_mangle)]
extern "C" fn dcgmInit() -> c_int {
    if node().is_some() { OK } else { UNINITIALISED }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmShutdown() -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn dcgmConnect(_address: *const c_char, _handle: *mut usize) -> c_int {
    // No host engine listens on this node.
    CONNECTION_NOT_VALID
}

#[unsafe(no_mangle)]
extern "C" fn dcgmConnect_v2(
    _address: *const c_char,
    _params: *mut c_void,
    _handle: *mut usize,
) -> c_int {
    CONNECTION_NOT_VALID
}

#[unsafe(no_mangle)]
extern "C" fn dcgmDisconnect(_handle: usize) -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn dcgmStartEmbedded(_mode: c_int, handle: *mut usize) -> c_int {
    put(handle, HANDLE)
}

/// The structure begins with its version and the mode; the handle follows.
#[unsafe(no_mangle)]
extern "C" fn dcgmStartEmbedded_v2(params: *mut [c_uint; 4]) -> c_int {
    if params.is_null() {
        return BAD_PARAMETER;
    }
    // SAFETY: the C caller promises the structure, whose handle is eight bytes in.
    unsafe { params.cast::<u8>().add(8).cast::<usize>().write_unaligned(HANDLE) };
    OK
}

#[unsafe(no_mangle)]
extern "C" fn dcgmStopEmbedded(_handle: usize) -> c_int {
    values::forget_all();
    OK
}

fn list_devices(ids: *mut c_uint, count: *mut c_int) -> c_int {
    let Some(node) = node() else { return UNINITIALISED };
    if ids.is_null() {
        return BAD_PARAMETER;
    }
    let gpus = node.gpu_count().min(32);
    for i in 0..gpus {
        // SAFETY: the C caller promises room for 32 ids.
        unsafe { ids.add(i).write_unaligned(i as c_uint) };
    }
    put(count, gpus as c_int)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGetAllDevices(_handle: usize, ids: *mut c_uint, count: *mut c_int) -> c_int {
    list_devices(ids, count)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGetAllSupportedDevices(
    _handle: usize,
    ids: *mut c_uint,
    count: *mut c_int,
) -> c_int {
    list_devices(ids, count)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGroupCreate(
    _handle: usize,
    kind: c_int,
    _name: *const c_char,
    group: *mut usize,
) -> c_int {
    let members = if kind == 0 { (1 << 32) - 1 } else { 0 };
    put(group, values::new_group(members))
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGroupAddDevice(_handle: usize, group: usize, gpu: c_uint) -> c_int {
    let there = node().is_some_and(|node| (gpu as usize) < node.gpu_count());
    if there && values::add_to_group(group, gpu) { OK } else { BAD_PARAMETER }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGroupDestroy(_handle: usize, group: usize) -> c_int {
    if values::remove_group(group) { OK } else { BAD_PARAMETER }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmFieldGroupCreate(
    _handle: usize,
    count: c_int,
    fields: *const c_ushort,
    _name: *const c_char,
    group: *mut usize,
) -> c_int {
    let Ok(count) = usize::try_from(count) else { return BAD_PARAMETER };
    if fields.is_null() || count > 128 {
        return BAD_PARAMETER;
    }
    // SAFETY: the C caller promises that many numbers.
    let list = (0..count).map(|i| unsafe { fields.add(i).read_unaligned() }).collect();
    put(group, values::new_fields(list))
}

#[unsafe(no_mangle)]
extern "C" fn dcgmFieldGroupDestroy(_handle: usize, group: usize) -> c_int {
    if values::remove_fields(group) { OK } else { BAD_PARAMETER }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmWatchFields(
    _handle: usize,
    group: usize,
    fields: usize,
    _every_us: c_longlong,
    _keep_s: f64,
    _most: c_int,
) -> c_int {
    watch(group, fields, true)
}

fn watch(group: usize, fields: usize, begin: bool) -> c_int {
    let Some(node) = node() else { return UNINITIALISED };
    if values::watch(group, fields, node.gpu_count(), begin) { OK } else { BAD_PARAMETER }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmUnwatchFields(_handle: usize, group: usize, fields: usize) -> c_int {
    watch(group, fields, false)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmUpdateAllFields(_handle: usize, _wait: c_int) -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGetLatestValuesForFields(
    _handle: usize,
    gpu: c_int,
    fields: *const c_ushort,
    count: c_uint,
    out: *mut FieldValue,
) -> c_int {
    let Some(node) = node() else { return UNINITIALISED };
    let Ok(gpu) = usize::try_from(gpu) else { return BAD_PARAMETER };
    if fields.is_null() || out.is_null() || gpu >= node.gpu_count() {
        return BAD_PARAMETER;
    }
    let reading = match values::Reading::take(node, gpu) {
        Ok(reading) => reading,
        Err(error) => return error,
    };
    for i in 0..count as usize {
        // SAFETY: the C caller promises that many fields and places.
        unsafe {
            let field = fields.add(i).read_unaligned();
            out.add(i).write_unaligned(reading.field(field));
        }
    }
    OK
}

/// One asked entity: its group (1 is GPUs) and number.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Entity {
    group: c_uint,
    id: c_uint,
}

/// `dcgmFieldValue_v2`: the same value with the entity in front.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct EntityValue {
    version: c_uint,
    group: c_uint,
    id: c_uint,
    field: c_ushort,
    kind: c_ushort,
    status: c_int,
    unused: c_uint,
    at_us: i64,
    value: [u8; 4096],
}

#[unsafe(no_mangle)]
extern "C" fn dcgmEntitiesGetLatestValues(
    _handle: usize,
    entities: *const Entity,
    entity_count: c_uint,
    fields: *const c_ushort,
    field_count: c_uint,
    _flags: c_uint,
    out: *mut EntityValue,
) -> c_int {
    let Some(node) = node() else { return UNINITIALISED };
    if entities.is_null() || fields.is_null() || out.is_null() {
        return BAD_PARAMETER;
    }
    let mut place = 0;
    for e in 0..entity_count as usize {
        // SAFETY: the C caller promises that many entities.
        let entity = unsafe { entities.add(e).read_unaligned() };
        if entity.group != 1 || entity.id as usize >= node.gpu_count() {
            return BAD_PARAMETER;
        }
        let reading = match values::Reading::take(node, entity.id as usize) {
            Ok(reading) => reading,
            Err(error) => return error,
        };
        for f in 0..field_count as usize {
            // SAFETY: the C caller promises that many fields, and a place for each pair.
            unsafe {
                let value = reading.field(fields.add(f).read_unaligned());
                out.add(place).write_unaligned(EntityValue {
                    version: size_of::<EntityValue>() as c_uint | 2 << 24,
                    group: 1,
                    id: entity.id,
                    field: value.field,
                    kind: value.kind,
                    status: value.status,
                    unused: 0,
                    at_us: value.at_us,
                    value: value.value,
                });
            }
            place += 1;
        }
    }
    OK
}

/// Called with the entity's group and number, its values, how many, and the caller's own pointer.
type EntityCallback =
    Option<unsafe extern "C" fn(c_uint, c_uint, *mut FieldValue, c_int, *mut c_void) -> c_int>;

#[unsafe(no_mangle)]
extern "C" fn dcgmGetLatestValues_v2(
    _handle: usize,
    group: usize,
    fields: usize,
    callback: EntityCallback,
    data: *mut c_void,
) -> c_int {
    let Some(node) = node() else { return UNINITIALISED };
    let (Some(list), Some(callback)) = (values::fields(fields), callback) else {
        return BAD_PARAMETER;
    };
    let Some(members) = values::members(group, node.gpu_count()) else { return BAD_PARAMETER };
    for gpu in members {
        let reading = match values::Reading::take(node, gpu) {
            Ok(reading) => reading,
            Err(error) => return error,
        };
        let mut found: Vec<FieldValue> = list.iter().map(|f| reading.field(*f)).collect();
        // SAFETY: the caller gave this function to be called with just these.
        unsafe { callback(1, gpu as c_uint, found.as_mut_ptr(), found.len() as c_int, data) };
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn dcgmProfPause(_handle: usize) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn errorString(code: c_int) -> *const c_char {
    let text = match code {
        OK => c"Success",
        BAD_PARAMETER => c"Bad parameter passed to function",
        UNINITIALISED => c"DCGM initialization error",
        NOT_SUPPORTED => c"This request is not supported by DCGM",
        CONNECTION_NOT_VALID => c"The connection to the host engine is not valid any longer",
        _ => c"Generic unspecified error",
    };
    text.as_ptr()
}
