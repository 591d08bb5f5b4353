//! Who is on the GPU and what they have pushed: coming, going, queueing.

use std::collections::{BTreeMap, VecDeque};

use super::{Client, Effect, Engine, Head, Limits, Queued, Stream};
use crate::channel::Entry;

impl Engine {
    pub(crate) fn add_client(&mut self, client: u32, limits: Limits) {
        self.clients.insert(
            client,
            Client { limits, streams: BTreeMap::new(), busy: Vec::new(), running: 0 },
        );
        self.meters.add_client(client);
    }

    /// Forgets a client and all its work, done or not; says whether any was unfinished.
    pub(crate) fn remove_client(&mut self, client: u32) -> bool {
        let Some(gone) = self.clients.remove(&client) else { return false };
        self.kernels.retain(|k| k.client != client);
        self.copies.retain(|c| c.client != client);
        self.effects.retain(|e| {
            !matches!(e, Effect::Completed { client: c, .. } | Effect::Recorded { client: c, .. }
                | Effect::HostReady { client: c, .. } | Effect::Notified { client: c } if *c == client)
        });
        self.meters.remove_client(client);
        self.dirty = true;
        !gone.busy.is_empty()
    }

    /// Drops all queued and running work of a client, whose streams then count as complete.
    pub(crate) fn abort_client(&mut self, client: u32) {
        self.kernels.retain(|k| k.client != client);
        self.copies.retain(|c| c.client != client);
        self.dirty = true;
        let Some(it) = self.clients.get_mut(&client) else { return };
        it.running = 0;
        it.busy.clear();
        for (number, stream) in &mut it.streams {
            let Some(last) = stream.queue.back() else { continue };
            stream.completed = last.entry.seq;
            stream.head = Head::Waiting;
            stream.queue.clear();
            self.effects.push(Effect::Completed {
                client,
                stream: *number,
                seq: stream.completed,
                time_ns: self.now_ns,
            });
        }
        self.effects.push(Effect::Notified { client });
    }

    /// Whether a client has work that is not complete.
    pub(crate) fn is_busy(&self, client: u32) -> bool {
        self.clients.get(&client).is_some_and(|c| !c.busy.is_empty())
    }

    /// Work from a client's ring, pushed at `arrival_ns`.
    pub(crate) fn submit(&mut self, client: u32, entry: Entry, arrival_ns: f64) {
        let least = self.least_ns(&entry);
        let Some(it) = self.clients.get_mut(&client) else { return };
        let stream = it.streams.entry(entry.stream).or_insert_with(|| Stream {
            queue: VecDeque::new(),
            head: Head::Waiting,
            completed: entry.seq.saturating_sub(1),
            host_done: 0,
            cumulative_ns: 0.0,
        });
        if stream.queue.is_empty() {
            it.busy.push(entry.stream);
        }
        stream.cumulative_ns += least;
        stream.queue.push_back(Queued {
            entry,
            arrival_ns: arrival_ns.max(self.now_ns),
            cumulative_ns: stream.cumulative_ns,
        });
    }

    /// The client's host functions of a stream have returned up to `seq`.
    pub(crate) fn host_done(&mut self, client: u32, stream: u32, seq: u64) {
        let it = self.clients.get_mut(&client).and_then(|c| c.streams.get_mut(&stream));
        if let Some(it) = it {
            it.host_done = it.host_done.max(seq);
        }
    }

    /// Streams of a client whose host function runs.
    pub(crate) fn hosts(&self, client: u32) -> impl Iterator<Item = u32> + '_ {
        self.clients.get(&client).into_iter().flat_map(|c| {
            c.busy
                .iter()
                .copied()
                .filter(|s| c.streams.get(s).is_some_and(|s| s.head == Head::Host))
        })
    }
}
