//! Rolling restarts: replicas are replaced one after another.
//!
//! The new one comes first, and the old one leaves once the new one serves. Only where nothing but the
//! old one's own GPU is left does the old one leave first, right after a write that shows that the disk
//! takes one. For any other reason for which a new one cannot be started the old one stays, and the
//! rollout waits and says why.

use std::time::Instant;

use super::start::NotStarted;
use super::{Phase, Service, Slot};
use crate::executor::Place;
use crate::pool::ReplicaState;

#[derive(Debug)]
pub(super) struct Rolling {
    pub(super) old: String,
    new: Option<String>,
}

impl Service {
    /// One step of a rolling restart, if one is under way or asked for.
    pub(super) fn roll(&mut self, places: &[Place]) {
        match self.rolling.take() {
            Some(Rolling { old, new: Some(new) }) if self.has(&old) && self.has(&new) => {
                // The old one leaves once the new one serves.
                if self.is_ready(&new) {
                    self.leave(&old);
                }
                self.rolling = Some(Rolling { old, new: Some(new) });
            }
            Some(Rolling { old, new: Some(new) }) if self.is_up(&old) => {
                self.new_is_gone(old, &new)
            }
            // It was to go first, and its successor could not be written down.
            Some(Rolling { old, new: None }) if self.is_up(&old) => self.to_restart.push_front(old),
            Some(rolling) if self.has(&rolling.old) => {
                self.leave(&rolling.old);
                self.rolling = Some(rolling);
            }
            Some(rolling) => {
                // The old one is gone; the next waits until all others serve again.
                let up: Vec<&Slot> = self.slots.iter().filter(|s| s.phase == Phase::Up).collect();
                let whole = up.len() >= self.wanted() as usize
                    && up.iter().all(|slot| slot.replica.state().0 == ReplicaState::Ready);
                if !whole {
                    self.rolling = Some(rolling);
                }
            }
            None => {}
        }
        if self.rolling.is_none() {
            self.roll_next(places);
        }
    }

    /// The new one was never ready, or could not even be ordered; the old one serves.
    fn new_is_gone(&mut self, old: String, new: &str) {
        if let Some((_, reason)) = self.not_started.take_if(|(name, _)| name == new) {
            self.rollout_waits = Some(waits(&old, &reason));
            self.to_restart.push_front(old);
            return;
        }
        // What serves now stays, and nothing else is replaced.
        let text = format!(
            "the rolling restart was ended: {new} was not ready within {} s, and {old} goes on as it was; mend the declaration and declare it again",
            self.spec.health.restart_after.as_secs_f64()
        );
        tracing::error!(service = %self.spec.name, "{text}");
        self.to_restart.clear();
        self.ended_rollout = Some(text);
    }

    fn roll_next(&mut self, places: &[Place]) {
        while let Some(old) = self.to_restart.pop_front() {
            if !self.has(&old) {
                continue;
            }
            if Instant::now() < self.not_before {
                self.to_restart.push_front(old);
                return;
            }
            self.rollout_waits = None;
            match self.try_start(places) {
                // With a free GPU the new one comes first.
                Ok(new) => self.rolling = Some(Rolling { old, new: Some(new) }),
                Err(NotStarted::NoRoom(_)) if self.makes_room(&old, places) => self.make_room(old),
                Err(NotStarted::NoRoom(reason) | NotStarted::Otherwise(reason)) => {
                    self.rollout_waits = Some(waits(&old, &reason));
                    self.to_restart.push_front(old);
                }
            }
            return;
        }
        self.rollout_waits = None;
    }

    /// Lets the old one go first, unless its successor could not be written down.
    fn make_room(&mut self, old: String) {
        if let Some((why, _)) = &self.cannot_write {
            self.rollout_waits = Some(waits(&old, why));
            self.to_restart.push_front(old);
            return;
        }
        self.go_first(&old);
        self.rolling = Some(Rolling { old, new: None });
    }

    /// Whether the GPU of a replica is one for its successor.
    fn makes_room(&self, name: &str, places: &[Place]) -> bool {
        let slot = self.slots.iter().find(|slot| slot.replica.name == name);
        let place = slot.and_then(|slot| places.iter().find(|p| p.id == slot.replica.place));
        place.is_some_and(|place| place.usable && self.fits(place))
    }
}

fn waits(old: &str, reason: &str) -> String {
    format!("the rolling restart waits, and {old} goes on as it was: {reason}")
}
