//! How long a kernel takes alone, and how it loads the GPU.
//!
//! The rule, also in `docs/emulated-gpu.md`: thread instructions over what the SMs it reaches can
//! issue, bytes over what DRAM gives, and the latency of one wave after the other; the largest of
//! the three counts, plus a fixed start. Instructions and bytes per thread come from running
//! sample threads of a PTX kernel, from counting machine instructions of a binary kernel, or from
//! a hint in its name.

use crate::facts::Facts;

/// What one launch asks of the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Launch {
    /// Blocks.
    pub blocks: f64,
    /// Threads of a block.
    pub threads: u32,
    /// Shared memory of a block, bytes.
    pub shared_bytes: u64,
    /// Instructions of a thread.
    pub instructions: f64,
    /// DRAM bytes of a thread.
    pub bytes: f64,
}

/// What the device is told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Nanoseconds alone at full clock.
    pub work_ns: u64,
    /// SMs that its blocks can fill.
    pub sm_fill: f32,
    /// Warps against what fits, 0 to 1.
    pub occupancy: f32,
    /// Issue slots, 0 to 1.
    pub issue: f32,
    /// DRAM bandwidth, 0 to 1.
    pub bandwidth: f32,
}

/// What every kernel takes before its first instruction.
pub const START_NS: f64 = 1_500.0;
/// Cycles until a dependent instruction can follow.
const LATENCY_CYCLES: f64 = 6.0;
/// Part of the peak that real code reaches.
const REACHED: f64 = 0.8;

/// The rule.
pub fn cost(facts: &Facts, launch: &Launch) -> Cost {
    let sms = f64::from(facts.sms.max(1));
    let warps = f64::from(launch.threads.max(1).div_ceil(32));
    let fitting = resident_blocks(facts, launch.threads, launch.shared_bytes).max(1);
    let blocks = launch.blocks.max(1.0);
    let reached = blocks.min(sms);
    let per_sm = (blocks / sms).ceil().min(f64::from(fitting));
    let hz = f64::from(facts.max_mhz.max(1)) * 1e6;
    let threads = blocks * f64::from(launch.threads.max(1));
    let lanes = f64::from(facts.cores_per_sm.max(1));
    let issue_s = threads * launch.instructions / (reached * lanes * hz * REACHED);
    let dram_s = threads * launch.bytes / (facts.dram_bytes_per_s * REACHED);
    let waves = (blocks / (sms * f64::from(fitting))).ceil().max(1.0);
    let latency_s = waves * launch.instructions * LATENCY_CYCLES / hz;
    let work_s = issue_s.max(dram_s).max(latency_s) + START_NS / 1e9;
    let occupancy = (per_sm * warps / f64::from(facts.warps_per_sm.max(1))).min(1.0);
    Cost {
        work_ns: (work_s * 1e9) as u64,
        sm_fill: blocks.min(1e6) as f32,
        occupancy: occupancy as f32,
        issue: (issue_s / work_s * REACHED).min(1.0) as f32,
        bandwidth: (dram_s / work_s * REACHED).min(1.0) as f32,
    }
}

/// Blocks of this size that fit on an SM at once.
pub fn resident_blocks(facts: &Facts, threads: u32, shared_bytes: u64) -> u32 {
    if threads == 0 || threads > 1024 {
        return 0;
    }
    let by_warps = facts.warps_per_sm / threads.div_ceil(32);
    let by_shared = if shared_bytes == 0 {
        u32::MAX
    } else {
        // Since Ampere each block also holds a kilobyte for the system.
        let reserved = if facts.capability[0] >= 8 { 1024 } else { 0 };
        (facts.shared_bytes[0] / (shared_bytes + reserved).next_multiple_of(128)) as u32
    };
    by_warps.min(by_shared).min(facts.blocks_per_sm)
}

/// Reads a cost from a kernel's name: `..._muxflow_us250_f40_o50_i60_b30` says 250 microseconds
/// alone, 40 SMs, occupancy 50 %, issue 60 %, bandwidth 30 %; what is left out is full fill, half
/// of everything else.
pub fn hint(name: &str, facts: &Facts) -> Option<Cost> {
    let (_, tail) = name.split_once("_muxflow_us")?;
    let mut words = tail.split('_');
    let us: u64 = words.next()?.parse().ok()?;
    let sms = facts.sms as f32;
    let mut cost = Cost {
        work_ns: us.min(1 << 40) * 1000,
        sm_fill: sms,
        occupancy: 0.5,
        issue: 0.5,
        bandwidth: 0.5,
    };
    for word in words {
        let Some((letter, digits)) = word.split_at_checked(1) else { continue };
        let Ok(value) = digits.parse::<u16>() else { continue };
        let part = (f32::from(value) / 100.0).min(1.0);
        match letter {
            "f" => cost.sm_fill = f32::from(value).max(0.1),
            "o" => cost.occupancy = part,
            "i" => cost.issue = part,
            "b" => cost.bandwidth = part,
            _ => {}
        }
    }
    Some(cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    fn t4() -> Facts {
        Profile::parse(Profile::built_in_text("t4").unwrap()).unwrap().facts
    }

    #[test]
    fn a_large_vector_add_takes_what_memory_allows() {
        let launch = Launch {
            blocks: 262_144.0,
            threads: 256,
            shared_bytes: 0,
            instructions: 12.0,
            bytes: 12.0,
        };
        let cost = cost(&t4(), &launch);
        // 67 million elements, 12 bytes each, at 320 GB/s of which 80 % is reached.
        let expected_ms = 67.108_864 * 12.0 / (320.0 * 0.8);
        let ms = cost.work_ns as f64 / 1e6;
        assert!((ms / expected_ms - 1.0).abs() < 0.02, "{ms} ms");
        assert!(cost.bandwidth > 0.75 && cost.issue < 0.5, "{cost:?}");
    }

    #[test]
    fn a_tiny_kernel_takes_the_start_and_its_latency() {
        let launch =
            Launch { blocks: 1.0, threads: 32, shared_bytes: 0, instructions: 20.0, bytes: 12.0 };
        let cost = cost(&t4(), &launch);
        assert!((1_500..3_000).contains(&cost.work_ns), "{cost:?}");
        assert!(cost.sm_fill < 1.5);
    }

    /// What a block may ask for fits on every GPU.
    #[test]
    fn a_block_with_all_shared_memory_fits_once() {
        for gpu in ["t4", "a10", "v100", "a100", "h100"] {
            let facts = Profile::parse(Profile::built_in_text(gpu).unwrap()).unwrap().facts;
            assert_eq!(resident_blocks(&facts, 64, facts.shared_bytes[1]), 1, "{gpu}");
        }
    }

    #[test]
    fn names_may_say_what_they_cost() {
        let cost = hint("conv_muxflow_us250_f20_b80", &t4()).unwrap();
        assert_eq!(cost.work_ns, 250_000);
        assert!((cost.sm_fill - 20.0).abs() < 1e-6 && (cost.bandwidth - 0.8).abs() < 1e-6);
        assert_eq!(hint("vadd", &t4()), None);
    }
}
