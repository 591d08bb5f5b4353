//! Checks a submission and makes jobs of it.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_agent::cgroup;
use muxflow_api::jobs::{ArrayRange, Checkpoint, JobSubmit};
use muxflow_store::submission::NewJob;
use muxflow_types::{GpuType, WorkloadName};

use crate::error::{ManagerError, Result};

/// Arguments and variables together: the kernel refuses much more than this. Nor does the whole take
/// more as it is kept, for every plan reads it.
const MOST_BYTES: usize = 256 << 10;
/// Program and arguments.
const MOST_WORDS: usize = 4096;
/// GPU types that a job may name: every plan copies them.
const MOST_TYPES: usize = 64;
/// A list of processors: more than a hundred ranges fit.
const MOST_CPUS_BYTES: usize = 1 << 10;
/// Jobs in one array.
pub const MOST_IN_ARRAY: u64 = 10_000;
/// What all jobs of one array take in the store: each keeps its own copy.
const MOST_ARRAY_BYTES: u64 = 32 << 20;
/// A year.
const LONGEST_DEADLINE_S: u64 = 365 * 24 * 3600;

fn invalid<T>(field: &str, problem: impl Into<String>) -> Result<T> {
    Err(ManagerError::invalid(field, problem))
}

/// Checks everything that can be checked without looking at the machine.
pub fn check(submit: &JobSubmit) -> Result<()> {
    if submit.gpus != 1 {
        return invalid(
            "gpus",
            format!(
                "{} GPUs were asked for, and a job gets one: MuxFlow pairs one job with one GPU; submit one job per GPU",
                submit.gpus
            ),
        );
    }
    command_check(submit)?;
    path_check("cwd", &submit.cwd)?;
    if let Some(name) = &submit.name
        && (name.is_empty() || name.chars().count() > 100 || name.chars().any(char::is_control))
    {
        return invalid("name", "1 to 100 characters, none of them a control character");
    }
    range("priority", u64::from(submit.priority), 1, 1000)?;
    range("retries", u64::from(submit.retries), 0, 100)?;
    if let Some(seconds) = submit.deadline_s {
        range("deadline_s", seconds, 1, LONGEST_DEADLINE_S)?;
    }
    for (field, bytes) in
        [("memory_bytes", submit.memory_bytes), ("host_memory_bytes", submit.host_memory_bytes)]
    {
        if let Some(bytes) = bytes {
            range(field, bytes, 1, 1 << 50)?;
        }
    }
    if let Some(checkpoint) = &submit.checkpoint {
        checkpoint_check(checkpoint)?;
    }
    types_check(&submit.gpu_types)?;
    if let Some(list) = &submit.cpus {
        processor_list_check(list)?;
    }
    if let Some(array) = submit.array {
        array_check(array)?;
    }
    whole_check(submit)
}

fn command_check(submit: &JobSubmit) -> Result<()> {
    if submit.command.first().is_none_or(String::is_empty) {
        return invalid("command", "give the program and its arguments");
    }
    let words = submit.command.len();
    if words > MOST_WORDS {
        return invalid("command", format!("{words} words; at most {MOST_WORDS} are allowed"));
    }
    text_check("command", submit.command.iter())?;
    environment_check(&submit.env)?;
    let bytes = submit.command.iter().map(|word| word.len() + 1).sum::<usize>()
        + submit.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
    if bytes > MOST_BYTES {
        return invalid(
            "command",
            format!("arguments and variables take {bytes} bytes; at most {MOST_BYTES} are allowed"),
        );
    }
    Ok(())
}

fn types_check(types: &[String]) -> Result<()> {
    if types.len() > MOST_TYPES {
        let problem = format!("{} types; at most {MOST_TYPES} are allowed", types.len());
        return invalid("gpu_types", problem);
    }
    for (index, name) in types.iter().enumerate() {
        GpuType::new(name).map_err(|error| {
            ManagerError::invalid(format!("gpu_types[{index}]"), error.to_string())
        })?;
    }
    Ok(())
}

