//! One measurement of another crate in a process of its own: prints a line of JSON.
//!
//! `crates lapjv|pathfinding KIND ROWS COLS SEED FILE`. Only the solving is measured, not the making
//! of the crate's own kind of matrix.

use std::path::Path;

use bench_matching::instance::{Kind, load};
use bench_matching::meter::{cpu_s, peak_bytes};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, solver, kind, rows, cols, seed, path] = &args[..] else {
        panic!("usage: crates SOLVER KIND ROWS COLS SEED FILE");
    };
    let kind = Kind::parse(kind).expect("a known kind");
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let (rows, cols) = (number(rows), number(cols));
    let data = load(Path::new(path), kind, rows, cols, number(seed) as u64).expect("it is read");
    let (cpu, value) = match solver.as_str() {
        "lapjv" => {
            let cost: Vec<f64> = data.iter().map(|&w| 1.0 - f64::from(w)).collect();
            let cost = ndarray_of(rows, cols, cost);
            let before = cpu_s();
            let (columns, _) = lapjv::lapjv(&cost).expect("lapjv solves it");
            (cpu_s() - before, total(&data, cols, &columns))
        }
        "pathfinding" => {
            let units = data.iter().map(|&w| (f64::from(w) * f64::from(1 << 24)) as i64).collect();
            let weights =
                pathfinding::matrix::Matrix::from_vec(rows, cols, units).expect("it fits");
            let before = cpu_s();
            let (_, columns) = pathfinding::kuhn_munkres::kuhn_munkres(&weights);
            (cpu_s() - before, total(&data, cols, &columns))
        }
        other => panic!("no solver {other}"),
    };
    println!("{{\"cpu_s\":{cpu:.4},\"value\":{value},\"peak_bytes\":{}}}", peak_bytes());
}

fn ndarray_of(rows: usize, cols: usize, data: Vec<f64>) -> lapjv::Matrix<f64> {
    lapjv::Matrix::from_shape_vec((rows, cols), data).expect("it fits")
}

fn total(data: &[f32], cols: usize, columns: &[usize]) -> f64 {
    columns.iter().enumerate().map(|(r, &c)| f64::from(data[r * cols + c])).sum()
}
