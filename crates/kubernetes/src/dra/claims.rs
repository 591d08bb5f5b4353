//! What was given to whom by a claim, in one file for each claim: an agent that restarts knows its
//! guests again without asking anybody.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use muxflow_agent::cgroup::encode;
use muxflow_types::{Bytes, GpuId, JobId, SmCount, SmShare};
use serde::{Deserialize, Serialize};

use crate::device::plugin::Kind;
use crate::node::placed::Grant;
use crate::whole_file;

/// A claim that was prepared.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Claimed {
    /// The pod that uses it.
    pub(crate) pod: JobId,
    pub(crate) kind: Kind,
    pub(crate) grant: Grant,
}

/// One file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Record {
    pod: String,
    offline: bool,
    gpu: String,
    share_sms: u32,
    sms: u32,
    quota_bytes: u64,
}

impl Record {
    fn of(claimed: &Claimed) -> Self {
        let grant = &claimed.grant;
        Record {
            pod: claimed.pod.as_str().to_owned(),
            offline: claimed.kind == Kind::Offline,
            gpu: grant.gpu.to_string(),
            share_sms: grant.share.sms().0,
            sms: grant.share.total().0,
            quota_bytes: grant.quota.0,
        }
    }

    fn read(text: &[u8]) -> Result<Claimed, String> {
        let record: Record = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let share = SmShare::new(SmCount(record.share_sms), SmCount(record.sms));
        Ok(Claimed {
            pod: JobId::new(&record.pod).map_err(|e| e.to_string())?,
            kind: if record.offline { Kind::Offline } else { Kind::Online },
            grant: Grant {
                gpu: GpuId::new(&record.gpu).map_err(|e| e.to_string())?,
                share: share.map_err(|e| e.to_string())?,
                quota: Bytes(record.quota_bytes),
            },
        })
    }
}

/// Where the runtime looks for what a claim gives, in its folder of devices.
pub(crate) fn cdi_file(cdi: &Path, uid: &str) -> PathBuf {
    cdi.join(format!("muxflow.dev-claim-{}.json", encode(uid)))
}

/// All claims that are prepared on this node, by their uids.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    claims: Mutex<BTreeMap<String, Claimed>>,
}

impl Store {
    /// With what an earlier agent left in the folder. A file that cannot be read is left alone and
    /// told of: its pod is then refused at its gate, and the kubelet prepares it anew.
    pub(crate) fn open(folder: PathBuf) -> Self {
        let mut claims = BTreeMap::new();
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let Some(uid) = path.file_name().and_then(|n| n.to_str()?.strip_suffix(".json")) else {
                continue;
            };
            let read = fs::read(&path).map_err(|e| e.to_string());
            match read.and_then(|text| Record::read(&text)) {
                Ok(claimed) => {
                    claims.insert(uid.to_owned(), claimed);
                }
                Err(error) => {
                    tracing::warn!(file = %path.display(), error, "a claim that was prepared here cannot be read");
                }
            }
        }
        Store { folder, claims: Mutex::new(claims) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Claimed>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{}.json", encode(uid)))
    }

    /// Remembers a claim, on disk first.
    pub(crate) fn insert(&self, uid: &str, claimed: Claimed) -> Result<(), String> {
        let text = serde_json::to_vec(&Record::of(&claimed)).map_err(|e| e.to_string())?;
        let mut claims = self.lock();
        whole_file::write(&self.file(uid), &text)?;
        claims.insert(uid.to_owned(), claimed);
        Ok(())
    }

    pub(crate) fn get(&self, uid: &str) -> Option<Claimed> {
        self.lock().get(uid).cloned()
    }

    /// Forgets a claim; one that is not known is forgotten already.
    pub(crate) fn remove(&self, uid: &str) -> Result<(), String> {
        self.lock().remove(uid);
        whole_file::remove(&self.file(uid))
    }

    /// Forgets the claims of pods that are over. The kubelet lets claims go by itself, unless it has
    /// lost its own memory of them; then a record would keep its GPU for ever. What the runtime was
    /// told of them, in `cdi`, goes too.
    pub(crate) fn forget_if(&self, cdi: Option<&Path>, is_over: impl Fn(&JobId) -> bool) {
        // Under one lock: the claim may be on its way to the next pod, whose files are written under it
        // or later.
        self.lock().retain(|uid, claimed| {
            let over = is_over(&claimed.pod);
            if over {
                tracing::warn!(claim = uid, pod = %claimed.pod, "a claim has outlived its pod");
                self.remove_files(uid, cdi);
            }
            !over
        });
    }

    fn remove_files(&self, uid: &str, cdi: Option<&Path>) {
        for file in cdi.map(|cdi| cdi_file(cdi, uid)).into_iter().chain([self.file(uid)]) {
            if let Err(error) = whole_file::remove(&file) {
                tracing::warn!(claim = uid, error, "a file of a claim cannot be removed");
            }
        }
    }

    /// What pods were given for offline work, by their uids.
    pub(crate) fn offline(&self) -> BTreeMap<JobId, Grant> {
        let claims = self.lock();
        let offline = claims.values().filter(|claimed| claimed.kind == Kind::Offline);
        offline.map(|claimed| (claimed.pod.clone(), claimed.grant.clone())).collect()
    }

    /// Whether a service holds a GPU by another claim than this one.
    pub(crate) fn serves_another(&self, gpu: &str, uid: &str) -> bool {
        let on =
            |claimed: &Claimed| claimed.kind == Kind::Online && claimed.grant.gpu.as_str() == gpu;
        self.lock().iter().any(|(own, claimed)| own != uid && on(claimed))
    }

    /// The GPUs that services hold, and the uids of their pods.
    pub(crate) fn online(&self) -> Vec<(String, JobId)> {
        let claims = self.lock();
        let online = claims.values().filter(|claimed| claimed.kind == Kind::Online);
        online.map(|claimed| (claimed.grant.gpu.to_string(), claimed.pod.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_outlive_the_agent_and_broken_files_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_owned());
        let claimed = |kind| Claimed {
            pod: JobId::new("pod-1").unwrap(),
            kind,
            grant: Grant {
                gpu: GpuId::new("GPU-1").unwrap(),
                share: SmShare::new(SmCount(10), SmCount(40)).unwrap(),
                quota: Bytes(1 << 30),
            },
        };
        store.insert("c-1", claimed(Kind::Offline)).unwrap();
        store.insert("c-2", claimed(Kind::Online)).unwrap();
        fs::write(folder.path().join("c-3.json"), "{\"pod\": 1").unwrap();
        let again = Store::open(folder.path().to_owned());
        assert_eq!(again.get("c-1"), Some(claimed(Kind::Offline)));
        assert_eq!(again.offline().len(), 1);
        assert_eq!(again.online(), [("GPU-1".to_owned(), JobId::new("pod-1").unwrap())]);
        assert_eq!(again.get("c-3"), None);
        assert!(again.serves_another("GPU-1", "c-1") && !again.serves_another("GPU-1", "c-2"));
        again.remove("c-1").unwrap();
        again.remove("c-1").unwrap();
        assert!(Store::open(folder.path().to_owned()).offline().is_empty());
    }
}
