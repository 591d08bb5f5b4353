//! The long version of the chaos test: 200 processes of one job.

#![expect(clippy::print_stdout, reason = "a program whose output is its result")]

use std::time::Duration;

use muxflow_e2e::chaos;

fn main() {
    for seed in [1, 2, 3] {
        let (count, duration) = (200, Duration::from_secs(20));
        // The last one with so little room that they take from each other all the time.
        let (quota_bytes, pace_us) = if seed < 3 { (1 << 30, 1_000) } else { (16 << 20, 200) };
        let result = chaos::run(chaos::Plan { count, seed, duration, quota_bytes, pace_us });
        println!("seed {seed}: {result:?}");
        assert_eq!(result.charged_bytes, result.live_bytes);
        assert_eq!(result.left_bytes, 0);
    }
}
