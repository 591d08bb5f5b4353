//! Tests of the matching as others see it, in one program.

mod brute_force;
mod instance;
mod larger;
