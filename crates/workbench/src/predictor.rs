//! How fast all pairs are predicted, against the machine's peak and against ONNX Runtime, all in
//! the same run and in CPU seconds, because the machine is shared.

use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use muxflow_predictor::feature::{Column, SideEncoder};
use muxflow_predictor::mlp::Mlp;
use muxflow_predictor::model::{FitOptions, MlpModel, Model, ModelKind};
use muxflow_predictor::random::Rng;
use muxflow_predictor::simd::{InstructionSet, peak_work};
use muxflow_predictor::{Card, Dataset, SpeedSample, TrainedModel, bound};
use muxflow_types::{
    GpuType, Micros, OfflineInput, OnlineInput, PairSpeeds, Percent, ProfileRecord, SmShare,
    SpeedPredictor, WorkloadName,
};

use crate::root;

/// Settings of the benchmark.
#[derive(Debug, Args)]
pub(crate) struct PredictorBench {
    /// Rounds; each measures everything once, and the medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// GPUs, and jobs, of the whole matrix; 0 leaves it out.
    #[arg(long, default_value_t = 20_000)]
    size: usize,
    /// Threads for the whole matrix.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Leave ONNX Runtime out.
    #[arg(long)]
    no_onnx: bool,
}

/// CPU time of this thread, in seconds.
fn thread_cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// CPU seconds of one call.
fn cpu_of(call: impl FnOnce()) -> f64 {
    let begin = thread_cpu_s();
    call();
    thread_cpu_s() - begin
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A network of this shape with random weights: 6 online inputs, 5 offline inputs.
fn network(hidden: &[usize]) -> anyhow::Result<TrainedModel> {
    let column = |source| Column { source, mean: 0.5, deviation: 0.3, indicator: false };
    let encoder = |sources: &[usize]| SideEncoder {
        columns: sources.iter().map(|s| column(*s)).collect(),
        families: Vec::new(),
    };
    let model = MlpModel {
        online: encoder(&[0, 1, 2, 3, 4, 7]),
        offline: encoder(&[0, 1, 2, 3, 4]),
        net: Mlp::new(11, hidden, &mut Rng::new(1)),
        trend: [0.0; 2],
    };
    trained(Model::Mlp(model))
}

fn trained(model: Model) -> anyhow::Result<TrainedModel> {
    Ok(TrainedModel {
        gpu_type: GpuType::new("T4")?,
        model,
        online_seen: std::collections::BTreeSet::new(),
        offline_seen: std::collections::BTreeSet::new(),
        deviation: [0.1; 3],
        card: Card::default(),
    })
}

/// 50 services and 20 programs, each replica blurred by two points.
fn lists(size: usize) -> anyhow::Result<(Vec<OnlineInput>, Vec<OfflineInput>)> {
    let mut rng = Rng::new(5);
    let t4 = muxflow_gpu_model::GpuProfile::built_in("T4")?;
    let kinds = muxflow_gpu_model::samples(&t4, 400, 3)?;
    let mut blurred = |record: &ProfileRecord, name: String| -> anyhow::Result<ProfileRecord> {
        let mut near =
            |p: Option<Percent>| p.and_then(|p| Percent::clamped(p.value() + 2.0 * rng.normal()));
        Ok(ProfileRecord {
            workload: WorkloadName::new(&name)?,
            gpu_util: near(record.gpu_util),
            sm_activity: near(record.sm_activity),
            sm_occupancy: near(record.sm_occupancy),
            dram_activity: near(record.dram_activity),
            ..record.clone()
        })
    };
    let (mut online, mut offline) = (Vec::new(), Vec::new());
    for index in 0..size {
        let (service, program) = (&kinds[index % 50], &kinds[50 + index % 20]);
        let name = service.online.workload.to_string();
        let profile = blurred(&service.online, name)?;
        let free = profile.sm_activity.unwrap_or(Percent::ZERO).complement();
        online.push(OnlineInput { profile, share: SmShare::from_percent(free, t4.sm_count())? });
        let name = program.offline.workload.to_string();
        offline.push(OfflineInput { profile: blurred(&program.offline, name)? });
    }
    Ok((online, offline))
}

/// Peak multiply-add rate of one thread, in FLOP per CPU second.
fn peak(set: InstructionSet) -> f64 {
    let mut operations = 0;
    let mut sink = 0.0;
    let cpu = cpu_of(|| {
        let (count, value) = peak_work(set, 20_000_000);
        operations = count;
        sink += value;
    });
    std::hint::black_box(sink);
    #[expect(clippy::cast_precision_loss, reason = "a count of operations")]
    let rate = operations as f64 / cpu;
    rate
}

/// Slices of a round in which the peak and the network take turns.
const TURNS: usize = 8;

/// The rate over slices of equal work.
fn harmonic_mean(rates: &[f64]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let count = rates.len() as f64;
    count / rates.iter().map(|rate| 1.0 / rate).sum::<f64>()
}

/// Predictions per CPU second of one thread.
fn rate(pairs: &dyn PairSpeeds, rows: Range<usize>, columns: usize) -> f64 {
    let mut out = vec![0.0; columns];
    let count = rows.len() * columns;
    let cpu = cpu_of(|| {
        for row in rows {
            pairs.fill(row, 0, &mut out);
            std::hint::black_box(&out);
        }
    });
    #[expect(clippy::cast_precision_loss, reason = "a count of pairs")]
    let rate = count as f64 / cpu;
    rate
}

const ONNX: &str = r#"
import sys, time
import numpy as np, onnx, onnxruntime as ort
from onnx import helper, numpy_helper, TensorProto
sizes = [int(s) for s in sys.argv[1].split(",")]
rng = np.random.default_rng(1)
nodes, weights, last = [], [], "x"
for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
    weights.append(numpy_helper.from_array(rng.normal(size=(a, b)).astype(np.float32) * .2, f"w{i}"))
    weights.append(numpy_helper.from_array(np.zeros(b, np.float32), f"b{i}"))
    nodes.append(helper.make_node("Gemm", [last, f"w{i}", f"b{i}"], [f"z{i}"]))
    last = f"z{i}"
    if i + 2 < len(sizes):
        nodes.append(helper.make_node("Relu", [last], [f"r{i}"]))
        last = f"r{i}"
graph = helper.make_graph(nodes, "mlp", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, sizes[0]])],
    [helper.make_tensor_value_info(last, TensorProto.FLOAT, [None, 1])], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
