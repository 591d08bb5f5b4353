//! The page that says how far the model is from the measurements.

use muxflow_gpu_model::GpuProfile;

use super::fit::Errors;
use super::search::{mean_abs, quantile_abs};

/// One dataset: errors where it was fitted, and where it was held out.
#[derive(Debug, Clone)]
pub(crate) struct Section {
    name: String,
    parts: [Errors; 2],
}

impl Section {
    pub(crate) fn new(name: &str, parts: [Errors; 2]) -> Self {
        Section { name: name.to_owned(), parts }
    }
}

/// Errors of normalised speed (1 = as fast as alone), fitted and held out, beside a plain baseline.
pub(crate) fn table(sections: &[Section]) -> String {
    let mut out = String::from(
        "| measurement | part | points | mean abs. error | 95 % below | bias | baseline's mean abs. error |\n|---|---|---|---|---|---|---|\n",
    );
    for s in sections {
        for (part, e) in ["fitted", "held out"].iter().zip(&s.parts) {
            #[expect(clippy::cast_precision_loss, reason = "a count")]
            let bias = e.model.iter().sum::<f64>() / e.model.len().max(1) as f64;
            out.push_str(&format!(
                "| {} | {part} | {} | {:.3} | {:.3} | {bias:+.3} | {:.3} |\n",
                s.name,
                e.model.len(),
                mean_abs(&e.model),
                quantile_abs(&e.model, 0.95),
                mean_abs(&e.baseline),
            ));
        }
    }
    out
}

/// The whole page.
pub(crate) fn document(table: &str, fitted: &[GpuProfile]) -> String {
    let mut parameters = String::from(
        "| type | bandwidth saturation share | DRAM interference | cache interference | block hold | SM power W | clock exponent |\n|---|---|---|---|---|---|---|\n",
    );
    for p in fitted {
        let c = p.contention;
        parameters.push_str(&format!(
            "| {} | {:.3} | {:.3} | {:.3} | {} | {:.0} | {:.2} |\n",
            p.gpu_type,
            c.bandwidth_saturation_share,
            c.dram_interference,
            c.cache_interference,
            if c.block_hold > 0.0 { format!("{:.4}", c.block_hold) } else { "-".to_owned() },
            p.power.sm_w,
            p.power.exponent
        ));
    }
    format!(
        "{}{table}{}{parameters}{}",
        include_str!("head.md"),
        include_str!("middle.md"),
        include_str!("tail.md")
    )
}
