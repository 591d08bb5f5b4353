//! A small bounded pattern search: the models here are not differentiable everywhere.

/// One parameter: start, bounds and first step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Moves `x` to a local minimum of `cost`, one coordinate at a time; returns the cost there.
pub(crate) fn minimise(
    x: &mut [f64],
    ranges: &[Range],
    rounds: usize,
    mut cost: impl FnMut(&[f64]) -> f64,
) -> f64 {
    let mut best = cost(x);
    let mut step: Vec<f64> = ranges.iter().map(|r| (r.high - r.low) / 4.0).collect();
    for _ in 0..rounds {
        for i in 0..x.len() {
            let old = x[i];
            let mut improved = false;
            for direction in [1.0, -1.0] {
                x[i] = (old + direction * step[i]).clamp(ranges[i].low, ranges[i].high);
                let now = cost(x);
                if now < best {
                    best = now;
                    improved = true;
                    break;
                }
                x[i] = old;
            }
            step[i] *= if improved { 1.3 } else { 0.5 };
        }
    }
    best
}

/// Mean of absolute values.
pub(crate) fn mean_abs(errors: &[f64]) -> f64 {
    if errors.is_empty() {
        return f64::NAN;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count")]
    let n = errors.len() as f64;
    errors.iter().map(|e| e.abs()).sum::<f64>() / n
}

/// The value below which a share of the absolute errors lie.
pub(crate) fn quantile_abs(errors: &[f64], share: f64) -> f64 {
    let mut sorted: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    sorted.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let at = ((sorted.len() as f64 - 1.0) * share).round().max(0.0) as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}
