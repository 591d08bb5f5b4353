//! Seeded instances for the tests.

/// A small generator of pseudo-random numbers (xorshift with a multiplier).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// Uniform in [0, 1) on a grid of 2^-24.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// A matrix, row by row.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f32>,
}

impl Instance {
    /// Up to 5 × 6 or 6 × 5, of one of several characters: fine or coarse weights (ties), signs,
    /// forbidden edges, repeated lines.
    pub(crate) fn small(random: &mut Random, minimize: bool) -> Self {
        let (mut rows, mut cols) = (random.below(6), random.below(7));
        if random.below(2) == 1 {
            (rows, cols) = (cols, rows);
        }
        let losing = if minimize { f32::INFINITY } else { f32::NEG_INFINITY };
        let (kind, forbid, signed) = (random.below(3), random.below(4), random.below(2));
        let mut data: Vec<f32> = (0..rows * cols)
            .map(|_| {
                let w = match kind {
                    0 => random.unit(),
                    1 => random.below(4) as f32,
                    _ => random.unit() * 1000.0,
                };
                let w = if signed == 1 { w - random.below(3) as f32 } else { w };
                if random.below(8) < forbid * forbid / 2 { losing } else { w }
            })
            .collect();
        if random.below(3) == 0 && rows > 1 && cols > 1 {
            for _ in 0..random.below(4) {
                let (a, b) = (random.below(rows), random.below(rows));
                data.copy_within(a * cols..(a + 1) * cols, b * cols);
                let (a, b) = (random.below(cols), random.below(cols));
                for row in 0..rows {
                    data[row * cols + b] = data[row * cols + a];
                }
            }
        }
        Self { rows, cols, data }
    }

    /// Independent and uniform in [0, 1).
    pub(crate) fn uniform(random: &mut Random, rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: (0..rows * cols).map(|_| random.unit()).collect() }
    }

    /// Many near ties: a smooth function of a row's and a column's kind, with noise on both.
    pub(crate) fn clustered(random: &mut Random, rows: usize, cols: usize, noise: f32) -> Self {
        let mut places = |count: usize, kinds: usize| -> Vec<[f32; 3]> {
            let kinds: Vec<[f32; 3]> =
                (0..kinds).map(|_| std::array::from_fn(|_| random.unit())).collect();
            (0..count)
                .map(|_| kinds[random.below(kinds.len())].map(|x| x + noise * random.unit()))
                .collect()
        };
        let (online, offline) = (places(rows, 20), places(cols, 10));
        let speed = |a: &[f32; 3], b: &[f32; 3]| {
            let load: f32 = a.iter().zip(b).map(|(x, y)| (x + y).max(0.4) * (x - y).abs()).sum();
            ((1.0 / (1.0 + load)) * 16_777_216.0).floor() / 16_777_216.0
        };
        let data = online.iter().flat_map(|a| offline.iter().map(move |b| speed(a, b))).collect();
        Self { rows, cols, data }
    }

    /// Each row and column as often as the counts say.
    pub(crate) fn expand(&self, row_counts: &[u32], col_counts: &[u32]) -> Self {
        let repeat = |counts: &[u32]| -> Vec<usize> {
            counts.iter().enumerate().flat_map(|(i, &n)| vec![i; n as usize]).collect()
        };
        let (rows, cols) = (repeat(row_counts), repeat(col_counts));
        let data = rows
            .iter()
            .flat_map(|&r| cols.iter().map(move |&c| self.data[r * self.cols + c]))
            .collect();
        Self { rows: rows.len(), cols: cols.len(), data }
    }
}
