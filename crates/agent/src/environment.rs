//! The environment of a workload: everything that decides which GPU it sees, through which MPS
//! server, and under which hand.
//!
//! Built from nothing: of the agent's own environment only the variables on a list pass. What the
//! workload asks for comes next, and what MuxFlow must set comes last, so that nobody overrides it by
//! accident. The one variable that both may want is `LD_PRELOAD`: the interposer goes first.

use std::collections::BTreeMap;
use std::path::Path;

use muxflow_types::{Bytes, SmShare};

/// Variables of the agent that workloads get unless the configuration says otherwise.
pub const PASSED: [&str; 9] =
    ["PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME"];

/// The variable that names the directory of a job's control block. Every process of a job has it,
/// unless it was taken away.
pub const CONTROL_VARIABLE: &str = "MUXFLOW_CONTROL";

/// The GPU of a workload.
#[derive(Debug, Clone, Copy)]
pub struct GpuSide<'a> {
    /// Its UUID: an index would mean another GPU inside MPS.
    pub uuid: &'a str,
    /// Where its MPS server listens; none when it runs without MPS.
    pub mps_pipe_dir: Option<&'a Path>,
    /// Where MPS writes.
    pub mps_log_dir: Option<&'a Path>,
}

/// What holds an offline job back.
#[derive(Debug, Clone, Copy)]
pub struct Restraint<'a> {
    /// The interposer's library.
    pub interposer: &'a Path,
    /// The directory of the control block.
    pub control_dir: &'a Path,
    /// The share of SMs it is started with.
    pub share: SmShare,
    /// A memory limit for the driver to enforce too, where it can.
    pub driver_memory_limit: Option<Bytes>,
    /// A static partition of SMs, which takes the place of the share.
    pub sm_partition: Option<&'a str>,
}

/// The variables of the agent's own environment that pass.
pub fn passed<'a>(
    own: impl IntoIterator<Item = (String, String)>,
    list: impl IntoIterator<Item = &'a str>,
) -> BTreeMap<String, String> {
    let list: Vec<&str> = list.into_iter().collect();
    own.into_iter().filter(|(name, _)| list.contains(&name.as_str())).collect()
}

fn set(env: &mut BTreeMap<String, String>, name: &str, value: impl Into<String>) {
    env.insert(name.to_owned(), value.into());
}

