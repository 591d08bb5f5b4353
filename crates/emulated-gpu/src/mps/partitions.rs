//! Static SM partitions of the daemon: chunks of SMs that clients name, from Ampere on.

use super::daemon::{Daemon, device_facts};
use super::limits::device_key;
use crate::facts::Facts;

/// A part of the SMs of one GPU.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Partition {
    /// Hex digits of the GPU's UUID.
    uuid: String,
    chunks: u32,
    /// Its part of the GPU, in per cent.
    pub percent: f64,
}

fn uuid_of(facts: &Facts) -> String {
    facts.uuid.iter().map(|b| format!("{b:02x}")).collect()
}

/// SMs of one chunk: larger from Hopper on.
fn chunk_sms(facts: &Facts) -> u32 {
    if facts.capability[0] >= 9 { 8 } else { 4 }
}

impl Daemon {
    /// `sm_partition add GPU CHUNKS` and `sm_partition rm NAME`.
    pub(super) fn partition_command(&mut self, words: &[&str]) -> Result<String, String> {
        if !self.options.static_partitions {
            return Err("The daemon was not started for static partitioning".to_owned());
        }
        if self.servers.keys().any(|server| !self.clients_of(*server).is_empty()) {
            return Err("There are active clients".to_owned());
        }
        match words {
            [_, "add", gpu, chunks] => self.add_partition(gpu, chunks),
            [_, "rm", name] => match self.partitions.remove(*name) {
                Some(_) => Ok(format!("Partition {name} removed\n")),
                None => Err(format!("Partition {name} not found")),
            },
            _ => Err("sm_partition add GPU CHUNKS | sm_partition rm PARTITION".to_owned()),
        }
    }

    fn add_partition(&mut self, gpu: &str, chunks: &str) -> Result<String, String> {
        let wanted: u32 =
            chunks.parse().ok().filter(|n| *n > 0).ok_or(format!("{chunks} is not a number"))?;
        let mut served =
            self.options.gpus.iter().filter_map(|g| device_facts(&self.options.node, *g));
        let facts = served
            .find(|facts| uuid_of(facts).starts_with(&device_key(gpu)))
            .ok_or(format!("{gpu} is not a device of this daemon"))?;
        if facts.capability[0] < 8 {
            return Err(format!("{gpu} does not support static partitioning"));
        }
        let uuid = uuid_of(&facts);
        let all = facts.sms / chunk_sms(&facts);
        let used: u32 = self.partitions.values().filter(|p| p.uuid == uuid).map(|p| p.chunks).sum();
        if used + wanted > all {
            return Err(format!("{} chunks are free", all - used));
        }
        self.partitions_made += 1;
        let name = format!("{gpu}/D{}", self.partitions_made);
        let percent = f64::from(wanted * chunk_sms(&facts)) / f64::from(facts.sms) * 100.0;
        self.partitions.insert(name.clone(), Partition { uuid, chunks: wanted, percent });
        Ok(format!("Partition {name} created\n"))
    }

    /// A line for each partition.
    pub(super) fn partition_lines(&self) -> String {
        let line = |(name, p): (&String, &Partition)| format!("{name}\t{} chunks\n", p.chunks);
        self.partitions.iter().map(line).collect()
    }
}
