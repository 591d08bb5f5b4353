//! Profiles by workload and type, from the cluster's objects.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use muxflow_predictor::Registry;
use muxflow_types::{Bytes, GpuType, Micros, Percent, ProfileRecord, WorkloadName};

use crate::resource::{MAX_SOLO_SPEED, MIN_SOLO_SPEED, Profile};

/// Nobody has measured these, and no model was trained with them. By default each Job is a workload of
/// its own; those of which nothing is known are all the same to the planner, so they carry one name
/// and are planned as one kind.
const UNPROFILED: &str = "unprofiled";

/// Speeds that one type of GPU can have against another; what is outside was measured wrongly, and a
/// weight out of all proportion would leave no plan at all.
const SOLO_SPEEDS: RangeInclusive<f64> = MIN_SOLO_SPEED..=MAX_SOLO_SPEED;

/// Profiles by workload and type.
#[derive(Debug)]
pub(crate) struct Profiles<'a> {
    map: BTreeMap<(WorkloadName, GpuType), (ProfileRecord, Option<f64>)>,
    models: &'a Registry,
}

impl<'a> Profiles<'a> {
    pub(crate) fn new(objects: &[Arc<Profile>], models: &'a Registry) -> Self {
        let mut map = BTreeMap::new();
        for object in objects {
            let spec = &object.spec;
            let (Ok(workload), Ok(gpu_type)) =
                (WorkloadName::new(&spec.workload), GpuType::new(&spec.gpu_type))
            else {
                continue;
            };
            let percent = |v: Option<f64>| v.and_then(Percent::clamped);
            let record = ProfileRecord {
                workload: workload.clone(),
                gpu_type: gpu_type.clone(),
                gpu_util: percent(spec.gpu_util_pct),
                sm_activity: percent(spec.sm_activity_pct),
                sm_occupancy: percent(spec.sm_occupancy_pct),
                dram_activity: percent(spec.dram_activity_pct),
                solo_time: spec.solo_time_us.map(Micros),
                memory: spec.memory_bytes.map(Bytes),
            };
            let speed = spec.solo_speed.filter(|speed| SOLO_SPEEDS.contains(speed));
            map.insert((workload, gpu_type), (record, speed));
        }
        Profiles { map, models }
    }

    /// What is known of a workload on a kind of GPU, whose real type is given too.
    pub(crate) fn get(
        &self,
        workload: &WorkloadName,
        real: &GpuType,
        kind: &GpuType,
    ) -> ProfileRecord {
        match self.map.get(&(workload.clone(), real.clone())) {
            Some((record, _)) => ProfileRecord { gpu_type: kind.clone(), ..record.clone() },
            None => ProfileRecord::unknown(self.name(workload), kind.clone()),
        }
    }

    /// The workload, if something is known of it on one of these types; else the name of those of
    /// which nothing is.
    pub(crate) fn known<'t>(
        &self,
        workload: &WorkloadName,
        mut real_types: impl Iterator<Item = &'t GpuType>,
    ) -> WorkloadName {
        let known = real_types.any(|t| self.map.contains_key(&(workload.clone(), t.clone())));
        if known { workload.clone() } else { self.name(workload) }
    }

    /// The name of a workload without a profile: its own, where a model knows it by that.
    fn name(&self, workload: &WorkloadName) -> WorkloadName {
        let name = workload.as_str();
        let seen = self
            .models
            .models()
            .any(|model| model.online_seen.contains(name) || model.offline_seen.contains(name));
        match WorkloadName::new(UNPROFILED) {
            Ok(unprofiled) if !seen => unprofiled,
            _ => workload.clone(),
        }
    }

    pub(crate) fn speed(&self, workload: &WorkloadName, gpu_type: &GpuType) -> Option<f64> {
        self.map.get(&(workload.clone(), gpu_type.clone())).and_then(|(_, speed)| *speed)
    }
}
