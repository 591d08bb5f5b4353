//! The one module with `unsafe`: code for wider vectors than every x86-64 has, called only after the
//! processor was asked for them.
//!
//! A network is run for a block of pairs at once, one pair per vector lane: the inputs of a layer
//! are `inputs × block` numbers, and each weight is broadcast to all lanes. Two vectors of pairs
//! times five outputs are summed in registers (twelve sums and what feeds them are one too many),
//! so the loop does nearly nothing but multiply and add.

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

/// Numbers in a cache line.
pub(crate) const CACHE_LINE: usize = 16;

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
    /// `factors` has one for each output with padding. Beside the values comes what will be read
    /// next, which is brought near meanwhile.
    pub(crate) fn run_last(
        &self,
        set: InstructionSet,
        factors: &[f32],
        (values, ahead): (&[f32], &[f32]),
        start: f32,
        out: &mut [f32],
    ) {
        let block = set.block();
        assert!(values.len() >= self.inputs * block && out.len() >= block);
        assert_eq!(factors.len(), self.outputs);
        match set.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: whoever holds this `set` has a processor with AVX2 and FMA.
            Kind::Avx2 => unsafe {
                x86::last_layers_avx2(self, factors, (values, ahead), start, out);
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, with AVX-512F.
            Kind::Avx512 => unsafe {
                x86::last_layers_avx512(self, factors, (values, ahead), start, out);
            },
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
mod x86;

#[cfg(test)]
mod tests;
