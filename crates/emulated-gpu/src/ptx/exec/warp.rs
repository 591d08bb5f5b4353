//! Where the lanes of a warp meet: to wait for one another, or to exchange values.

use super::{Block, Pause, Thread};
use crate::ptx::ins::{Code, Shuffle, Vote};

impl Block<'_> {
    /// Lets the threads go on that wait for one another, wherever they do, when all of their mask are
    /// there. Without that nobody would go on: then the first to be met do.
    pub(super) fn meet(&mut self, warp: &mut [Thread]) {
        let waits = |t: &Thread| t.state == Some(Pause::Warp);
        let syncs = |t: &Thread| waits(t) && self.kernel.code[t.pc].code == Code::WarpSync;
        let mask = |t: &Thread| self.value(t, self.kernel.code[t.pc].a) as u32;
        let same = |t: &Thread, wanted: u32| syncs(t) && mask(t) == wanted;
        let alone = |t: &Thread| {
            syncs(t) && {
                let missing = |other: &Thread| {
                    let named = mask(t) >> (other.linear % 32) & 1 == 1;
                    named && other.state != Some(Pause::Exit) && !same(other, mask(t))
                };
                warp.iter().any(missing)
            }
        };
        let (mut held, mut ready): (Vec<&Thread>, Vec<&Thread>) =
            warp.iter().filter(|t| waits(t)).partition(|t| alone(t));
        let list = if ready.is_empty() { &mut held } else { &mut ready };
        list.sort_by_key(|t| t.pc);
        let Some(first) = list.first() else { return };
        if !syncs(first) {
            let pc = first.pc;
            self.exchange(warp, pc);
            return;
        }
        let wanted = mask(first);
        let going: Vec<usize> = (0..warp.len()).filter(|i| same(&warp[*i], wanted)).collect();
        for lane in going {
            warp[lane].pc += 1;
            warp[lane].state = None;
        }
    }

    /// Threads of a warp that have met at the same instruction exchange values there.
    fn exchange(&mut self, warp: &mut [Thread], pc: usize) {
        let meeting = |t: &Thread| t.state == Some(Pause::Warp);
        let lanes: Vec<usize> =
            (0..warp.len()).filter(|i| meeting(&warp[*i]) && warp[*i].pc == pc).collect();
        let ins = self.kernel.code[pc];
        let values: Vec<u64> = lanes.iter().map(|l| self.value(&warp[*l], ins.a)).collect();
        let of_lane = |lane: usize| lanes.iter().position(|l| *l == lane).map(|i| values[i]);
        let mask = lanes.iter().fold(0_u64, |m, l| m | 1 << (l % 32));
        let ballot = lanes.iter().zip(&values).fold(0_u64, |m, (l, v)| m | (v & 1) << (l % 32));
        for (i, lane) in lanes.iter().enumerate() {
            let (result, flag) = match ins.code {
                Code::Shuffle(kind) => {
                    let b = self.value(&warp[*lane], ins.b) as usize & 31;
                    let c = self.value(&warp[*lane], ins.c) as usize;
                    let (clamp, segment) = (c & 31, c >> 8 & 31);
                    let from = shuffle_source(kind, *lane, b, clamp, segment);
                    match from.and_then(of_lane) {
                        Some(value) => (value, 1),
                        None => (values[i], 0),
                    }
                }
                Code::Vote(Vote::All) => (u64::from(ballot == mask), 0),
                Code::Vote(Vote::Any) => (u64::from(ballot != 0), 0),
                Code::Vote(Vote::Uniform) => (u64::from(ballot == 0 || ballot == mask), 0),
                Code::Vote(Vote::Ballot) => (ballot, 0),
                _ => (mask, 0),
            };
            self.set(&warp[*lane], ins.dst, result);
            self.set(&warp[*lane], ins.dst2, flag);
            warp[*lane].pc += 1;
            warp[*lane].state = None;
        }
    }
}

fn shuffle_source(
    kind: Shuffle,
    lane: usize,
    b: usize,
    clamp: usize,
    segment: usize,
) -> Option<usize> {
    let lane32 = lane % 32;
    let base = lane - lane32;
    let highest = lane32 & segment | clamp & !segment & 31;
    let lowest = lane32 & segment;
    let (from, valid) = match kind {
        Shuffle::Up => (lane32.wrapping_sub(b), lane32 >= b && lane32 - b >= highest.min(lowest)),
        Shuffle::Down => (lane32 + b, lane32 + b <= highest),
        Shuffle::Butterfly => (lane32 ^ b, (lane32 ^ b) <= highest),
        Shuffle::Index => (lowest | b & !segment & 31, (lowest | b & !segment & 31) <= highest),
    };
    valid.then_some(base + from)
}
