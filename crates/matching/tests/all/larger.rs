//! Instances too large for brute force: the certificate speaks.

use crate::instance::{Instance, Random};
use muxflow_matching::{
    CertificateError, Dense, MatchError, Matching, Options, Streamed, Warm, solve, solve_classes,
    verify, verify_flow,
};
use proptest::prelude::*;

fn dense(i: &Instance) -> Dense<'_, f32> {
    Dense::new(i.rows, i.cols, &i.data).expect("the shape fits")
}

fn proved(i: &Instance, options: Options<'_>) -> Matching {
    let matching = solve(&dense(i), options).expect("solvable");
    let proof = verify(&dense(i), &matching).expect("proved");
    assert!(proof.exact);
    matching
}

#[test]
fn large_instances_are_proved_in_every_shape_and_mode() {
    let mut random = Random::new(11);
    for (rows, cols) in [(700, 700), (600, 900), (900, 600), (1200, 1200), (513, 4000), (1, 3000)] {
        for minimize in [false, true] {
            let clustered = Instance::clustered(&mut random, rows, cols, 0.02);
            proved(&clustered, Options { minimize, ..Options::default() });
        }
        let mut shifted = Instance::uniform(&mut random, rows, cols);
        shifted.data.iter_mut().for_each(|w| *w -= 0.995);
        let m = proved(&shifted, Options { optional: true, ..Options::default() });
        let used: Vec<f32> = m
            .row_to_col
            .iter()
            .zip(shifted.data.chunks(cols))
            .filter_map(|(c, l)| Some(l[(*c)? as usize]))
            .collect();
        assert!(used.iter().all(|&w| w > 0.0), "an edge that lowers the total is in use");
    }
}

#[test]
fn forbidden_edges_leave_as_few_unmatched_as_possible() {
    let mut random = Random::new(12);
    for density in [0.002, 0.01, 0.3] {
        let mut i = Instance::clustered(&mut random, 700, 800, 0.05);
        for w in &mut i.data {
            if random.unit() > density {
                *w = f32::NEG_INFINITY;
            }
        }
        let m = proved(&i, Options::default());
        let matched = m.row_to_col.iter().flatten().count();
        assert_eq!(matched, most_edges(&i), "density {density}");
    }
}

/// Size of a largest matching, by augmenting paths.
fn most_edges(i: &Instance) -> usize {
    fn try_row(i: &Instance, row: usize, seen: &mut [bool], holder: &mut [usize]) -> bool {
        for col in 0..i.cols {
            if i.data[row * i.cols + col].is_finite() && !seen[col] {
                seen[col] = true;
                if holder[col] == usize::MAX || try_row(i, holder[col], seen, holder) {
                    holder[col] = row;
                    return true;
                }
            }
        }
        false
    }
    let mut holder = vec![usize::MAX; i.cols];
    (0..i.rows).filter(|&row| try_row(i, row, &mut vec![false; i.cols], &mut holder)).count()
}

#[test]
fn equal_rows_and_columns_are_treated_as_classes() {
    let mut random = Random::new(13);
    let i = Instance::clustered(&mut random, 1500, 1500, 0.0);
    let m = proved(&i, Options::default());
    assert!(m.effort.refills < 200, "{:?}: each class is read about once", m.effort);
    let small = Instance::uniform(&mut random, 12, 9);
    let (rows, cols) = ([40_000; 12], [50_000; 9]);
    let flow = solve_classes(&dense(&small), &rows, &cols, Options::default()).unwrap();
    let proof = verify_flow(&dense(&small), &rows, &cols, &flow).unwrap();
    assert_eq!((proof.exact, proof.matched), (true, 450_000));
}

#[test]
fn the_same_input_gives_the_same_output() {
    let mut random = Random::new(14);
    let i = Instance::clustered(&mut random, 900, 900, 0.02);
    let first = proved(&i, Options::default());
    for threads in [0, 1, 2, 5] {
        let again = solve(&dense(&i), Options { threads, ..Options::default() }).unwrap();
        assert_eq!(first, again, "{threads} threads");
    }
    let streamed = Streamed::new(i.rows, i.cols, |row, first, out: &mut [f32]| {
        let from = row * i.cols + first;
        out.copy_from_slice(&i.data[from..from + out.len()]);
    });
    assert_eq!(first, solve(&streamed, Options { threads: 2, ..Options::default() }).unwrap());
}

