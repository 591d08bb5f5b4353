//! The two threads that a GPU process gets. The *worker* watches the agent's command and this
//! process's own stop, publishes statistics, and keeps time limits. The *hands* make the driver calls that
//! may block (wait for all work, destroy contexts), so that the worker never does.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use muxflow_abi::control::{Gate, SlotState};

use crate::{context, elf, exit, flight, gate, process, record, signal, sys};

/// How far this process is on its way out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
#[repr(u32)]
pub(crate) enum Phase {
    Running = 0,
    /// Gate shut, waiting for the work in flight.
    Draining = 1,
    /// The program saves its state: copies free, one launch in flight.
    Checkpoint = 2,
    Releasing = 3,
    Released = 4,
}

static PHASE: AtomicU32 = AtomicU32::new(0);
/// The process that the threads were started in: fork leaves them behind.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Bumped to wake the worker.
static WAKE: AtomicU32 = AtomicU32::new(0);
/// The signal that stops this process; zero: none came.
static STOP: AtomicI32 = AtomicI32::new(0);
/// Whether the program leaves that signal to its default action.
static STOP_BY_DEFAULT: AtomicU32 = AtomicU32::new(0);

/// Whether the heartbeat was late when the worker last looked.
static LATE: AtomicU32 = AtomicU32::new(0);

/// Not zero: a thread is missing.
static UNWATCHED: AtomicU32 = AtomicU32::new(0);

/// The hands' order book: what is asked for, and how many were done.
static ASKED: AtomicU32 = AtomicU32::new(0);
static TASK: AtomicU32 = AtomicU32::new(0);
static DONE: AtomicU32 = AtomicU32::new(0);

/// How often the worker looks, at least.
const TICK_NS: u64 = 10_000_000;
/// How long after launches stopped for want of an agent the process is stopped itself.
const ABANDONED_MS: u64 = 30_000;

#[derive(Clone, Copy)]
#[repr(u32)]
enum Task {
    Synchronise = 1,
    Release = 2,
}

/// Where this process is; a forked child is at the beginning.
#[inline]
pub(crate) fn phase() -> Phase {
    match PHASE.load(Ordering::Acquire) {
        0 => Phase::Running,
        1 => Phase::Draining,
        2 => Phase::Checkpoint,
        3 => Phase::Releasing,
        _ => Phase::Released,
    }
}

/// Whether the agent's heartbeat is late: launches must look at it themselves.
pub(crate) fn is_late() -> bool {
    LATE.load(Ordering::Acquire) != 0
}

fn set_phase(phase: Phase) {
    PHASE.store(phase as u32, Ordering::Release);
    gate::attend();
    sys::futex_wake(&PHASE);
}

/// Whether the threads run in this very process.
pub(crate) fn is_mine() -> bool {
    OWNER.load(Ordering::Acquire) == sys::pid()
}

/// Starts the threads, once per process. Costs one load when they run.
pub(crate) fn ensure() {
    static STARTED: AtomicU64 = AtomicU64::new(0);
    // The slot is wiped by fork, so it tells a new process cheaply; asking for the pid would cost.
    let slot = process::control().map_or(0, |control| control.slot as u64 + 1);
    if STARTED.load(Ordering::Relaxed) == slot && slot != 0 {
        return;
    }
    let me = sys::pid();
    if OWNER.swap(me, Ordering::AcqRel) != me {
        PHASE.store(0, Ordering::Release);
        STOP.store(0, Ordering::Release);
        DONE.store(ASKED.load(Ordering::Relaxed), Ordering::Release);
        gate::attend();
        let watched = start(work) && start(serve);
        UNWATCHED.store(u32::from(!watched), Ordering::Release);
        if watched {
            signal::arm();
        } else {
            sys::say("cannot start a thread: kernel launches are refused");
        }
    }
    STARTED.store(slot, Ordering::Relaxed);
}

/// Whether the threads could not be started: nobody would heed a dead agent, a drain or a signal.
pub(crate) fn is_unwatched() -> bool {
    UNWATCHED.load(Ordering::Acquire) != 0
}

/// Starts a thread that no signal is delivered to but the one that its own accesses raise; says whether it runs.
fn start(body: extern "C" fn(*mut c_void) -> *mut c_void) -> bool {
    type Create = unsafe extern "C" fn(
        *mut libc::pthread_t,
        *const libc::pthread_attr_t,
        extern "C" fn(*mut c_void) -> *mut c_void,
        *mut c_void,
    ) -> c_int;
    let create = elf::libc_function(c"pthread_create");
    if create.is_null() {
        return false;
    }
    let before = sys::set_blocked(!(1_u64 << (libc::SIGBUS - 1)));
    let mut thread: libc::pthread_t = 0;
    // SAFETY: the address is glibc's pthread_create; the body takes nothing.
    let failed = unsafe {
        core::mem::transmute::<*const c_void, Create>(create)(
            &raw mut thread,
            core::ptr::null(),
            body,
            core::ptr::null_mut(),
        )
    };
    sys::set_blocked(before);
    failed == 0
}

