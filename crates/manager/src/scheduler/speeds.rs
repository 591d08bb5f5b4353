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

/// More profiles than this are not kept in memory: some tens of megabytes.
const MOST_KEPT: usize = 50_000;

type Key = (WorkloadName, GpuType);

/// Profiles that were read, also that there is none.
#[derive(Debug, Default)]
struct Profiles {
    kept: BTreeMap<Key, Option<ProfileRecord>>,
    /// How often something was forgotten. What was read before the last time may be old.
    generation: u64,
}

impl Profiles {
    fn keep(&mut self, generation: u64, key: Key, read: Option<ProfileRecord>) {
        if generation != self.generation {
            return;
        }
        if self.kept.len() >= MOST_KEPT && !self.kept.contains_key(&key) {
            // Those that are still asked for come back with the next plan.
            self.kept.clear();
        }
        self.kept.insert(key, read);
    }

    fn forget(&mut self, workload: &WorkloadName) {
        self.generation += 1;
        self.kept.retain(|(name, _), _| name != workload);
    }
}

/// Models in use, and profiles that were read.
#[derive(Debug, Default)]
pub struct Speeds {
    in_use: RwLock<InUse>,
    profiles: Mutex<Profiles>,
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
        let generation = {
            let profiles = unpoisoned(self.profiles.lock());
            if let Some(known) = profiles.kept.get(&key) {
                return Ok(known.clone());
            }
            profiles.generation
        };
        let read = manager.reader().profile(workload, gpu_type)?;
        unpoisoned(self.profiles.lock()).keep(generation, key, read.clone());
        Ok(read)
    }

    /// A new profile was written.
    pub fn forget(&self, workload: &WorkloadName) {
        unpoisoned(self.profiles.lock()).forget(workload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        (WorkloadName::new(name).unwrap(), GpuType::new("T4").unwrap())
    }

    #[test]
    fn what_was_read_before_something_new_was_written_is_not_kept() {
        let mut profiles = Profiles::default();
        let before = profiles.generation;
        // Somebody has read that there is none; before it is kept, a profile is written.
        profiles.forget(&key("a").0);
        profiles.keep(before, key("a"), None);
        assert_eq!(profiles.kept.get(&key("a")), None, "the store is asked again");
        profiles.keep(profiles.generation, key("a"), None);
        assert_eq!(profiles.kept.get(&key("a")), Some(&None));
    }

    #[test]
    fn memory_is_bounded() {
        let mut profiles = Profiles::default();
        for number in 0..=MOST_KEPT {
            profiles.keep(0, key(&format!("w{number}")), None);
            assert!(profiles.kept.len() <= MOST_KEPT);
        }
        assert!(profiles.kept.contains_key(&key(&format!("w{MOST_KEPT}"))));
    }
}
