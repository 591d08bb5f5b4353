//! What one machine has measured and trained, as objects of a cluster: where jobs share GPUs from the
//! first moment on, nobody can be measured alone.

use muxflow_types::{Bytes, GpuType, Micros, Percent, ProfileRecord};

use crate::resource::{MAX_SOLO_SPEED, MIN_SOLO_SPEED, Model, ModelSpec, Profile, ProfileSpec};

/// An object's name may have 253 characters, of which the checksum takes nine.
const NAME_ROOM: usize = 240;

/// A profile as an object. `solo_speed` is against the type of GPU that counts as 1; one that cannot be
/// is left out.
pub fn profile(record: &ProfileRecord, solo_speed: Option<f64>) -> Profile {
    let (workload, gpu_type) = (record.workload.as_str(), record.gpu_type.as_str());
    let percent = |value: Option<Percent>| value.map(Percent::value);
    let spec = ProfileSpec {
        workload: workload.to_owned(),
        gpu_type: gpu_type.to_owned(),
        solo_speed: solo_speed.filter(|s| (MIN_SOLO_SPEED..=MAX_SOLO_SPEED).contains(s)),
        gpu_util_pct: percent(record.gpu_util),
        sm_activity_pct: percent(record.sm_activity),
        sm_occupancy_pct: percent(record.sm_occupancy),
        dram_activity_pct: percent(record.dram_activity),
        solo_time_us: record.solo_time.map(|Micros(us)| us),
        memory_bytes: record.memory.map(|Bytes(bytes)| bytes),
    };
    Profile::new(&name(&format!("{workload}-{gpu_type}")), spec)
}

/// A model as an object; `bytes` is the file that `muxflow train` wrote.
pub fn model(gpu_type: &GpuType, bytes: Vec<u8>, note: &str) -> Model {
    let spec = ModelSpec {
        gpu_type: gpu_type.as_str().to_owned(),
        data: k8s_openapi::ByteString(bytes),
        note: Some(note.to_owned()),
    };
    Model::new(&name(gpu_type.as_str()), spec)
}

/// A name for an object: the words as they are where Kubernetes allows them; otherwise what it allows of
/// them, and a checksum, so that two that look alike then stay apart.
fn name(words: &str) -> String {
    let allowed = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let kept: String = words.to_lowercase().chars().map(allowed).take(NAME_ROOM).collect();
    let kept = kept.trim_matches('-');
    if kept == words {
        return kept.to_owned();
    }
    // FNV-1a: the same on every machine and in every version.
    let sum = words
        .bytes()
        .fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{kept}-{sum:08x}").trim_start_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest;
    use muxflow_types::WorkloadName;

    #[test]
    fn names_are_those_that_kubernetes_allows_and_stay_apart() {
        assert_eq!(name("bert-t4"), "bert-t4");
        let all = ["d/train-T4", "d-train-T4", "D.train-t4", "---", "é", &"x".repeat(400)];
        let names: Vec<String> = all.iter().map(|words| name(words)).collect();
        for name in &names {
            let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(!name.is_empty() && name.len() <= 253 && name.chars().all(fine), "{name}");
            assert!(!name.starts_with('-') && !name.ends_with('-'), "{name}");
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let record = ProfileRecord {
            workload: WorkloadName::new("shop/bert").unwrap(),
            gpu_type: GpuType::new("T4").unwrap(),
            gpu_util: Percent::new(80.5).ok(),
            sm_activity: Percent::new(41.25).ok(),
            sm_occupancy: None,
            dram_activity: Percent::new(12.0).ok(),
            solo_time: Some(Micros(12_345)),
            memory: Some(Bytes(3 << 30)),
        };
        let written = profile(&record, Some(1.5));
        let text = manifest::document(&written);
        let read: Profile = serde_saphyr::from_str(&text).unwrap();
        assert_eq!((&read.metadata.name, &read.spec), (&written.metadata.name, &written.spec));
        assert_eq!(profile(&record, Some(1e39)).spec.solo_speed, None);
        let trained = model(&record.gpu_type, vec![1, 2, 255], "trees");
        let text = manifest::document(&trained);
        let read: Model = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(read.spec, trained.spec);
    }
}
