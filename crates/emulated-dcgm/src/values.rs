//! Fields and their latest values.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_ushort};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use muxflow_emulated_gpu::facts::{Facts, Stats, untext};
use muxflow_emulated_gpu::node::Node;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};

/// `dcgmFieldValue_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldValue {
    pub version: c_uint,
    pub field: c_ushort,
    /// `d`, `i` or `s`.
    pub kind: c_ushort,
    pub status: c_int,
    pub at_us: i64,
    pub value: [u8; 4096],
}

// As in dcgm_structs.h.
const NO_DATA: c_int = -14;
const NOT_WATCHED: c_int = -16;
const GPU_IS_LOST: c_int = -18;

struct Groups {
    next: usize,
    members: BTreeMap<usize, u64>,
    fields: BTreeMap<usize, Vec<c_ushort>>,
    /// What somebody watches, by GPU: of nothing else are there values.
    watched: BTreeSet<(usize, c_ushort)>,
}

/// The group of all GPUs.
const ALL_GPUS: usize = 0x7fff_ffff;

static GROUPS: Mutex<Groups> = Mutex::new(Groups {
    next: 10,
    members: BTreeMap::new(),
    fields: BTreeMap::new(),
    watched: BTreeSet::new(),
});

fn groups() -> std::sync::MutexGuard<'static, Groups> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group of GPUs, as bits.
pub(crate) fn new_group(members: u64) -> usize {
    let mut groups = groups();
    groups.next += 1;
    let number = groups.next;
    groups.members.insert(number, members);
    number
}

pub(crate) fn add_to_group(group: usize, gpu: c_uint) -> bool {
    let Some(bit) = 1_u64.checked_shl(gpu) else { return false };
    groups().members.get_mut(&group).is_some_and(|members| {
        *members |= bit;
        true
    })
}

pub(crate) fn remove_group(group: usize) -> bool {
    groups().members.remove(&group).is_some()
}

/// The GPUs of a group, of so many on the node; none when there is no such group.
pub(crate) fn members(group: usize, gpus: usize) -> Option<Vec<usize>> {
    let bits = match group {
        ALL_GPUS => u64::MAX,
        _ => *groups().members.get(&group)?,
    };
    let inside = |gpu: &usize| {
        u32::try_from(*gpu).is_ok_and(|gpu| bits.checked_shr(gpu).is_some_and(|bits| bits % 2 == 1))
    };
    Some((0..gpus).filter(inside).collect())
}

/// Begins or ends to watch fields of GPUs; says whether both groups are there.
pub(crate) fn watch(group: usize, list: usize, gpus: usize, begin: bool) -> bool {
    let (Some(members), Some(list)) = (members(group, gpus), fields(list)) else { return false };
    let mut groups = groups();
    for gpu in members {
        for field in &list {
            if begin {
                groups.watched.insert((gpu, *field));
            } else {
                groups.watched.remove(&(gpu, *field));
            }
        }
    }
    true
}

/// The engine ends, and all of its groups and watches with it.
pub(crate) fn forget_all() {
    let mut groups = groups();
    groups.members.clear();
    groups.fields.clear();
    groups.watched.clear();
}

/// A list of fields.
pub(crate) fn new_fields(list: Vec<c_ushort>) -> usize {
    let mut groups = groups();
    groups.next += 1;
    let number = groups.next;
    groups.fields.insert(number, list);
    number
}

pub(crate) fn remove_fields(group: usize) -> bool {
    groups().fields.remove(&group).is_some()
}

pub(crate) fn fields(group: usize) -> Option<Vec<c_ushort>> {
    groups().fields.get(&group).cloned()
}

/// All of one GPU at a moment.
#[derive(Debug)]
pub(crate) struct Reading {
    known: Option<(Stats, Facts)>,
    now_us: i64,
    gpu: usize,
}

enum Value {
    Double(f64),
    Integer(i64),
    Text(String),
}

impl Value {
    /// As `dcgm_fields.h` writes its type.
    fn kind(&self) -> u8 {
        match self {
            Value::Double(_) => b'd',
            Value::Integer(_) => b'i',
            Value::Text(_) => b's',
        }
    }
}

