//! Conversions between counts and floats, in one place, so that each is checked once.

/// A count as a float.
pub(crate) fn float(n: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    let f = n as f64;
    f
}

/// The whole part of a float as an index; negative and NaN become 0.
pub(crate) fn index(x: f64) -> usize {
    if x.is_nan() || x < 0.0 {
        return 0;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked above; a float beyond usize saturates"
    )]
    let i = x as usize;
    i
}

/// The value at a share (0 to 1) of a sorted list; 0 when it is empty.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get(index((float(last) * share).round())).copied().unwrap_or(0.0)
}

/// Mean; 0 when there is nothing.
pub(crate) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / float(values.len()) }
}
