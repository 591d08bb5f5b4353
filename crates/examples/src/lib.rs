//! What the two example programs share: the CUDA driver opened at run time, networks sized like
//! well-known ones, and the PTX that stands for their layers.
//!
//! They are ordinary driver-API programs: on a machine with a GPU they run on it, and nothing in
//! them knows of MuxFlow or of emulation.
//!
//! Absent on purpose: real network mathematics. A layer does as many multiply-adds on as many bytes
//! as the layer it stands for, so that its time and its load are like the real one's.

pub mod driver;
pub mod histogram;
pub mod network;
pub mod signals;