fn gpu_side(env: &mut BTreeMap<String, String>, gpu: GpuSide<'_>) {
    set(env, "CUDA_VISIBLE_DEVICES", gpu.uuid);
    set(env, "CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    env.retain(|name, _| !name.starts_with("CUDA_MPS_"));
    if let Some(dir) = gpu.mps_pipe_dir {
        set(env, "CUDA_MPS_PIPE_DIRECTORY", dir.to_string_lossy());
    }
    if let Some(dir) = gpu.mps_log_dir {
        set(env, "CUDA_MPS_LOG_DIRECTORY", dir.to_string_lossy());
    }
}

/// MPS rounds a percentage down to whole SMs, and 58 % of 50 is 28.999… in floating point; so it is
/// written a hundredth too large.
fn percentage(share: SmShare) -> String {
    let hundredths = (share.percent().value() * 100.0).ceil() + 1.0;
    format!("{}", (hundredths / 100.0).min(100.0))
}

/// The environment of an online service.
pub fn online(
    mut env: BTreeMap<String, String>,
    asked: &BTreeMap<String, String>,
    gpu: GpuSide<'_>,
) -> BTreeMap<String, String> {
    env.extend(asked.iter().map(|(name, value)| (name.clone(), value.clone())));
    gpu_side(&mut env, gpu);
    env
}

/// The environment of an offline job.
pub fn offline(
    mut env: BTreeMap<String, String>,
    asked: &BTreeMap<String, String>,
    gpu: GpuSide<'_>,
    restraint: &Restraint<'_>,
) -> BTreeMap<String, String> {
    env.extend(asked.iter().map(|(name, value)| (name.clone(), value.clone())));
    gpu_side(&mut env, gpu);
    let interposer = restraint.interposer.to_string_lossy();
    let preload = match env.get("LD_PRELOAD").map(|own| own.trim()) {
        Some(own) if !own.is_empty() => format!("{interposer}:{own}"),
        _ => interposer.into_owned(),
    };
    set(&mut env, "LD_PRELOAD", preload);
    set(&mut env, CONTROL_VARIABLE, restraint.control_dir.to_string_lossy());
    if gpu.mps_pipe_dir.is_some() {
        set(&mut env, "CUDA_MPS_CLIENT_PRIORITY", "1");
        match restraint.sm_partition {
            Some(partition) => set(&mut env, "CUDA_MPS_SM_PARTITION", partition),
            None => {
                set(&mut env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage(restraint.share));
            }
        }
        if let Some(limit) = restraint.driver_memory_limit {
            let mib = limit.0 >> 20;
            // By UUID: an index would be counted among the GPUs of the machine.
            let limit = format!("{}={mib}M", gpu.uuid);
            set(&mut env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit);
        }
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_types::SmCount;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
    }

    fn gpu() -> GpuSide<'static> {
        GpuSide {
            uuid: "GPU-1",
            mps_pipe_dir: Some(Path::new("/run/m/pipe")),
            mps_log_dir: Some(Path::new("/run/m/log")),
        }
    }

    fn restraint() -> Restraint<'static> {
        Restraint {
            interposer: Path::new("/lib/x.so"),
            control_dir: Path::new("/run/m/job"),
            share: SmShare::new(SmCount(13), SmCount(40)).unwrap(),
            driver_memory_limit: None,
            sm_partition: None,
        }
    }

    #[test]
    fn the_workload_cannot_override_what_must_hold() {
        let asked = map(&[
            ("CUDA_VISIBLE_DEVICES", "0"),
            ("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"),
            ("LD_PRELOAD", "libjemalloc.so"),
            ("EPOCHS", "3"),
        ]);
        let env = offline(map(&[("PATH", "/bin")]), &asked, gpu(), &restraint());
        assert_eq!(env["CUDA_VISIBLE_DEVICES"], "GPU-1");
        assert_eq!(env["CUDA_MPS_PIPE_DIRECTORY"], "/run/m/pipe");
        assert_eq!(env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "32.51");
        assert_eq!(env["CUDA_MPS_CLIENT_PRIORITY"], "1");
        assert_eq!(env["LD_PRELOAD"], "/lib/x.so:libjemalloc.so");
        assert_eq!(env["MUXFLOW_CONTROL"], "/run/m/job");
        assert_eq!((env["EPOCHS"].as_str(), env["PATH"].as_str()), ("3", "/bin"));
    }

    #[test]
    fn online_gets_no_hand_laid_on_it() {
        let asked = map(&[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")]);
        let env = online(map(&[]), &asked, gpu());
        let names: Vec<&str> = env.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "CUDA_DEVICE_ORDER",
                "CUDA_MPS_LOG_DIRECTORY",
                "CUDA_MPS_PIPE_DIRECTORY",
                "CUDA_VISIBLE_DEVICES"
            ]
        );
        let alone = GpuSide { mps_pipe_dir: None, mps_log_dir: None, ..gpu() };
        assert!(!online(map(&[]), &asked, alone).keys().any(|name| name.contains("MPS")));
    }

    #[test]
    fn percentages_never_lose_an_sm_to_rounding() {
        for total in 1..=200u32 {
            for sms in 1..=total {
                let share = SmShare::new(SmCount(sms), SmCount(total)).unwrap();
                let written: f64 = percentage(share).parse().unwrap();
                let given = (written / 100.0 * f64::from(total)).floor();
                assert_eq!(given, f64::from(sms), "{sms} of {total}: {written}");
            }
        }
    }

    #[test]
    fn driver_side_limits_where_there_are_some() {
        let hand = Restraint {
            driver_memory_limit: Some(Bytes::from_gib(2)),
            sm_partition: Some("p1"),
            ..restraint()
        };
        let env = offline(map(&[]), &map(&[]), gpu(), &hand);
        assert_eq!(env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "GPU-1=2048M");
        assert_eq!(env["CUDA_MPS_SM_PARTITION"], "p1");
        assert!(!env.contains_key("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"));
    }

    #[test]
    fn only_listed_variables_pass() {
        let own = map(&[("PATH", "/bin"), ("AWS_SECRET", "x")]);
        assert_eq!(passed(own, PASSED), map(&[("PATH", "/bin")]));
    }
}
