//! The control block under hostile bytes, under threads, and over the death of its owners.

use std::alloc::{Layout, alloc_zeroed};

use muxflow_abi::control::agent::{AgentPart, Gate, Limits, Settings};
use muxflow_abi::control::job::{JobPart, Owner, SlotState};
use muxflow_abi::control::{Invalid, SLOTS};

const ME: Owner = Owner { pid: 1, start_ticks: 1 };

/// Zeroed pages that live as long as the test program.
fn pages(bytes: usize) -> *mut u8 {
    let layout = Layout::from_size_align(bytes, 4096).expect("a page-aligned layout");
    // SAFETY: the layout is not empty.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null());
    base
}

fn agent() -> (&'static AgentPart, *mut u8) {
    let base = pages(AgentPart::BYTES);
    // SAFETY: zeroed, aligned, never freed; an AgentPart is made of atomics.
    let part = unsafe { &*base.cast_const().cast::<AgentPart>() };
    part.initialise(7, &Settings::default());
    (part, base)
}

fn job() -> &'static JobPart {
    // SAFETY: zeroed, aligned, never freed; a JobPart is made of atomics.
    let part = unsafe { &*pages(JobPart::BYTES).cast_const().cast::<JobPart>() };
    part.initialise(7);
    part
}

#[test]
fn a_new_agent_part_is_valid_closed_and_silent() {
    let (part, base) = agent();
    // SAFETY: the pages of `agent` live for ever.
    let read = unsafe { AgentPart::validate(base, AgentPart::BYTES) }.expect("valid");
    assert_eq!(read.settings(), Settings::default());
    assert_eq!(Gate::from_word(read.command_word()), Gate::Closed);
    assert_eq!(read.heartbeat_age_ms(1), u64::MAX);
    part.beat(5_000_000);
    assert_eq!(read.heartbeat_age_ms(9_000_000), 4);
    assert_eq!(read.limits(), Limits::OPEN);
    let first = part.set_gate(Gate::Drain);
    assert_ne!(first, part.set_gate(Gate::Drain), "a repeated command is a new word");
}

#[test]
fn every_damaged_byte_of_the_fixed_part_is_noticed() {
    let (_, base) = agent();
    for at in (0..40).chain(64..64 + 16 * 16) {
        // SAFETY: within the page; nobody else uses it.
        unsafe { *base.add(at) ^= 0x40 };
        // SAFETY: as above.
        let damaged = unsafe { AgentPart::validate(base, AgentPart::BYTES) };
        assert!(damaged.is_err(), "byte {at}");
        // SAFETY: as above.
        unsafe { *base.add(at) ^= 0x40 };
    }
    // SAFETY: as above.
    let short = unsafe { AgentPart::validate(base, 100) };
    assert_eq!(short.err(), Some(Invalid::Truncated { bytes: 100, needed: AgentPart::BYTES }));
    // SAFETY: as above.
    unsafe { *base.add(8) = 99 };
    // SAFETY: as above.
    let other = unsafe { AgentPart::validate(base, AgentPart::BYTES) };
    assert_eq!(other.err(), Some(Invalid::Version { found: 99 }));
}

#[test]
fn charges_never_pass_the_quota_and_come_back_exactly() {
    let job = job();
    let quota = 1_000;
    std::thread::scope(|scope| {
        for pid in 1..=4 {
            scope.spawn(move || {
                let slot = job.claim(Owner { pid, start_ticks: 1 }, 0).expect("a slot");
                let mut held = 0;
                for step in 0..20_000_u64 {
                    let bytes = step * u64::from(pid) % 97;
                    if job.charge(0, slot, bytes, quota) {
                        assert!(
                            job.charged_bytes(0) <= quota + 4 * 97,
                            "only attempts stand above"
                        );
                        held += bytes;
                    }
                    if step % 3 == 0 {
                        job.uncharge(0, slot, held);
                        held = 0;
                    }
                }
                assert_eq!(job.slot_bytes(0, slot), held);
            });
        }
    });
    let cleared = job.reclaim(ME, |_, _| true, |_| {});
    assert_eq!(cleared, 4);
    assert_eq!(job.charged_bytes(0), 0);
}

#[test]
fn a_dead_owner_and_a_dead_reclaimer_leave_nothing() {
    let job = job();
    let slot = job.claim(Owner { pid: 5, start_ticks: 2 }, 0).expect("a slot");
    assert!(job.charge(0, slot, 10, 100));
    let mut words = Vec::new();
    assert_eq!(job.reclaim(ME, |owner, _| owner.pid == 6, |c| words.push(*c)), 0);
    assert_eq!(job.reclaim(ME, |owner, _| owner.pid == 5, |c| words.push(*c)), 1);
    assert_eq!(words[0].charged_bytes[0], 10);
    assert_eq!(job.charged_bytes(0), 0);
}

