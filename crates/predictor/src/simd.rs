//! The one module with `unsafe`: code for wider vectors than every x86-64 has, called only after the
//! processor was asked for them.
//!
//! A network is run for a block of pairs at once, one pair per vector lane: the inputs of a layer
//! are `inputs × block` numbers, and each weight is broadcast to all lanes. Two vectors of pairs
//! times five outputs are summed in registers (twelve sums and what feeds them are one too many), so the loop does nearly nothing but multiply and add.
//! AVX2 and AVX-512 are the same text, written once as a macro.

#![expect(unsafe_code, reason = "instruction sets chosen at run time")]

use crate::gemm::product;

/// Which instructions to use. One can only be had from a processor that has them, so whoever holds
/// one may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstructionSet(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    /// What every machine has.
    Plain,
    /// 8 lanes with fused multiply-add.
    Avx2,
    /// 16 lanes with fused multiply-add.
    Avx512,
}

/// Outputs of a layer are padded to a multiple of this.
pub(crate) const OUTPUT_STEP: usize = 5;

impl InstructionSet {
    /// The best one that this processor has.
    pub fn best() -> Self {
        InstructionSet::all_here().last().copied().unwrap_or(InstructionSet(Kind::Plain))
    }

    /// All that this processor has, slowest first.
    pub fn all_here() -> Vec<Self> {
        let mut sets = vec![InstructionSet(Kind::Plain)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(InstructionSet(Kind::Avx2));
            }
            if is_x86_feature_detected!("avx512f") {
                sets.push(InstructionSet(Kind::Avx512));
            }
        }
        sets
    }

    /// Pairs in a block.
    pub fn block(self) -> usize {
        match self.0 {
            Kind::Plain | Kind::Avx2 => 16,
            Kind::Avx512 => 32,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Plain => "plain",
            Kind::Avx2 => "AVX2",
            Kind::Avx512 => "AVX-512",
        }
    }
}

/// One layer of weights as the block kernels want them.
#[derive(Debug, Clone)]
pub(crate) struct PackedLayer {
    inputs: usize,
    /// Padded to [`OUTPUT_STEP`]; the padding's weights are zero.
    outputs: usize,
    /// For each five outputs, for each input, the five weights.
    weights: Vec<f32>,
    biases: Vec<f32>,
}

impl PackedLayer {
    /// `weights` has one row per input.
    pub(crate) fn new(inputs: usize, outputs: usize, weights: &[f32], biases: &[f32]) -> Self {
        let padded = outputs.next_multiple_of(OUTPUT_STEP);
        let mut packed = vec![0.0; inputs * padded];
        for input in 0..inputs {
            for output in 0..outputs {
                let group = output / OUTPUT_STEP * OUTPUT_STEP;
                packed[group * inputs + input * OUTPUT_STEP + output % OUTPUT_STEP] =
                    weights[input * outputs + output];
            }
        }
        let mut biases = biases.to_vec();
        biases.resize(padded, 0.0);
        PackedLayer { inputs, outputs: padded, weights: packed, biases }
    }

