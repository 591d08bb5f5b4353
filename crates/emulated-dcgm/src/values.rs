//! Fields and their latest values.

use std::collections::BTreeMap;
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

const NO_DATA: c_int = -35;
const NOT_WATCHED: c_int = -36;

struct Groups {
    next: usize,
    members: BTreeMap<usize, u64>,
    fields: BTreeMap<usize, Vec<c_ushort>>,
}

static GROUPS: Mutex<Groups> =
    Mutex::new(Groups { next: 10, members: BTreeMap::new(), fields: BTreeMap::new() });

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
    groups().members.get_mut(&group).is_some_and(|members| {
        *members |= 1 << (gpu % 64);
        true
    })
}

/// Whether a GPU is in a group; numbers that are not ours mean all GPUs.
pub(crate) fn is_member(group: usize, gpu: usize) -> bool {
    groups().members.get(&group).is_none_or(|members| members >> (gpu % 64) & 1 == 1)
}

/// A list of fields.
pub(crate) fn new_fields(list: Vec<c_ushort>) -> usize {
    let mut groups = groups();
    groups.next += 1;
    let number = groups.next;
    groups.fields.insert(number, list);
    number
}

pub(crate) fn fields(group: usize) -> Option<Vec<c_ushort>> {
    groups().fields.get(&group).cloned()
}

/// All of one GPU at a moment.
#[derive(Debug)]
pub(crate) struct Reading {
    known: Option<(Stats, Facts)>,
    now_us: i64,
}

enum Value {
    Double(f64),
    Integer(i64),
    Text(String),
}

impl Reading {
    pub(crate) fn take(node: &Node, gpu: usize) -> Reading {
        let ask = || {
            let socket = Socket::connect(&node.socket(gpu)).ok()?;
            let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).ok()?;
            let stats = Stats::from_bytes(&answer.tail)?;
            let facts = Facts::from_bytes(answer.tail.get(size_of::<Stats>()..)?)?;
            Some((stats, facts))
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_us = since.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
        Reading { known: ask(), now_us }
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
        let profiling = (1001..=1010).contains(&field);
        if profiling {
            if stats.profiling_time_ns == 0 {
                out.status = NO_DATA;
                return out;
            }
            let age = stats.time_ns.saturating_sub(stats.profiling_time_ns) as f64;
            out.at_us -= (age / facts.time_factor / 1e3) as i64;
        }
        let Some(value) = value(field, stats, facts) else { return out };
        out.status = 0;
        match value {
            Value::Double(v) => out.value[..8].copy_from_slice(&v.to_ne_bytes()),
            Value::Integer(v) => {
                out.kind = b'i'.into();
                out.value[..8].copy_from_slice(&v.to_ne_bytes());
            }
            Value::Text(text) => {
                out.kind = b's'.into();
                let bytes = text.as_bytes();
                let length = bytes.len().min(255);
                out.value[..length].copy_from_slice(&bytes[..length]);
            }
        }
        out
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
        1009 => Value::Integer(stats.pcie_bytes[1].cast_signed()),
        1010 => Value::Integer(stats.pcie_bytes[0].cast_signed()),
        _ => return None,
    })
}
