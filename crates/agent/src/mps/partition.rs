//! Static SM partitions: SMs of the service and of the job that neither can take from the other.
//!
//! Drivers have them from CUDA 13.1 on, for Ampere and later. They are asked for in chunks of SMs,
//! before the first client comes, and every client must then name its own; so they are an operator's
//! choice and not the default, which lends SMs by what the service needs. Whether the driver has them
//! is found by trying: its help does not say, and chunks differ in size between GPUs.

use serde::{Deserialize, Serialize};

use super::control::MpsControl;
use crate::error::Result;

/// No GPU has more chunks than this.
const MOST_CHUNKS: u32 = 64;

/// The two partitions of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partitions {
    /// What the service names in `CUDA_MPS_SM_PARTITION`.
    pub online: String,
    /// What a job names.
    pub offline: String,
    /// Chunks of the job.
    pub offline_chunks: u32,
    /// All chunks of the GPU.
    pub chunks: u32,
}

/// The name in `Partition NAME created`.
fn created(text: &str) -> Option<String> {
    let name = |line: &str| {
        let rest = line.trim().strip_prefix("Partition ")?.strip_suffix(" created")?;
        Some(rest.trim().to_owned()).filter(|name| !name.is_empty())
    };
    text.lines().find_map(name)
}

fn add(control: &MpsControl, uuid: &str, chunks: u32) -> Result<Option<String>> {
    control.ask(&format!("sm_partition add {uuid} {chunks}")).map(|text| created(&text))
}

impl Partitions {
    /// Makes them on a daemon that was started for partitions and has no client yet; `None` when it
    /// does not have them or the GPU is too small to be cut.
    pub fn make(control: &MpsControl, uuid: &str, offline_share: f64) -> Option<Self> {
        // The largest that is granted is the whole GPU.
        let whole = (1..=MOST_CHUNKS).rev().find_map(|chunks| {
            let name = add(control, uuid, chunks).ok().flatten()?;
            Some((chunks, name))
        });
        let (chunks, name) = whole?;
        control.ask(&format!("sm_partition rm {name}")).ok()?;
        let offline_chunks = share_of(chunks, offline_share)?;
        let offline = add(control, uuid, offline_chunks).ok().flatten()?;
        let online = add(control, uuid, chunks - offline_chunks).ok().flatten()?;
        Some(Partitions { online, offline, offline_chunks, chunks })
    }

    /// The job's part of so many SMs.
    pub fn offline_sms(&self, sms: u32) -> u32 {
        let part = u64::from(sms) * u64::from(self.offline_chunks) / u64::from(self.chunks.max(1));
        u32::try_from(part).unwrap_or(0)
    }
}

/// At least one chunk for each side.
fn share_of(chunks: u32, share: f64) -> Option<u32> {
    let most = chunks.checked_sub(1).filter(|most| *most > 0)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of chunks"
    )]
    let wanted = (f64::from(chunks) * share.clamp(0.0, 1.0)).round() as u32;
    Some(wanted.clamp(1, most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    fn scripted(body: &str) -> (tempfile::TempDir, MpsControl) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("control");
        let script =
            format!("#!/bin/sh\nread line\nset -- $line\ncd {}\n{body}\n", dir.path().display());
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let control = MpsControl::new(program, dir.path().into(), Duration::from_secs(20));
        (dir, control)
    }

    #[test]
    fn the_gpu_is_cut_in_two_and_every_chunk_is_used() {
        // A GPU of 9 chunks; the file `used` has a byte for each that is taken.
        let (dir, control) = scripted(
            "used=$(cat used 2>/dev/null | wc -c)\n\
             case \"$2\" in\n\
             add) if [ $((used + $4)) -gt 9 ]; then echo 'not enough' >&2; exit 1; fi\n\
                  head -c $4 /dev/zero >> used; echo \"Partition $3/D$4 created\";;\n\
             rm) : > used;;\n\
             esac",
        );
        let made = Partitions::make(&control, "GPU-1", 0.4).unwrap();
        assert_eq!((made.offline_chunks, made.chunks), (4, 9));
        assert_eq!((made.offline.as_str(), made.online.as_str()), ("GPU-1/D4", "GPU-1/D5"));
        assert_eq!(made.offline_sms(72), 32);
        assert_eq!(std::fs::read(dir.path().join("used")).unwrap().len(), 9);
    }

    #[test]
    fn a_driver_without_them_is_found_out() {
        let (_dir, control) = scripted("echo 'Unknown command: sm_partition'");
        assert_eq!(Partitions::make(&control, "GPU-1", 0.4), None);
        assert_eq!(share_of(1, 0.5), None, "nothing to cut");
        assert_eq!(share_of(10, 0.0), Some(1));
        assert_eq!(share_of(10, 1.0), Some(9));
    }
}
