//! PTX of a useful subset, run for real: so that a vector add adds.
//!
//! [`parse`] reads the text, [`lower`] turns each kernel into numbered instructions, [`exec`] runs a
//! grid of them block by block on memory that the caller vouches for. What is not understood makes
//! that one kernel unknown, by name and reason; it is then timed only. Counting instructions on a
//! few sample threads also gives a kernel's cost ([`exec::probe`]).
//!
//! Absent on purpose: textures, surfaces, tensor-core and warp-group instructions, calls of
//! functions that were not inlined, and anything about time.

mod alu;
mod cell;
pub mod exec;
mod ins;
mod lower;
mod parse;
#[cfg(test)]
mod tests;
mod words;

pub use exec::{Grid, Memory, Outcome, Sample, probe, run};
pub use ins::{Kernel, Module, Variable};

/// Reads a module; kernels that cannot be run carry the reason instead of code.
pub fn load(text: &str) -> Result<Module, String> {
    lower::lower(&parse::parse(text)?)
}
