//! `muxflow node`: what only a person knows, told to the agent of this node.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use muxflow_agent::config::AgentConfig;
use muxflow_agent::marks::{self, Mark};
use muxflow_agent::monitor::nvml;
use muxflow_manager::config::UpConfig;

/// What is told.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// A GPU that is disabled was reset, and the driver does not show it.
    WasReset {
        /// Its UUID or number.
        gpu: String,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Evictions that are held back as too many at once may go on: the sensors tell the truth.
    SensorsAreRight {
        #[command(flatten)]
        place: PlaceArgs,
    },
}

/// Which agent.
#[derive(Debug, Args)]
pub(crate) struct PlaceArgs {
    /// The configuration file of `muxflow agent`.
    #[arg(long, value_name = "FILE", conflicts_with = "up_config")]
    config: Option<PathBuf>,
    /// The configuration file of `muxflow up`, where that runs the agent.
    #[arg(long, value_name = "FILE")]
    up_config: Option<PathBuf>,
}

impl PlaceArgs {
    fn state_dir(&self) -> anyhow::Result<PathBuf> {
        Ok(match (&self.config, &self.up_config) {
            (Some(path), _) => AgentConfig::read(path)?.state_dir,
            (None, Some(path)) => UpConfig::read(path)?.agent.state_dir,
            (None, None) => AgentConfig::built_in()?.state_dir,
        })
    }
}

/// An agent that runs looks several times a second.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

impl NodeCommand {
    #[expect(clippy::print_stdout, reason = "this is the answer")]
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            NodeCommand::WasReset { gpu, place } => {
                let state_dir = place.state_dir()?;
                let uuid = uuid_of(&gpu, &marks::known_gpus(&state_dir))
                    .with_context(|| format!("state directory {}", state_dir.display()))?;
                if marks::disabled_for(&state_dir, &uuid).is_none() {
                    bail!("GPU {uuid} is not disabled: there is nothing to tell its agent");
                }
                let taken = leave(&Mark::GpuWasReset(&uuid).file(&state_dir))?;
                println!(
                    "{}",
                    match taken {
                        true => "the agent has taken note; the GPU returns once a client attaches",
                        false => "no agent has taken note yet: the next one does",
                    }
                );
            }
            NodeCommand::SensorsAreRight { place } => {
                let file = Mark::SensorsAreRight.file(&place.state_dir()?);
                if leave(&file)? {
                    println!("the agent has taken note: evictions go on");
                } else {
                    // One that is left for later would let evictions through that nobody has looked at.
                    std::fs::remove_file(&file)
                        .with_context(|| format!("cannot remove {}", file.display()))?;
                    bail!("no agent has taken note: none holds evictions back here");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Leaves a mark and waits; says whether somebody took it.
fn leave(file: &std::path::Path) -> anyhow::Result<bool> {
    std::fs::write(file, "").with_context(|| format!("cannot write {}", file.display()))?;
    let deadline = Instant::now() + TAKEN_WITHIN;
    while file.exists() {
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(true)
}

/// The UUID of a GPU that the agent remembers. A number is the driver's, which must answer for it.
fn uuid_of(gpu: &str, known: &[String]) -> anyhow::Result<String> {
    let uuid = match gpu.parse::<u32>() {
        Ok(number) => {
            let nvml = nvml::open()?;
            nvml::facts(&nvml, number)
                .with_context(|| format!("GPU {number} cannot be read: name it by its UUID"))?
                .uuid
        }
        Err(_) => gpu.to_owned(),
    };
    if !known.contains(&uuid) {
        bail!("no agent has used a GPU `{uuid}` here; known are {}", known.join(", "));
    }
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_no_agent_knows_is_named() {
        let known = ["GPU-a".to_owned(), "GPU-b".to_owned()];
        assert_eq!(uuid_of("GPU-b", &known).unwrap(), "GPU-b");
        let error = uuid_of("GPU-c", &known).unwrap_err().to_string();
        assert!(error.contains("GPU-c") && error.contains("GPU-a, GPU-b"), "{error}");
    }

    #[test]
    fn a_mark_that_is_taken_is_told_from_one_that_waits() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mark");
        let other = file.clone();
        let taker = std::thread::spawn(move || {
            while std::fs::remove_file(&other).is_err() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert!(leave(&file).unwrap());
        taker.join().unwrap();
        assert!(leave(&dir.path().join("none/mark")).unwrap_err().to_string().contains("mark"));
    }
}
