//! Online-only: no job runs anywhere; the latency that others are measured against.

use muxflow_gpu_model::Sharing;
use muxflow_types::{
    ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor, WaitReason, Waiting,
};

use super::Policy;
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct OnlineOnly;

impl Policy for OnlineOnly {
    fn name(&self) -> &'static str {
        "online-only"
    }

    fn about(&self) -> &'static str {
        "services alone; no offline job runs"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Exclusive, gated: false }
    }

    fn watched(&self) -> bool {
        false
    }

    fn share(&self, _need: Percent, sms: SmCount, _service: &Service) -> SmShare {
        super::part(sms, Percent::ZERO)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        _predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        let wait = |j: &muxflow_types::JobSnapshot| Waiting {
            job: j.job.clone(),
            reason: WaitReason::NoShare,
        };
        Ok(ClusterPlan {
            at: snapshot.at,
            certified: true,
            waiting: snapshot.jobs.iter().map(wait).collect(),
            ..ClusterPlan::default()
        })
    }
}
