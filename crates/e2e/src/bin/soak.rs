//! The long version of the chaos test: 200 processes of one job.

#![expect(clippy::print_stdout, reason = "a program whose output is its result")]

use std::time::Duration;

use muxflow_e2e::chaos;

fn main() {
    for seed in [1, 2, 3] {
        let result = chaos::run(200, seed, Duration::from_secs(20));
        println!("seed {seed}: {result:?}");
        assert_eq!(result.charged_bytes, result.live_bytes);
        assert_eq!(result.left_bytes, 0);
    }
}
