//! MPS: one control daemon and one server per GPU, kept alive by the agent and outliving it.
//!
//! A fatal fault of one client takes every client on the server with it, and a client of two servers
//! links them; so each GPU has a daemon of its own, with its own pipe directory. What the daemon says
//! of itself is not believed alone: only a client that attaches ([`probe`]) shows that one can.

pub mod control;
pub mod daemon;
pub mod partition;
pub mod probe;
