//! The device process of one emulated GPU.

use std::process::ExitCode;

use muxflow_emulated_gpu::device::{Options, run};
use muxflow_emulated_gpu::node::Node;

const USAGE: &str = "usage: muxflow-emulated-device --dir DIR --index N [--time-factor F] \
                     [--seed N] [--parent PID]";

fn options() -> Result<Options, String> {
    let mut options =
        Options { node: Node::at(""), index: 0, time_factor: 1.0, seed: 0, parent: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value; {USAGE}"))?;
        let bad = |what: &str| format!("{name} {value}: {what}; {USAGE}");
        match name.as_str() {
            "--dir" => options.node = Node::at(&value),
            "--index" => options.index = value.parse().map_err(|_| bad("not a number"))?,
            "--seed" => options.seed = value.parse().map_err(|_| bad("not a number"))?,
            "--parent" => {
                options.parent = Some(value.parse().map_err(|_| bad("not a process id"))?);
            }
            "--time-factor" => {
                options.time_factor = value.parse().map_err(|_| bad("not a number"))?;
                if !(0.001..=10_000.0).contains(&options.time_factor) {
                    return Err(bad("it must lie between 0.001 and 10000"));
                }
            }
            _ => return Err(format!("{name} is not known; {USAGE}")),
        }
    }
    if options.node.root().as_os_str().is_empty() {
        return Err(format!("--dir is missing; {USAGE}"));
    }
    Ok(options)
}

#[expect(clippy::print_stderr, reason = "this is where errors reach the person who started it")]
fn main() -> ExitCode {
    let result = options().and_then(|o| {
        run(&o).map_err(|e| {
            let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
            format!("{e}{cause}")
        })
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("muxflow-emulated-device: {error}");
            ExitCode::FAILURE
        }
    }
}
