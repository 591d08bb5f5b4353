//! How the places of the local socket are shared out: no user takes them all, and some are kept for
//! operators, who must get in to mend things.
//!
//! A connection is counted when the kernel has told whose it is. One too many is told so and closed,
//! so that it keeps no place from whoever comes next.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The word for programs in [`TOO_MANY`].
pub const CODE: &str = "too-many";

/// What somebody with too many connections is told.
pub const TOO_MANY: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\n\
    content-type: application/json\r\ncontent-length: 100\r\nconnection: close\r\n\r\n\
    {\"code\":\"too-many\",\"message\":\"the manager has too many of your connections; end some, or try later\"}";

/// The places of a socket, and who has them.
#[derive(Debug)]
pub struct Seats {
    /// For one user.
    each: usize,
    /// For all who are no operators.
    together: usize,
    taken: Mutex<BTreeMap<u32, usize>>,
}

impl Seats {
    /// Shares so many places out: a quarter for each user, and an eighth is kept for operators.
    pub fn new(places: usize) -> Arc<Self> {
        let (each, kept) = ((places / 4).max(1), (places / 8).max(1));
        let taken = Mutex::default();
        Arc::new(Seats { each, together: places.saturating_sub(kept).max(1), taken })
    }

    /// A place for a user who is no operator; none when there are too many of them.
    pub fn take(self: &Arc<Self>, uid: u32) -> Option<Seat> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = taken.values().sum();
        let own = taken.get(&uid).copied().unwrap_or(0);
        if own >= self.each || all >= self.together {
            return None;
        }
        taken.insert(uid, own + 1);
        Some(Seat { seats: Arc::clone(self), uid })
    }
}

/// A place that is taken until this is dropped.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    uid: u32,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_takes_all_and_some_are_kept() {
        let seats = Seats::new(16);
        let mut first: Vec<Seat> = (0..20).map_while(|_| seats.take(1)).collect();
        assert_eq!(first.len(), 4, "a quarter");
        let others: Vec<Seat> = (2..20).filter_map(|uid| seats.take(uid)).collect();
        assert_eq!(others.len(), 10, "two are kept for operators");
        assert!(seats.take(30).is_none());
        first.pop();
        assert!(seats.take(30).is_some(), "and given back");
        drop((first, others));
        assert!(seats.taken.lock().unwrap().is_empty(), "nobody is remembered");
    }

    #[test]
    fn few_places_are_shared_out_too() {
        let seats = Seats::new(1);
        let one = seats.take(1);
        assert!(one.is_some() && seats.take(2).is_none());
    }

    #[test]
    fn the_refusal_is_as_long_as_it_says() {
        let text = std::str::from_utf8(TOO_MANY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{}", body.len());
        let problem: muxflow_api::problem::Problem = serde_json::from_str(body).unwrap();
        assert!(problem.message.contains("too many"));
        assert_eq!(problem.code, CODE);
    }
}
