//! Every instruction set against the definition.

use super::*;
use crate::random::Rng;
use proptest::prelude::*;

#[expect(clippy::cast_possible_truncation, reason = "test data")]
fn draw(count: usize, rng: &mut Rng) -> Vec<f32> {
    (0..count).map(|_| rng.normal() as f32).collect()
}

proptest! {
    #[test]
    fn every_instruction_set_gives_what_the_definition_gives(
        inputs in 1usize..70, outputs in 1usize..70, seed in 0u64..1000,
    ) {
        let mut rng = Rng::new(seed);
        let (weights, biases) = (draw(inputs * outputs, &mut rng), draw(outputs, &mut rng));
        let layer = PackedLayer::new(inputs, outputs, &weights, &biases);
        for set in InstructionSet::all_here() {
            let block = set.block();
            let values = draw(inputs * block, &mut rng);
            let mut out = vec![f32::NAN; layer.outputs() * block];
            layer.run(set, &values, &mut out);
            for output in 0..layer.outputs() {
                for lane in 0..block {
                    let mut want = biases.get(output).copied().unwrap_or(0.0);
                    if output < outputs {
                        for input in 0..inputs {
                            want += weights[input * outputs + output] * values[input * block + lane];
                        }
                    }
                    let got = out[output * block + lane];
                    prop_assert!((got - want.max(0.0)).abs() < 1e-3, "{set:?} {got} {want}");
                }
            }
            let factors = draw(layer.outputs(), &mut rng);
            let mut sums = vec![f32::NAN; block];
            layer.run_last(set, &factors, (&values, &values), 0.25, &mut sums);
            for (lane, sum) in sums.iter().enumerate() {
                let products = (0..layer.outputs()).map(|k| factors[k] * out[k * block + lane]);
                let want = 0.25 + products.sum::<f32>();
                prop_assert!((sum - want).abs() < 1e-2, "{set:?} {sum} {want}");
            }
            let factors = draw(inputs, &mut rng);
            let mut sums = vec![f32::NAN; block];
            weighted_sum(set, &factors, &values, 0.25, &mut sums);
            for (lane, sum) in sums.iter().enumerate() {
                let want: f32 =
                    0.25 + (0..inputs).map(|k| factors[k] * values[k * block + lane]).sum::<f32>();
                prop_assert!((sum - want).abs() < 1e-3, "{set:?}");
            }
        }
    }
}

#[test]
fn instruction_sets_that_this_machine_lacks_are_named() {
    let here = InstructionSet::all_here();
    for kind in [Kind::Avx2, Kind::Avx512] {
        if !here.contains(&InstructionSet(kind)) {
            println!("NOT TESTED HERE: this processor has no {kind:?}");
        }
    }
    assert_eq!(here[0].name(), "plain");
    let (flops, value) = peak_work(InstructionSet::best(), 10);
    assert!(flops > 0 && value.is_finite());
}
