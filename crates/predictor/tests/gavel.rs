//! Leave-one-out validation on Gavel's public measurements.

use std::io::Read;
use std::path::PathBuf;

use muxflow_predictor::datasets::gavel;
use muxflow_predictor::model::{FitOptions, ModelKind};
use muxflow_predictor::sample::Dataset;
use muxflow_predictor::validate::{FoldBy, cross_validate, folds};

fn shared(path: &str) -> Option<Vec<u8>> {
    let root = std::env::var_os("MUXFLOW_SHARED_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let file = root.join(path);
    let Ok(packed) = std::fs::read(&file) else {
        assert!(std::env::var_os("CI").is_none(), "{} is needed when CI is set", file.display());
        println!(
            "SKIPPED: no {}; set MUXFLOW_SHARED_DATA to the folder that holds it",
            file.display()
        );
        return None;
    };
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(packed.as_slice()).read_to_end(&mut text).unwrap();
    Some(text)
}

fn gavel(gpu_type: &str) -> Option<Dataset> {
    let text = String::from_utf8(shared("gavel/simulation_throughputs.json.gz")?).unwrap();
    Some(gavel::read(&text, gpu_type, "simulation_throughputs.json").unwrap())
}

#[test]
fn explore() {
    for gpu in ["k80", "p100", "v100"] {
        let Some(data) = gavel(gpu) else { return };
        for by in [FoldBy::Family, FoldBy::Workload] {
            let folds = folds(&data, by);
            for kind in ModelKind::ALL {
                let start = std::time::Instant::now();
                let v = cross_validate(kind, &data, &folds, &FitOptions::default(), 2).unwrap();
                println!(
                    "{gpu} {by:?} {kind} {:.4} coverage {:.2} {:.2} {:?}",
                    v.mean_absolute_error(),
                    v.coverage(1.0),
                    v.coverage(2.0),
                    start.elapsed()
                );
            }
        }
    }
}
