//! The heuristic against all possible packings, on small cases.

use super::*;
use proptest::prelude::*;

/// Worth by a table: what each job is worth alone on each GPU, and how much of it is left with a
/// second and third neighbour.
#[derive(Debug)]
struct Table {
    alone: Vec<Vec<f64>>,
    friction: Vec<Vec<f64>>,
}

impl SetValue for Table {
    fn value(&self, gpu: usize, jobs: &[usize]) -> Option<f64> {
        let mut total = 0.0;
        for (i, &a) in jobs.iter().enumerate() {
            let mut worth = self.alone[gpu][a];
            for (k, &b) in jobs.iter().enumerate() {
                if i != k {
                    worth *= self.friction[a][b];
                }
            }
            total += worth;
        }
        Some(total)
    }
}

fn table(gpus: usize, jobs: usize) -> impl Strategy<Value = Table> {
    let row = proptest::collection::vec(0.05f64..1.0, jobs);
    let rub = proptest::collection::vec(0.1f64..0.95, jobs);
    (proptest::collection::vec(row, gpus), proptest::collection::vec(rub, jobs))
        .prop_map(|(alone, friction)| Table { alone, friction })
}

fn small() -> impl Strategy<Value = (usize, usize, usize, Table)> {
    (1usize..4, 1usize..7, 1usize..4)
        .prop_flat_map(|(g, j, most)| (Just(g), Just(j), Just(most), table(g, j)))
}

proptest! {
    #[test]
    fn never_above_the_best_never_below_one_matching(
        (gpus, jobs, most, table) in small()
    ) {
        let (g, j): (Vec<usize>, Vec<usize>) = ((0..gpus).collect(), (0..jobs).collect());
        let problem =
            Problem { gpu_kinds: &g, job_kinds: &j, most, held: &[], values: &table };
        let one = rounds(&Problem { most: 1, ..problem }).unwrap();
        let first = rounds(&problem).unwrap();
        let ours = solve(&problem, 100_000).unwrap();
        let best = exhaustive(&problem);
        prop_assert!(ours.total <= best.total + 1e-6, "{ours:?} {best:?}");
        prop_assert!(ours.total >= first.total - 1e-9 && first.total >= one.total - 1e-5);
        if most == 1 {
            prop_assert!(one.total >= best.total - 1e-5, "a matching is exact: {one:?} {best:?}");
        }
        // Nobody twice, nobody too many.
        let mut seen: Vec<usize> = ours.sets.iter().flatten().copied().collect();
        let placed = seen.len();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), placed);
        prop_assert!(ours.sets.iter().all(|s| s.len() <= most));
        prop_assert!((problem.worth(&ours.sets) - ours.total).abs() < 1e-9);
    }

    #[test]
    fn held_jobs_stay_where_they_are((gpus, jobs, most, table) in small()) {
        let (g, j): (Vec<usize>, Vec<usize>) = ((0..gpus).collect(), (0..jobs).collect());
        let mut held = vec![Vec::new(); gpus];
        held[gpus - 1].push(0);
        let problem =
            Problem { gpu_kinds: &g, job_kinds: &j, most, held: &held, values: &table };
        let ours = solve(&problem, 100_000).unwrap();
        prop_assert_eq!(ours.sets[gpus - 1][0], 0);
        prop_assert!(ours.total <= exhaustive(&problem).total + 1e-6);
    }
}

/// How far from the best: mean and worst over many small cases. The bound is far from what is
/// measured, so that only a broken heuristic fails.
#[test]
fn the_distance_from_the_best_is_small() {
    let mut state = 1u64;
    let mut next = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let x = (state >> 11) as f64 / 9_007_199_254_740_992.0;
        x
    };
    let (mut sum, mut worst, cases) = (0.0, 1.0f64, 100);
    for _ in 0..cases {
        let mut rows = |n: usize, m: usize, low: f64| -> Vec<Vec<f64>> {
            (0..n).map(|_| (0..m).map(|_| low + (1.0 - low) * next()).collect()).collect()
        };
        let table = Table { alone: rows(3, 6, 0.1), friction: rows(6, 6, 0.3) };
        let (g, j): (Vec<usize>, Vec<usize>) = ((0..3).collect(), (0..6).collect());
        let problem = Problem { gpu_kinds: &g, job_kinds: &j, most: 2, held: &[], values: &table };
        let ours = solve(&problem, 100_000).unwrap();
        let ratio = ours.total / exhaustive(&problem).total;
        sum += ratio;
        worst = worst.min(ratio);
    }
    let mean = sum / f64::from(cases);
    println!("mean {mean:.4}, worst {worst:.4}");
    assert!(mean > 0.97 && worst > 0.75, "mean {mean:.4}, worst {worst:.4}");
}
