//! Beyond the paper: up to two offline jobs on one GPU, packed by matching rounds and local
//! improvement. Two jobs need more memory than the paper's quota of 40 %, so all is lent that the
//! service and the reserve leave. Everything else is MuxFlow.

use muxflow_gpu_model::Sharing;
use muxflow_policy::cluster::{Parameters, plan_packed};
use muxflow_policy::node::quota::QuotaParams;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, dynamic};
use crate::outcome::{MOST_JOBS, Mode};
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowPacked;

impl Policy for MuxFlowPacked {
    fn name(&self) -> &'static str {
        "muxflow-packed"
    }

    fn about(&self) -> &'static str {
        "beyond the paper: dynamic SM share, up to two jobs on a GPU"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn most_jobs(&self) -> usize {
        MOST_JOBS
    }

    fn quota(&self) -> QuotaParams {
        QuotaParams { quota: Percent::FULL, ..QuotaParams::default() }
    }

    fn share(&self, need: Percent, sms: SmCount, _service: &Service) -> SmShare {
        dynamic(need, sms, 0.0)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        let parameters = Parameters { quota: self.quota(), ..Parameters::default() };
        plan_packed(snapshot, predictor, &parameters, MOST_JOBS).map_err(|e| e.to_string())
    }
}
