//! Limits of MPS: share of threads, pinned memory for each device, priority.

use std::collections::BTreeMap;

/// What a daemon, a server or a client may use. Lower levels only tighten.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Per cent of SMs.
    pub thread_pct: f64,
    /// Bytes by device: its place among those that the daemon serves, or hex digits of a UUID.
    pub memory: BTreeMap<String, u64>,
    /// 0 normal, 1 below normal.
    pub priority: u32,
    /// The static partition that a client names; empty names none.
    pub partition: String,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { thread_pct: 100.0, memory: BTreeMap::new(), priority: 0, partition: String::new() }
    }
}

/// A device as it is named in a limit: a number stays, a UUID loses its dashes.
pub fn device_key(text: &str) -> String {
    match text.trim().strip_prefix("GPU-") {
        Some(uuid) => uuid.replace('-', "").to_ascii_lowercase(),
        None => text.trim().to_owned(),
    }
}

/// `1G`, `512MB`, `1024M`, or bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let number: u64 = digits.parse().ok()?;
    let shift = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" => 10,
        "M" | "MB" => 20,
        "G" | "GB" => 30,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// `0=1G,GPU-uuid=512MB`; what cannot be read is left out.
pub fn parse_memory(text: &str) -> BTreeMap<String, u64> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.filter_map(|(device, size)| Some((device_key(device), parse_size(size)?))).collect()
}

impl Limits {
    /// What the environment of this process asks for.
    pub fn from_environment() -> Limits {
        let variable = |name: &str| std::env::var(name).ok();
        let mut limits = Limits::default();
        let pct = variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").and_then(|v| v.trim().parse().ok());
        if let Some(pct) = pct.filter(|p: &f64| (0.0..=100.0).contains(p) && *p > 0.0) {
            limits.thread_pct = pct;
        }
        if let Some(text) = variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") {
            limits.memory = parse_memory(&text);
        }
        if variable("CUDA_MPS_CLIENT_PRIORITY").as_deref() == Some("1") {
            limits.priority = 1;
        }
        limits.partition = variable("CUDA_MPS_SM_PARTITION").unwrap_or_default().trim().to_owned();
        limits
    }

    /// On one line.
    pub fn to_text(&self) -> String {
        let memory: Vec<String> = self.memory.iter().map(|(d, b)| format!("{d}={b}")).collect();
        let memory = memory.join(",");
        format!("{};{memory};{};{}", self.thread_pct, self.priority, self.partition)
    }

    /// From such a line; what cannot be read is no limit.
    pub fn from_text(text: &str) -> Limits {
        let mut parts = text.trim().split(';');
        let thread_pct = parts.next().and_then(|p| p.parse().ok()).unwrap_or(100.0);
        let memory = parts.next().map(parse_memory).unwrap_or_default();
        let priority = parts.next().and_then(|p| p.parse().ok()).unwrap_or(0);
        let partition = parts.next().unwrap_or_default().to_owned();
        Limits { thread_pct, memory, priority, partition }
    }

    /// Both limits at once.
    #[must_use]
    pub fn tightened(&self, other: &Limits) -> Limits {
        let mut memory = self.memory.clone();
        for (device, bytes) in &other.memory {
            let now = memory.entry(device.clone()).or_insert(*bytes);
            *now = (*now).min(*bytes);
        }
        Limits {
            thread_pct: self.thread_pct.min(other.thread_pct),
            memory,
            priority: self.priority.max(other.priority),
            partition: other.partition.clone(),
        }
    }

    /// The limit of a device, which may be named by index or UUID.
    pub fn memory_of(&self, place: usize, uuid_hex: &str) -> Option<u64> {
        let fits =
            |key: &str| key == place.to_string() || (key.len() >= 8 && uuid_hex.starts_with(key));
        self.memory.iter().filter(|(key, _)| fits(key)).map(|(_, bytes)| *bytes).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_only_tighten_and_survive_the_wire() {
        let server = Limits { thread_pct: 50.0, ..Limits::default() };
        let client = Limits {
            thread_pct: 80.0,
            memory: parse_memory("0=1G,GPU-0a0b0c0d-1111-2222-3333-444455556666=512MB,x=?"),
            priority: 1,
            partition: "GPU-0a/D1".to_owned(),
        };
        let both = Limits::from_text(&server.to_text()).tightened(&client);
        assert!((both.thread_pct - 50.0).abs() < 1e-9);
        assert_eq!(both.priority, 1);
        assert_eq!(both.memory_of(0, "ff"), Some(1 << 30));
        assert_eq!(both.memory_of(3, "0a0b0c0d111122223333444455556666"), Some(512 << 20));
        assert_eq!(both.memory_of(3, "ff"), None);
        assert_eq!(Limits::from_text(&both.to_text()), both);
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("2G"), Some(2 << 30));
        assert_eq!(parse_size("512MB"), Some(512 << 20));
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("many"), None);
        assert_eq!(parse_size("17179869184G"), None, "more than can be counted");
    }
}