model.ir_version = 9
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
best = 0
for batch in (1024, 4096, 16384):
    x = rng.normal(size=(batch, sizes[0])).astype(np.float32)
    for _ in range(5): session.run(None, {"x": x})
    count, begin = 0, time.process_time()
    while time.process_time() - begin < .5:
        session.run(None, {"x": x}); count += batch
    best = max(best, count / (time.process_time() - begin))
print(ort.__version__, best)
"#;

/// The Python of a throw-away environment with ONNX Runtime.
fn onnx_python() -> anyhow::Result<PathBuf> {
    let folder = root().join("target/venv-onnx");
    let python = folder.join("bin/python");
    let ready = folder.join("ready");
    if !ready.exists() {
        println!("installing onnxruntime into {} …", folder.display());
        let run = |command: &mut Command| -> anyhow::Result<()> {
            let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
            if status.success() { Ok(()) } else { bail!("{command:?} failed: {status}") }
        };
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "onnxruntime",
            "onnx",
            "numpy",
        ]))?;
        std::fs::write(&ready, "")?;
    }
    Ok(python)
}

/// Version, and predictions per CPU second at the best of three batch sizes.
fn onnx(python: &PathBuf, sizes: &str) -> anyhow::Result<(String, f64)> {
    let output = Command::new(python).args(["-c", ONNX, sizes]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let (version, rate) = text
        .trim()
        .split_once(' ')
        .with_context(|| format!("no answer: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok((version.to_owned(), rate.parse()?))
}

/// The rates of one network on one instruction set beside the peak and ONNX Runtime.
fn network_table(bench: &PredictorBench) -> anyhow::Result<()> {
    let (online, offline) = lists(2_400)?;
    let python = if bench.no_onnx { None } else { Some(onnx_python()?) };
    println!(
        "| network | instructions | predictions per CPU-s | GFLOP per CPU-s | peak, same round | of peak | onnxruntime, same round | ratio |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for hidden in [vec![64usize, 64], vec![64, 64, 64]] {
        let model = network(&hidden)?;
        #[expect(clippy::cast_precision_loss, reason = "a count of operations")]
        let flops = model.flops_per_pair().unwrap_or(0) as f64;
        let sizes: Vec<String> =
            [11].iter().chain(&hidden).chain(&[1]).map(usize::to_string).collect();
        for set in InstructionSet::all_here().into_iter().rev() {
            let pairs = model.prepare_with(&online, &offline, set);
            let rows = if set == InstructionSet::best() { 1_200 } else { 150 };
            let (mut rates, mut shares, mut peaks, mut ratios, mut others) =
                (vec![], vec![], vec![], vec![], vec![]);
            for _ in 0..bench.rounds.max(1) {
                // In turns, because the clock of a shared machine wanders within a round.
                let (mut tops, mut owns) = (vec![], vec![]);
                for turn in 0..TURNS {
                    tops.push(peak(set));
                    let part = turn * rows / TURNS..(turn + 1) * rows / TURNS;
                    owns.push(rate(pairs.as_ref(), part, offline.len()));
                }
                let (top, own) = (harmonic_mean(&tops), harmonic_mean(&owns));
                rates.push(own);
                peaks.push(top);
                shares.push(own * flops / top);
                if let (Some(python), true) = (&python, set == InstructionSet::best()) {
                    let (_, other) = onnx(python, &sizes.join(","))?;
                    others.push(other);
                    ratios.push(own / other);
                }
            }
            let (own, top) = (median(rates), median(peaks));
            println!(
                "| {} | {} | {own:.3e} | {:.1} | {:.1} | {:.0} % | {:.3e} | {:.2} |",
                sizes.join("-"),
                set.name(),
                own * flops / 1e9,
                top / 1e9,
                100.0 * median(shares),
                median(others),
                median(ratios),
            );
        }
    }
    Ok(())
}

/// A model of each kind trained on the GPU model's samples.
pub(super) fn synthetic(kind: ModelKind) -> anyhow::Result<TrainedModel> {
    let t4 = muxflow_gpu_model::GpuProfile::built_in("T4")?;
    let samples = muxflow_gpu_model::samples(&t4, 1_500, 1)?;
    let samples = samples
        .into_iter()
        .map(|pair| SpeedSample {
            online: pair.online,
            offline: pair.offline,
            share: Some(pair.share.percent()),
            speed: pair.offline_speed,
            at: Micros::ZERO,
        })
        .collect();
    let data = Dataset { gpu_type: t4.gpu_type, origin: "GPU model".to_owned(), samples };
    let go_on = &mut |_| std::ops::ControlFlow::Continue(());
    let (model, _) = Model::fit(kind, &data, &FitOptions::default(), go_on)?;
    trained(model)
}

/// The time of every pair of `size` × `size`.
fn matrix_table(bench: &PredictorBench) -> anyhow::Result<()> {
    let size = bench.size;
    let (online, offline) = lists(size)?;
    println!("\n{size} × {size} pairs, {} threads, preparation included:\n", bench.threads);
    println!("| model | wall s | CPU s |\n| --- | ---: | ---: |");
    for kind in [ModelKind::Rule, ModelKind::Kernel, ModelKind::Hybrid] {
        let model = synthetic(kind)?;
        let begin = Instant::now();
        let mut cpu = 0.0;
        cpu += {
            let start = thread_cpu_s();
            let pairs = model.prepare(&online, &offline);
            let prepared = thread_cpu_s() - start;
            let next = std::sync::atomic::AtomicUsize::new(0);
            let filled: f64 = std::thread::scope(|scope| {
                let workers: Vec<_> = (0..bench.threads.max(1))
                    .map(|_| {
                        scope.spawn(|| {
                            let start = thread_cpu_s();
                            let mut out = vec![0.0; size];
                            loop {
                                let row = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                                if row >= size {
                                    break thread_cpu_s() - start;
                                }
                                pairs.fill(row, 0, &mut out);
                                std::hint::black_box(&out);
                            }
                        })
                    })
                    .collect();
                workers.into_iter().map(|worker| worker.join().unwrap_or(f64::NAN)).sum()
            });
            prepared + filled
        };
        println!("| {kind} | {:.1} | {cpu:.1} |", begin.elapsed().as_secs_f64());
    }
    Ok(())
}

/// How many pairs a bound on whole groups of jobs rules out.
fn bound_table() -> anyhow::Result<()> {
    let (online, offline) = lists(2_000)?;
    let model = synthetic(ModelKind::Hybrid)?;
    println!(
        "\nPairs that an upper bound over groups of similar jobs rules out (2000 × 2000, hybrid):\n"
    );
    println!("| groups | below the row's best 64 | below 0.3 | bounds per pair saved |");
    println!("| ---: | ---: | ---: | ---: |");
    for groups in [20, 100, 400] {
        let outcome = bound::try_bound(&model, &online[..200], &offline, groups, 64, 0.3)
            .context("a bound is for perceptrons")?;
        println!(
            "| {groups} | {:.1} % | {:.1} % | {:.2} |",
            100.0 * outcome.below_best,
            100.0 * outcome.below_floor,
            outcome.bounds_per_saved
        );
    }
    Ok(())
}

/// Runs the benchmark.
pub(crate) fn run(bench: &PredictorBench) -> anyhow::Result<()> {
    network_table(bench)?;
    if bench.size > 0 {
        matrix_table(bench)?;
    }
    bound_table()
}
