//! The orders that wait for the slow loop, and which of them is next.
//!
//! An answer to an error can take seconds, and a driver can tell of many errors at once. A job that
//! must leave does not wait behind them.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use super::{FaultSeen, Order};

/// What came of waiting for an order.
#[derive(Debug)]
pub(super) enum Next {
    /// This one is next.
    Order(Order),
    /// None came in time.
    Nothing,
    /// Nobody will ever send one again.
    Closed,
}

/// Orders that were sent and not yet carried out.
#[derive(Debug)]
pub(super) struct Inbox {
    orders: Receiver<Order>,
    waiting: VecDeque<Order>,
    closed: bool,
}

/// Takes a job off the GPU.
fn is_urgent(order: &Order) -> bool {
    matches!(order, Order::Evict { .. } | Order::StopOffline { .. })
}

/// May be passed by what is urgent: it neither brings a job nor ends the loop.
fn may_wait(order: &Order) -> bool {
    matches!(
        order,
        Order::Fault(_) | Order::Blame(_) | Order::StartOnline(_) | Order::StopOnline(_)
    )
}

impl Inbox {
    pub(super) fn new(orders: Receiver<Order>) -> Self {
        Inbox { orders, waiting: VecDeque::new(), closed: false }
    }

    fn gather(&mut self) {
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.waiting.push_back(order),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// The next order; waits for at most `limit`.
    pub(super) fn next(&mut self, limit: Duration) -> Next {
        self.gather();
        if self.waiting.is_empty() && !self.closed {
            match self.orders.recv_timeout(limit) {
                Ok(order) => self.waiting.push_back(order),
                Err(RecvTimeoutError::Timeout) => return Next::Nothing,
                Err(RecvTimeoutError::Disconnected) => self.closed = true,
            }
            self.gather();
        }
        let passed = self.waiting.iter().take_while(|order| may_wait(order)).count();
        let index = if self.waiting.get(passed).is_some_and(is_urgent) { passed } else { 0 };
        self.waiting.remove(index).map_or(Next::Closed, Next::Order)
    }

    /// Errors that were told and not yet answered.
    pub(super) fn faults(&mut self) -> impl Iterator<Item = &mut FaultSeen> {
        self.gather();
        self.waiting.iter_mut().filter_map(|order| match order {
            Order::Fault(seen) | Order::Blame(seen) => Some(seen),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker::Ground;
    use crate::gpu::StopReason;
    use muxflow_policy::node::fault::Fault;
    use muxflow_types::{JobId, Micros};
    use std::sync::mpsc;

    fn fault() -> Order {
        Order::Fault(FaultSeen { at: Micros(1), fault: Fault::Xid(45), pid: Some(7) })
    }

    fn word(next: Next) -> &'static str {
        match next {
            Next::Order(Order::Fault(_)) => "fault",
            Next::Order(Order::Evict { .. }) => "evict",
            Next::Order(Order::StopOffline { .. }) => "stop",
            Next::Order(Order::Detach(_)) => "detach",
            Next::Order(Order::Shutdown) => "shutdown",
            Next::Order(_) => "other",
            Next::Nothing => "nothing",
            Next::Closed => "closed",
        }
    }

    #[test]
    fn a_job_that_must_leave_does_not_wait_behind_errors() {
        let (send, receive) = mpsc::channel();
        let mut inbox = Inbox::new(receive);
        assert_eq!(word(inbox.next(Duration::ZERO)), "nothing");
        for _ in 0..40 {
            send.send(fault()).unwrap();
        }
        send.send(Order::Evict { cause: "memory".into(), ground: Ground::Certain }).unwrap();
        assert_eq!(inbox.faults().count(), 40);
        assert_eq!(word(inbox.next(Duration::ZERO)), "evict");
        assert_eq!(word(inbox.next(Duration::ZERO)), "fault");
    }

    #[test]
    fn a_stop_does_not_overtake_what_brings_a_job_or_takes_one_away() {
        let (send, receive) = mpsc::channel();
        let mut inbox = Inbox::new(receive);
        send.send(fault()).unwrap();
        send.send(Order::Detach(JobId::new("a").unwrap())).unwrap();
        send.send(Order::StopOffline { job: None, reason: StopReason::Asked }).unwrap();
        send.send(Order::Shutdown).unwrap();
        drop(send);
        let all: Vec<_> = (0..5).map(|_| word(inbox.next(Duration::ZERO))).collect();
        assert_eq!(all, ["fault", "detach", "stop", "shutdown", "closed"]);
    }
}