    /// Outputs with padding.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// `out = relu(weights · values + biases)` for a block of pairs.
    pub(crate) fn run(&self, set: InstructionSet, values: &[f32], out: &mut [f32]) {
        let block = set.block();
        assert!(values.len() >= self.inputs * block && out.len() >= self.outputs * block);
        match set.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: whoever holds this `set` has a processor with AVX2 and FMA.
            Kind::Avx2 => unsafe { x86::layer_avx2(self, values, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, with AVX-512F.
            Kind::Avx512 => unsafe { x86::layer_avx512(self, values, out) },
            _ => self.run_plain(block, values, out),
        }
    }

    /// `out = start + Σ factors · relu(weights · values + biases)` for a block of pairs: the last
    /// hidden layer and the one node behind it, without writing down what is between them.
    /// `factors` has one for each output with padding.
    pub(crate) fn run_last(
        &self,
        set: InstructionSet,
        factors: &[f32],
        values: &[f32],
        start: f32,
        out: &mut [f32],
    ) {
        let block = set.block();
        assert!(values.len() >= self.inputs * block && out.len() >= block);
        assert_eq!(factors.len(), self.outputs);
        match set.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: whoever holds this `set` has a processor with AVX2 and FMA.
            Kind::Avx2 => unsafe { x86::last_layers_avx2(self, factors, values, start, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, with AVX-512F.
            Kind::Avx512 => unsafe { x86::last_layers_avx512(self, factors, values, start, out) },
            _ => {
                let mut between = vec![0.0; self.outputs * block];
                self.run_plain(block, values, &mut between);
                weighted_sum(set, factors, &between, start, out);
            }
        }
    }

    /// The weights and biases of each five outputs.
    #[cfg(target_arch = "x86_64")]
    fn groups(&self) -> impl Iterator<Item = (&[[f32; OUTPUT_STEP]], &[f32; OUTPUT_STEP])> {
        let weights = self.weights.as_chunks::<OUTPUT_STEP>().0.chunks_exact(self.inputs.max(1));
        weights.zip(self.biases.as_chunks::<OUTPUT_STEP>().0)
    }

    fn run_plain(&self, block: usize, values: &[f32], out: &mut [f32]) {
        for output in 0..self.outputs {
            let line = &mut out[output * block..(output + 1) * block];
            line.fill(self.biases[output]);
            let group = output / OUTPUT_STEP * OUTPUT_STEP * self.inputs + output % OUTPUT_STEP;
            for (input, values) in values.chunks_exact(block).take(self.inputs).enumerate() {
                let weight = self.weights[group + input * OUTPUT_STEP];
                for (sum, value) in line.iter_mut().zip(values) {
                    *sum += weight * value;
                }
            }
            for value in line.iter_mut() {
                *value = value.max(0.0);
            }
        }
    }
}

/// `out = start + Σ factors[k] · values[k]` for a block of pairs; `values` is `factors × block`.
pub(crate) fn weighted_sum(
    set: InstructionSet,
    factors: &[f32],
    values: &[f32],
    start: f32,
    out: &mut [f32],
) {
    let block = set.block();
    assert!(values.len() >= factors.len() * block && out.len() >= block);
    match set.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever holds this `set` has a processor with AVX2 and FMA.
        Kind::Avx2 => unsafe { x86::weighted_sum_avx2(factors, values, start, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above, with AVX-512F.
        Kind::Avx512 => unsafe { x86::weighted_sum_avx512(factors, values, start, out) },
        _ => {
            let out = &mut out[..block];
            out.fill(start);
            for (factor, values) in factors.iter().zip(values.chunks_exact(block)) {
                for (sum, value) in out.iter_mut().zip(values) {
                    *sum += factor * value;
                }
            }
        }
    }
}

/// Multiplies and adds in registers `rounds` times as fast as the processor can, for measuring
/// against: returns how many floating-point operations that was, and a number that depends on all.
pub fn peak_work(set: InstructionSet, rounds: usize) -> (u64, f32) {
    match set.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever holds this `set` has a processor with it.
        Kind::Avx2 => (rounds as u64 * 12 * 8 * 2, unsafe { x86::peak_avx2(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever holds this `set` has a processor with it.
        Kind::Avx512 => (rounds as u64 * 12 * 16 * 2, unsafe { x86::peak_avx512(rounds) }),
        _ => {
            let mut sums = [0.5f32; 32];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = *sum * 0.999 + 0.001;
                }
            }
            (rounds as u64 * 64, sums.iter().sum())
        }
    }
}

/// `out[k] = max(floor, online[k] + offline[k])` for a block of pairs: the first layer, of which each
/// half is known.
pub(crate) fn join_halves(
    set: InstructionSet,
    online: &[f32],
    offline: &[f32],
    floor: f32,
    out: &mut [f32],
) {
    match set.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever holds this `set` has a processor with AVX2; AVX-512 includes it.
        Kind::Avx2 => unsafe { x86::join_halves_avx2(online, offline, floor, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: whoever holds this `set` has a processor with AVX-512F.
        Kind::Avx512 => unsafe { x86::join_halves_avx512(online, offline, floor, out) },
        _ => join::<16>(online, offline, floor, out),
    }
}

/// Plain Rust that each instruction set compiles for itself.
#[inline(always)]
fn join<const BLOCK: usize>(online: &[f32], offline: &[f32], floor: f32, out: &mut [f32]) {
    let (offline, out) = (offline.as_chunks::<BLOCK>().0, out.as_chunks_mut::<BLOCK>().0);
    for ((out, offline), online) in out.iter_mut().zip(offline).zip(online) {
        for (value, offline) in out.iter_mut().zip(offline) {
            *value = (online + offline).max(floor);
        }
    }
}

/// `c = a · b`, or `c += a · b` when `accumulate`; see [`crate::gemm`].
pub(crate) fn matrix_product(
    shape: [usize; 3],
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    accumulate: bool,
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, asked for in the line above.
        return unsafe { x86::matrix_product_avx2(shape, a, b, c, accumulate) };
    }
    product(shape, a, b, c, accumulate);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{OUTPUT_STEP, PackedLayer, join, product};
    use std::arch::x86_64::*;

    /// Two vectors of pairs, five outputs: ten sums, which with two inputs and a weight fit the
    /// sixteen registers of AVX2 and still cover the latency of a multiply-add.
    const VECTORS: usize = 2;

    macro_rules! kernels {
        ($features:literal, $lanes:literal, $vector:ty, $sums:ident, $layer:ident,
         $last_layers:ident, $weighted_sum:ident, $peak:ident, $load:ident, $store:ident, $set1:ident, $fma:ident, $max:ident) => {
            /// A vector of these numbers. Loads through pointers carry checks in debug builds.
            #[target_feature(enable = $features)]
            #[inline]
            fn $load(numbers: [f32; $lanes]) -> $vector {
                // SAFETY: both are the same number of floats, and any bits are valid in both.
                unsafe { std::mem::transmute(numbers) }
            }

            #[target_feature(enable = $features)]
            #[inline]
            fn $store(vector: $vector) -> [f32; $lanes] {
                // SAFETY: both are the same number of floats, and any bits are valid in both.
                unsafe { std::mem::transmute(vector) }
            }

            /// Five outputs of a layer for two vectors of pairs, before what is negative is cut.
            #[target_feature(enable = $features)]
            #[inline]
            fn $sums(
                values: &[[[f32; $lanes]; VECTORS]],
                weights: &[[f32; OUTPUT_STEP]],
                biases: &[f32; OUTPUT_STEP],
            ) -> [$vector; VECTORS * OUTPUT_STEP] {
                // Ten sums by name: as an array they would live in memory.
                let (mut a0, mut a1) = ($set1(biases[0]), $set1(biases[0]));
                let (mut b0, mut b1) = ($set1(biases[1]), $set1(biases[1]));
                let (mut c0, mut c1) = ($set1(biases[2]), $set1(biases[2]));
                let (mut d0, mut d1) = ($set1(biases[3]), $set1(biases[3]));
                let (mut e0, mut e1) = ($set1(biases[4]), $set1(biases[4]));
                macro_rules! add {
                    ($x:expr, $w:expr) => {
                        let (x, w) = ($x, $w);
                        let (x0, x1) = ($load(x[0]), $load(x[1]));
                        let factor = $set1(w[0]);
                        a0 = $fma(factor, x0, a0);
                        a1 = $fma(factor, x1, a1);
                        let factor = $set1(w[1]);
                        b0 = $fma(factor, x0, b0);
                        b1 = $fma(factor, x1, b1);
                        let factor = $set1(w[2]);
                        c0 = $fma(factor, x0, c0);
                        c1 = $fma(factor, x1, c1);
                        let factor = $set1(w[3]);
                        d0 = $fma(factor, x0, d0);
                        d1 = $fma(factor, x1, d1);
                        let factor = $set1(w[4]);
                        e0 = $fma(factor, x0, e0);
                        e1 = $fma(factor, x1, e1);
                    };
                }
                // Eight inputs at a time: so few rounds that the processor foresees the last one.
                let (values_by_8, values) = values.as_chunks::<8>();
                let (weights_by_8, weights) = weights.as_chunks::<8>();
                for (x, w) in values_by_8.iter().zip(weights_by_8) {
                    add!(&x[0], &w[0]);
                    add!(&x[1], &w[1]);
                    add!(&x[2], &w[2]);
                    add!(&x[3], &w[3]);
                    add!(&x[4], &w[4]);
                    add!(&x[5], &w[5]);
                    add!(&x[6], &w[6]);
                    add!(&x[7], &w[7]);
                }
                for (x, w) in values.iter().zip(weights) {
                    add!(x, w);
                }
                [a0, a1, b0, b1, c0, c1, d0, d1, e0, e1]
            }

            #[target_feature(enable = $features)]
            pub(super) fn $layer(layer: &PackedLayer, values: &[f32], out: &mut [f32]) {
                let values = &values.as_chunks::<$lanes>().0.as_chunks::<VECTORS>().0;
                let values = &values[..layer.inputs];
                let out =
                    out.as_chunks_mut::<$lanes>().0.as_chunks_mut::<{ VECTORS * OUTPUT_STEP }>().0;
                for (out, (weights, biases)) in out.iter_mut().zip(layer.groups()) {
                    for (out, sum) in out.iter_mut().zip($sums(values, weights, biases)) {
                        *out = $store($max(sum, $set1(0.0)));
                    }
                }
            }

            #[target_feature(enable = $features)]
            pub(super) fn $last_layers(
                layer: &PackedLayer,
                factors: &[f32],
                values: &[f32],
                start: f32,
                out: &mut [f32],
            ) {
                let values = &values.as_chunks::<$lanes>().0.as_chunks::<VECTORS>().0;
                let values = &values[..layer.inputs];
                let (mut total0, mut total1) = ($set1(start), $set1(start));
                let factors = factors.as_chunks::<OUTPUT_STEP>().0;
                for ((weights, biases), factors) in layer.groups().zip(factors) {
                    let sums = $sums(values, weights, biases);
                    for (pair, factor) in sums.as_chunks::<VECTORS>().0.iter().zip(factors) {
                        let factor = $set1(*factor);
                        total0 = $fma(factor, $max(pair[0], $set1(0.0)), total0);
                        total1 = $fma(factor, $max(pair[1], $set1(0.0)), total1);
                    }
                }
                if let [o0, o1, ..] = out.as_chunks_mut::<$lanes>().0 {
                    (*o0, *o1) = ($store(total0), $store(total1));
                }
            }

            #[target_feature(enable = $features)]
            pub(super) fn $weighted_sum(
                factors: &[f32],
                values: &[f32],
                start: f32,
                out: &mut [f32],
            ) {
                let values = values.as_chunks::<$lanes>().0.as_chunks::<VECTORS>().0;
                // Four factors at a time: more sums in flight.
                let (mut a0, mut a1) = ($set1(start), $set1(start));
                let (mut b0, mut b1) = ($set1(0.0), $set1(0.0));
                let (mut c0, mut c1) = ($set1(0.0), $set1(0.0));
                let (mut d0, mut d1) = ($set1(0.0), $set1(0.0));
                let (fours, rest) = factors.as_chunks::<4>();
                for (f, [x, y, z, u]) in fours.iter().zip(values.as_chunks::<4>().0) {
                    let factor = $set1(f[0]);
                    a0 = $fma(factor, $load(x[0]), a0);
                    a1 = $fma(factor, $load(x[1]), a1);
                    let factor = $set1(f[1]);
                    b0 = $fma(factor, $load(y[0]), b0);
                    b1 = $fma(factor, $load(y[1]), b1);
                    let factor = $set1(f[2]);
                    c0 = $fma(factor, $load(z[0]), c0);
                    c1 = $fma(factor, $load(z[1]), c1);
                    let factor = $set1(f[3]);
                    d0 = $fma(factor, $load(u[0]), d0);
                    d1 = $fma(factor, $load(u[1]), d1);
                }
                for (factor, x) in rest.iter().zip(&values[fours.len() * 4..]) {
                    let factor = $set1(*factor);
                    a0 = $fma(factor, $load(x[0]), a0);
                    a1 = $fma(factor, $load(x[1]), a1);
                }
                let one = $set1(1.0);
                if let [o0, o1, ..] = out.as_chunks_mut::<$lanes>().0 {
                    *o0 = $store($fma(one, $fma(one, a0, b0), $fma(one, c0, d0)));
                    *o1 = $store($fma(one, $fma(one, a1, b1), $fma(one, c1, d1)));
                }
            }

            #[target_feature(enable = $features)]
            pub(super) fn $peak(rounds: usize) -> f32 {
                let (factor, add) = ($set1(0.999), $set1(0.001));
                let mut sums = [$set1(0.5); 12];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $fma(*sum, factor, add);
                    }
                }
                sums.into_iter().map(|sum| $store(sum)[0]).sum()
            }
        };
    }

    kernels!(
        "avx2,fma",
        8,
        __m256,
        sums_avx2,
        layer_avx2,
        last_layers_avx2,
        weighted_sum_avx2,
        peak_avx2,
        load_avx2,
        store_avx2,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_max_ps
    );
    kernels!(
        "avx512f",
        16,
        __m512,
        sums_avx512,
        layer_avx512,
        last_layers_avx512,
        weighted_sum_avx512,
        peak_avx512,
        load_avx512,
        store_avx512,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_max_ps
    );

    #[target_feature(enable = "avx2")]
    pub(super) fn join_halves_avx2(online: &[f32], offline: &[f32], floor: f32, out: &mut [f32]) {
        join::<16>(online, offline, floor, out);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn join_halves_avx512(online: &[f32], offline: &[f32], floor: f32, out: &mut [f32]) {
        join::<32>(online, offline, floor, out);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn matrix_product_avx2(
        shape: [usize; 3],
        a: &[f32],
        b: &[f32],
        c: &mut [f32],
        accumulate: bool,
    ) {
        product(shape, a, b, c, accumulate);
    }
}

#[cfg(test)]
mod tests;
