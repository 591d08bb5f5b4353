//! One row per memory and launch entry point and variant: charged, refused, gated, released.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_abi::control::{Limits, Settings};
use muxflow_abi::driver::{Category, DRIVER, DriverFn};
use muxflow_e2e::{Job, Outcome, client, stub_driver};

const QUOTA: u64 = 64 << 20;

fn run(job: &Job, arguments: &[&str]) -> Outcome {
    let program = client("table", &[]);
    let mut command = job.command(&program, stub_driver());
    command.args(arguments).output().expect("it runs").into()
}

/// `name key value key value …` as a map.
fn fields(line: &str) -> (&str, BTreeMap<&str, &str>) {
    let mut words = line.split(' ');
    let name = words.next().unwrap_or_default();
    let rest: Vec<_> = words.collect();
    (name, rest.chunks(2).filter(|pair| pair.len() == 2).map(|pair| (pair[0], pair[1])).collect())
}

#[test]
fn every_way_to_take_memory_is_charged_refused_and_given_back() {
    let job = Job::with(QUOTA, &Settings { context_bytes: 4 << 20, ..Settings::default() });
    let outcome = run(&job, &[]);
    assert!(outcome.status.success(), "{}\n{}", outcome.stdout, outcome.stderr);
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for line in outcome.stdout.lines() {
        let (name, row) = fields(line);
        if name == "free" {
            if !line.ends_with(" 0") {
                wrong.push(line);
            }
            continue;
        }
        seen.insert(name.to_owned());
        let charged: i64 = row["charged"].parse().expect("a number");
        let fits = match name {
            "cuIpcOpenMemHandle" | "cuIpcOpenMemHandle_v2" => charged == 1 << 20,
            "cuCtxAttach" | "cuCtxDetach" | "cuGreenCtxCreate" => charged == 4 << 20,
            name if name.starts_with("cuCtxCreate") || name.starts_with("cuDevicePrimary") => {
                charged == 4 << 20
            }
            "cuMipmappedArrayCreate" => charged > 10 << 20,
            name if name.starts_with("cuModule") || name.starts_with("cuLibrary") => {
                charged > 16_000
            }
            _ => charged == 8 << 20,
        };
        let good = fits
            && row["result"] == "0"
            && row["released"] == "yes"
            && row["refused"] == "2"
            && row["clean"] == "yes";
        if !good {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), outcome.stderr);
    assert!(!job.stub_log().contains("dead pool"), "a destroyed pool was asked for something");
    // Every function of the table that takes memory has a row, or a reason not to.
    let without_row = [
        ("cuExternalMemoryGetMappedBuffer", "a window of imported memory, charged at import"),
        ("cuExternalMemoryGetMappedMipmappedArray", "a window of imported memory"),
        ("cuMemPoolImportFromShareableHandle", "the exporter's pool is charged in its process"),
        ("cuMemPoolImportPointer", "as the pool that it comes from"),
        ("cuMulticastCreate", "binds memory that is charged by itself"),
    ];
    let more = [
        "cuCtxAttach",
        "cuCtxDetach",
        "cuGraphInstantiate",
        "cuGraphInstantiate_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphInstantiateWithParams",
        "cuGraphInstantiateWithParams_ptsz",
        "cuGreenCtxCreate",
        "cuMemRetainAllocationHandle",
    ];
    let takes = |row: &&DriverFn| row.category == Category::Alloc || more.contains(&row.symbol);
    for row in DRIVER.iter().filter(takes) {
        let excused = without_row.iter().any(|(name, _)| *name == row.symbol);
        assert!(seen.contains(row.symbol) || excused, "no row for {}", row.symbol);
    }
}

#[test]
fn every_way_to_launch_is_gated_by_its_cost() {
    let job = Job::new(QUOTA);
    job.block.agent().set_limits(&Limits { rate_milli_per_s: 1_000_000, burst: 1, in_flight: 256 });
    let outcome = run(&job, &["launches"]);
    let mut seen = BTreeSet::new();
    for line in outcome.stdout.lines() {
        let (name, row) = fields(line);
        seen.insert(name.to_owned());
        let number = |key: &str| row[key].parse::<u64>().expect("a number");
        let cost = number("cost");
        assert_eq!(row["result"], "0", "{line}");
        assert_eq!(number("arrived"), 10 * cost, "{line}");
        // A thousand kernels a second: ten launches take ten milliseconds for each kernel in them.
        assert!(number("took_us") >= 8_000 * cost, "{line}");
        assert!(number("took_us") < 40_000 * cost + 200_000, "{line}");
    }
    for row in DRIVER.iter().filter(|row| row.category == Category::Launch) {
        assert!(seen.contains(row.symbol), "no row for {}", row.symbol);
    }
}
