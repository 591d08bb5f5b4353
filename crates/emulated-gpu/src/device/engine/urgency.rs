//! Priorities of streams: among the kernels of one process, the urgent ones go first.
//!
//! Real hardware gives free places on SMs to blocks of the most urgent stream. Here a kernel stands
//! still while more urgent ones of its process fill all SMs that it may use, and runs beside them when
//! they leave some. Between processes priorities do not count.

use super::Running;

/// Marks the kernels that stand still.
pub(super) fn hold_back(kernels: &mut [Running], sms: f64) {
    let same = kernels.windows(2).all(|pair| pair[0].priority == pair[1].priority);
    for i in 0..kernels.len() {
        let it = kernels[i];
        kernels[i].held = !same && {
            let urgent = |k: &&Running| k.client == it.client && k.priority < it.priority;
            let filled: f64 = kernels.iter().filter(urgent).map(|k| k.resident.sm_fill).sum();
            filled >= it.resident.sm_cap.min(sms)
        };
    }
}
