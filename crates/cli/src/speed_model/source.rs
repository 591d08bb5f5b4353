//! Where training samples come from: a CSV, public measurements, the store, or the GPU model.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use muxflow_gpu_model::GpuProfile;
use muxflow_predictor::datasets::{gavel, miso, table};
use muxflow_predictor::{Dataset, SpeedSample};
use muxflow_store::{Source, Store};
use muxflow_types::{GpuType, Micros};

/// Which samples. At least one source must be given; with `--store` and `--data` the rows of the CSV
/// are added to the store first.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// A CSV of measured pairs (see docs/predictor.md).
    #[arg(long, value_name = "FILE.csv")]
    data: Option<PathBuf>,
    /// Gavel's throughput file (`simulation_throughputs.json`, also `.gz`).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "store"])]
    gavel: Option<PathBuf>,
    /// The folder with MISO's `mig_iteration_times.json` and `solo_profiles_a100.json`.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["data", "store", "gavel"])]
    miso: Option<PathBuf>,
    /// The profile store: measured pairs and observed speeds.
    #[arg(long, value_name = "FILE.db")]
    pub(crate) store: Option<PathBuf>,
    /// This many synthetic samples from the built-in GPU model of this type.
    #[arg(long, value_name = "N", conflicts_with_all = ["data", "store", "gavel", "miso"])]
    gpu_model: Option<usize>,
    /// The GPU type of the samples, such as T4; with `--gavel` one of k80, p100, v100.
    #[arg(long, value_name = "TYPE")]
    pub(crate) gpu_type: String,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Reads a text file, unpacking it when its name ends in `.gz`.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let bytes = if path.extension().is_some_and(|e| e == "gz") {
        let mut out = Vec::new();
        flate2::read::GzDecoder::new(bytes.as_slice())
            .read_to_end(&mut out)
            .with_context(|| format!("{} is not a sound gzip file", path.display()))?;
        out
    } else {
        bytes
    };
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
}

/// The file, or the same with `.gz`.
fn plain_or_packed(folder: &Path, name: &str) -> PathBuf {
    let packed = folder.join(format!("{name}.gz"));
    if packed.exists() { packed } else { folder.join(name) }
}

impl SourceArgs {
    pub(crate) fn gpu_type(&self) -> anyhow::Result<GpuType> {
        GpuType::new(&self.gpu_type).context("--gpu-type")
    }

    /// Reads the samples.
    pub(crate) fn load(&self) -> anyhow::Result<Dataset> {
        let gpu_type = self.gpu_type()?;
        if let Some(path) = &self.store {
            return self.read_store(path, &gpu_type);
        }
        if let Some(path) = &self.data {
            return Ok(table::read(&read_text(path)?, &gpu_type, &path.display().to_string())?);
        }
        if let Some(path) = &self.gavel {
            let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into());
            return Ok(gavel::read(&read_text(path)?, &self.gpu_type, &name)?);
        }
        if let Some(folder) = &self.miso {
            let times = read_text(&plain_or_packed(folder, "mig_iteration_times.json"))?;
            let profiles = read_text(&plain_or_packed(folder, "solo_profiles_a100.json"))?;
            let data = miso::read(&times, &profiles, "mig_iteration_times.json")?;
            if data.gpu_type != gpu_type {
                bail!("MISO measured on {}, not on {gpu_type}: use --gpu-type A100", data.gpu_type);
            }
            return Ok(data);
        }
        if let Some(count) = self.gpu_model {
            return from_gpu_model(&gpu_type, count, self.seed);
        }
        bail!(
            "no samples: give --data FILE.csv, --store FILE.db, --gavel FILE, --miso DIR or --gpu-model N"
        )
    }

    fn read_store(&self, path: &Path, gpu_type: &GpuType) -> anyhow::Result<Dataset> {
        let mut store = Store::open(path)?;
        if let Some(csv) = &self.data {
            let name = csv.display().to_string();
            let data = table::read(&read_text(csv)?, gpu_type, &name)?;
            store.put_samples(&data.samples, &name)?;
        }
        let mut samples = store.samples(gpu_type, Source::Measured)?;
        let observed = store.samples(gpu_type, Source::Observed)?;
        let origin = format!(
            "the store {}: {} measured pairs, {} observed speeds",
            path.display(),
            samples.len(),
            observed.len()
        );
        samples.extend(observed);
        if samples.is_empty() {
            bail!("{} has no samples of GPU type {gpu_type} yet", path.display());
        }
        Ok(Dataset { gpu_type: gpu_type.clone(), origin, samples })
    }
}

/// Synthetic samples, labelled so.
pub(crate) fn from_gpu_model(
    gpu_type: &GpuType,
    count: usize,
    seed: u64,
) -> anyhow::Result<Dataset> {
    let profile = GpuProfile::built_in(gpu_type.as_str())?;
    let samples = muxflow_gpu_model::samples(&profile, count, seed)?;
    let samples = samples
        .into_iter()
        .map(|pair| SpeedSample {
            online: pair.online,
            offline: pair.offline,
            share: Some(pair.share.percent()),
            speed: pair.offline_speed,
            at: Micros::ZERO,
        })
        .collect();
    Ok(Dataset {
        gpu_type: profile.gpu_type,
        origin: format!(
            "SYNTHETIC: {count} pairs drawn from the built-in GPU model of {gpu_type}, seed {seed}; no real GPU was measured"
        ),
        samples,
    })
}
