//! Finds rows that are equal and columns that are equal.
//!
//! Equal columns are poison to short lists: more of them tie than a list is long. As one class with
//! several units they cost no more than one column. A few lines of the matrix tell most candidates
//! apart; only those that agree there are hashed whole, and only those whose hashes agree are
//! compared number by number, so that two lines are never called equal by accident.

use std::collections::BTreeMap;

use crate::scalar::Scalar;
use crate::weights::{Weights, row_of};

const PROBES: usize = 24;

/// A partition of rows or of columns.
#[derive(Debug)]
pub(crate) struct Classes {
    /// The first member of each member's class.
    head: Vec<u32>,
    /// Units that each first member stands for; zero for all others.
    pub(crate) counts: Vec<u32>,
}

impl Classes {
    /// Classes of equal rows.
    pub(crate) fn of_rows<W: Weights>(w: &W) -> Self {
        let probes = probes(w.cols());
        let mut buffer = Vec::new();
        let mut one = [W::Scalar::ZERO];
        let sketch: Vec<u64> = (0..w.rows())
            .map(|row| match w.row(row) {
                Some(line) => probes.iter().fold(0, |h, &c| mix(h, line[c])),
                None => probes.iter().fold(0, |h, &c| {
                    w.fill(row, c, &mut one);
                    mix(h, one[0])
                }),
            })
            .collect();
        let mut doubtful = twins(&sketch);
        let whole: Vec<(u64, u32)> = doubtful
            .drain(..)
            .map(|row| {
                let line = row_of(w, row as usize, &mut buffer);
                (line.iter().fold(0, |h, &x| mix(h, x)), row)
            })
            .collect();
        let mut classes = Self::single(w.rows());
        let mut other = Vec::new();
        for (head, members) in groups(whole) {
            let first: Vec<W::Scalar> = row_of(w, head as usize, &mut buffer).to_vec();
            for member in members {
                if row_of(w, member as usize, &mut other) == first {
                    classes.join(member, head);
                }
            }
        }
        classes
    }

    /// Classes of equal columns; of equal rows it is enough to look at one.
    pub(crate) fn of_cols<W: Weights>(w: &W, rows: &Self) -> Self {
        let heads: Vec<usize> = (0..w.rows()).filter(|&r| rows.counts[r] > 0).collect();
        let mut buffer = Vec::new();
        let mut sketch = vec![0; w.cols()];
        for at in probes(heads.len()) {
            let line = row_of(w, heads[at], &mut buffer);
            for (h, &x) in sketch.iter_mut().zip(line) {
                *h = mix(*h, x);
            }
        }
        let mut classes = Self::single(w.cols());
        let doubtful = twins(&sketch);
        if doubtful.is_empty() {
            return classes;
        }
        let mut whole: Vec<(u64, u32)> = doubtful.iter().map(|&c| (0, c)).collect();
        for &row in &heads {
            let line = row_of(w, row, &mut buffer);
            for (h, c) in &mut whole {
                *h = mix(*h, line[*c as usize]);
            }
        }
        let mut pairs: Vec<(u32, u32, bool)> = Vec::new();
        for (head, members) in groups(whole) {
            pairs.extend(members.into_iter().map(|m| (head, m, true)));
        }
        if pairs.is_empty() {
            return classes;
        }
        for &row in &heads {
            let line = row_of(w, row, &mut buffer);
            for (head, member, equal) in &mut pairs {
                *equal &= line[*head as usize] == line[*member as usize];
            }
        }
        for (head, member, _) in pairs.into_iter().filter(|&(_, _, equal)| equal) {
            classes.join(member, head);
        }
        classes
    }

    fn single(len: usize) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "sizes are checked before")]
        Self { head: (0..len as u32).collect(), counts: vec![1; len] }
    }

    fn join(&mut self, member: u32, head: u32) {
        self.head[member as usize] = head;
        self.counts[member as usize] = 0;
        self.counts[head as usize] += 1;
    }

    /// Gives every member what its class's first member has.
    pub(crate) fn spread(&self, values: &mut [i128]) {
        for (at, &head) in self.head.iter().enumerate() {
            values[at] = values[head as usize];
        }
    }

    /// Hands out the members of each class one by one.
    pub(crate) fn members(&self) -> Members<'_> {
        let mut next = vec![u32::MAX; self.head.len()];
        let mut last: Vec<u32> = self.head.clone();
        for (at, &head) in (0u32..).zip(&self.head) {
            if at != head {
                next[last[head as usize] as usize] = at;
                last[head as usize] = at;
            }
        }
        Members { classes: self, next, current: self.head.clone() }
    }
}

/// See [`Classes::members`].
#[derive(Debug)]
pub(crate) struct Members<'a> {
    classes: &'a Classes,
    next: Vec<u32>,
    current: Vec<u32>,
}

impl Members<'_> {
    /// The next member of the class with this first member, in order.
    pub(crate) fn take(&mut self, head: u32) -> Option<u32> {
        let at = *self.current.get(head as usize)?;
        if at == u32::MAX || self.classes.head[at as usize] != head {
            return None;
        }
        self.current[head as usize] = self.next[at as usize];
        Some(at)
    }
}

/// Places spread over 0..len.
fn probes(len: usize) -> Vec<usize> {
    let count = PROBES.min(len);
    (0..count).map(|k| k * len / count).collect()
}

/// Mixes one weight into a hash; both zeros are the same number.
fn mix<S: Scalar>(hash: u64, x: S) -> u64 {
    let bits = (x.to_f64() + 0.0).to_bits();
    let h = (hash ^ bits).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 29)
}

/// Members whose sketch occurs more than once.
fn twins(sketch: &[u64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0u32..).take(sketch.len()).collect();
    order.sort_unstable_by_key(|&m| (sketch[m as usize], m));
    let mut out: Vec<u32> = order
        .chunk_by(|&a, &b| sketch[a as usize] == sketch[b as usize])
        .filter(|group| group.len() > 1)
        .flatten()
        .copied()
        .collect();
    out.sort_unstable();
    out
}

/// First member and the others of each group of more than one.
fn groups(whole: Vec<(u64, u32)>) -> Vec<(u32, Vec<u32>)> {
    let mut by_hash: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (hash, member) in whole {
        by_hash.entry(hash).or_default().push(member);
    }
    let mut out: Vec<(u32, Vec<u32>)> =
        by_hash.into_values().filter(|g| g.len() > 1).map(|g| (g[0], g[1..].to_vec())).collect();
    out.sort_unstable();
    out
}
