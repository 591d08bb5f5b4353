//! A trainer: iterations of forward and backward passes, and a checkpoint to go on from.

#![expect(clippy::print_stdout, reason = "a program for people at a terminal")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use muxflow_examples::driver::Gpu;
use muxflow_examples::network::{Loaded, Network};
use muxflow_examples::signals;

/// Trains a network of a known size, in time and load if not in accuracy.
#[derive(Debug, Parser)]
struct Arguments {
    /// resnet50, vgg16, densenet201, mobilenet-v2 or inception-v3.
    #[arg(long, default_value = "resnet50")]
    network: String,
    /// Images in a batch.
    #[arg(long, default_value_t = 8)]
    batch: u32,
    /// Iterations altogether; 0 goes on until it is stopped.
    #[arg(long, default_value_t = 100)]
    iterations: u64,
    /// Where to save, and to go on from if it is there.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Save every so many iterations as well.
    #[arg(long, default_value_t = 0)]
    save_every: u64,
    /// Print `iteration N` every so many seconds; 0 prints none.
    #[arg(long, default_value_t = 0.0)]
    report_every: f64,
    /// Let signals do what they do by default, as most training scripts do: the program ends at once.
    #[arg(long)]
    default_signals: bool,
}

const MAGIC: &[u8; 8] = b"MUXCKPT1";

/// Writes beside the place and moves there, so that a half-written file is never found.
fn save(path: &Path, iteration: u64, model: &Loaded<'_>) -> anyhow::Result<()> {
    let mut data = vec![0; 16 + model.weights.bytes()];
    data[..8].copy_from_slice(MAGIC);
    data[8..16].copy_from_slice(&iteration.to_le_bytes());
    model.weights.read(&mut data[16..])?;
    let beside = path.with_extension("partial");
    fs::write(&beside, &data).with_context(|| format!("cannot write {}", beside.display()))?;
    fs::rename(&beside, path).with_context(|| format!("cannot write {}", path.display()))
}

fn resume(path: &Path, model: &Loaded<'_>) -> anyhow::Result<u64> {
    let data = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let fits = data.len() == 16 + model.weights.bytes() && data.starts_with(MAGIC);
    if !fits {
        bail!(
            "{} is not a checkpoint of {}: remove it or name another",
            path.display(),
            model.network.name
        );
    }
    model.weights.write(&data[16..])?;
    let mut iteration = [0; 8];
    iteration.copy_from_slice(&data[8..16]);
    Ok(u64::from_le_bytes(iteration))
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if !arguments.default_signals {
        signals::watch();
    }
    let gpu = Gpu::open()?;
    let model = Loaded::new(&gpu, Network::find(&arguments.network)?)?;
    let mut iteration = match &arguments.checkpoint {
        Some(path) if path.exists() => {
            let at = resume(path, &model)?;
            println!("going on from iteration {at}");
            at
        }
        _ => 0,
    };
    let (began, first) = (Instant::now(), iteration);
    let mut reported = began;
    while arguments.iterations == 0 || iteration < arguments.iterations {
        // Forward once, backward twice as costly.
        model.pass(arguments.batch, 1)?;
        model.pass(arguments.batch, 2)?;
        gpu.synchronize()?;
        iteration += 1;
        if arguments.report_every > 0.0
            && reported.elapsed().as_secs_f64() >= arguments.report_every
        {
            println!("iteration {iteration}");
            reported = Instant::now();
        }
        let due = arguments.save_every > 0 && iteration.is_multiple_of(arguments.save_every);
        let stop = signals::stop_asked();
        if let Some(path) = &arguments.checkpoint
            && (due || stop || signals::save_asked())
        {
            save(path, iteration, &model)?;
            println!("saved at iteration {iteration}");
        }
        if stop {
            break;
        }
    }
    if let Some(path) = arguments.checkpoint.as_ref().filter(|_| !signals::stop_asked()) {
        save(path, iteration, &model)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "counts of iterations")]
    let rate = (iteration - first) as f64 / seconds;
    println!(
        "{} iterations, {rate:.2} per second, {:.2} images per second",
        iteration - first,
        rate * f64::from(arguments.batch)
    );
    Ok(())
}