impl Reading {
    /// All of it, or what the call for it fails with.
    pub(crate) fn take(node: &Node, gpu: usize) -> Result<Reading, c_int> {
        let ask = || {
            let socket = Socket::connect(&node.socket(gpu)).ok()?;
            let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).ok()?;
            let stats = Stats::from_bytes(&answer.tail)?;
            let facts = Facts::from_bytes(answer.tail.get(size_of::<Stats>()..)?)?;
            Some((stats, facts))
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_us = since.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
        let known = ask();
        match known.as_ref().map_or(0, |(stats, _)| stats.dcgm_error) {
            0 => Ok(Reading { known, now_us, gpu }),
            error => Err(-c_int::try_from(error).unwrap_or(1)),
        }
    }

    /// The latest value of a field.
    pub(crate) fn field(&self, field: c_ushort) -> FieldValue {
        let mut out = FieldValue {
            version: size_of::<FieldValue>() as c_uint | 1 << 24,
            field,
            kind: b'd'.into(),
            status: NOT_WATCHED,
            at_us: self.now_us,
            value: [0; 4096],
        };
        let Some((stats, facts)) = &self.known else {
            out.status = NO_DATA;
            return out;
        };
        let Some(value) = value(field, stats, facts) else { return out };
        if !groups().watched.contains(&(self.gpu, field)) {
            return out;
        }
        out.kind = value.kind().into();
        if stats.lost == 1 {
            out.status = GPU_IS_LOST;
            return out;
        }
        let Some(changed_ns) = changed_ns(field, stats) else {
            out.status = NO_DATA;
            return out;
        };
        out.at_us = facts.epoch_us(changed_ns).cast_signed();
        out.status = 0;
        match value {
            Value::Double(v) => out.value[..8].copy_from_slice(&v.to_ne_bytes()),
            Value::Integer(v) => out.value[..8].copy_from_slice(&v.to_ne_bytes()),
            Value::Text(text) => {
                let bytes = text.as_bytes();
                let length = bytes.len().min(255);
                out.value[..length].copy_from_slice(&bytes[..length]);
            }
        }
        out
    }
}

/// Device time at which a field last changed; none while it never has.
fn changed_ns(field: c_ushort, stats: &Stats) -> Option<u64> {
    let [utilisation, clock, power] = stats.sensor_time_ns;
    match field {
        1001..=1010 => Some(stats.profiling_time_ns).filter(|at| *at > 0),
        203 => Some(utilisation),
        100 => Some(clock),
        150 | 155 => Some(power),
        _ => Some(stats.time_ns),
    }
}

fn value(field: c_ushort, stats: &Stats, facts: &Facts) -> Option<Value> {
    let mib = |bytes: u64| Value::Integer((bytes >> 20).cast_signed());
    Some(match field {
        50 => Value::Text(untext(&facts.name)),
        54 => {
            let hex: String = facts.uuid.iter().map(|b| format!("{b:02x}")).collect();
            let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            Value::Text(format!("GPU-{}", parts.join("-")))
        }
        100 => Value::Integer(stats.clock_mhz[0].into()),
        101 => Value::Integer(stats.clock_mhz[1].into()),
        150 => Value::Integer(stats.temperature_c.into()),
        155 => Value::Double(f64::from(stats.power_mw[0]) / 1e3),
        203 => Value::Integer(stats.utilisation_pct[0].into()),
        230 => Value::Integer(stats.xid[0].into()),
        250 => mib(facts.memory_bytes.iter().sum()),
        251 => mib(facts.memory_bytes[0].saturating_sub(stats.used_bytes)),
        252 => mib(stats.used_bytes),
        1001..=1005 => Value::Double(stats.profiling[usize::from(field - 1001)]),
        1009 => Value::Integer(stats.pcie_bytes_per_s[1] as i64),
        1010 => Value::Integer(stats.pcie_bytes_per_s[0] as i64),
        _ => return None,
    })
}
