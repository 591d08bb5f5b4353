//! Matrix product for training: plain Rust that the compiler turns into whatever vectors the caller
//! is compiled for.
//!
//! Each output is summed over `k` in order, without fused multiply-add, so the result does not
//! depend on the width of the vectors: a seed gives the same weights with and without AVX.

/// Rows of one block.
const ROWS: usize = 4;
/// Columns of one block.
const COLUMNS: usize = 16;

/// `c = a · b`, or `c += a · b` when `accumulate`; `a` is `m × k`, `b` is `k × n`, all row-major.
#[inline(always)]
pub(crate) fn product(
    [m, k, n]: [usize; 3],
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    accumulate: bool,
) {
    assert!(a.len() >= m * k && b.len() >= k * n && c.len() >= m * n, "shapes do not fit");
    let mut row = 0;
    while row < m {
        let rows = ROWS.min(m - row);
        let mut column = 0;
        while column < n {
            let columns = COLUMNS.min(n - column);
            if rows == ROWS && columns == COLUMNS {
                block([k, n], &a[row * k..], &b[column..], &mut c[row * n + column..], accumulate);
            } else {
                for r in row..row + rows {
                    for j in column..column + columns {
                        let mut sum = 0.0f32;
                        for i in 0..k {
                            sum += a[r * k + i] * b[i * n + j];
                        }
                        let target = &mut c[r * n + j];
                        *target = if accumulate { *target + sum } else { sum };
                    }
                }
            }
            column += columns;
        }
        row += rows;
    }
}

#[inline(always)]
fn block([k, n]: [usize; 2], a: &[f32], b: &[f32], c: &mut [f32], accumulate: bool) {
    let mut sums = [[0.0f32; COLUMNS]; ROWS];
    let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &a[r * k..(r + 1) * k]);
    for i in 0..k {
        let Some(line) = b[i * n..].first_chunk::<COLUMNS>() else { return };
        for r in 0..ROWS {
            let factor = rows[r][i];
            for lane in 0..COLUMNS {
                sums[r][lane] += factor * line[lane];
            }
        }
    }
    for (r, sum) in sums.iter().enumerate() {
        let target = &mut c[r * n..r * n + COLUMNS];
        for (t, s) in target.iter_mut().zip(sum) {
            *t = if accumulate { *t + s } else { *s };
        }
    }
}

/// `out = inᵀ`; `input` is `m × n`.
pub(crate) fn transpose([m, n]: [usize; 2], input: &[f32], out: &mut [f32]) {
    for row in 0..m {
        for column in 0..n {
            out[column * m + row] = input[row * n + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    #[test]
    fn blocks_and_edges_equal_the_definition() {
        let mut rng = Rng::new(3);
        for [m, k, n] in [[1, 1, 1], [4, 11, 64], [7, 5, 33], [64, 64, 64], [3, 64, 1]] {
            let mut draw = |len: usize| -> Vec<f32> {
                #[expect(clippy::cast_possible_truncation, reason = "test data")]
                (0..len).map(|_| rng.normal() as f32).collect()
            };
            let (a, b) = (draw(m * k), draw(k * n));
            let mut c = vec![1.0; m * n];
            product([m, k, n], &a, &b, &mut c, true);
            for row in 0..m {
                for column in 0..n {
                    let want: f32 = (0..k).map(|i| a[row * k + i] * b[i * n + column]).sum();
                    assert!((c[row * n + column] - 1.0 - want).abs() < 1e-4);
                }
            }
        }
    }
}
