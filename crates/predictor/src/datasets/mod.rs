//! Readers of measured pairs. They take text or bytes that the caller has read and unpacked, and
//! name the caller's file in every error.

pub mod gavel;
pub mod miso;
pub mod table;
