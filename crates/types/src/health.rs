//! The state of one GPU as MuxFlow sees it (the paper's SysMonitor).

use std::fmt;

/// Whether a GPU may carry offline work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HealthState {
    /// Not yet known: no valid sample has arrived since start or since the GPU came back.
    Init,
    /// Offline work may be placed and may run.
    Healthy,
    /// A metric is past its Unhealthy threshold: what runs may go on, nothing new may be placed.
    Unhealthy,
    /// A metric is past its Overlimit threshold: offline work is evicted.
    Overlimit,
    /// The device is unavailable; nothing runs on it.
    Disabled,
}

impl HealthState {
    /// All states, in the order of the paper.
    pub const ALL: [HealthState; 5] = [
        HealthState::Init,
        HealthState::Healthy,
        HealthState::Unhealthy,
        HealthState::Overlimit,
        HealthState::Disabled,
    ];

    /// The word used in tables, files and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            HealthState::Init => "Init",
            HealthState::Healthy => "Healthy",
            HealthState::Unhealthy => "Unhealthy",
            HealthState::Overlimit => "Overlimit",
            HealthState::Disabled => "Disabled",
        }
    }

    /// Reads the word that [`HealthState::as_str`] writes, whatever its case.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.as_str().eq_ignore_ascii_case(text))
    }

    /// Whether a new offline job may be placed here.
    pub fn allows_placement(self) -> bool {
        self == HealthState::Healthy
    }

    /// Whether an offline job that is here may go on.
    pub fn allows_running(self) -> bool {
        matches!(self, HealthState::Healthy | HealthState::Unhealthy)
    }
}

impl fmt::Display for HealthState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back() {
        for s in HealthState::ALL {
            assert_eq!(HealthState::parse(s.as_str()), Some(s));
        }
        assert_eq!(HealthState::parse("sick"), None);
    }
}