/// Before it is read: a short list already stands for many processors.
fn processor_list_check(list: &str) -> Result<()> {
    if list.len() > MOST_CPUS_BYTES {
        let problem = format!("{} bytes; at most {MOST_CPUS_BYTES} are allowed", list.len());
        return invalid("cpus", problem);
    }
    match cgroup::parse_cpus(list) {
        Some(_) => Ok(()),
        None => invalid("cpus", format!("`{list}` is no list of processors such as `0-3,8`")),
    }
}

/// What is kept of it, all fields together and as it is written.
fn whole_check(submit: &JobSubmit) -> Result<()> {
    let bytes = written(submit)?.len();
    if bytes > MOST_BYTES {
        return invalid(
            "command",
            format!(
                "the whole submission takes {bytes} bytes as JSON; at most {MOST_BYTES} are allowed: put long arguments and variables into a file"
            ),
        );
    }
    Ok(())
}

/// A submission as it is kept: without its array, and each GPU type once.
fn written(submit: &JobSubmit) -> Result<String> {
    let mut single = JobSubmit { array: None, ..submit.clone() };
    let mut seen = BTreeSet::new();
    single.gpu_types.retain(|name| seen.insert(name.clone()));
    serde_json::to_string(&single)
        .map_err(|error| ManagerError::invalid("command", error.to_string()))
}

/// Checks what this machine must have. A kernel that refuses a processor would refuse it for ever.
pub fn check_here(submit: &JobSubmit) -> Result<()> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
    online.map_or(Ok(()), |online| processors_check(submit, online.trim()))
}

fn processors_check(submit: &JobSubmit, online: &str) -> Result<()> {
    let (Some(list), Some(there)) = (&submit.cpus, cgroup::parse_cpus(online)) else {
        return Ok(());
    };
    let wanted = cgroup::parse_cpus(list).unwrap_or_default();
    match wanted.iter().find(|cpu| !there.contains(cpu)) {
        Some(cpu) => {
            let problem = format!("`{list}`: there is no processor {cpu}; there are {online}");
            invalid("cpus", problem)
        }
        None => Ok(()),
    }
}

fn range(field: &str, value: u64, low: u64, high: u64) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    invalid(field, format!("{value} is out of range; write {low} to {high}"))
}

fn text_check<'a>(field: &str, words: impl Iterator<Item = &'a String>) -> Result<()> {
    for word in words {
        if word.contains('\0') {
            return invalid(field, "a zero byte cannot be passed to a program");
        }
    }
    Ok(())
}

fn path_check(field: &str, path: &str) -> Result<()> {
    text_check(field, std::iter::once(&path.to_owned()))?;
    if !path.starts_with('/') {
        return invalid(field, format!("`{path}` is not an absolute path; begin it with `/`"));
    }
    if path.len() > 4096 {
        return invalid(field, "a path has at most 4096 bytes");
    }
    Ok(())
}

fn environment_check(env: &BTreeMap<String, String>) -> Result<()> {
    for name in env.keys() {
        if name.is_empty() || name.contains('=') {
            return invalid("env", format!("`{name}` cannot be the name of a variable"));
        }
    }
    text_check("env", env.keys().chain(env.values()))
}

fn checkpoint_check(checkpoint: &Checkpoint) -> Result<()> {
    if let Some(dir) = &checkpoint.dir {
        path_check("checkpoint.dir", dir)?;
    }
    if signal(&checkpoint.signal).is_none() {
        return invalid(
            "checkpoint.signal",
            format!(
                "`{}` is no signal that asks a program to leave; write TERM, INT, HUP, USR1 or USR2",
                checkpoint.signal
            ),
        );
    }
    range("checkpoint.window_s", checkpoint.window_s, 1, 3600)
}

fn array_check(array: ArrayRange) -> Result<()> {
    if array.first > array.last {
        return invalid(
            "array",
            format!(
                "it begins at {} and ends at {}; write it the other way round",
                array.first, array.last
            ),
        );
    }
    let count = u64::from(array.last - array.first) + 1;
    if count > MOST_IN_ARRAY || array.last > 1_000_000 {
        return invalid(
            "array",
            format!(
                "{count} jobs up to index {}; at most {MOST_IN_ARRAY} jobs and index 1000000 are allowed",
                array.last
            ),
        );
    }
    Ok(())
}

