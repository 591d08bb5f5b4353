//! What the agent tells the processes of a job. They map it read-only.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{AGENT_MAGIC, DEVICES, Header, Invalid, mix};

/// What the launch gate is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Gate {
    /// Launches pass as the limits allow. After [`Gate::Frozen`] this is the thaw.
    Open = 0,
    /// Launches wait.
    Closed = 1,
    /// Launches wait, work in flight is waited for, and the process reports that it is drained.
    Frozen = 2,
    /// As frozen, on the way to a stop: it will not be thawed.
    Drain = 3,
    /// Copies are free, launches pass one at a time: the program saves its state.
    Checkpoint = 4,
    /// The process releases its contexts; launches fail.
    Reset = 5,
}

impl Gate {
    /// From the low byte of the command word. Unknown commands close the gate: the safe side.
    #[must_use]
    pub fn from_word(word: u32) -> Self {
        match word & 0xff {
            0 => Self::Open,
            2 => Self::Frozen,
            3 => Self::Drain,
            4 => Self::Checkpoint,
            5 => Self::Reset,
            _ => Self::Closed,
        }
    }
}

/// What is fixed for the life of a job; covered by the checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Identity of each device that the job may use; all zero: any device, told apart by ordinal.
    pub devices: [[u8; 16]; DEVICES],
    /// Charged for each context, as far as the agent knows what one costs on this GPU.
    pub context_bytes: u64,
    /// Heartbeat older than this: launches slow down.
    pub slow_after_ms: u64,
    /// Heartbeat older than this: launches stop.
    pub stop_after_ms: u64,
    /// How long a drain may take.
    pub drain_limit_ms: u64,
    /// How long the program may take to save its state after a signal.
    pub checkpoint_window_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: [[0; 16]; DEVICES],
            context_bytes: 0,
            slow_after_ms: 1_000,
            stop_after_ms: 3_000,
            drain_limit_ms: 2_000,
            checkpoint_window_ms: 10_000,
        }
    }
}

/// What the agent changes from tick to tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Kernels that the job may start per second, in thousandths; `u64::MAX` is no limit.
    pub rate_milli_per_s: u64,
    /// Kernels that may start at once after a pause.
    pub burst: u64,
    /// Kernels that one process may have in flight.
    pub in_flight: u64,
}

impl Limits {
    /// No limit on the rate, and the default bound on work in flight.
    pub const OPEN: Self = Self { rate_milli_per_s: u64::MAX, burst: 64, in_flight: 256 };
}

/// The agent's file. One page.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct AgentPart {
    header: Header,
    devices: [[AtomicU64; 2]; DEVICES],
    context_bytes: AtomicU64,
    slow_after_ms: AtomicU64,
    stop_after_ms: AtomicU64,
    drain_limit_ms: AtomicU64,
    checkpoint_window_ms: AtomicU64,
    spare: [AtomicU64; 3],
    // The live part, on its own cache line: the gate reads it at every launch.
    command: AtomicU32,
    pad: AtomicU32,
    heartbeat_ns: AtomicU64,
    rate_milli_per_s: AtomicU64,
    burst: AtomicU64,
    in_flight: AtomicU64,
    live_spare: [AtomicU64; 3],
    quota_bytes: [AtomicU64; DEVICES],
    fill: [AtomicU64; 448],
}

impl AgentPart {
    /// Length of the file.
    pub const BYTES: usize = size_of::<Self>();

    /// The part that lies in mapped memory, if it is whole and ours.
    ///
    /// # Errors
    /// Says what is wrong with it.
    ///
    /// # Safety
    /// `base` points to `bytes` readable bytes that stay mapped for `'a`, aligned to a page.
    pub unsafe fn validate<'a>(base: *const u8, bytes: usize) -> Result<&'a Self, Invalid> {
        if bytes < Self::BYTES {
            return Err(Invalid::Truncated { bytes, needed: Self::BYTES });
        }
        // SAFETY: long enough by the check above, mapped and aligned by contract, and every bit
        // pattern is a valid AgentPart, for it is made of atomics only.
        let part = unsafe { &*base.cast::<Self>() };
        part.header.check(AGENT_MAGIC, Self::BYTES, part.settings_sum())?;
        Ok(part)
    }

    /// Writes a whole new part. The gate starts closed and the heartbeat at zero: nothing runs
    /// before the first beat.
    pub fn initialise(&self, generation: u64, settings: &Settings) {
        for (words, uuid) in self.devices.iter().zip(&settings.devices) {
            let [low, high] = words;
            let (first, second) = uuid.split_at(8);
            low.store(le_word(first), Ordering::Relaxed);
            high.store(le_word(second), Ordering::Relaxed);
        }
        self.context_bytes.store(settings.context_bytes, Ordering::Relaxed);
        self.slow_after_ms.store(settings.slow_after_ms, Ordering::Relaxed);
        self.stop_after_ms.store(settings.stop_after_ms, Ordering::Relaxed);
        self.drain_limit_ms.store(settings.drain_limit_ms, Ordering::Relaxed);
        self.checkpoint_window_ms.store(settings.checkpoint_window_ms, Ordering::Relaxed);
        self.command.store(Gate::Closed as u32, Ordering::Relaxed);
        self.heartbeat_ns.store(0, Ordering::Relaxed);
        self.set_limits(&Limits::OPEN);
        self.header.write(AGENT_MAGIC, Self::BYTES, generation, self.settings_sum());
    }

