//! The matching equals brute force on small instances, in every mode.

use crate::instance::{Instance, Random};
use muxflow_matching::{Dense, Options, Streamed, solve, solve_classes, verify, verify_flow};

/// Best (cardinality, value) by trying everything; weights in the direction of maximising.
fn brute(instance: &Instance, optional: bool, minimize: bool) -> (usize, f64) {
    fn go(
        i: &Instance,
        row: usize,
        taken: u32,
        sign: f64,
        count: usize,
        sum: f64,
        best: &mut dyn FnMut(usize, f64),
    ) {
        if row == i.rows {
            best(count, sum);
            return;
        }
        go(i, row + 1, taken, sign, count, sum, best);
        for col in 0..i.cols {
            let w = f64::from(i.data[row * i.cols + col]);
            if taken & (1 << col) == 0 && w.is_finite() {
                go(i, row + 1, taken | 1 << col, sign, count + 1, sum + sign * w, best);
            }
        }
    }
    let mut top = (0, f64::NEG_INFINITY);
    let sign = if minimize { -1.0 } else { 1.0 };
    go(instance, 0, 0, sign, 0, 0.0, &mut |count, sum| {
        let better = if optional { sum > top.1 } else { (count, sum) > top };
        if better {
            top = (count, sum);
        }
    });
    (top.0, sign * top.1)
}

#[test]
fn ten_thousand_small_instances_equal_brute_force() {
    let mut random = Random::new(1);
    for case in 0..10_000u64 {
        let minimize = random.below(2) == 1;
        let optional = random.below(2) == 1;
        let instance = Instance::small(&mut random, minimize);
        let weights = Dense::new(instance.rows, instance.cols, &instance.data).unwrap();
        let options = Options { minimize, optional, ..Options::default() };
        let matching = solve(&weights, options).unwrap();
        let proof = verify(&weights, &matching)
            .unwrap_or_else(|e| panic!("case {case} {instance:?} {options:?}: {e}\n{matching:?}"));
        assert!(proof.exact);
        let (count, value) = brute(&instance, optional, minimize);
        assert!(
            (matching.value - value).abs() < 1e-9,
            "case {case}: {} instead of {value}\n{instance:?} {options:?}\n{matching:?}",
            matching.value
        );
        if !optional {
            assert_eq!(proof.matched, count as u64, "case {case}: {instance:?}");
        }
    }
}

#[test]
fn classes_equal_their_expansion() {
    let mut random = Random::new(2);
    for case in 0..3_000u64 {
        let minimize = random.below(2) == 1;
        let optional = random.below(2) == 1;
        let instance = Instance::small(&mut random, minimize);
        let counts = |n: usize, random: &mut Random| -> Vec<u32> {
            (0..n).map(|_| [0, 1, 2, 3][random.below(4)]).collect()
        };
        let row_counts = counts(instance.rows, &mut random);
        let col_counts = counts(instance.cols, &mut random);
        let weights = Dense::new(instance.rows, instance.cols, &instance.data).unwrap();
        let options = Options { minimize, optional, ..Options::default() };
        let flow = solve_classes(&weights, &row_counts, &col_counts, options).unwrap();
        let proof = verify_flow(&weights, &row_counts, &col_counts, &flow).unwrap_or_else(|e| {
            panic!(
                "case {case} {instance:?} {row_counts:?} {col_counts:?} {options:?}: {e}\n{flow:?}"
            )
        });
        let wide = instance.expand(&row_counts, &col_counts);
        let matching =
            solve(&Dense::new(wide.rows, wide.cols, &wide.data).unwrap(), options).unwrap();
        let other =
            verify(&Dense::new(wide.rows, wide.cols, &wide.data).unwrap(), &matching).unwrap();
        assert!((flow.value - matching.value).abs() < 1e-9, "case {case}: {instance:?}");
        if !optional {
            assert_eq!(proof.matched, other.matched);
        }
    }
}

#[test]
fn a_closure_gives_the_same_as_a_slice() {
    let mut random = Random::new(3);
    for _ in 0..500 {
        let instance = Instance::small(&mut random, false);
        let dense = Dense::new(instance.rows, instance.cols, &instance.data).unwrap();
        let streamed =
            Streamed::new(instance.rows, instance.cols, |row, first, out: &mut [f32]| {
                let from = row * instance.cols + first;
                out.copy_from_slice(&instance.data[from..from + out.len()]);
            });
        let options = Options::default();
        assert_eq!(solve(&dense, options).unwrap(), solve(&streamed, options).unwrap());
    }
}

/// The worked example of the paper: online A, B; offline C, D, E.
#[test]
fn the_worked_example_of_the_paper_gives_1_6() {
    #[rustfmt::skip]
    let data: [f32; 6] = [
        0.3, 0.8, 0.2,
        0.8, 0.1, 0.4,
    ];
    let weights = Dense::new(2, 3, &data).unwrap();
    let matching = solve(&weights, Options::default()).unwrap();
    assert_eq!(matching.row_to_col, [Some(1), Some(0)]);
    assert!((matching.value - 1.6).abs() < 1e-6);
    assert!(verify(&weights, &matching).unwrap().exact);
}