/// Asks the hands for something and waits, at most so long; says whether it was done.
fn ask(task: Task, limit_ns: u64) -> bool {
    let until_ns = sys::now_ns().saturating_add(limit_ns);
    // One at a time; whoever finds the hands busy waits for its turn, within its limit.
    let number = loop {
        let done = DONE.load(Ordering::Acquire);
        let free =
            ASKED.compare_exchange(done, done.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed);
        if free.is_ok() {
            break done.wrapping_add(1);
        }
        if sys::now_ns() > until_ns {
            return false;
        }
        sys::sleep_ns(200_000);
    };
    TASK.store(task as u32, Ordering::Release);
    sys::futex_wake(&TASK);
    loop {
        let done = DONE.load(Ordering::Acquire);
        if done == number {
            return true;
        }
        let now_ns = sys::now_ns();
        if now_ns >= until_ns {
            return false;
        }
        sys::futex_wait(&DONE, done, (until_ns - now_ns).min(TICK_NS));
    }
}

/// The last release of a process that ends was carried out, in time or later.
static LET_GO: AtomicU32 = AtomicU32::new(0);

/// Releases for good; says whether that was done in time.
fn let_go() -> bool {
    LET_GO.store(0, Ordering::Release);
    ask(Task::Release, drain_limit_ns())
}

/// The hands.
extern "C" fn serve(_: *mut c_void) -> *mut c_void {
    loop {
        let task = TASK.swap(0, Ordering::AcqRel);
        if task == 0 {
            sys::futex_wait(&TASK, 0, 1_000_000_000);
            continue;
        }
        if task == Task::Synchronise as u32 {
            context::synchronise_all();
        } else {
            context::release_all();
            LET_GO.store(1, Ordering::Release);
        }
        DONE.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake(&DONE);
    }
}

/// How long a drain may take.
pub(crate) fn drain_limit_ns() -> u64 {
    process::settings().drain_limit_ms.min(60_000) * 1_000_000
}

/// From a signal handler: this process is to stop. Waits until the program's own handler may run
/// (or, for a default action, until contexts are gone). Only flags, futexes and the clock are used.
pub(crate) fn stop_by(signal: c_int, by_default: bool) {
    if by_default {
        STOP_BY_DEFAULT.store(1, Ordering::Release);
    }
    let _first = STOP.compare_exchange(0, signal, Ordering::AcqRel, Ordering::Relaxed);
    WAKE.fetch_add(1, Ordering::AcqRel);
    sys::futex_wake(&WAKE);
    let wanted = if by_default { Phase::Released } else { Phase::Checkpoint };
    let until_ns = sys::now_ns() + 2 * drain_limit_ns() + 200_000_000;
    loop {
        let seen = PHASE.load(Ordering::Acquire);
        let now_ns = sys::now_ns();
        if seen >= wanted as u32 || now_ns >= until_ns {
            return;
        }
        sys::futex_wait(&PHASE, seen, (until_ns - now_ns).min(50_000_000));
    }
}

/// Waits for the work in flight, leaving the gate as it is: the process calls `exit`, and its own
/// exit handlers may still use the GPU.
pub(crate) fn settle() {
    if is_mine() && context::any() && phase() < Phase::Releasing {
        ask(Task::Synchronise, drain_limit_ns());
    }
}

/// Drains and releases, because the process ends now.
pub(crate) fn finish() {
    if !is_mine() || !context::any() || phase() >= Phase::Releasing {
        publish();
        return;
    }
    set_phase(Phase::Draining);
    ask(Task::Synchronise, drain_limit_ns());
    set_phase(Phase::Releasing);
    let gone = let_go();
    set_phase(Phase::Released);
    if gone {
        report(SlotState::Released, None);
    }
    publish();
}

/// The worker.
extern "C" fn work(_: *mut c_void) -> *mut c_void {
    let mut seen_command = 0;
    let mut window_ends_ns = u64::MAX;
    let mut abandoned = false;
    loop {
        let wake = WAKE.load(Ordering::Acquire);
        if STOP.load(Ordering::Acquire) == 0 {
            sys::futex_wait(&WAKE, wake, TICK_NS);
        } else if phase() == Phase::Running {
            window_ends_ns = begin_stop();
        } else {
            sys::futex_wait(&WAKE, wake, TICK_NS);
        }
        let by_default = STOP_BY_DEFAULT.load(Ordering::Acquire) != 0;
        if phase() == Phase::Checkpoint && (by_default || sys::now_ns() > window_ends_ns) {
            end_stop(by_default);
        }
        if obey(&mut seen_command) {
            window_ends_ns = 0;
        }
        publish();
        if let Some(agent) = process::agent() {
            let (slow_after_ms, stop_after_ms) = agent.patience_ms();
            let age_ms = agent.heartbeat_age_ms(sys::now_ns());
            let late = u32::from(age_ms > slow_after_ms);
            if LATE.swap(late, Ordering::AcqRel) != late {
                gate::attend();
            }
            let limit_ms = stop_after_ms.saturating_add(abandoned_after_ms());
            if !abandoned && age_ms > limit_ms {
                abandoned = true;
                sys::say("the agent did not come back: stopping this process");
                // Stopped also if it ignores or blocks the signal; its handler runs if it has one.
                let _first =
                    STOP.compare_exchange(0, libc::SIGTERM, Ordering::AcqRel, Ordering::Relaxed);
                sys::kill_self(libc::SIGTERM);
            }
        }
    }
}