/// The number of a signal by name, with or without `SIG`.
pub fn signal(name: &str) -> Option<i32> {
    let name = name.strip_prefix("SIG").unwrap_or(name);
    match name {
        "TERM" => Some(libc::SIGTERM),
        "INT" => Some(libc::SIGINT),
        "HUP" => Some(libc::SIGHUP),
        "USR1" => Some(libc::SIGUSR1),
        "USR2" => Some(libc::SIGUSR2),
        _ => None,
    }
}

/// What a submission runs, as far as profiles are concerned: two submissions of the same program
/// with the same arguments, variables and directory are one workload.
pub fn workload(submit: &JobSubmit) -> Result<WorkloadName> {
    let program = submit.command.first().map_or("", String::as_str);
    let base = program.rsplit('/').next().unwrap_or(program);
    let base: String = base
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' })
        .take(64)
        .collect();
    let mut hash = Fingerprint::new();
    hash.add(&submit.cwd);
    submit.command.iter().for_each(|word| hash.add(word));
    hash.add("");
    for (name, value) in &submit.env {
        hash.add(name);
        hash.add(value);
    }
    WorkloadName::new(&format!("{base}-{:016x}", hash.0))
        .map_err(|error| ManagerError::invalid("command", error.to_string()))
}

/// FNV-1a, because it must be the same in every version of the program.
struct Fingerprint(u64);

