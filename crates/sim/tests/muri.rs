//! The public run of Muri's test bed: 400 jobs on 64 V100 under its own baselines.

use std::path::{Path, PathBuf};

use muxflow_sim::exclusive::{ExclusiveCluster, ExclusivePolicy, off_by_pct, run_exclusive};
use muxflow_sim::trace::{MultiGpu, read_jobs};

#[test]
fn the_published_job_completion_times_are_near() {
    let root = std::env::var_os("MUXFLOW_SHARED_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    if !root.is_dir() {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI needs the public traces at {}",
            root.display()
        );
        println!("SKIPPED: no public traces at {}; set MUXFLOW_SHARED_DATA", root.display());
        return;
    }
    let trace = read_jobs(&root.join("muri/testbed_trace.csv.gz"), None, MultiGpu::One).unwrap();
    let cluster = ExclusiveCluster::default();
    for (policy, jct, makespan) in [
        (ExclusivePolicy::Srtf, 249_140.0, 4_156_633.0),
        (ExclusivePolicy::Srsf, 238_612.0, 4_223_122.0),
        (ExclusivePolicy::Tiresias, 336_533.0, 3_959_797.0),
    ] {
        let r = run_exclusive(&trace.jobs, &cluster, policy).unwrap();
        let (off, span) = (off_by_pct(r.jct_mean_s, jct), off_by_pct(r.makespan_s, makespan));
        println!(
            "{policy:?}: JCT {:.0} ({off:+.1} %), makespan {:.0} ({span:+.1} %)",
            r.jct_mean_s, r.makespan_s
        );
        assert!(off.abs() < 25.0 && span.abs() < 25.0);
    }
}
