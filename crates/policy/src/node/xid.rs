//! Reads the driver's XID lines from the kernel log.
//!
//! NVML tells the number of an XID; which process it was and, for XID 154, which recovery the driver
//! asks for, are only in the log line:
//!
//! ```text
//! NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, ... MMU Fault ...
//! NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
//! ```

use std::fmt;

/// What the driver says must happen before the GPU is whole again (XID 154, driver R565 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecoveryAction {
    /// Nothing: the GPU is whole.
    None,
    /// Peer-to-peer traffic must be drained.
    DrainP2p,
    /// All work must be drained, then the GPU reset.
    DrainAndReset,
    /// The GPU must be reset.
    GpuReset,
    /// The machine must be rebooted.
    NodeReboot,
    /// Words and a number that this program does not know.
    Unknown,
}

impl RecoveryAction {
    /// All of them.
    pub const ALL: [RecoveryAction; 6] = [
        RecoveryAction::None,
        RecoveryAction::DrainP2p,
        RecoveryAction::DrainAndReset,
        RecoveryAction::GpuReset,
        RecoveryAction::NodeReboot,
        RecoveryAction::Unknown,
    ];

    /// The word used in the configuration and in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            RecoveryAction::None => "none",
            RecoveryAction::DrainP2p => "drain-p2p",
            RecoveryAction::DrainAndReset => "drain-and-reset",
            RecoveryAction::GpuReset => "gpu-reset",
            RecoveryAction::NodeReboot => "node-reboot",
            RecoveryAction::Unknown => "unknown",
        }
    }

    /// From the words in the log; drivers of different years name the same action differently.
    pub fn from_words(words: &str) -> Self {
        let words = words.trim().to_ascii_lowercase();
        match words.strip_suffix(" required").unwrap_or(&words) {
            "none" => RecoveryAction::None,
            "drain p2p" => RecoveryAction::DrainP2p,
            "drain and reset" => RecoveryAction::DrainAndReset,
            "gpu reset" | "reset" | "pf flr" => RecoveryAction::GpuReset,
            "node reboot" | "os reboot" | "reboot" => RecoveryAction::NodeReboot,
            _ => RecoveryAction::Unknown,
        }
    }

    /// From the number that NVML and the log use.
    pub fn from_number(number: u32) -> Self {
        match number {
            0 => RecoveryAction::None,
            1 => RecoveryAction::GpuReset,
            2 => RecoveryAction::NodeReboot,
            3 => RecoveryAction::DrainP2p,
            4 => RecoveryAction::DrainAndReset,
            _ => RecoveryAction::Unknown,
        }
    }
}

impl fmt::Display for RecoveryAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One XID line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidLine {
    /// The PCI address as the driver writes it, such as `0000:3b:00`.
    pub pci: String,
    /// The number.
    pub xid: u16,
    /// The process that the driver blames. Under MPS this can be the server.
    pub pid: Option<u32>,
    /// What XID 154 asks for.
    pub recovery: Option<RecoveryAction>,
}

/// Reads one line of the kernel log; `None` when it is not an XID line.
pub fn parse_kernel_line(line: &str) -> Option<XidLine> {
    let (_, rest) = line.split_once("NVRM: Xid (PCI:")?;
    let (pci, rest) = rest.split_once("):")?;
    let rest = rest.trim_start();
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let xid = rest.get(..digits)?.parse().ok()?;
    let details = rest.get(digits..)?;
    let recovery = (xid == 154).then(|| recovery_in(details));
    Some(XidLine { pci: pci.to_owned(), xid, pid: pid_in(details), recovery })
}

fn pid_in(details: &str) -> Option<u32> {
    // `pid=4711,` in most drivers, `pid='4711',` in some.
    let (_, rest) = details.split_once("pid=")?;
    let rest = rest.trim_start_matches('\'');
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest.get(..end)?.parse().ok()
}

/// The action after the last ` to `, by its words and, where these are new, by its number.
fn recovery_in(details: &str) -> RecoveryAction {
    let Some((_, target)) = details.rsplit_once(" to ") else {
        return RecoveryAction::Unknown;
    };
    let (number, words) = match target.split_once('(') {
        Some((number, words)) => (number, words.split(')').next().unwrap_or_default()),
        None => ("", target),
    };
    let by_words = RecoveryAction::from_words(words);
    if by_words != RecoveryAction::Unknown {
        return by_words;
    }
    let hex = number.trim().trim_start_matches("0x");
    u32::from_str_radix(hex, 16).map_or(RecoveryAction::Unknown, RecoveryAction::from_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_of_real_drivers_are_read() {
        let line = "[  42.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008";
        let read = parse_kernel_line(line).unwrap();
        assert_eq!((read.pci.as_str(), read.xid, read.pid), ("0000:3b:00", 31, Some(4711)));
        assert_eq!(read.recovery, None);
        let read = parse_kernel_line("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.");
        assert_eq!(
            read.unwrap(),
            XidLine { pci: "0000:3b:00".into(), xid: 79, pid: None, recovery: None }
        );
        let quoted = parse_kernel_line("NVRM: Xid (PCI:0000:3b:00): 13, pid='77', name=x").unwrap();
        assert_eq!(quoted.pid, Some(77));
    }

    #[test]
    fn every_recovery_action_is_understood_from_words_or_number() {
        let of = |target: &str| {
            let line = format!(
                "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to {target}"
            );
            parse_kernel_line(&line).unwrap().recovery.unwrap()
        };
        assert_eq!(of("0x2 (Node Reboot Required)"), RecoveryAction::NodeReboot);
        assert_eq!(of("0x2 (OS Reboot)"), RecoveryAction::NodeReboot);
        assert_eq!(of("0x1 (GPU Reset Required)"), RecoveryAction::GpuReset);
        assert_eq!(of("0x1 (PF FLR)"), RecoveryAction::GpuReset);
        assert_eq!(of("0x3 (Drain P2P)"), RecoveryAction::DrainP2p);
        assert_eq!(of("0x4 (Drain and Reset)"), RecoveryAction::DrainAndReset);
        assert_eq!(of("0x0 (None)"), RecoveryAction::None);
        assert_eq!(of("0x2 (Something New)"), RecoveryAction::NodeReboot, "by number");
        assert_eq!(of("0x9 (Something New)"), RecoveryAction::Unknown);
        assert_eq!(of("Node Reboot Required"), RecoveryAction::NodeReboot, "without a number");
    }

    #[test]
    fn other_lines_are_left_alone() {
        for line in [
            "",
            "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:66:00): abc, pid=1",
            "NVRM: Xid (PCI:0000:66:00): 70000",
            "NVRM: Xid (PCI:0000:66:00",
        ] {
            assert_eq!(parse_kernel_line(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in "(NVRM: Xid \\(PCI:)?.{0,20}(\\): 154, )?.{0,40}( to )?.{0,20}") {
            let _read = parse_kernel_line(&line);
        }
    }
}
