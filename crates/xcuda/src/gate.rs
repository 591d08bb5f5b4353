//! The launch gate. A launch passes at once while its thread has launches left; otherwise it takes
//! the slow path, where the agent's command, the heartbeat, the rate and the work in flight are looked at.
//!
//! No lock and no allocation on either path. Waiting is always for something that comes from outside
//! this process (the agent, the clock) or, for work in flight, bounded: work that makes no progress may
//! be waiting for something that this very thread does next.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use muxflow_abi::control::rhythm;
use muxflow_abi::control::{Gate, Limits};
use muxflow_abi::cuda::result::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS,
};
use muxflow_abi::cuda::{CUresult, CUstream};

use crate::process::{self, Control};
use crate::record::{self, Record};
use crate::worker::{self, Phase};
use crate::{capture, flight, sys};

/// Not zero: launches take the slow path (a capture is going on, or the process is stopping).
static ATTENTION: AtomicU32 = AtomicU32::new(0);

/// Longest time that a launch waits for work in flight of which nothing gets done.
const NO_PROGRESS_NS: u64 = 200_000_000;
/// How often a closed gate is looked at.
const LOOK_NS: u64 = 500_000;
/// What a launch waits at least while the heartbeat is late.
const SLOW_NS: u64 = 10_000_000;

/// Recomputes whether the fast path may be taken.
pub(crate) fn attend() {
    let stops = worker::phase() != Phase::Running || process::is_torn();
    let busy = capture::any() || stops || worker::is_late();
    ATTENTION.store(u32::from(busy), Ordering::Release);
}

/// How a launch may go ahead.
enum Pass {
    Go,
    /// One at a time: wait for it before the next.
    Alone,
    Refused(CUresult),
}

/// Whether one kernel launch may pass at once. If not, [`pass`] must be asked. Kept apart so that
/// the handler can hand its arguments on as they are.
#[inline(always)]
pub(crate) fn is_open(function: usize, stream: CUstream) -> bool {
    // SAFETY: null, or this thread's record, which lives for ever.
    let Some(record) = (unsafe { record::mine().as_ref() }) else { return false };
    let Some(agent) = process::agent() else { return false };
    let left = record.left.load(Ordering::Relaxed);
    let calm = agent.command_word() & 0xff == Gate::Open as u32
        && ATTENTION.load(Ordering::Relaxed) == 0
        && record.stream.load(Ordering::Relaxed) == stream as usize + 1;
    if calm && left > 0 {
        record.left.store(left - 1, Ordering::Relaxed);
        count(record, function);
        return true;
    }
    false
}

/// Lets one kernel launch through, in its turn.
pub(crate) fn pass(
    function: usize,
    stream: CUstream,
    launch: impl FnOnce() -> CUresult,
) -> CUresult {
    if is_open(function, stream) {
        return launch();
    }
    pass_slowly(function, stream, 1, launch)
}

/// Lets work of some cost through: always by the slow path.
#[cold]
#[inline(never)]
pub(crate) fn pass_slowly(
    function: usize,
    stream: CUstream,
    cost: u64,
    launch: impl FnOnce() -> CUresult,
) -> CUresult {
    match slow(function, stream, cost) {
        Pass::Go => launch(),
        Pass::Alone => {
            let result = launch();
            driver!(cuStreamSynchronize(stream => CUstream));
            result
        }
        Pass::Refused(result) => result,
    }
}

