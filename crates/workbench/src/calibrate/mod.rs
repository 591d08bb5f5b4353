//! `cargo xtask calibrate`: fits the GPU model on public measurements, writes the fitted numbers
//! into the profiles and the comparison into `docs/gpu-model.md`.

mod data;
mod fit;
mod report;
mod search;

use std::path::Path;

use anyhow::Context;
use muxflow_gpu_model::GpuProfile;

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

    let mut fitted = vec![a100.clone()];
    for (name, key) in [("V100", "v100"), ("P100", "p100"), ("K80", "k80")] {
        let mut profile = GpuProfile::built_in(name)?;
        profile.contention.bandwidth_saturation_share = a100.contention.bandwidth_saturation_share;
        let (jobs, pairs) = data::gavel(&root, key)?;
        eprintln!("Gavel {name}: {} job types, {} pairs", jobs.len(), pairs.len());
        let (sharing, errors) = fit::gavel(&mut profile, jobs.len(), &pairs);
        sections.push(report::Section::new(
            &format!("Gavel, {name}, pairs of training jobs, as {sharing:?}"),
            errors,
        ));
        fitted.push(profile);
    }
    let table = report::table(&sections);
    println!("{table}");
    if check {
        return Ok(());
    }
    let workspace = crate::root();
    for p in &fitted {
        write_profile(&workspace, p, p.gpu_type.as_str() == "A100")?;
    }
    // T4 and A10 have no public co-location measurement: they take the A100's, and say so.
    for name in ["T4", "A10"] {
        let mut p = GpuProfile::built_in(name)?;
        p.contention = a100.contention;
        write_profile(&workspace, &p, false)?;
    }
    let path = workspace.join("docs/gpu-model.md");
    std::fs::write(&path, report::document(&table, &fitted)).context("write docs/gpu-model.md")?;
    println!("wrote {} and the profiles", path.display());
    Ok(())
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