#[test]
fn f64_weights_are_exact_on_a_grid_and_honest_beyond_it() {
    let mut random = Random::new(15);
    let n = 60;
    let on_grid: Vec<f64> =
        (0..n * n).map(|_| (random.bits() >> 11) as f64 / (1u64 << 53) as f64).collect();
    let weights = Dense::new(n, n, &on_grid).unwrap();
    let proof = verify(&weights, &solve(&weights, Options::default()).unwrap()).unwrap();
    assert!(proof.exact, "53 bits fit");
    let wild: Vec<f64> = (0..n * n)
        .map(|_| f64::from(random.unit()) * 10f64.powf(random.below(60) as f64 - 30.0))
        .collect();
    let weights = Dense::new(n, n, &wild).unwrap();
    let matching = solve(&weights, Options::default()).unwrap();
    let proof = verify(&weights, &matching).unwrap();
    assert!(!proof.exact);
    assert!(proof.gap > 0.0 && proof.gap < matching.value * 1e-14, "{proof:?}");
    for (scale, offset) in [(1e-305, 0.0), (1e300, 0.0), (1e-6, 1e9), (0.0, 3.5)] {
        let odd: Vec<f64> = (0..n * n).map(|_| f64::from(random.unit()) * scale + offset).collect();
        let weights = Dense::new(n, n, &odd).unwrap();
        let matching = solve(&weights, Options::default()).unwrap();
        verify(&weights, &matching).unwrap_or_else(|e| panic!("{scale} {offset}: {e}"));
    }
}

#[test]
fn weights_without_a_meaning_are_refused_by_position() {
    let mut data = vec![0.5f32; 70 * 50];
    data[33 * 50 + 41] = f32::NAN;
    let found = solve(&Dense::new(70, 50, &data).unwrap(), Options::default());
    assert_eq!(found.unwrap_err(), MatchError::NotANumber { row: 33, col: 41 });
    data[33 * 50 + 41] = f32::INFINITY;
    let found = solve(&Dense::new(70, 50, &data).unwrap(), Options::default());
    assert_eq!(found.unwrap_err(), MatchError::Infinite { row: 33, col: 41 });
    let options = Options { minimize: true, ..Options::default() };
    assert!(solve(&Dense::new(70, 50, &data).unwrap(), options).is_ok());
    assert!(Dense::new(3, 3, &data).is_err());
}

#[test]
fn the_checker_rejects_what_was_tampered_with() {
    let mut random = Random::new(16);
    let i = Instance::clustered(&mut random, 60, 80, 0.05);
    let honest = proved(&i, Options::default());
    let rejected = |change: &dyn Fn(&mut Matching)| {
        let mut bad = honest.clone();
        change(&mut bad);
        verify(&dense(&i), &bad).unwrap_err()
    };
    assert!(matches!(
        rejected(&|m| {
            let (a, b) = (m.row_to_col[0], m.row_to_col[1]);
            m.row_to_col[0] = b;
            m.row_to_col[1] = a;
        }),
        CertificateError::Value { .. } | CertificateError::Gap { .. }
    ));
    assert!(matches!(rejected(&|m| m.value += 0.001), CertificateError::Value { .. }));
    assert!(matches!(
        rejected(&|m| m.row_to_col[3] = m.row_to_col[4]),
        CertificateError::Infeasible(_)
    ));
    assert!(matches!(rejected(&|m| m.row_to_col[3] = None), CertificateError::Infeasible(_)));
    assert!(matches!(rejected(&|m| m.row_to_col[3] = Some(80)), CertificateError::Infeasible(_)));
    assert!(matches!(rejected(&|m| m.certificate.prices[7] = -1), CertificateError::Malformed(_)));
    assert!(matches!(
        rejected(&|m| m.certificate.prices[7] += 1 << 40),
        CertificateError::Gap { .. }
    ));
    assert!(matches!(
        rejected(&|m| m.certificate.way_out = Some(0)),
        CertificateError::Malformed(_)
    ));
    assert!(matches!(rejected(&|m| m.certificate.prices.truncate(9)), CertificateError::Shape(_)));
    let mut forbidden = i.clone();
    let col = honest.row_to_col[5].unwrap() as usize;
    forbidden.data[5 * 80 + col] = f32::NEG_INFINITY;
    assert!(matches!(verify(&dense(&forbidden), &honest), Err(CertificateError::Infeasible(_))));
    let mut broken = i.clone();
    broken.data[100] = f32::NAN;
    assert!(matches!(
        verify(&dense(&broken), &honest),
        Err(CertificateError::Weight { row: 1, col: 20 })
    ));
}

