//! `muxflow gpus`: the GPUs of this machine, as NVML sees them.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};

/// Show the GPUs of this machine and who is on them.
#[derive(Debug, Args)]
pub(crate) struct GpusArgs {
    /// Also list the processes on each GPU.
    #[arg(long)]
    processes: bool,
}

fn or_dash<T: std::fmt::Display, E>(value: Result<T, E>, unit: &str) -> String {
    value.map_or("-".to_owned(), |v| format!("{v}{unit}"))
}

fn row(device: &Device<'_>) -> Vec<String> {
    let memory = device.memory_info();
    let mib = |bytes: u64| bytes >> 20;
    vec![
        or_dash(device.index(), ""),
        or_dash(device.name(), ""),
        or_dash(device.uuid(), ""),
        memory.map_or("-".to_owned(), |m| format!("{} / {} MiB", mib(m.used), mib(m.total))),
        or_dash(device.utilization_rates().map(|u| u.gpu), " %"),
        or_dash(device.clock_info(Clock::SM), " MHz"),
        or_dash(device.power_usage().map(|mw| mw / 1000), " W"),
        or_dash(device.temperature(TemperatureSensor::Gpu), " C"),
    ]
}

#[expect(clippy::print_stdout, reason = "this is the answer")]
pub(crate) fn run(args: &GpusArgs) -> anyhow::Result<ExitCode> {
    let nvml = Nvml::init().context(
        "no NVIDIA driver answers: on a machine without GPUs try \
         `muxflow emulate --gpus t4x4 -- muxflow gpus`",
    )?;
    let head = ["GPU", "NAME", "UUID", "MEMORY", "BUSY", "CLOCK", "POWER", "HEAT"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut processes = Vec::new();
    for index in 0..nvml.device_count().context("NVML does not say how many GPUs there are")? {
        let device = nvml.device_by_index(index);
        let device = match device {
            Ok(device) => device,
            Err(error) => {
                let mut lost = vec![index.to_string(), error.to_string()];
                lost.resize(head.len(), "-".to_owned());
                rows.push(lost);
                continue;
            }
        };
        rows.push(row(&device));
        let mut seen = device.running_compute_processes().unwrap_or_default();
        seen.extend(device.mps_running_compute_processes().unwrap_or_default());
        processes.extend(seen.into_iter().map(|p| (index, p)));
    }
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    if args.processes {
        for (gpu, process) in processes {
            println!("GPU {gpu}: pid {} {:?}", process.pid, process.used_gpu_memory);
        }
    }
    Ok(ExitCode::SUCCESS)
}