    fn settings_sum(&self) -> u64 {
        let words = self.devices.iter().flatten().chain([
            &self.context_bytes,
            &self.slow_after_ms,
            &self.stop_after_ms,
            &self.drain_limit_ms,
            &self.checkpoint_window_ms,
        ]);
        words.fold(0, |sum, word| mix(sum, word.load(Ordering::Relaxed)))
    }

    /// The fixed settings.
    pub fn settings(&self) -> Settings {
        let mut devices = [[0; 16]; DEVICES];
        for (uuid, [low, high]) in devices.iter_mut().zip(&self.devices) {
            let (first, second) = uuid.split_at_mut(8);
            first.copy_from_slice(&low.load(Ordering::Relaxed).to_le_bytes());
            second.copy_from_slice(&high.load(Ordering::Relaxed).to_le_bytes());
        }
        Settings {
            devices,
            context_bytes: self.context_bytes.load(Ordering::Relaxed),
            slow_after_ms: self.slow_after_ms.load(Ordering::Relaxed),
            stop_after_ms: self.stop_after_ms.load(Ordering::Relaxed),
            drain_limit_ms: self.drain_limit_ms.load(Ordering::Relaxed),
            checkpoint_window_ms: self.checkpoint_window_ms.load(Ordering::Relaxed),
        }
    }

    /// How old the heartbeat may be before launches slow down, and before they stop.
    pub fn patience_ms(&self) -> (u64, u64) {
        (self.slow_after_ms.load(Ordering::Relaxed), self.stop_after_ms.load(Ordering::Relaxed))
    }

    /// Which job this is: the job part carries the same number.
    pub fn generation(&self) -> u64 {
        self.header.generation.load(Ordering::Relaxed)
    }

    /// Agent: I live, at this time of the monotonic clock.
    pub fn beat(&self, now_ns: u64) {
        self.heartbeat_ns.store(now_ns, Ordering::Release);
    }

    /// How old the heartbeat is. A beat from the future is garbage and counts as infinitely old.
    pub fn heartbeat_age_ms(&self, now_ns: u64) -> u64 {
        let beat_ns = self.heartbeat_ns.load(Ordering::Acquire);
        if beat_ns == 0 || beat_ns > now_ns.saturating_add(1_000_000_000) {
            return u64::MAX;
        }
        now_ns.saturating_sub(beat_ns) / 1_000_000
    }

    /// Agent: a new command. The number in the high bits makes a repeated command a new word.
    pub fn set_gate(&self, gate: Gate) -> u32 {
        self.change_gate(gate, |_| true).unwrap_or_else(|| self.command_word())
    }

    /// Agent: a new command, unless `may` refuses to replace the one that stands. Two may write at the
    /// same time: each sees what the other wrote.
    pub fn change_gate(&self, gate: Gate, may: impl Fn(Gate) -> bool) -> Option<u32> {
        let next = |old: u32| {
            may(Gate::from_word(old)).then(|| (old & !0xff).wrapping_add(0x100) | gate as u32)
        };
        let changed = self.command.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
        changed.ok().and_then(next)
    }

    /// The command word as it is; see [`Gate::from_word`].
    #[inline]
    pub fn command_word(&self) -> u32 {
        self.command.load(Ordering::Relaxed)
    }

    /// Where the command word is, for a futex.
    pub fn command_address(&self) -> *const u32 {
        self.command.as_ptr()
    }

    /// Agent: new limits.
    pub fn set_limits(&self, limits: &Limits) {
        self.rate_milli_per_s.store(limits.rate_milli_per_s, Ordering::Relaxed);
        self.burst.store(limits.burst, Ordering::Relaxed);
        self.in_flight.store(limits.in_flight, Ordering::Relaxed);
    }

    /// The limits, with what makes no sense put right.
    pub fn limits(&self) -> Limits {
        Limits {
            rate_milli_per_s: self.rate_milli_per_s.load(Ordering::Relaxed),
            burst: self.burst.load(Ordering::Relaxed).clamp(1, 1 << 20),
            in_flight: self.in_flight.load(Ordering::Relaxed).clamp(1, 1 << 20),
        }
    }

    /// Agent: how much the job may hold on a device.
    pub fn set_quota(&self, device: usize, bytes: u64) {
        if let Some(quota) = self.quota_bytes.get(device) {
            quota.store(bytes, Ordering::Relaxed);
        }
    }

    /// How much the job may hold on a device; nothing on one that it was not given.
    #[inline]
    pub fn quota_bytes(&self, device: usize) -> u64 {
        self.quota_bytes.get(device).map_or(0, |quota| quota.load(Ordering::Relaxed))
    }
}

fn le_word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}
