//! The one module with `unsafe`: code compiled for wider vectors than every x86-64 has, and called
//! only after the processor was asked for them.

#![expect(unsafe_code, reason = "instruction sets chosen at run time")]

use crate::gemm::product;

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
        return unsafe { matrix_product_avx2(shape, a, b, c, accumulate) };
    }
    product(shape, a, b, c, accumulate);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn matrix_product_avx2(shape: [usize; 3], a: &[f32], b: &[f32], c: &mut [f32], accumulate: bool) {
    product(shape, a, b, c, accumulate);
}
