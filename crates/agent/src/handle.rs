//! The agent as other threads see it: they look and give orders, they do not own it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use crate::error::{AgentError, Result};
use crate::gpu::{GpuShared, Order};
use crate::launch::{Exit, Kind};
use crate::runner::Runner;

/// What a GPU shares, and where its orders go.
pub(crate) type Ends = (Arc<GpuShared>, Sender<Order>);

/// A way to give orders and to look, for any number of threads.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    pub(crate) gpus: Arc<BTreeMap<String, Ends>>,
    pub(crate) order: Arc<[String]>,
    pub(crate) numbers: Arc<[usize]>,
    pub(crate) runner: Arc<Runner>,
    pub(crate) found: Arc<[(String, u64)]>,
}

impl AgentHandle {
    /// The GPUs, in the order of the driver.
    pub fn gpus(&self) -> &[String] {
        &self.order
    }

    /// The same with the numbers that the driver gave them: it counts those that cannot be used too.
    pub fn numbered_gpus(&self) -> impl Iterator<Item = (usize, &str)> {
        self.numbers.iter().copied().zip(self.order.iter().map(String::as_str))
    }

    /// What a GPU shares with its loops.
    pub fn shared(&self, uuid: &str) -> Option<&Arc<GpuShared>> {
        self.gpus.get(uuid).map(|(shared, _)| shared)
    }

    /// Gives an order to a GPU.
    pub fn order(&self, uuid: &str, order: Order) -> Result<()> {
        let unknown = || AgentError::Unknown { workload: format!("GPU {uuid}") };
        let (shared, orders) = self.gpus.get(uuid).ok_or_else(unknown)?;
        shared.status().claim(&order)?;
        orders.send(order).map_err(|_| unknown())
    }

    /// Offline runs of an earlier agent that were found on their way out, each with its number; an
    /// event tells their end.
    pub fn found(&self) -> &[(String, u64)] {
        &self.found
    }

    /// How the last start of a job ended, when that is written down.
    pub fn last_exit(&self, job: &str) -> Result<Option<Exit>> {
        self.runner.last_exit(Kind::Offline, job)
    }

    /// The file of a job's output, `stdout` or `stderr`.
    pub fn log_file(&self, job: &str, stream: &str) -> PathBuf {
        self.runner.log_file(Kind::Offline, job, stream)
    }

    /// Removes what is left of a job that has ended.
    pub fn forget(&self, job: &str) -> Result<()> {
        self.runner.forget(Kind::Offline, job)
    }
}
