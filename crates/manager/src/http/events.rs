//! What happened: as a list, and as a stream that goes on.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures::Stream;
use futures::stream::{self, StreamExt};
use muxflow_api::events::{EventList, EventView};
use muxflow_api::problem::Problem;
use serde::Deserialize;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use utoipa::IntoParams;

use super::jobs::limit;
use super::problem::{Query, Refusal, blocking};
use super::server::Leaving;
use crate::bus;
use crate::error::Result as ManagerResult;
use crate::manager::Manager;
use crate::user::Caller;

/// Events read from the store at once.
const PAGE: usize = 500;

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// After this number; from the oldest kept when left out.
    after: Option<u64>,
    /// Of this kind.
    kind: Option<String>,
    /// At most so many.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u64>,
}

impl Manager {
    /// Events after a number, oldest first.
    pub fn events(
        &self,
        after: u64,
        kind: Option<&str>,
        limit: usize,
    ) -> ManagerResult<Vec<EventView>> {
        let rows = self.reader().events(after, kind, limit)?;
        Ok(rows.into_iter().map(bus::view_of_row).collect())
    }
}

/// Events, oldest first.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventQuery), responses(
    (status = 200, body = EventList), (status = "4XX", body = Problem)))]
pub async fn list(
    State(manager): State<Arc<Manager>>,
    _: Caller,
    Query(query): Query<EventQuery>,
) -> Result<Json<EventList>, Refusal> {
    let limit = limit(query.limit, 100, 1..=1000)?;
    let after = query.after.unwrap_or(0);
    let kind = query.kind;
    let mut items = blocking(move || manager.events(after, kind.as_deref(), limit + 1)).await?;
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().map_or(after, |event| event.seq);
    Ok(Json(EventList { items, next, more }))
}

/// From where.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StreamQuery {
    /// After this number, what is kept first; only what comes from now on when left out.
    after: Option<u64>,
}

/// Where a stream of events is.
struct Reading {
    manager: Arc<Manager>,
    listening: Receiver<EventView>,
    leaving: Leaving,
    ready: std::collections::VecDeque<EventView>,
    after: u64,
    catching_up: bool,
}

impl Reading {
    /// The next event; none when the server leaves.
    async fn next(&mut self) -> Option<EventView> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.after = event.seq;
                return Some(event);
            }
            if self.catching_up {
                let (manager, after) = (Arc::clone(&self.manager), self.after);
                let page = blocking(move || manager.events(after, None, PAGE)).await.ok()?;
                self.catching_up = page.len() == PAGE;
                self.ready.extend(page);
                continue;
            }
            tokio::select! {
                heard = self.listening.recv() => match heard {
                    // One in between was not heard, or will be heard late: the store has all.
                    Ok(event) if event.seq.saturating_sub(1) > self.after => self.catching_up = true,
                    Ok(event) if event.seq > self.after => self.ready.push_back(event),
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => self.catching_up = true,
                    Err(RecvError::Closed) => return None,
                },
                () = self.leaving.wait() => return None,
            }
        }
    }
}

/// Events as they happen, as server-sent events whose id is the event's number. A client that comes
/// back with `Last-Event-ID` misses none.
#[utoipa::path(get, path = "/v1/events/stream", tag = "events", params(StreamQuery), responses(
    (status = 200, content_type = "text/event-stream", body = String),
    (status = "4XX", body = Problem)))]
pub async fn stream(
    State(manager): State<Arc<Manager>>,
    axum::Extension(leaving): axum::Extension<Leaving>,
    _: Caller,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let asked = last.or(query.after);
    // Listen first, then look what is kept: nothing falls between the two.
    let listening = manager.bus.listen();
    let looked = Arc::clone(&manager);
    let newest = blocking(move || Ok(looked.reader().last_event()?)).await?;
    let reading = Reading {
        manager,
        listening,
        leaving,
        ready: std::collections::VecDeque::new(),
        after: asked.unwrap_or(newest),
        catching_up: asked.is_some(),
    };
    let events = stream::unfold(reading, |mut reading| async move {
        reading.next().await.map(|event| (event, reading))
    });
    let sent = events.map(|event| {
        let data = serde_json::to_string(&event).unwrap_or_default();
        Ok(Event::default().id(event.seq.to_string()).event(event.kind).data(data))
    });
    Ok(Sse::new(sent).keep_alive(KeepAlive::new().interval(Duration::from_secs(10))))
}
