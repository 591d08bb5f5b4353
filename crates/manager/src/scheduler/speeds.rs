//! Where predictions come from: the models of the store, and the profiles of workloads, kept in
//! memory until something new is written.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use muxflow_predictor::{Registry, file};
use muxflow_store::Store;
use muxflow_types::{GpuType, ProfileRecord, WorkloadName};

use super::record;
use crate::error::Result;
use crate::manager::Manager;

#[derive(Debug, Default)]
struct InUse {
    registry: Arc<Registry>,
    words: String,
    texts: BTreeMap<String, String>,
}

/// Models in use, and profiles that were read.
#[derive(Debug, Default)]
pub struct Speeds {
    in_use: RwLock<InUse>,
    profiles: Mutex<BTreeMap<(WorkloadName, GpuType), Option<ProfileRecord>>>,
}

fn unpoisoned<T>(result: std::result::Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

impl Speeds {
    /// Takes the models of the store into use, for these GPU types. One that cannot be read is told
    /// and left out: the conservative rule stands in.
    pub fn load(&self, store: &Store, types: impl IntoIterator<Item = GpuType>) -> Result<()> {
        let mut registry = Registry::default();
        let mut texts = BTreeMap::new();
        let mut words = Vec::new();
        for gpu_type in types {
            let Some(row) = store.model_in_use(&gpu_type)? else {
                words.push(format!("{gpu_type} by the conservative rule"));
                continue;
            };
            match file::from_bytes_for(&row.bytes, &gpu_type) {
                Ok(model) => {
                    words.push(format!("{gpu_type} by {} {}", row.kind, row.checksum));
                    texts.insert(gpu_type.as_str().to_owned(), record::model_text(&row.bytes));
                    registry.insert(model);
                }
                Err(error) => {
                    tracing::error!(%gpu_type, error = %error, "the model in use cannot be read");
                    words.push(format!(
                        "{gpu_type} by the conservative rule (model {} is damaged)",
                        row.id.0
                    ));
                }
            }
        }
        let in_use = InUse { registry: Arc::new(registry), words: words.join(", "), texts };
        *unpoisoned(self.in_use.write()) = in_use;
        Ok(())
    }

    /// The models in use.
    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&unpoisoned(self.in_use.read()).registry)
    }

    /// Where speeds come from, in words.
    pub fn words(&self) -> String {
        unpoisoned(self.in_use.read()).words.clone()
    }

    /// The models, for a record.
    pub fn model_texts(&self) -> BTreeMap<String, String> {
        unpoisoned(self.in_use.read()).texts.clone()
    }

    /// The profile of a workload on a GPU type. The store is asked only for what is not known yet,
    /// so that nobody waits for it while a plan is made.
    pub fn profile(
        &self,
        manager: &Manager,
        workload: &WorkloadName,
        gpu_type: &GpuType,
    ) -> Result<Option<ProfileRecord>> {
        let key = (workload.clone(), gpu_type.clone());
        if let Some(known) = unpoisoned(self.profiles.lock()).get(&key) {
            return Ok(known.clone());
        }
        let read = manager.reader().profile(workload, gpu_type)?;
        unpoisoned(self.profiles.lock()).insert(key, read.clone());
        Ok(read)
    }

    /// A new profile was written.
    pub fn forget(&self, workload: &WorkloadName) {
        unpoisoned(self.profiles.lock()).retain(|(name, _), _| name != workload);
    }
}