/// A test may not want to wait half a minute.
fn abandoned_after_ms() -> u64 {
    let set = process::environment(c"MUXFLOW_ABANDONED_MS")
        .and_then(|value| core::str::from_utf8(value.to_bytes()).ok())
        .and_then(|text| text.parse().ok());
    set.unwrap_or(ABANDONED_MS)
}

/// Shuts the gate, waits for the work in flight, opens the checkpoint window; says when it ends.
fn begin_stop() -> u64 {
    set_phase(Phase::Draining);
    report(SlotState::Draining, None);
    if ask(Task::Synchronise, drain_limit_ns()) {
        report(SlotState::Drained, None);
    }
    set_phase(Phase::Checkpoint);
    sys::now_ns().saturating_add(process::settings().checkpoint_window_ms.saturating_mul(1_000_000))
}

/// Releases; at the deadline also ends the process as the signal would have.
fn end_stop(by_default: bool) {
    set_phase(Phase::Releasing);
    ask(Task::Synchronise, drain_limit_ns());
    if let_go() {
        report(SlotState::Released, None);
    }
    publish();
    set_phase(Phase::Released);
    if !by_default {
        sys::say("the checkpoint window is over: ending the process");
        exit::by_force(STOP.load(Ordering::Acquire));
    }
}

/// Does what the agent's command asks of the process as a whole. `true` when it ends the checkpoint
/// window of a process that is stopping by itself.
fn obey(seen: &mut u32) -> bool {
    let Some(agent) = process::agent() else { return false };
    let word = agent.command_word();
    let phase = phase();
    if word == *seen || matches!(phase, Phase::Draining | Phase::Releasing) {
        return false;
    }
    if phase == Phase::Released && LET_GO.load(Ordering::Acquire) == 0 {
        // The release did not come about within its limit, and may never do.
        return false;
    }
    *seen = word;
    let gate = Gate::from_word(word);
    match (phase, gate) {
        (Phase::Released, _) => report(SlotState::Released, Some(word)),
        (_, Gate::Frozen | Gate::Drain) => {
            report(SlotState::Draining, Some(word));
            if ask(Task::Synchronise, drain_limit_ns()) {
                report(SlotState::Drained, Some(word));
            }
        }
        (Phase::Checkpoint, Gate::Reset) => return true,
        (_, Gate::Reset) => {
            ask(Task::Synchronise, drain_limit_ns());
            if ask(Task::Release, drain_limit_ns()) {
                report(SlotState::Released, Some(word));
            }
        }
        // Nothing is in flight but what it saves its state with, one launch at a time.
        (Phase::Checkpoint, Gate::Open | Gate::Closed | Gate::Checkpoint) => {
            report(SlotState::Drained, Some(word));
        }
        (_, Gate::Open | Gate::Closed | Gate::Checkpoint) => {
            report(SlotState::Registered, Some(word));
        }
    }
    false
}

fn report(state: SlotState, word: Option<u32>) {
    if !process::is_registered() {
        return;
    }
    if let Some(control) = process::control()
        && let Some(mine) = control.mine()
    {
        mine.report(state, word.unwrap_or_else(|| control.agent.command_word()));
    }
}

/// Writes the statistics into the slot.
pub(crate) fn publish() {
    if !process::is_registered() {
        return;
    }
    if let Some(control) = process::control()
        && let Some(mine) = control.mine()
    {
        let launches = record::launches();
        if mine.launches.swap(launches, Ordering::Relaxed) != launches {
            let now_ns = sys::now_ns();
            mine.last_launch_ns.store(now_ns, Ordering::Relaxed);
            if mine.first_launch_ns.load(Ordering::Relaxed) == 0 {
                mine.first_launch_ns.store(now_ns, Ordering::Relaxed);
            }
        }
        mine.in_flight.store(flight::total(), Ordering::Relaxed);
        let held: u64 = (0..muxflow_abi::control::DEVICES)
            .map(|device| control.job.slot_bytes(device, control.slot))
            .fold(0, u64::saturating_add);
        mine.peak_bytes.fetch_max(held, Ordering::Relaxed);
    }
}
