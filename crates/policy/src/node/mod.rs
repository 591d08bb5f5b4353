//! The laws of one GPU. They see samples and the time, and say what may run.
