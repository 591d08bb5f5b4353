//! `cargo xtask calibrate`: fits the GPU model on public measurements, writes the fitted numbers
//! into the profiles and the comparison into `docs/gpu-model.md`.
//!
//! Every search begins at values stated in `fit`, whatever the profiles hold, so a second run writes
//! the same bytes.

mod data;
mod fit;
mod pairs;
mod report;
mod search;

use std::path::Path;

use anyhow::Context;
use muxflow_gpu_model::GpuProfile;

/// Values of cache interference at which the page shows how little the error depends on it.
const HELD: [f64; 5] = [0.0, 0.1, 0.2, 0.4, 0.8];

/// Fits everything. With `check`, nothing is written and the fitted errors are only printed.
pub(crate) fn run(check: bool) -> anyhow::Result<()> {
    let root = data::root()?;
    let mut sections = Vec::new();

    let mut a100 = GpuProfile::built_in("A100")?;
    let curves = data::muxserve(&root)?;
    eprintln!("MuxServe: {} curves", curves.len());
    sections.push(report::Section::new(
        "MuxServe, A100, one client, SM share 30 to 100 %",
        fit::muxserve(&mut a100, &curves),
    ));
    let rows = data::parvagpu(&root)?;
    eprintln!("ParvaGPU: {} models and batches", rows.len());
    sections.push(report::Section::new(
        "ParvaGPU, A100 slices, 2 to 5 equal MPS clients",
        fit::parvagpu(&mut a100, &rows),
    ));
    let (mig, mixes) = data::miso(&root)?;
    eprintln!("MISO: {} classes, {} distinct mixes", mig.len(), mixes.len());
    sections.push(report::Section::new(
        "MISO, A100, seven MPS clients at 100, 50 and 14 %",
        fit::miso(&a100, &mig, &mixes),
    ));

    let mut flat = Vec::new();
    let mut fitted = vec![a100.clone()];
    for (name, key) in [("V100", "v100"), ("P100", "p100"), ("K80", "k80")] {
        let mut profile = GpuProfile::built_in(name)?;
        profile.contention.bandwidth_saturation_share = a100.contention.bandwidth_saturation_share;
        let (jobs, pairs) = data::gavel(&root, key)?;
        eprintln!("Gavel {name}: {} job types, {} pairs", jobs.len(), pairs.len());
        let (sharing, errors) = pairs::gavel(&mut profile, jobs.len(), &pairs);
        if name == "V100" {
            flat = pairs::flatness(&profile, jobs.len(), &pairs, &HELD);
        }
        sections.push(report::Section::new(
            &format!("Gavel, {name}, pairs of training jobs, as {sharing:?}"),
            errors,
        ));
        fitted.push(profile);
    }
    let table = report::table(&sections);
    println!("{table}");
    fitted.extend(assumed(&fitted)?);
    for p in &fitted {
        println!("{}: {:?}, SMs {:.4} W", p.gpu_type, p.contention, p.power.sm_w);
    }
    if check {
        return Ok(());
    }
    let workspace = crate::root();
    for p in &fitted {
        write_profile(&workspace, p, p.gpu_type.as_str() == "A100")?;
    }
    let path = workspace.join("docs/gpu-model.md");
    std::fs::write(&path, report::document(&table, &fitted, &flat))
        .context("write docs/gpu-model.md")?;
    println!("wrote {} and the profiles", path.display());
    Ok(())
}

/// T4 and A10, of which no co-location measurement is public: they take the interference of the
/// V100, which is like them in that its L2 is a few megabytes, and say so. The wait for blocks is
/// the published sweep's on a T4, for both.
fn assumed(fitted: &[GpuProfile]) -> anyhow::Result<Vec<GpuProfile>> {
    let v100 = fitted.iter().find(|p| p.gpu_type.as_str() == "V100").context("V100 was fitted")?;
    let mut like =
        ["T4", "A10"].map(GpuProfile::built_in).into_iter().collect::<Result<Vec<_>, _>>()?;
    for p in &mut like {
        p.contention = v100.contention;
    }
    let hold = anchored_block_hold(&like[0])?;
    for p in &mut like {
        p.contention.block_hold = hold;
    }
    Ok(like)
}

/// How far the service's speed swings over the shares of the paper's sweep, published for a T4.
const PUBLISHED_SWING: f64 = 5.0;

/// The smallest wait for blocks with which the service's speed swings as published.
fn anchored_block_hold(t4: &GpuProfile) -> anyhow::Result<f64> {
    let swing = |hold: f64| -> anyhow::Result<f64> {
        let mut p = t4.clone();
        p.contention.block_hold = hold;
        let speeds = muxflow_sim::paper::share_sweep(&p)?;
        let (low, high) = speeds
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(low, high), (_, on, _)| (low.min(*on), high.max(*on)));
        Ok(high / low)
    };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..20 {
        let middle = 0.5 * (low + high);
        if swing(middle)? < PUBLISHED_SWING {
            low = middle;
        } else {
            high = middle;
        }
    }
    // Rounded up to what the profile keeps, so that it is reached.
    Ok((high * 1e4).ceil() / 1e4)
}

/// Replaces the fitted values in a profile's text, line by line, and leaves the rest as it is.
fn write_profile(workspace: &Path, p: &GpuProfile, with_power: bool) -> anyhow::Result<()> {
    let name = p.gpu_type.as_str().to_lowercase();
    let path = workspace.join(format!("crates/gpu-model/profiles/{name}.toml"));
    let old = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut values = vec![
        ("bandwidth_saturation_share", p.contention.bandwidth_saturation_share),
        ("dram_interference", p.contention.dram_interference),
        ("cache_interference", p.contention.cache_interference),
        ("block_hold", p.contention.block_hold),
    ];
    if with_power {
        values.push(("sm_w", p.power.sm_w));
        values.push(("exponent", p.power.exponent));
    }
    let mut new = String::new();
    for line in old.lines() {
        let key = line.split('=').next().unwrap_or("").trim();
        match values.iter().find(|(k, _)| *k == key) {
            Some((k, v)) => new.push_str(&format!("{k} = {v:.4}\n")),
            None => {
                new.push_str(line);
                new.push('\n');
            }
        }
    }
    GpuProfile::from_toml(&new)
        .with_context(|| format!("the fitted {} does not read", path.display()))?;
    std::fs::write(&path, new).with_context(|| format!("write {}", path.display()))
}
