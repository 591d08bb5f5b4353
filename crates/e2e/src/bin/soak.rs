//! The long version of the chaos test: 200 processes of one job, or as many as the first argument says,
//! for 20 seconds or as long as the second says.

#![expect(clippy::print_stdout, reason = "a program whose output is its result")]

use std::time::Duration;

use muxflow_e2e::chaos;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |otherwise: u32| match arguments.next() {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("`{text}` is no number")),
        None => otherwise,
    };
    let (count, seconds) = (number(200), number(20));
    let mut failed = Vec::new();
    for seed in [1, 2, 3] {
        // The last one with so little room that they take from each other all the time. Who is refused
        // looks whether each of the others lives, so that fewer steps make as much work.
        let (quota_bytes, pace_us) = if seed < 3 { (1 << 30, 1_000) } else { (16 << 20, 4_000) };
        let plan = chaos::Plan {
            count: count as usize,
            seed,
            duration: Duration::from_secs(seconds.into()),
            quota_bytes,
            pace_us,
        };
        let result = chaos::run(plan);
        println!("seed {seed}: {result:#?}");
        let exact = result.charged_bytes == result.live_bytes && result.left_bytes == 0;
        let crowded = result.killed > 0 && result.most_at_once * 10 >= plan.count * 9;
        if !exact || !result.wrong.is_empty() || !crowded {
            failed.push(seed);
        }
    }
    assert!(
        failed.is_empty(),
        "the charge is not what is live, or too little happened, with the seeds {failed:?}"
    );
}
