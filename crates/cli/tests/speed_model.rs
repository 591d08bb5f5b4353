//! `muxflow train`, `evaluate` and `predict` as a person would type them.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

fn muxflow(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_muxflow")).args(args).current_dir(folder).output().unwrap()
}

fn ok(folder: &Path, args: &[&str]) -> String {
    let output = muxflow(folder, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn fails(folder: &Path, args: &[&str]) -> String {
    let output = muxflow(folder, args);
    assert!(!output.status.success(), "{args:?} succeeded");
    String::from_utf8(output.stderr).unwrap()
}

/// A table with a simple law; `noise` moves the speeds about.
fn table(noise: f64) -> String {
    let mut text = String::from(
        "online,offline,speed,share_pct,online_sm_activity_pct,offline_sm_activity_pct,at_s\n",
    );
    let mut wobble = 0.5f64;
    for on in 0..6 {
        for off in 0..5 {
            for share in [20, 50, 80] {
                wobble = (wobble * 997.0).fract();
                let (a, s) = (0.3 + 0.1 * f64::from(off), f64::from(share) / 100.0);
                let speed = 1.0 / (1.0 - a + a / s + 0.05 * f64::from(on)) + noise * (wobble - 0.5);
                writeln!(
                    text,
                    "web-{on},train-{off},{},{share},{},{},{}",
                    speed.clamp(0.0, 1.0),
                    10 + 8 * on,
                    a * 100.0,
                    on * 100 + off
                )
                .unwrap();
            }
        }
    }
    text
}

#[test]
fn train_evaluate_predict_and_never_a_worse_model() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    std::fs::write(dir.join("good.csv"), table(0.01)).unwrap();
    std::fs::write(dir.join("bad.csv"), table(0.6)).unwrap();

    let pair = ["--gpu-type", "T4", "--online", "web-1", "--offline", "train-2", "--share", "50"];
    let rule = ok(dir, &[&["predict"][..], &pair].concat());
    assert!(rule.contains("no model for T4"), "{rule}");

    let train = ["train", "--data", "good.csv", "--gpu-type", "T4", "--epochs", "40"];
    let first = ok(dir, &train);
    assert!(first.contains("(chosen)") && first.contains("In use: models/T4.model"), "{first}");
    let card = std::fs::read_to_string(dir.join("models/T4.card.md")).unwrap();
    for want in ["good.csv", "Samples: 90", "train-3", "mean", "Coverage"] {
        assert!(card.contains(want), "{want} in {card}");
    }
    let curve = std::fs::read_to_string(dir.join("models/T4.curve.svg")).unwrap();
    assert!(curve.starts_with("<svg") && curve.matches("<polyline").count() == 2);
    let answer = ok(dir, &[&["predict", "--off", "sm_activity=50"][..], &pair].concat());
    assert!(answer.contains("both workloads seen"), "{answer}");

    let model = std::fs::read(dir.join("models/T4.model")).unwrap();
    let again = ok(dir, &train);
    assert!(again.contains("it stays"), "trained on the same, judged without them: {again}");
    assert_eq!(std::fs::read(dir.join("models/T4.model")).unwrap(), model);
    assert!(std::fs::read_dir(dir.join("models")).unwrap().count() > 3, "the loser is kept too");

    let evaluation = ok(
        dir,
        &[
            "evaluate",
            "--data",
            "good.csv",
            "--gpu-type",
            "T4",
            "--kinds",
            "mean,kernel",
            "--seeds",
            "4",
        ],
    );
    assert!(evaluation.contains("workload left out") && evaluation.contains("kernel"));
    let study = ["evaluate", "--data", "good.csv", "--gpu-type", "T4", "--study", "layers"];
    let study = ok(dir, &[&study[..], &["--epochs", "2"]].concat());
    assert!(study.contains("8 layers"), "{study}");
    let csv = std::fs::read_to_string(dir.join("study/layers.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 7 * 2);
    assert!(dir.join("study/layers.svg").exists());
}

#[test]
fn the_same_seed_gives_the_same_model_file() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let train = |out: &str, seed: &str| {
        let source = ["train", "--gpu-model", "200", "--gpu-type", "T4", "--kinds", "hybrid"];
        let rest = ["--epochs", "10", "--seed", seed, "--out", out];
        ok(dir, &[&source[..], &rest].concat());
        std::fs::read(dir.join(out).join("T4.model")).unwrap()
    };
    let first = train("a", "5");
    assert_eq!(first, train("b", "5"), "the same command, another folder");
    assert_ne!(first, train("c", "6"), "another seed draws other samples and other weights");
}

#[test]
fn the_store_collects_samples_and_keeps_both_models() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    std::fs::write(dir.join("bad.csv"), table(0.9)).unwrap();
    std::fs::write(dir.join("good.csv"), table(0.0)).unwrap();
    let base = ["train", "--store", "s.db", "--gpu-type", "T4", "--epochs", "20"];
    let first = ok(dir, &[&base[..], &["--data", "bad.csv", "--kinds", "mean"]].concat());
    assert!(first.contains("90 measured pairs"), "{first}");
    let second = ok(dir, &[&base[..], &["--data", "good.csv", "--kinds", "kernel"]].concat());
    assert!(second.contains("180 measured pairs") && second.contains("In use"), "{second}");
    let third = ok(dir, &[&base[..], &["--kinds", "mean"]].concat());
    assert!(third.contains("it stays"), "{third}");
    let store = muxflow_store::Store::open_read_only(&dir.join("s.db")).unwrap();
    let models = store.models().unwrap();
    let kinds: Vec<&str> = models.iter().map(|m| m.kind.as_str()).collect();
    assert_eq!(kinds, ["mean", "kernel", "mean"]);
    assert_eq!(models.iter().map(|m| m.in_use).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(models[2].parent, Some(models[1].id));
    let answer = ok(
        dir,
        &[
            "predict",
            "--store",
            "s.db",
            "--gpu-type",
            "T4",
            "--online",
            "web-1",
            "--offline",
            "train-2",
            "--share",
            "50",
        ],
    );
    assert!(answer.contains("kernel model, both workloads seen"), "{answer}");
}

#[test]
fn errors_name_the_input_the_place_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    std::fs::write(dir.join("bad.csv"), "online,offline,speed\na,b,fast\n").unwrap();
    std::fs::write(dir.join("short.csv"), "online,offline,speed\na,b,0.5\n").unwrap();
    std::fs::write(dir.join("some.model"), "hello\n").unwrap();
    std::fs::write(dir.join("some.db"), "hello, this is no database, but a longer text".repeat(40))
        .unwrap();
    let t4 = ["--gpu-type", "T4"];
    let pair = ["--gpu-type", "T4", "--online", "a", "--offline", "b", "--share", "50"];
    let cases: [(Vec<&str>, &str); 12] = [
        ([&["train"][..], &t4].concat(), "give --data FILE.csv"),
        ([&["train", "--data", "no.csv"][..], &t4].concat(), "cannot read no.csv"),
        ([&["train", "--data", "bad.csv"][..], &t4].concat(), "bad.csv, line 2: speed: `fast`"),
        ([&["train", "--data", "short.csv"][..], &t4].concat(), "1 samples of 2 workloads"),
        ([&["train", "--data", "short.csv", "--kinds", "gpt"][..], &t4].concat(), "no kind `gpt`"),
        ([&["train", "--store", "some.db"][..], &t4].concat(), "not a MuxFlow store"),
        (vec!["train", "--gpu-model", "100", "--gpu-type", "RTX9"], "RTX9"),
        (vec!["train", "--gpu-model", "100", "--gpu-type", "a b"], "--gpu-type"),
        ([&["predict", "--model", "some.model"][..], &pair].concat(), "some.model: cannot load"),
        ([&["predict", "--on", "speed=3"][..], &pair].concat(), "no feature `speed`"),
        ([&["predict", "--off", "gpu_util=300"][..], &pair].concat(), "300 is not a percentage"),
        ([&["evaluate", "--data", "short.csv"][..], &t4].concat(), "at least 20 samples"),
    ];
    for (args, want) in cases {
        let error = fails(dir, &args);
        assert!(error.starts_with("muxflow: ") && error.contains(want), "{args:?}: {error}");
    }
    let model = dir.join("models");
    assert!(!model.join("T4.model").exists(), "nothing was left behind by the failures");
}
