//! MPS: one control daemon and one server per GPU, kept alive by the agent and outliving it.
//!
//! A fatal fault of one client takes every client on the server with it, and a client of two servers
//! links them; so each GPU has a daemon of its own, with its own pipe directory.

pub mod control;
