//! The emulated MPS, as its clients see it.

use crate::client::Allowance;
use crate::facts::Facts;

/// Leave to use the GPUs through an MPS server, for as long as it is held.
#[derive(Debug)]
pub struct Admission {
    allowance: Allowance,
}

impl Admission {
    /// Asks the MPS daemon, if there is one.
    pub fn ask() -> Result<Option<Admission>, u32> {
        Ok(None)
    }

    /// What it allows on a GPU.
    pub fn allowance(&self, _: &Facts) -> Allowance {
        self.allowance
    }
}
