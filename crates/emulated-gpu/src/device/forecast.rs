//! What the engine can say about the future without running: how long nobody can be waiting.

use super::engine::{Engine, Head, Queued};
use crate::channel::Op;

impl Engine {
    /// Earliest device time at which the stream can come to `seq`, from what is known now;
    /// infinite when the client has not pushed that much.
    pub(crate) fn earliest_ns(&self, client: u32, stream: u32, seq: u64) -> f64 {
        let Some(it) = self.clients.get(&client) else { return f64::INFINITY };
        let Some(s) = it.streams.get(&stream) else { return f64::INFINITY };
        if s.completed >= seq {
            return self.now_ns;
        }
        let Some(head) = s.queue.front() else { return f64::INFINITY };
        if s.head == Head::Host {
            return f64::INFINITY;
        }
        let offset = usize::try_from(seq.saturating_sub(head.entry.seq)).unwrap_or(usize::MAX);
        let Some(target) = s.queue.get(offset) else { return f64::INFINITY };
        let after_head = target.cumulative_ns - head.cumulative_ns;
        self.now_ns.max(head.arrival_ns) + self.head_left_ns(client, stream, head) + after_head
    }

    fn head_left_ns(&self, client: u32, stream: u32, head: &Queued) -> f64 {
        if let Some(k) = self.kernels.iter().find(|k| k.client == client && k.stream == stream) {
            // Alone on the GPU the rate holds until the clock moves; beside others it may rise.
            let alone = self.kernels.len() == 1 && k.rate > 0.0;
            return if alone { k.left_ns / k.rate } else { k.left_ns };
        }
        if let Some(c) = self.copies.iter().find(|c| c.client == client && c.stream == stream) {
            return if self.copies.len() == 1 { c.left_bytes / c.rate } else { 0.0 };
        }
        self.least_ns(&head.entry)
    }

    /// Streams of a client with unfinished work.
    pub(crate) fn busy_streams(&self, client: u32) -> &[u32] {
        self.clients.get(&client).map_or(&[], |c| &c.busy)
    }

    /// First host function or notice that waits in a stream, by sequence.
    pub(crate) fn first_host(&self, client: u32) -> Vec<(u32, u64)> {
        let Some(it) = self.clients.get(&client) else { return Vec::new() };
        let mut found = Vec::new();
        for number in &it.busy {
            let Some(s) = it.streams.get(number) else { continue };
            let heard = [Op::Host as u32, Op::Notify as u32];
            let host = s.queue.iter().find(|q| heard.contains(&q.entry.op));
            found.extend(host.map(|q| (*number, q.entry.seq)));
        }
        found
    }

    /// Earliest time at which anything of a client can complete.
    pub(crate) fn earliest_any_ns(&self, client: u32) -> f64 {
        let Some(it) = self.clients.get(&client) else { return f64::INFINITY };
        let heads = it.busy.iter().filter_map(|n| {
            let head = it.streams.get(n)?.queue.front()?;
            Some(self.earliest_ns(client, *n, head.entry.seq))
        });
        heads.fold(f64::INFINITY, f64::min)
    }
}
