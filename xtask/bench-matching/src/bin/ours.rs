//! One measurement of `muxflow-matching` in a process of its own: prints a line of JSON.
//!
//! `ours KIND ROWS COLS SEED FILE`: makes the matrix (or reads it from FILE), solves and proves it;
//! then, where rows can be drawn anew, changes 2 % of them and solves again from the last prices.

use std::path::Path;

use bench_matching::instance::{Cluster, Kind, Random, load};
use bench_matching::meter::{cpu_s, peak_bytes};
use muxflow_matching::{Dense, Matching, Options, Warm, solve, verify};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, kind, rows, cols, seed, path] = &args[..] else {
        panic!("usage: ours KIND ROWS COLS SEED FILE");
    };
    let kind = Kind::parse(kind).expect("a known kind");
    let (rows, cols): (usize, usize) = (parse(rows), parse(cols));
    let seed: u64 = parse(seed);
    let mut data = load(Path::new(path), kind, rows, cols, seed).expect("the instance is read");
    let stream_s = stream(&data);
    let (cold, solve_s, verify_s) = measure(rows, cols, &data, Options::default());
    let peak = peak_bytes();
    let warm = kind.noise().filter(|noise| noise.0 > 0.0).map(|noise| {
        let mut cluster = Cluster::new(rows, cols, noise, seed);
        let mut random = Random::new(seed + 1);
        let mut changed: Vec<usize> =
            (0..rows / 50).map(|_| (random.bits() % rows as u64) as usize).collect();
        changed.sort_unstable();
        changed.dedup();
        for &row in &changed {
            cluster.change_row(row);
            cluster.row(row, &mut data[row * cols..(row + 1) * cols]);
        }
        let warm = Warm { certificate: &cold.certificate, rows: &[], cols: &[] };
        let options = Options { warm: Some(warm), ..Options::default() };
        measure(rows, cols, &data, options)
    });
    let warm_peak = peak_bytes();
    let (warm_s, warm_refills) = match &warm {
        Some((m, solve_s, verify_s)) => (format!("{:.4}", solve_s + verify_s), m.effort.refills),
        None => ("null".into(), 0),
    };
    println!(
        "{{\"cpu_s\":{:.4},\"solve_s\":{solve_s:.4},\"verify_s\":{verify_s:.4},\
         \"stream_s\":{stream_s:.5},\"peak_bytes\":{peak},\"value\":{},\"bids\":{},\
         \"refills\":{},\"warm_s\":{warm_s},\"warm_refills\":{warm_refills},\
         \"warm_peak_bytes\":{warm_peak}}}",
        solve_s + verify_s,
        cold.value,
        cold.effort.bids,
        cold.effort.refills,
    );
}

fn parse<T: std::str::FromStr>(text: &str) -> T {
    text.parse().ok().expect("a number")
}

/// The unit: CPU time to read every weight once, the best of three.
fn stream(data: &[f32]) -> f64 {
    let once = || {
        let before = cpu_s();
        let mut sums = [0u32; 64];
        for block in data.as_chunks::<64>().0 {
            for lane in 0..64 {
                sums[lane] = sums[lane].wrapping_add(block[lane].to_bits());
            }
        }
        std::hint::black_box(sums);
        cpu_s() - before
    };
    (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Solves and proves; CPU time of each.
fn measure(rows: usize, cols: usize, data: &[f32], options: Options<'_>) -> (Matching, f64, f64) {
    let weights = Dense::new(rows, cols, data).expect("the shape fits");
    let before = cpu_s();
    let matching = solve(&weights, options).expect("solvable");
    let solve_s = cpu_s() - before;
    let before = cpu_s();
    let proof = verify(&weights, &matching).expect("proved optimal");
    assert!(proof.exact, "the weights are on a grid");
    (matching, solve_s, cpu_s() - before)
}