impl Fingerprint {
    fn new() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, text: &str) {
        for byte in text.bytes().chain([0xff]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// One job, or one for each index.
pub fn jobs(submit: &JobSubmit) -> Result<Vec<NewJob>> {
    let workload = workload(submit)?;
    let one = |index: Option<u32>| -> Result<NewJob> {
        Ok(NewJob { index, submit: written(submit)?, workload: workload.clone() })
    };
    match submit.array {
        None => Ok(vec![one(None)?]),
        Some(array) => {
            let example = one(Some(array.first))?;
            let count = u64::from(array.last.saturating_sub(array.first)) + 1;
            let each = example.submit.len() as u64;
            if count.saturating_mul(each) > MOST_ARRAY_BYTES {
                return invalid(
                    "array",
                    format!(
                        "{count} jobs of {each} bytes each; all jobs of an array together may take {MOST_ARRAY_BYTES} bytes: submit at most {} at a time, or put long arguments and variables into a file",
                        MOST_ARRAY_BYTES / each.max(1)
                    ),
                );
            }
            let indices = array.first..=array.last;
            Ok(indices.map(|index| NewJob { index: Some(index), ..example.clone() }).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> JobSubmit {
        serde_json::from_str(r#"{"command": ["/usr/bin/python3", "train.py"], "cwd": "/home/a"}"#)
            .unwrap()
    }

    fn refused(change: impl FnOnce(&mut JobSubmit)) -> String {
        let mut submit = good();
        change(&mut submit);
        check(&submit).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_field_and_the_remedy() {
        check(&good()).unwrap();
        assert!(refused(|s| s.gpus = 2).contains("submit one job per GPU"));
        assert!(refused(|s| s.command.clear()).contains("`command`"));
        assert!(refused(|s| s.command[0] = String::new()).contains("`command`"));
        assert!(refused(|s| s.command.push("a\0b".into())).contains("zero byte"));
        assert!(refused(|s| s.cwd = "here".into()).contains("absolute"));
        assert!(refused(|s| s.priority = 0).contains("1 to 1000"));
        assert!(refused(|s| s.retries = 101).contains("`retries`"));
        assert!(refused(|s| s.deadline_s = Some(0)).contains("`deadline_s`"));
        assert!(refused(|s| s.memory_bytes = Some(0)).contains("`memory_bytes`"));
        assert!(refused(|s| s.gpu_types = vec!["T 4".into()]).contains("gpu_types[0]"));
        assert!(refused(|s| s.gpu_types = vec!["T4".into(); 65]).contains("at most 64"));
        assert!(refused(|s| s.cpus = Some("x".into())).contains("0-3,8"));
        assert!(refused(|s| s.cpus = Some("0-65535,".repeat(1000))).contains("at most 1024"));
        assert!(refused(|s| s.cpus = Some("0-65535,".repeat(100))).contains("0-3,8"));
        assert!(refused(|s| s.name = Some("a\nb".into())).contains("`name`"));
        assert!(refused(|s| drop(s.env.insert("A=B".into(), String::new()))).contains("A=B"));
        let range = |first, last| Some(ArrayRange { first, last });
        assert!(refused(|s| s.array = range(3, 2)).contains("other way round"));
        assert!(refused(|s| s.array = range(0, 10_000)).contains("10000"));
        assert!(refused(|s| s.command.push("x".repeat(300_000))).contains("at most 262144"));
        assert!(refused(|s| s.command = vec!["x".into(); 4097]).contains("at most 4096"));
        // Six bytes each, as they are kept.
        let whole = refused(|s| s.command.push("\u{1}".repeat(50_000)));
        assert!(whole.contains("whole submission") && whole.contains("into a file"), "{whole}");
        let bad = |signal: &str| Checkpoint { dir: None, signal: signal.into(), window_s: 10 };
        assert!(refused(|s| s.checkpoint = Some(bad("KILL"))).contains("USR1"));
    }

    #[test]
    fn processors_that_are_not_there_are_refused() {
        let with = |list: &str| JobSubmit { cpus: Some(list.into()), ..good() };
        for well in ["0", "0-3", "2,3,5"] {
            processors_check(&with(well), "0-3,5").unwrap();
        }
        processors_check(&good(), "0").unwrap();
        let error = processors_check(&with("0-9999"), "0-3,5").unwrap_err().to_string();
        assert_eq!(error, "`cpus`: `0-9999`: there is no processor 4; there are 0-3,5");
        let error = check_here(&with("65535")).unwrap_err().to_string();
        assert!(error.contains("no processor 65535; there are 0"), "{error}");
    }

    #[test]
    fn the_same_command_is_the_same_workload() {
        let one = workload(&good()).unwrap();
        assert!(one.as_str().starts_with("python3-"), "{one}");
        let prioritised = JobSubmit { priority: 9, name: Some("x".into()), ..good() };
        assert_eq!(workload(&prioritised).unwrap(), one);
        let mut other = good();
        other.command = vec!["/usr/bin/python3".into(), "train".into(), ".py".into()];
        assert_ne!(workload(&other).unwrap(), one);
    }

    #[test]
    fn a_gpu_type_is_kept_once() {
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let submit = JobSubmit { gpu_types: named(&["T4", "A10", "T4"]), ..good() };
        check(&submit).unwrap();
        let kept: JobSubmit = serde_json::from_str(&jobs(&submit).unwrap()[0].submit).unwrap();
        assert_eq!(kept.gpu_types, ["T4", "A10"]);
    }

    #[test]
    fn arrays_become_one_job_per_index() {
        let array = Some(ArrayRange { first: 2, last: 4 });
        let made = jobs(&JobSubmit { array, ..good() }).unwrap();
        let indices: Vec<_> = made.iter().map(|job| job.index).collect();
        assert_eq!(indices, [Some(2), Some(3), Some(4)]);
        assert!(!made[0].submit.contains("array"));
        assert_eq!(jobs(&good()).unwrap()[0].index, None);
    }

    #[test]
    fn an_array_takes_only_so_much_room() {
        let mut submit = JobSubmit { array: Some(ArrayRange { first: 1, last: 10_000 }), ..good() };
        assert_eq!(jobs(&submit).unwrap().len(), 10_000);
        submit.command.push("x".repeat(200_000));
        check(&submit).unwrap();
        let error = jobs(&submit).unwrap_err().to_string();
        assert!(error.contains("`array`") && error.contains("at most 167 at a time"), "{error}");
        submit.array = Some(ArrayRange { first: 1, last: 167 });
        assert_eq!(jobs(&submit).unwrap().len(), 167);
    }
}
