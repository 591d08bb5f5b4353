//! Tells everybody who listens what happened, after it was written down.

use muxflow_api::events::EventView;
use muxflow_store::events::{EventRow, NewEvent};
use tokio::sync::broadcast;

/// Listeners that are slower than this many events lose some, and read them from the store.
const KEPT: usize = 4096;

/// The bus.
#[derive(Debug, Clone)]
pub struct Bus(broadcast::Sender<EventView>);

impl Default for Bus {
    fn default() -> Self {
        Bus(broadcast::channel(KEPT).0)
    }
}

/// An event as it was just written.
pub fn view(seq: u64, event: NewEvent) -> EventView {
    EventView {
        seq,
        at_us: event.at.0,
        kind: event.kind.to_owned(),
        gpu: event.gpu,
        job: event.job,
        service: event.service,
        text: event.text,
    }
}

/// An event as it is kept.
pub fn view_of_row(row: EventRow) -> EventView {
    EventView {
        seq: row.seq,
        at_us: row.at.0,
        kind: row.kind,
        gpu: row.gpu,
        job: row.job,
        service: row.service,
        text: row.text,
    }
}

impl Bus {
    /// Tells it.
    pub fn tell(&self, event: EventView) {
        // Nobody may listen: that is no error.
        drop(self.0.send(event));
    }

    /// Listens from now on.
    pub fn listen(&self) -> broadcast::Receiver<EventView> {
        self.0.subscribe()
    }
}
