//! `muxflow predict`: the speed of one pair.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use muxflow_gpu_model::GpuProfile;
use muxflow_predictor::{ConservativeRule, Registry, file};
use muxflow_store::Store;
use muxflow_types::{
    Bytes, GpuType, Micros, OfflineInput, OnlineInput, Percent, ProfileRecord, Provenance, SmCount,
    SmShare, SpeedPredictor, WorkloadName,
};

use crate::speed_model::files::{model_path, read_model};

/// Predict the speed of one offline job beside one online service.
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    /// The GPU type, such as T4.
    #[arg(long, value_name = "TYPE")]
    gpu_type: String,
    /// The online service's workload name.
    #[arg(long, value_name = "NAME")]
    online: String,
    /// The offline job's workload name.
    #[arg(long, value_name = "NAME")]
    offline: String,
    /// Per cent of the SMs offered to the job.
    #[arg(long, value_name = "PCT")]
    share: f64,
    /// A measured feature of the service alone: gpu_util, sm_activity, sm_occupancy, dram_activity
    /// (per cent), solo_time (seconds), memory (such as 6GiB). Leave out what is unknown.
    #[arg(long, value_name = "KEY=VALUE")]
    on: Vec<String>,
    /// A measured feature of the job alone, as for --on.
    #[arg(long, value_name = "KEY=VALUE")]
    off: Vec<String>,
    /// A model file; without one, the folder's.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The folder that `muxflow train` wrote to.
    #[arg(long, value_name = "DIR", default_value = "models")]
    models: PathBuf,
    /// The profile store: its model in use, and its profiles for features that are not given.
    #[arg(long, value_name = "FILE.db")]
    store: Option<PathBuf>,
}

/// Sets one feature of a profile from `key=value`.
fn set(profile: &mut ProfileRecord, text: &str) -> anyhow::Result<()> {
    let known = "gpu_util, sm_activity, sm_occupancy, dram_activity, solo_time, memory";
    let (key, value) = text.split_once('=').with_context(|| {
        format!("`{text}` is not a feature: write KEY=VALUE with one of {known}")
    })?;
    let number = || value.parse::<f64>().with_context(|| format!("{key}: `{value}` is no number"));
    let percent =
        || Ok::<_, anyhow::Error>(Some(Percent::new(number()?).with_context(|| key.to_owned())?));
    match key {
        "gpu_util" => profile.gpu_util = percent()?,
        "sm_activity" => profile.sm_activity = percent()?,
        "sm_occupancy" => profile.sm_occupancy = percent()?,
        "dram_activity" => profile.dram_activity = percent()?,
        "solo_time" => {
            profile.solo_time = Some(Micros::from_secs_f64(number()?).context("solo_time")?);
        }
        "memory" => profile.memory = Some(Bytes::parse(value).context("memory")?),
        _ => bail!("no feature `{key}`; there are {known}"),
    }
    Ok(())
}

impl PredictArgs {
    fn profile(
        &self,
        name: &str,
        features: &[String],
        flag: &str,
        gpu_type: &GpuType,
        store: Option<&Store>,
    ) -> anyhow::Result<ProfileRecord> {
        let workload = WorkloadName::new(name)?;
        let known = match store {
            Some(store) => store.profile(&workload, gpu_type)?,
            None => None,
        };
        let mut profile =
            known.unwrap_or_else(|| ProfileRecord::unknown(workload, gpu_type.clone()));
        for feature in features {
            set(&mut profile, feature).with_context(|| flag.to_owned())?;
        }
        Ok(profile)
    }

    fn registry(&self, gpu_type: &GpuType, store: Option<&Store>) -> anyhow::Result<Registry> {
        let mut registry = Registry::default();
        if let Some(path) = &self.model {
            registry.insert(read_model(path, Some(gpu_type))?.0);
        } else if let Some(store) = store {
            if let Some(row) = store.model_in_use(gpu_type)? {
                registry.insert(file::from_bytes_for(&row.bytes, gpu_type)?);
            }
        } else {
            let path = model_path(&self.models, gpu_type);
            if path.exists() {
                registry.insert(read_model(&path, Some(gpu_type))?.0);
            }
        }
        Ok(registry)
    }
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &PredictArgs) -> anyhow::Result<ExitCode> {
    let gpu_type = GpuType::new(&args.gpu_type).context("--gpu-type")?;
    let store = args.store.as_deref().map(Store::open_read_only).transpose()?;
    let online = args.profile(&args.online, &args.on, "--on", &gpu_type, store.as_ref())?;
    let offline = args.profile(&args.offline, &args.off, "--off", &gpu_type, store.as_ref())?;
    let registry = args.registry(&gpu_type, store.as_ref())?;
    // A type that nobody described has 100 SMs, so that a share is a percentage.
    let sms = GpuProfile::built_in(gpu_type.as_str()).map_or(SmCount(100), |p| p.sm_count());
    let share = Percent::new(args.share).context("--share")?;
    let online = OnlineInput { profile: online, share: SmShare::from_percent(share, sms)? };
    let offline = OfflineInput { profile: offline };
    let answer = registry.predict(&online, &offline);
    let rule = ConservativeRule.predict(&online, &offline);
    println!("speed        {:.3} of the speed alone", answer.speed);
    println!("uncertainty  {:.3} (one standard deviation)", answer.uncertainty);
    let from = match (answer.provenance, registry.get(&gpu_type)) {
        (Provenance::Seen, Some(model)) => {
            format!("{} model, both workloads seen in training", model.model.kind())
        }
        (Provenance::Unseen, Some(model)) => {
            format!("{} model, at least one workload never seen", model.model.kind())
        }
        (_, None) => format!("the conservative rule: there is no model for {gpu_type}"),
        _ => "the conservative rule: nothing is known of one of the workloads".to_owned(),
    };
    println!("from         {from}");
    println!("rule         {:.3}", rule.speed);
    println!("share        {} of {} SMs", online.share.sms().0, sms.0);
    Ok(ExitCode::SUCCESS)
}
