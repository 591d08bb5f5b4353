//! `muxflow export`: profiles and models of one machine's store, as objects for a cluster.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_kubernetes::{export, manifest};
use muxflow_store::Store;
use muxflow_types::{GpuType, Micros, WorkloadName};

/// Print the profiles and the models in use of a store as objects of a Kubernetes cluster, for
/// `kubectl apply -f -`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The profile store that `muxflow up` keeps, or `muxflow train --store` wrote.
    #[arg(long, value_name = "FILE.db")]
    store: PathBuf,
    /// The GPU type whose speed counts as 1; by default the one with the most profiles.
    #[arg(long, value_name = "TYPE")]
    reference: Option<String>,
}

pub(crate) fn run(args: &ExportArgs) -> anyhow::Result<ExitCode> {
    let store = Store::open_read_only(&args.store)?;
    let reference = args.reference.as_deref().map(GpuType::new).transpose();
    let text = objects(&store, reference.context("--reference")?)?;
    if text.is_empty() {
        bail!(
            "{} holds no profile and no model in use: run jobs with `muxflow up`, or `muxflow train --store`",
            args.store.display()
        );
    }
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to the standard output")?;
    Ok(ExitCode::SUCCESS)
}

fn objects(store: &Store, reference: Option<GpuType>) -> anyhow::Result<String> {
    let profiles = store.profiles()?;
    let mut counts: BTreeMap<&GpuType, usize> = BTreeMap::new();
    for profile in &profiles {
        *counts.entry(&profile.gpu_type).or_default() += 1;
    }
    let commonest = || counts.iter().max_by_key(|(_, n)| **n).map(|(t, _)| (*t).clone());
    let reference = reference.or_else(commonest);
    let on_reference: BTreeMap<&WorkloadName, Micros> = profiles
        .iter()
        .filter(|profile| Some(&profile.gpu_type) == reference.as_ref())
        .filter_map(|profile| Some((&profile.workload, profile.solo_time?)))
        .collect();
    let mut text = String::new();
    for profile in &profiles {
        let here = profile.solo_time.map(Micros::as_secs_f64).filter(|s| *s > 0.0);
        let there = on_reference.get(&profile.workload).map(|time| time.as_secs_f64());
        let speed = there.zip(here).map(|(there, here)| there / here);
        text.push_str(&manifest::document(&export::profile(profile, speed)));
    }
    for row in store.models()?.into_iter().filter(|row| row.in_use) {
        let note = format!("{}, error on unseen workloads {:.4}", row.kind, row.unseen_error);
        text.push_str(&manifest::document(&export::model(&row.gpu_type, row.bytes, &note)));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_store::NewModel;
    use muxflow_types::ProfileRecord;

    #[test]
    fn the_newest_profiles_and_the_models_in_use_are_printed() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(&dir.path().join("profiles.db")).unwrap();
        assert_eq!(objects(&store, None).unwrap(), "");
        let record = |gpu_type: &str, us: u64| ProfileRecord {
            solo_time: Some(Micros(us)),
            ..ProfileRecord::unknown(
                WorkloadName::new("bert").unwrap(),
                GpuType::new(gpu_type).unwrap(),
            )
        };
        store.put_profile(&record("T4", 9_000), Micros(1)).unwrap();
        store.put_profile(&record("T4", 3_000), Micros(2)).unwrap();
        store.put_profile(&record("A10", 1_000), Micros(3)).unwrap();
        let t4 = GpuType::new("T4").unwrap();
        for (kind, in_use) in [("mean", true), ("trees", true), ("mlp", false)] {
            let model = NewModel {
                gpu_type: &t4,
                kind,
                bytes: kind.as_bytes(),
                checksum: kind,
                card: "",
                unseen_error: 0.05,
                parent: None,
                created_at: Micros(1),
            };
            store.put_model(&model, in_use).unwrap();
        }
        let text = objects(&store, Some(t4)).unwrap();
        let of = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        assert_eq!((of("kind: \"Profile\""), of("kind: \"Model\"")), (2, 1), "{text}");
        for words in ["soloSpeed: 1.0", "soloSpeed: 3.0", "soloTimeUs: 3000", "trees, error"] {
            assert_eq!(of(words), 1, "{words} in {text}");
        }
        assert_eq!(of("soloTimeUs: 9000"), 0, "an old profile: {text}");
    }
}
