//! Model files, pairs at once, missing features, selection: on made-up measurements with a known law.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::ops::ControlFlow;

use muxflow_predictor::model::{FitOptions, Model, ModelKind};
use muxflow_predictor::random::Rng;
use muxflow_predictor::select::{SelectOptions, hold_out, judge, select};
use muxflow_predictor::simd::InstructionSet;
use muxflow_predictor::trained::{Card, TrainedModel};
use muxflow_predictor::{ConservativeRule, Dataset, Registry, SpeedSample, file};
use muxflow_types::{
    Bytes, GpuType, Micros, OfflineInput, OnlineInput, Percent, ProfileRecord, Provenance, SmCount,
    SmShare, SpeedPredictor, WorkloadName,
};
use proptest::prelude::*;

fn percent(fraction: f64) -> Percent {
    Percent::clamped(fraction * 100.0).unwrap()
}

/// A workload with its own load, some features missing at random.
fn profile(name: &str, load: f64, missing: f64, rng: &mut Rng) -> ProfileRecord {
    let mut record =
        ProfileRecord::unknown(WorkloadName::new(name).unwrap(), GpuType::new("T4").unwrap());
    let mut keep = |value: f64| (rng.unit() >= missing).then(|| percent(value));
    record.gpu_util = keep((load * 1.3).min(1.0));
    record.sm_activity = keep(load);
    record.sm_occupancy = keep(load * 0.7);
    record.dram_activity = keep(load * 0.5);
    record.memory = Some(Bytes::from_gib(2).scaled(percent(load)));
    record.solo_time = Some(Micros::from_millis(20));
    record
}

/// Speed falls with the load of both and rises with the share.
fn measured(count: usize, missing: f64, seed: u64) -> Dataset {
    let mut rng = Rng::new(seed);
    let mut samples = Vec::new();
    for _ in 0..count {
        let (on, off) = (rng.below(9), rng.below(7));
        let (on_load, off_load) = (0.1 + 0.07 * on as f64, 0.2 + 0.1 * off as f64);
        let share = 0.1 * (1 + rng.below(10)) as f64;
        let stretch = (1.0 - off_load) + off_load / share + on_load * off_load * 0.8;
        samples.push(SpeedSample {
            online: profile(&format!("web-{on}"), on_load, missing, &mut rng),
            offline: profile(&format!("train-{off}"), off_load, missing, &mut rng),
            share: Some(percent(share)),
            speed: (1.0 / stretch + 0.01 * rng.normal()).clamp(0.0, 1.0),
            at: Micros(samples.len() as u64),
        });
    }
    Dataset { gpu_type: GpuType::new("T4").unwrap(), origin: "a test".into(), samples }
}

