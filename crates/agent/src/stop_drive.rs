//! Carries out a stop on the control block of a job: the keeper does it, and the agent in its place
//! when the keeper was killed.

use std::time::{Duration, Instant};

use crate::control_block::ControlBlock;
use crate::launch::Launch;
use crate::mps::control::MpsControl;
use crate::stop::{Act, Sight, StepTaken, StopOrder};

/// A stop under way.
#[derive(Debug)]
pub(crate) struct StopDrive {
    order: StopOrder,
    began: Instant,
    block: Option<ControlBlock>,
}

/// The control block of a job, when it has one that can be used.
pub(crate) fn block_of(launch: &Launch) -> Option<ControlBlock> {
    let opened = ControlBlock::open(launch.control_dir.as_deref()?);
    opened
        .inspect_err(|error| tracing::warn!(error = %error, "stopping without a control block"))
        .ok()
}

impl StopDrive {
    /// Begins: the work in flight is drained.
    pub(crate) fn begin(launch: &Launch) -> Self {
        let block = block_of(launch);
        let (order, first) = StopOrder::begin(launch.stop, 0);
        if let (Some(block), Act::SetGate(gate)) = (&block, first) {
            block.set_gate(gate);
        }
        StopDrive { order, began: Instant::now(), block }
    }

    /// What it went through so far.
    pub(crate) fn taken(&self) -> &[StepTaken] {
        self.order.taken()
    }

    /// Looks, and does what is next; `signal` sends the main process the signal it is to save its
    /// state at. True when nothing is left to do but to kill the group.
    pub(crate) fn turn(&mut self, launch: &Launch, main_alive: bool, signal: impl Fn(i32)) -> bool {
        // The agent may be gone: the job must not take its silence for a reason to stop early.
        if let Some(block) = &self.block {
            block.beat();
        }
        let answers = self.block.as_ref().map(ControlBlock::answers);
        let sight = Sight {
            main_alive,
            live: answers.map_or(0, |a| a.live),
            drained: answers.map_or(0, |a| a.drained),
            released: answers.map_or(0, |a| a.released),
        };
        let elapsed_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        for act in self.order.advance(elapsed_ms, sight) {
            match act {
                Act::SetGate(gate) => {
                    if let Some(block) = &self.block {
                        block.set_gate(gate);
                    }
                }
                Act::SignalProgram => signal(launch.stop.signal),
                Act::TerminateClients => self.terminate_clients(launch),
                Act::KillGroup => return true,
            }
        }
        false
    }

    fn terminate_clients(&self, launch: &Launch) {
        let Some((program, pipe_dir)) = &launch.mps else { return };
        let limit = Duration::from_millis(launch.stop.terminate_ms.max(100));
        let control = MpsControl::new(program.clone(), pipe_dir.clone(), limit);
        let mine = self.block.as_ref().map(ControlBlock::registered).unwrap_or_default();
        match control.terminate_clients(&mine) {
            Ok(cut) => tracing::info!(workload = launch.name, cut, "clients terminated"),
            Err(error) => {
                tracing::warn!(workload = launch.name, error = %error, "cannot terminate clients");
            }
        }
    }
}