#[test]
fn a_program_that_execs_takes_its_own_slot_over() {
    let job = job();
    let owner = Owner { pid: 5, start_ticks: 2 };
    let before = job.claim(owner, 0).expect("a slot");
    assert!(job.charge(3, before, 10, 100));
    let after = job.claim(owner, 0).expect("a slot");
    assert_eq!(before, after);
    assert_eq!(job.charged_bytes(3), 0);
}

#[test]
fn what_is_called_in_is_free_for_others_and_gone_from_the_hand() {
    let job = job();
    let mine = job.claim(Owner { pid: 5, start_ticks: 2 }, 0).expect("a slot");
    let other = job.claim(Owner { pid: 6, start_ticks: 2 }, 0).expect("a slot");
    let hand = job.slot(mine).expect("exists").hand();
    for round in 0..3 {
        assert!(job.charge(0, mine, 80, 100));
        assert!(hand.give(0, 60, 64) && !hand.give(0, 10, 64), "no more than so much");
        assert_eq!((hand.bytes(0), job.slot_bytes(0, mine)), (60, 20), "round {round}");
        assert!(!job.charge(0, other, 50, 100), "in hand it is charged");
        assert!(!job.recall(0, || false, || {}), "without a barrier nobody may take it");
        assert!(job.recall(0, || true, || {}));
        assert_eq!((hand.bytes(0), job.slot_bytes(0, mine)), (0, 20));
        assert!(!hand.take(0, 1) && !job.recall(0, || true, || {}), "nothing is left");
        assert!(job.charge(0, other, 80, 100) && !job.charge(0, other, 1, 100));
        assert_eq!(job.charged_bytes(0), 100);
        job.uncharge(0, other, 80);
        job.uncharge(0, mine, 20);
        assert_eq!(job.charged_bytes(0), 0);
    }
    // What the dead had in hand, and what was taken back from it, is nothing to the next owner.
    assert!(job.charge(0, mine, 80, 100) && hand.give(0, 60, 64));
    assert_eq!(job.reclaim(ME, |owner, _| owner.pid == 5, |_| {}), 1);
    assert_eq!(job.claim(Owner { pid: 7, start_ticks: 2 }, 0), Some(mine));
    assert_eq!((job.charged_bytes(0), hand.bytes(0)), (0, 0));
    assert!(job.charge(0, mine, 100, 100) && hand.give(0, 100, 100) && hand.take(0, 40));
    assert_eq!((job.slot_bytes(0, mine), hand.bytes(0)), (40, 60));
    job.uncharge(0, mine, 1_000);
    assert_eq!(job.charged_bytes(0), 0, "never below nothing");
}

#[test]
fn slots_run_out_without_harm() {
    let job = job();
    for pid in 1..=u32::try_from(SLOTS).expect("few") {
        assert!(job.claim(Owner { pid, start_ticks: 1 }, 0).is_some());
    }
    assert_eq!(job.claim(Owner { pid: 9_999, start_ticks: 1 }, 0), None);
    job.slot(3).expect("exists").report(SlotState::Drained, 0x103);
    let mut seen = 0;
    job.each(|counters| seen += usize::from(counters.state == SlotState::Drained));
    assert_eq!(seen, 1);
}

#[test]
fn the_bucket_gives_its_rate_and_its_burst() {
    let job = job();
    let (rate, burst) = (1_000_000, 10); // a thousand a second
    let mut now_ns = 1_000_000_000;
    let mut passed = 0;
    while now_ns < 2_000_000_000 {
        match job.take(now_ns, 1, rate, burst) {
            0 => passed += 1,
            wait_ns => now_ns += wait_ns,
        }
    }
    assert!((1_000..=1_011).contains(&passed), "{passed}");
    assert_eq!(job.take(now_ns, 1, u64::MAX, burst), 0);
    assert_eq!(job.take(now_ns, 1, 0, burst), u64::MAX);
    // A cost above the burst passes, once the bucket is full.
    let later_ns = now_ns + 10_000_000_000;
    assert_eq!(job.take(later_ns, 500, rate, burst), 0);
    assert!(job.take(later_ns, 1, rate, burst) > 400_000_000);
}

#[test]
fn own_exports_are_known() {
    let job = job();
    job.remember_export(&[1; 64]);
    assert!(job.is_own_export(&[1; 64]));
    assert!(!job.is_own_export(&[2; 64]));
}