/// Notes a launch of a kernel; threads may overwrite each other's, which a statistic can bear.
#[inline(always)]
fn count(record: &Record, function: usize) {
    let rhythm = record.rhythm.load(Ordering::Relaxed);
    if !rhythm.is_null() {
        // SAFETY: BUCKETS counters of this process's slot, mapped for good.
        let bucket = unsafe { &*rhythm.add(rhythm::bucket(function)) };
        bucket.store(bucket.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

#[cold]
#[inline(never)]
fn slow(function: usize, stream: CUstream, cost: u64) -> Pass {
    let Some(control) = process::control() else {
        return Pass::Refused(CUDA_ERROR_SYSTEM_NOT_READY);
    };
    if capture::is_capturing(stream) {
        return Pass::Go;
    }
    worker::ensure();
    if worker::is_unwatched() {
        return Pass::Refused(CUDA_ERROR_SYSTEM_NOT_READY);
    }
    let pass = wait_for_turn(&control, stream, cost);
    if let (Pass::Go | Pass::Alone, Some(record)) = (&pass, record::claim()) {
        if record.rhythm.load(Ordering::Relaxed).is_null()
            && let Some(mine) = control.mine()
        {
            record.rhythm.store(mine.rhythm.as_ptr().cast_mut(), Ordering::Relaxed);
        }
        count(record, function);
    }
    pass
}

/// Lets a launch wait, and counts that as delay of the job. Piece by piece: a launch that waits for
/// long is seen to wait, and one whose process ends meanwhile has waited too.
fn pause(control: &Control, ns: u64) {
    let from_ns = sys::now_ns();
    sys::sleep_ns(ns);
    if let Some(mine) = control.mine() {
        let waited_ns = sys::now_ns().saturating_sub(from_ns);
        mine.delayed_ns.fetch_add(waited_ns, Ordering::Relaxed);
    }
}

fn wait_for_turn(control: &Control, stream: CUstream, cost: u64) -> Pass {
    let Some(record) = record::claim() else { return wait_unrecorded(control, cost) };
    let first = record.launched.load(Ordering::Relaxed) == 0;
    flush(record);
    // The worker looks at the heartbeat and raises attention; only a thread's first launch cannot
    // rely on it, because the worker may just have been started.
    let mut calm = !first
        && ATTENTION.load(Ordering::Acquire) == 0
        && control.agent.command_word() & 0xff == Gate::Open as u32;
    let (index, every) = loop {
        if !calm && let Some(other) = but_go(wait_for_command(control), record, cost) {
            return other;
        }
        let limits = control.agent.limits();
        if let Some(other) = pay(control, record, &limits, cost) {
            return other;
        }
        let index = flight::entry_of(record, stream as usize);
        let every = mark_every(limits.in_flight);
        if bound_in_flight(control, record, index, every, limits.in_flight) {
            break (index, every);
        }
        // The gate closed while this launch waited for others: it is commanded anew.
        calm = false;
    };
    let entry = &record.entries[index];
    let cost32 = u32::try_from(cost).unwrap_or(u32::MAX / 4);
    let pending = entry.pending.load(Ordering::Relaxed).saturating_add(cost32);
    entry.pending.store(pending, Ordering::Relaxed);
    add(&record.launched, cost);
    let mut paid = record.credit.load(Ordering::Relaxed).max(0).cast_unsigned();
    paid -= cost.min(paid);
    let more = paid.min(u64::from(every.saturating_sub(pending)));
    record.credit.store(paid.cast_signed(), Ordering::Relaxed);
    record.granted.store(more.cast_signed(), Ordering::Relaxed);
    record.left.store(more.cast_signed(), Ordering::Relaxed);
    record.current.store(index, Ordering::Relaxed);
    record.stream.store(stream as usize + 1, Ordering::Relaxed);
    Pass::Go
}

/// What is not simply to go on; a launch that goes alone is counted here.
fn but_go(pass: Pass, record: &Record, cost: u64) -> Option<Pass> {
    match pass {
        Pass::Go => None,
        Pass::Alone => {
            add(&record.launched, cost);
            Some(Pass::Alone)
        }
        refused @ Pass::Refused(_) => Some(refused),
    }
}

/// Sees to it that this thread has paid for a launch; something else than `None` when it may not go on.
fn pay(control: &Control, record: &Record, limits: &Limits, cost: u64) -> Option<Pass> {
    let credit = record.credit.load(Ordering::Relaxed).max(0).cast_unsigned();
    let paid = if limits.rate_milli_per_s == u64::MAX {
        cost + u64::from(flight::MARK_MOST)
    } else if credit >= cost {
        credit
    } else {
        // In advance for a hundredth of a second and a burst at most, so that slow rates stay even.
        let most = u64::from(flight::MARK).min(limits.burst);
        let batch = (limits.rate_milli_per_s / 100_000).clamp(1, most);
        let wanted = batch.max(cost);
        let other = buy(control, wanted, limits.rate_milli_per_s, limits.burst);
        if let Some(other) = other.and_then(|other| but_go(other, record, cost)) {
            return Some(other);
        }
        credit + wanted
    };
    record.credit.store(paid.cast_signed(), Ordering::Relaxed);
    None
}

/// Adds to a number that only this thread writes.
fn add(number: &AtomicU64, more: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

fn wait_for_command(control: &Control) -> Pass {
    loop {
        match command(control) {
            Now::Wait(ns) => pause(control, ns),
            Now::Alone => return Pass::Alone,
            Now::Refuse(result) => return Pass::Refused(result),
            Now::Go => return Pass::Go,
        }
    }
}

/// Books the launches that the fast path has made since the last look.
fn flush(record: &Record) {
    let granted = record.granted.load(Ordering::Relaxed);
    let used = (granted - record.left.load(Ordering::Relaxed)).max(0);
    record.granted.store(0, Ordering::Relaxed);
    record.left.store(0, Ordering::Relaxed);
    if used == 0 {
        return;
    }
    add(&record.launched, used.cast_unsigned());
    record.credit.store(record.credit.load(Ordering::Relaxed) - used, Ordering::Relaxed);
    if let Some(entry) = record.entries.get(record.current.load(Ordering::Relaxed))
        && flight::takes_marks(entry)
    {
        let pending = entry.pending.load(Ordering::Relaxed) + u32::try_from(used).unwrap_or(0);
        entry.pending.store(pending, Ordering::Relaxed);
    }
}

/// Marks are as rare as they may be, and as frequent as a small bound needs: an eighth of a large
/// bound may go unmarked.
fn mark_every(in_flight: u64) -> u32 {
    let part = |n: u64| u32::try_from(in_flight / n).unwrap_or(u32::MAX);
    let rare = flight::mark_every().max(part(8).min(flight::MARK_MOST));
    part(2).clamp(1, rare)
}

enum Now {
    Go,
    Alone,
    Wait(u64),
    Refuse(CUresult),
}

/// What the agent, the heartbeat and the state of this process say.
fn command(control: &Control) -> Now {
    if process::is_torn() {
        return Now::Refuse(CUDA_ERROR_SYSTEM_NOT_READY);
    }
    match worker::phase() {
        Phase::Running => {}
        Phase::Draining => return Now::Wait(LOOK_NS),
        // The window is the process's own: the agent's law does not hold in it, but its stop does.
        Phase::Checkpoint => {
            return match Gate::from_word(control.agent.command_word()) {
                Gate::Frozen | Gate::Drain => Now::Wait(LOOK_NS),
                Gate::Reset => Now::Refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED),
                Gate::Open | Gate::Closed | Gate::Checkpoint => Now::Alone,
            };
        }
        Phase::Releasing | Phase::Released => return Now::Refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED),
    }
    match Gate::from_word(control.agent.command_word()) {
        Gate::Open => {}
        Gate::Closed | Gate::Frozen | Gate::Drain => {
            return heartbeat(control).unwrap_or(Now::Wait(LOOK_NS));
        }
        Gate::Checkpoint => return Now::Alone,
        Gate::Reset => return Now::Refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED),
    }
    heartbeat(control).unwrap_or(Now::Go)
}

/// Late: slow. Later: stop. The worker ends the process when it stays away.
fn heartbeat(control: &Control) -> Option<Now> {
    static SAID_SLOW: AtomicU32 = AtomicU32::new(0);
    static SAID_STOP: AtomicU32 = AtomicU32::new(0);
    let (slow_after_ms, stop_after_ms) = control.agent.patience_ms();
    let age_ms = control.agent.heartbeat_age_ms(sys::now_ns());
    if age_ms > stop_after_ms {
        sys::say_once(&SAID_STOP, "the agent is gone: kernel launches stop until it is back");
        return Some(Now::Wait(SLOW_NS));
    }
    if age_ms > slow_after_ms {
        sys::say_once(&SAID_SLOW, "the agent is late: kernel launches are slowed down");
        pause(control, SLOW_NS);
    }
    None
}

/// Takes launches out of the job's bucket, waiting as long as that takes.
fn buy(control: &Control, cost: u64, rate_milli_per_s: u64, burst: u64) -> Option<Pass> {
    let (mut rate, mut burst) = (rate_milli_per_s, burst);
    loop {
        let wait_ns = control.job.take(sys::now_ns(), cost, rate, burst);
        if wait_ns == 0 {
            return None;
        }
        pause(control, wait_ns.min(2_000_000));
        loop {
            match command(control) {
                Now::Go => break,
                Now::Alone => return Some(Pass::Alone),
                Now::Refuse(result) => return Some(Pass::Refused(result)),
                Now::Wait(ns) => pause(control, ns),
            }
        }
        let limits = control.agent.limits();
        (rate, burst) = (limits.rate_milli_per_s, limits.burst);
    }
}

/// Whether a launch that was allowed to go may still do so after it has waited.
fn is_still_open(control: &Control) -> bool {
    let heard = || {
        let (_, stop_after_ms) = control.agent.patience_ms();
        !worker::is_late() || control.agent.heartbeat_age_ms(sys::now_ns()) <= stop_after_ms
    };
    worker::phase() == Phase::Running
        && control.agent.command_word() & 0xff == Gate::Open as u32
        && !process::is_torn()
        && heard()
}

/// Marks what is due, and waits while too much is in flight. `false` when the gate closed meanwhile.
fn bound_in_flight(
    control: &Control,
    record: &Record,
    index: usize,
    every: u32,
    limit: u64,
) -> bool {
    flight::poll(record);
    if flight::total() == 0 {
        // The pipe ran empty: what comes next says nothing of how long kernels take.
        record.seen_ns.store(0, Ordering::Relaxed);
    }
    if record.entries[index].pending.load(Ordering::Relaxed) >= every {
        flight::mark(record, index);
    }
    let every = u64::from(every);
    let known = || flight::total() + flight::unmarked(record);
    let mut in_flight = known();
    if in_flight + every <= limit {
        return true;
    }
    let mut moved_ns = sys::now_ns();
    let mut pause_ns = 5_000;
    let mut done = flight::done(record);
    while in_flight + every > limit && flight::total() > 0 {
        pause(control, pause_ns);
        if !is_still_open(control) {
            return false;
        }
        pause_ns = (pause_ns * 2).min(200_000);
        flight::poll(record);
        let (now_ns, left) = (sys::now_ns(), known());
        let now_done = flight::done(record);
        if now_done != done {
            done = now_done;
            time_kernels(control, record, now_ns, done);
        }
        if left < in_flight {
            moved_ns = now_ns;
            pause_ns = 5_000;
        } else if now_ns.saturating_sub(moved_ns) > NO_PROGRESS_NS {
            if let Some(mine) = control.mine() {
                mine.overruns.fetch_add(1, Ordering::Relaxed);
            }
            break;
        }
        in_flight = left;
    }
    if in_flight + every > limit && flight::total() == 0 {
        // Only unmarked launches are left: see them end before more follow.
        flight::mark_all(record, index);
    }
    is_still_open(control)
}

/// A mark was just seen to be reached. Since the one that was seen before it the pipe was never
/// empty, so what lies between is the time of the kernels between.
fn time_kernels(control: &Control, record: &Record, now_ns: u64, done: u32) {
    let from_ns = record.seen_ns.swap(now_ns, Ordering::Relaxed);
    let from = record.seen_done.swap(done, Ordering::Relaxed);
    let kernels = u64::from(done.wrapping_sub(from));
    if from_ns != 0 && kernels <= u64::from(u32::MAX / 2) {
        learn(control, now_ns.saturating_sub(from_ns), kernels);
    }
}

/// So many kernels took so long: told smoothed, for the agent to turn a share of time into a rate.
fn learn(control: &Control, took_ns: u64, kernels: u64) {
    let (Some(mine), Some(each_ns)) = (control.mine(), took_ns.checked_div(kernels)) else {
        return;
    };
    let old_ns = mine.ns_per_launch.load(Ordering::Relaxed);
    let new_ns = if old_ns == 0 { each_ns } else { (old_ns * 7 + each_ns) / 8 };
    mine.ns_per_launch.store(new_ns, Ordering::Relaxed);
}

/// Lets a call wait for the device. A program that waits for each kernel never fills the pipe, so no
/// two marks tell how long one takes; what it waits here after a launch or a few does, if nothing of
/// another thread is in flight. It is a little less than the truth: the kernels run since their launch.
pub(crate) fn synchronise(wait: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: null, or this thread's record, which lives for ever.
    let Some(record) = (unsafe { record::mine().as_ref() }) else { return wait() };
    let launches = record.total();
    let kernels = launches.wrapping_sub(record.synchronised.swap(launches, Ordering::Relaxed));
    let told = (1..=u64::from(flight::MARK)).contains(&kernels) && flight::elsewhere(record) == 0;
    if !told {
        return wait();
    }
    let from_ns = sys::now_ns();
    let result = wait();
    if let (CUDA_SUCCESS, Some(control)) = (result, process::control()) {
        learn(&control, sys::now_ns().saturating_sub(from_ns), kernels);
    }
    result
}

/// A thread too many to have a record: paid and commanded like the others, launch by launch.
fn wait_unrecorded(control: &Control, cost: u64) -> Pass {
    match wait_for_command(control) {
        Pass::Go => {}
        other => return other,
    }
    let limits = control.agent.limits();
    buy(control, cost, limits.rate_milli_per_s, limits.burst).unwrap_or(Pass::Alone)
}
