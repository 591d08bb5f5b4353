//! The little linear algebra that the kernel model needs.

/// A square matrix, rows one after the other.
#[derive(Debug, Clone)]
pub struct Square {
    size: usize,
    values: Vec<f64>,
}

/// Sum of products, in an order that does not depend on the machine: eight partial sums.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0f64; 8];
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f64>() + rest
}

impl Square {
    /// All zero.
    pub fn zeros(size: usize) -> Self {
        Square { size, values: vec![0.0; size * size] }
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.size..(row + 1) * self.size]
    }

    /// One row, to write.
    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.values[row * self.size..(row + 1) * self.size]
    }

    /// Replaces a symmetric positive definite matrix (its lower half) by its Cholesky factor;
    /// `false` when it is not positive definite.
    pub fn factor(&mut self) -> bool {
        let size = self.size;
        for row in 0..size {
            let (above, below) = self.values.split_at_mut(row * size);
            let current = &mut below[..size];
            for column in 0..row {
                let other = &above[column * size..column * size + column + 1];
                let sum = dot(&current[..column], &other[..column]);
                current[column] = (current[column] - sum) / other[column];
            }
            let pivot = current[row] - dot(&current[..row], &current[..row]);
            if pivot.is_nan() || pivot <= 0.0 {
                return false;
            }
            current[row] = pivot.sqrt();
        }
        true
    }

    /// Solves `L Lᵀ x = b` in place, `self` being `L`.
    pub fn solve(&self, b: &mut [f64]) {
        self.solve_lower(b);
        for row in (0..self.size).rev() {
            b[row] /= self.row(row)[row];
            let value = b[row];
            let (head, _) = b.split_at_mut(row);
            for (target, factor) in head.iter_mut().zip(self.row(row)) {
                *target -= factor * value;
            }
        }
    }

    /// Solves `L x = b` in place.
    pub fn solve_lower(&self, b: &mut [f64]) {
        for row in 0..self.size {
            let sum = dot(&self.row(row)[..row], &b[..row]);
            b[row] = (b[row] - sum) / self.row(row)[row];
        }
    }

    /// Solves `Lᵀ x = b` in place.
    pub fn solve_upper(&self, b: &mut [f64]) {
        for row in (0..self.size).rev() {
            b[row] /= self.row(row)[row];
            let value = b[row];
            let (head, _) = b.split_at_mut(row);
            for (target, factor) in head.iter_mut().zip(self.row(row)) {
                *target -= factor * value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    #[test]
    fn a_factor_solves_its_matrix() {
        let mut rng = Rng::new(1);
        let size = 23;
        let a: Vec<Vec<f64>> =
            (0..size).map(|_| (0..size).map(|_| rng.normal()).collect()).collect();
        let mut matrix = Square::zeros(size);
        for (i, x) in a.iter().enumerate() {
            for (j, y) in a.iter().enumerate() {
                matrix.row_mut(i)[j] = dot(x, y) + if i == j { 0.5 } else { 0.0 };
            }
        }
        let whole = matrix.clone();
        assert!(matrix.factor());
        let want: Vec<f64> = (0..size).map(|_| rng.normal()).collect();
        let mut got: Vec<f64> = (0..size).map(|i| dot(whole.row(i), &want)).collect();
        matrix.solve(&mut got);
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() < 1e-8, "{g} {w}");
        }
    }

    #[test]
    fn an_indefinite_matrix_is_refused() {
        let mut matrix = Square::zeros(2);
        matrix.row_mut(0)[0] = 1.0;
        matrix.row_mut(1)[0] = 2.0;
        matrix.row_mut(1)[1] = 1.0;
        assert!(!matrix.factor());
    }
}
