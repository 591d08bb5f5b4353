//! The block kernels of x86-64: AVX2 and AVX-512 are the same text, written once as a macro.

use super::{CACHE_LINE, OUTPUT_STEP, PackedLayer, join, product};
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

        /// Five outputs of a layer for two vectors of pairs, before what is negative is cut. A macro,
        /// because a call would hand ten vectors over through memory.
        macro_rules! $sums {
            ($of:expr, $by:expr, $from:expr) => {{
                let (values, weights, biases) = ($of, $by, $from);
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
                // Four inputs at a time: so few rounds that the processor foresees the last one.
                let (values_by_4, values) = values.as_chunks::<4>();
                let (weights_by_4, weights) = weights.as_chunks::<4>();
                for (x, w) in values_by_4.iter().zip(weights_by_4) {
                    add!(&x[0], &w[0]);
                    add!(&x[1], &w[1]);
                    add!(&x[2], &w[2]);
                    add!(&x[3], &w[3]);
                }
                for (x, w) in values.iter().zip(weights) {
                    add!(x, w);
                }
                [[a0, a1], [b0, b1], [c0, c1], [d0, d1], [e0, e1]]
            }};
        }

        #[target_feature(enable = $features)]
        pub(super) fn $layer(layer: &PackedLayer, values: &[f32], out: &mut [f32]) {
            let values = &values.as_chunks::<$lanes>().0.as_chunks::<VECTORS>().0;
            let values = &values[..layer.inputs];
            let out =
                out.as_chunks_mut::<$lanes>().0.as_chunks_mut::<{ VECTORS * OUTPUT_STEP }>().0;
            for (out, (weights, biases)) in out.iter_mut().zip(layer.groups()) {
                let sums = $sums!(values, weights, biases);
                for (out, sums) in out.as_chunks_mut::<VECTORS>().0.iter_mut().zip(sums) {
                    *out = sums.map(|sum| $store($max(sum, $set1(0.0))));
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn $last_layers(
            layer: &PackedLayer,
            factors: &[f32],
            (values, ahead): (&[f32], &[f32]),
            start: f32,
            out: &mut [f32],
        ) {
            let values = &values.as_chunks::<$lanes>().0.as_chunks::<VECTORS>().0;
            let values = &values[..layer.inputs];
            let (mut total0, mut total1) = ($set1(start), $set1(start));
            let factors = factors.as_chunks::<OUTPUT_STEP>().0;
            let ahead = ahead.as_chunks::<CACHE_LINE>().0;
            let mut ahead = ahead.chunks(ahead.len().div_ceil(factors.len().max(1)).max(1));
            for ((weights, biases), factors) in layer.groups().zip(factors) {
                for line in ahead.next().unwrap_or_default() {
                    _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
                }
                for (pair, factor) in $sums!(values, weights, biases).iter().zip(factors) {
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
        pub(super) fn $weighted_sum(factors: &[f32], values: &[f32], start: f32, out: &mut [f32]) {
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