fn trained(kind: ModelKind, data: &Dataset) -> TrainedModel {
    let mut options = FitOptions::default();
    options.mlp.max_epochs = 30;
    options.trees.rounds = 40;
    let (model, _) = Model::fit(kind, data, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    TrainedModel {
        gpu_type: data.gpu_type.clone(),
        model,
        online_seen: data.samples.iter().map(|s| s.online.workload.to_string()).collect(),
        offline_seen: data.samples.iter().map(|s| s.offline.workload.to_string()).collect(),
        deviation: [0.05, 0.1, 0.2],
        card: Card { origin: "a test".into(), parent: Some("abc".into()), ..Card::default() },
    }
}

fn inputs(data: &Dataset) -> (Vec<OnlineInput>, Vec<OfflineInput>) {
    let share = |s: &SpeedSample| SmShare::from_percent(s.share.unwrap(), SmCount(40)).unwrap();
    let online = |s: &SpeedSample| OnlineInput { profile: s.online.clone(), share: share(s) };
    let offline = |s: &SpeedSample| OfflineInput { profile: s.offline.clone() };
    (data.samples.iter().map(online).collect(), data.samples.iter().map(offline).collect())
}

#[test]
fn a_model_file_gives_back_the_same_model_for_every_kind() {
    let data = measured(150, 0.2, 1);
    for kind in ModelKind::ALL {
        let model = trained(kind, &data);
        let bytes = file::to_bytes(&model);
        assert_eq!(file::from_bytes(&bytes).unwrap(), model, "{kind}");
        let other = GpuType::new("A10").unwrap();
        let error = file::from_bytes_for(&bytes, &other).unwrap_err().to_string();
        assert!(error.contains("GPU type T4") && error.contains("A10"), "{error}");
    }
}

#[test]
fn a_model_file_of_the_wrong_version_or_shape_is_refused_with_the_reason() {
    let bytes = file::to_bytes(&trained(ModelKind::Mlp, &measured(100, 0.0, 2)));
    let text = |bytes: &[u8]| file::from_bytes(bytes).unwrap_err().to_string();
    let mut newer = bytes.clone();
    newer[14] = b'9';
    assert!(text(&newer).contains("version 9"), "{}", text(&newer));
    assert!(text(b"PK\x03\x04 a zip\n").contains("muxflow-model"));
    assert!(text(&bytes[..bytes.len() - 4]).contains("cut short"));
    // Another shape with a right checksum: the header is rewritten and signed again.
    let end = bytes.iter().position(|b| *b == b'\n').unwrap();
    let header_length: usize = std::str::from_utf8(&bytes[..end])
        .unwrap()
        .rsplit_once("header=")
        .unwrap()
        .1
        .parse()
        .unwrap();
    let header = std::str::from_utf8(&bytes[end + 1..end + 1 + header_length]).unwrap();
    for (from, to, want) in [
        ("[64,64]", "[32,128]", "layer1.weights"),
        ("\"layers\":3", "\"layers\":2", "layer1.weights"),
        ("\"kind\":\"mlp\"", "\"kind\":\"oracle\"", "oracle"),
        ("\"kind\":\"mlp\"", "\"kind\":\"kernel\"", "online_workloads"),
        ("layer2.biases", "layer2.bias", "layer2.biases"),
    ] {
        assert!(header.contains(from), "{from} in {header}");
        let changed = header.replacen(from, to, 1);
        let mut body = changed.clone().into_bytes();
        body.extend(&bytes[end + 1 + header_length..]);
        let line =
            format!("muxflow-model 1 crc32={:08x} header={}\n", file::crc32(&body), changed.len());
        let mut forged = line.into_bytes();
        forged.extend(body);
        assert!(text(&forged).contains(want), "{to}: {}", text(&forged));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_damaged_model_file_is_refused_and_never_panics(
        kind in 0usize..ModelKind::ALL.len(), at in 0.0f64..1.0, bit in 0u8..8, cut in any::<bool>(),
    ) {
        let model = trained(ModelKind::ALL[kind], &measured(60, 0.1, 3));
        let mut bytes = file::to_bytes(&model);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let place = (at * bytes.len() as f64) as usize;
        if cut {
            bytes.truncate(place);
        } else {
            bytes[place] ^= 1 << bit;
        }
        prop_assert!(file::from_bytes(&bytes).is_err());
    }
}

#[test]
fn all_pairs_at_once_equal_one_pair_at_a_time_on_every_instruction_set() {
    let data = measured(160, 0.15, 4);
    let (mut online, mut offline) = inputs(&data.subset(&(0..70).collect::<Vec<_>>()));
    let nobody =
        ProfileRecord::unknown(WorkloadName::new("nobody").unwrap(), GpuType::new("T4").unwrap());
    online[3].profile = nobody.clone();
    offline[5].profile = nobody;
    for kind in ModelKind::ALL {
        let model = trained(kind, &data);
        for set in InstructionSet::all_here() {
            let pairs = model.prepare_with(&online, &offline, set);
            for row in [0, 3, 41] {
                for (first, count) in [(0, 70), (7, 1), (23, 40), (69, 1), (5, 0)] {
                    let mut out = vec![f32::NAN; count];
                    pairs.fill(row, first, &mut out);
                    for (speed, job) in out.iter().zip(&offline[first..]) {
                        let want = model.predict(&online[row], job).speed;
                        assert!((0.0..=1.0).contains(speed));
                        assert!((speed - want).abs() < 2e-4, "{kind} {set:?}: {speed} {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_kind_takes_profiles_with_anything_missing_and_says_where_the_answer_is_from() {
    let data = measured(200, 0.3, 5);
    let share = SmShare::new(SmCount(20), SmCount(40)).unwrap();
    let known = |name: &str| profile(name, 0.4, 0.0, &mut Rng::new(1));
    let bare = |name: &str| {
        ProfileRecord::unknown(WorkloadName::new(name).unwrap(), GpuType::new("T4").unwrap())
    };
    for kind in ModelKind::ALL {
        let model = trained(kind, &data);
        let ask = |on: ProfileRecord, off: ProfileRecord| {
            model.predict(&OnlineInput { profile: on, share }, &OfflineInput { profile: off })
        };
        let seen = ask(known("web-1"), known("train-1"));
        let half = ask(known("web-1"), known("new"));
        let none = ask(known("new"), known("newer"));
        let blind = ask(bare("new"), known("train-1"));
        for answer in [seen, half, none, blind, ask(bare("web-1"), bare("train-1"))] {
            assert!((0.0..=1.0).contains(&answer.speed) && answer.uncertainty > 0.0, "{kind}");
        }
        assert_eq!(blind.provenance, Provenance::Rule, "{kind}");
        if kind != ModelKind::Rule {
            assert_eq!(seen.provenance, Provenance::Seen);
            assert_eq!(none.provenance, Provenance::Unseen);
            assert!(seen.uncertainty < half.uncertainty && half.uncertainty < none.uncertainty);
        }
    }
}

#[test]
fn selection_beats_the_mean_and_a_worse_model_never_replaces_a_better_one() {
    let data = measured(300, 0.1, 6);
    let mut options = SelectOptions { threads: 2, ..SelectOptions::default() };
    options.fit.mlp.max_epochs = 60;
    let mut steps = 0;
    let chosen = select(&data, &options, &mut |_| {
        steps += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    let card = &chosen.model.card;
    assert!(steps >= 5 && !chosen.curve.is_empty());
    assert!(card.unseen_error < 0.5 * card.mean_unseen_error, "{card:?}");
    assert!(chosen.model.deviation.is_sorted());

    let (train, test) = hold_out(&data, 1);
    assert_eq!(test.samples.len(), 60);
    assert!(test.samples.contains(data.samples.last().unwrap()), "the newest is held out");
    assert!(test.samples.iter().all(|s| !train.samples.contains(s)));
    let good = trained(ModelKind::Kernel, &data);
    assert!(!judge(&good, ModelKind::Mean, &data, &options).unwrap().replace());
    let poor = trained(ModelKind::Mean, &data);
    let verdict = judge(&poor, ModelKind::Kernel, &data, &options).unwrap();
    assert!(verdict.replace() && verdict.new_error < 0.5 * verdict.old_error, "{verdict:?}");
    let (same, again) = (
        select(&data, &options, &mut |_| ControlFlow::Continue(())).unwrap(),
        select(&data, &options, &mut |_| ControlFlow::Continue(())).unwrap(),
    );
    assert_eq!(file::to_bytes(&same.model), file::to_bytes(&again.model), "same seed, same model");
}

#[test]
fn too_little_data_is_an_error_and_a_registry_falls_back_to_the_rule() {
    let data = measured(10, 0.0, 7);
    let error = select(&data, &SelectOptions::default(), &mut |_| ControlFlow::Continue(()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("10 samples"), "{error}");

    let data = measured(100, 0.0, 8);
    let mut registry = Registry::default();
    assert!(registry.insert(trained(ModelKind::Kernel, &data)).is_none());
    let (mut online, offline) = inputs(&data);
    assert_eq!(registry.predict(&online[0], &offline[0]).provenance, Provenance::Seen);
    online[1].profile.gpu_type = GpuType::new("A10").unwrap();
    let other = registry.predict(&online[1], &offline[0]);
    assert_eq!(other, ConservativeRule.predict(&online[1], &offline[0]));
    let pairs = registry.prepare(&online, &offline);
    for (row, input) in online.iter().enumerate().take(2) {
        let mut out = [0.0; 4];
        pairs.fill(row, 2, &mut out);
        let want = registry.predict(input, &offline[2]).speed;
        assert!((out[0] - want).abs() < 1e-6, "lists of two GPU types");
    }
}

#[test]
fn a_type_that_stands_for_another_is_answered_by_its_model() {
    let data = measured(100, 0.0, 8);
    let (mut online, offline) = inputs(&data);
    let real = online[0].profile.gpu_type.clone();
    let mut registry = Registry::with_names(|kind| {
        let (real, _) = kind.as_str().rsplit_once(':')?;
        GpuType::new(real).ok()
    });
    registry.insert(trained(ModelKind::Kernel, &data));
    let want = registry.predict(&online[0], &offline[0]);
    for input in &mut online {
        input.profile.gpu_type = GpuType::new(&format!("{real}:rack-7")).unwrap();
    }
    assert_eq!(registry.predict(&online[0], &offline[0]), want);
    let mut out = [0.0; 1];
    registry.prepare(&online, &offline).fill(0, 0, &mut out);
    assert!((out[0] - want.speed).abs() < 1e-6);
}