#[test]
fn a_warm_start_gives_the_value_of_a_cold_one() {
    let mut random = Random::new(17);
    for (rows, cols) in [(600, 600), (600, 800), (800, 600)] {
        let mut now = Instance::clustered(&mut random, rows, cols, 0.02);
        let mut last = proved(&now, Options::default());
        for _ in 0..4 {
            let fresh = Instance::clustered(&mut random, rows, cols, 0.02);
            for _ in 0..rows / 50 {
                let row = random.below(rows);
                now.data[row * cols..(row + 1) * cols]
                    .copy_from_slice(&fresh.data[row * cols..(row + 1) * cols]);
            }
            let warm = Warm { certificate: &last.certificate, rows: &[], cols: &[] };
            let warm = proved(&now, Options { warm: Some(warm), ..Options::default() });
            let cold = proved(&now, Options::default());
            assert_eq!(warm.value, cold.value);
            last = warm;
        }
    }
}

#[test]
fn a_small_change_is_repaired_without_phases() {
    let mut random = Random::new(23);
    let n = 900;
    for optional in [false, true] {
        let options = Options { optional, ..Options::default() };
        let mut now = Instance::clustered(&mut random, n, n, 0.02);
        let last = proved(&now, options);
        // Whoever holds something likes it better now, as running jobs do; a few rows are new.
        for row in 0..n {
            let col = last.row_to_col[row].unwrap() as usize;
            now.data[row * n + col] += 0.125;
        }
        let fresh = Instance::clustered(&mut random, n, n, 0.02);
        for _ in 0..n / 50 {
            let row = random.below(n);
            now.data[row * n..(row + 1) * n].copy_from_slice(&fresh.data[row * n..(row + 1) * n]);
        }
        let known = Warm { certificate: &last.certificate, rows: &[], cols: &[] };
        let options = Options { warm: Some(known), ..options };
        let warm = proved(&now, options);
        assert_eq!(warm, solve(&dense(&now), Options { threads: 3, ..options }).unwrap());
        let cold = proved(&now, Options { warm: None, ..options });
        assert_eq!(warm.value, cold.value);
        assert_eq!(warm.effort.phases, 1, "repaired, not solved anew");
        assert!(warm.effort.refills < 2 * n as u64, "{:?}", warm.effort);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Rows and columns come, go and change; the warm start never changes the value.
    #[test]
    fn a_warm_start_survives_any_change(seed in 0u64..1 << 40, rows in 1usize..40, cols in 1usize..40,
        new_rows in 1usize..40, new_cols in 1usize..40, optional: bool, minimize: bool, forbid in 0u8..3) {
        let mut random = Random::new(seed);
        let losing = if minimize { f32::INFINITY } else { f32::NEG_INFINITY };
        let make = |rows, cols, random: &mut Random| {
            let mut i = Instance::clustered(random, rows, cols, 0.03);
            for w in &mut i.data {
                *w -= 0.4;
                if random.below(4) < forbid as usize { *w = losing; }
            }
            i
        };
        let options = Options { optional, minimize, ..Options::default() };
        let then = make(rows, cols, &mut random);
        let last = proved(&then, options);
        let now = make(new_rows, new_cols, &mut random);
        let map = |new: usize, old: usize, random: &mut Random| -> Vec<Option<u32>> {
            (0..new).map(|_| (random.below(5) > 0).then(|| u32::try_from(random.below(old)).ok()).flatten()).collect()
        };
        let (row_map, col_map) = (map(new_rows, rows, &mut random), map(new_cols, cols, &mut random));
        let warm = Warm { certificate: &last.certificate, rows: &row_map, cols: &col_map };
        let warm = proved(&now, Options { warm: Some(warm), ..options });
        prop_assert_eq!(warm.value, proved(&now, options).value);
        let short = Warm { certificate: &last.certificate, rows: &row_map[1..], cols: &col_map };
        if new_rows > 1 {
            let refused = solve(&dense(&now), Options { warm: Some(short), ..options });
            prop_assert!(refused.is_err());
        }
    }
}
