//! `cargo xtask bench sim`: the event core alone, and whole runs by cluster size and by jobs.

mod picture;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use muxflow_sim::policy::Policy;
use muxflow_sim::predictors;
use muxflow_sim::queue::EventQueue;
use muxflow_sim::{Scenario, policy, run};

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct SimBench {
    /// Leave out the largest run (20,000 GPUs, 100,000 jobs).
    #[arg(long)]
    quick: bool,
    /// Draw cost against size into this file, for example docs/sim-cost.svg.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Seconds of processor time that this process has used.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may hold spaces, in parentheses: fields 14 and 15, in ticks of 10 ms.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|k| k.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Holds a thousand events at a time, as a busy run does, and handles `total` of them.
fn event_core(total: u32) -> f64 {
    let before = cpu_s();
    let mut queue = EventQueue::default();
    let mut draw = 1u32;
    for i in 0..1000u32 {
        queue.push(f64::from(i), i);
    }
    let mut sum = 0u64;
    for _ in 0..total {
        let Some(event) = queue.pop() else { break };
        sum += u64::from(event);
        draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        queue.push(queue.now_s() + f64::from(draw >> 20) * 1e-3, event);
    }
    assert!(sum > 0, "events were handled");
    f64::from(total) / (cpu_s() - before).max(0.01)
}

/// What one run cost, in CPU-seconds.
struct Cost {
    gpus: usize,
    jobs: usize,
    events: f64,
    predicting: f64,
    matching: f64,
    rest: f64,
}

impl Cost {
    fn all(&self) -> f64 {
        self.predicting + self.matching + self.rest
    }
}

fn measure(gpus: usize, jobs: usize, policy: Box<dyn Policy>) -> anyhow::Result<Cost> {
    let scenario = Scenario::generated(gpus, jobs, 0.5, 1)?;
    let types: Vec<_> = scenario.pools.iter().map(|p| p.profile.clone()).collect();
    let predictor = predictors::by_name("rule", &types, 1)?;
    let before = cpu_s();
    let with = predictor.predictor.as_ref();
    let r = run(&scenario, policy, with, &predictor.name, &mut |_, _| {})?;
    // The parts are timed by the wall clock; their shares are taken of the processor time.
    let wall = r.spent.planning_s + r.spent.rest_s;
    let share = (cpu_s() - before) / wall.max(1e-9);
    #[expect(clippy::cast_precision_loss, reason = "a count of events")]
    let events = r.counts.events as f64;
    Ok(Cost {
        gpus,
        jobs,
        events,
        predicting: r.spent.predicting_s * share,
        matching: (r.spent.planning_s - r.spent.predicting_s) * share,
        rest: r.spent.rest_s * share,
    })
}

/// Measures and prints the tables, and draws the picture.
pub(crate) fn run_bench(bench: &SimBench) -> anyhow::Result<()> {
    println!(
        "Event core alone: {:.1} million events per CPU-second.\n",
        event_core(5_000_000) / 1e6
    );
    println!(
        "| GPUs | jobs | events | CPU-s in all | predicting | matching and the rest of planning | outside both | events per CPU-s | peak memory |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut sizes = vec![
        (250, 7_287),
        (500, 7_287),
        (1_000, 7_287),
        (2_000, 7_287),
        (4_000, 7_287),
        (1_000, 1_410),
        (1_000, 3_600),
        (1_000, 14_574),
    ];
    if !bench.quick {
        sizes.push((20_000, 100_000));
    }
    let mut costs = Vec::new();
    for (gpus, jobs) in sizes {
        let c = measure(gpus, jobs, policy::by_name("muxflow", 1)?)?;
        println!(
            "| {gpus} | {jobs} | {:.2} M | {:.2} | {:.3} | {:.2} | {:.2} | {:.2} M | {} MiB |",
            c.events / 1e6,
            c.all(),
            c.predicting,
            c.matching,
            c.rest,
            c.events / c.all().max(0.01) / 1e6,
            peak_mib()
        );
        costs.push(c);
    }
    println!(
        "\n| GPUs | jobs | classes | predicting | matching and the rest of planning | outside both |"
    );
    println!("|---|---|---|---|---|---|");
    for (gpus, jobs) in [(250, 1_800), (500, 3_600), (1_000, 7_287)] {
        let both =
            [("collapsed", policy::by_name("muxflow", 1)?), ("none", policy::without_classes())];
        for (name, policy) in both {
            let c = measure(gpus, jobs, policy)?;
            println!(
                "| {gpus} | {jobs} | {name} | {:.2} | {:.2} | {:.2} |",
                c.predicting, c.matching, c.rest
            );
        }
    }
    if let Some(path) = &bench.svg {
        std::fs::write(path, picture::draw(&costs))
            .with_context(|| format!("write {}", path.display()))?;
        println!("\nwrote {}", path.display());
    }
    Ok(())
}
