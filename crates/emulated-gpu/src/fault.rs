//! The faults that can be injected, and how they are written on a command line and on the wire.

use crate::EmulationError;
use crate::node::Node;
use crate::wire::{Kind, Message, Socket};

/// Something that breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An XID with what real hardware does along with it.
    Xid(u32),
    /// Killing an MPS client with work in flight takes the others down, in so many per cent of
    /// cases.
    KillPropagates(u32),
    /// The MPS server dies.
    MpsCrash,
    /// New MPS clients hang in `cuInit` while the daemon says that all is well.
    MpsHang,
    /// The clock is held at this many MHz; 0 lets it go.
    Throttle(u32),
    /// This many MiB of memory are taken by somebody, or as many as are free; 0 gives them back.
    MemoryBurst(u32),
    /// NVML calls about this GPU block; `false` lets them go on.
    NvmlBlock(bool),
    /// NVML calls about this GPU return this error; 0 ends it.
    NvmlError(u32),
    /// DCGM calls for values of this GPU fail with minus this error; 0 ends it.
    DcgmError(u32),
    /// The sensors say that so many per cent of the memory are in use and of the highest clock are
    /// run, whatever is true; 0 ends it.
    SensorLie(u32),
    /// Everything as it was: the GPU was reset, with nobody on it.
    Reset,
}

/// Events that can be subscribed to, and what their data is.
pub mod event {
    /// An XID; data is its number.
    pub const XID: u64 = 8;
    /// The clients of an MPS server were struck: [server's process id, error].
    pub const MPS_FAULT: u64 = 1 << 32;
    /// The MPS server is to die; data is its process id.
    pub const MPS_CRASH: u64 = 1 << 33;
    /// New MPS clients are to hang.
    pub const MPS_HANG: u64 = 1 << 34;
    /// All is well again.
    pub const RESET: u64 = 1 << 35;
    /// A client of an MPS server has a context now: [server's process id, client's].
    pub const MPS_JOINED: u64 = 1 << 36;
    /// It has none any more: [server's process id, client's].
    pub const MPS_LEFT: u64 = 1 << 37;
}

/// What an MPS server asks of a device, beside the settings that others make.
pub mod server_order {
    /// [server's process id]: take its clients again.
    pub const RECOVER: u64 = 3;
    /// [server's process id, error]: a fault on another GPU reaches its clients here.
    pub const STRIKE: u64 = 4;
}

/// XIDs with a meaning here.
pub const XIDS: [u32; 11] = [13, 31, 43, 45, 48, 63, 74, 79, 94, 95, 154];

/// As it is written on a command line.
impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Xid(n) => write!(f, "xid {n}"),
            Fault::KillPropagates(pct) => write!(f, "kill-propagates {pct}"),
            Fault::MpsCrash => f.write_str("mps-crash"),
            Fault::MpsHang => f.write_str("mps-hang"),
            Fault::Throttle(mhz) => write!(f, "throttle {mhz}"),
            Fault::MemoryBurst(mib) => write!(f, "memory-burst {mib}"),
            Fault::NvmlBlock(true) => f.write_str("nvml-block"),
            Fault::NvmlBlock(false) => f.write_str("nvml-unblock"),
            Fault::NvmlError(error) => write!(f, "nvml-error {error}"),
            Fault::DcgmError(error) => write!(f, "dcgm-error {error}"),
            Fault::SensorLie(pct) => write!(f, "sensor-lie {pct}"),
            Fault::Reset => f.write_str("reset"),
        }
    }
}

impl Fault {
    /// Reads `xid 31`, `mps-crash`, `throttle 600` and so on.
    pub fn parse(words: &[String]) -> Result<Fault, EmulationError> {
        let text = words.join(" ");
        let bad =
            |reason: &str| EmulationError::Fault { text: text.clone(), reason: reason.to_owned() };
        let number = |what: &str| -> Result<u32, EmulationError> {
            let word = words.get(1).ok_or_else(|| bad(&format!("say {what}")))?;
            word.parse().map_err(|_| bad(&format!("`{word}` is not {what}")))
        };
        let fault = match words.first().map(String::as_str) {
            Some("xid") => {
                let xid = number("the number of the XID")?;
                if !XIDS.contains(&xid) {
                    let known = XIDS.map(|x| x.to_string()).join(", ");
                    return Err(bad(&format!("known XIDs are {known}")));
                }
                Fault::Xid(xid)
            }
            Some("kill-propagates") => Fault::KillPropagates(number("per cent")?.min(100)),
            Some("mps-crash") => Fault::MpsCrash,
            Some("mps-hang") => Fault::MpsHang,
            Some("throttle") => Fault::Throttle(number("MHz, or 0 to end it")?),
            Some("memory-burst") => Fault::MemoryBurst(number("MiB, or 0 to end it")?),
            Some("nvml-block") => Fault::NvmlBlock(true),
            Some("nvml-unblock") => Fault::NvmlBlock(false),
            Some("nvml-error") => Fault::NvmlError(number("an NVML error, or 0 to end it")?),
            Some("dcgm-error") => {
                Fault::DcgmError(number("a DCGM error without its sign, or 0 to end it")?.min(99))
            }
            Some("sensor-lie") => Fault::SensorLie(number("per cent, or 0 to end it")?.min(10_000)),
            Some("off-bus") => Fault::Xid(79),
            Some("reset") => Fault::Reset,
            _ => {
                return Err(bad(
                    "write one of: xid N, kill-propagates PCT, mps-crash, mps-hang, throttle MHZ, \
                     memory-burst MIB, nvml-block, nvml-unblock, nvml-error N, dcgm-error N, \
                     sensor-lie PCT, off-bus, reset",
                ));
            }
        };
        Ok(fault)
    }

    /// Any fault but the reset that ends them. Those that strike everybody on the GPU come only when `deadly` ones may.
    pub fn random(rng: &mut muxflow_gpu_model::Rng, deadly: bool) -> Fault {
        let mut pick = |n: usize| ((rng.uniform() * n as f64) as usize).min(n - 1);
        let of = |list: &[u32], i: usize| list.get(i).copied().unwrap_or(0);
        let of_all = [48, 79, 95];
        let xids: Vec<u32> =
            XIDS.iter().copied().filter(|x| deadly || !of_all.contains(x)).collect();
        match pick(13) {
            0..=3 => Fault::Xid(of(&xids, pick(xids.len()))),
            4 => Fault::MpsCrash,
            5 => Fault::KillPropagates(of(&[0, 50, 100], pick(3))),
            6 => Fault::Throttle(of(&[0, 300, 600, 900], pick(4))),
            7 => Fault::MemoryBurst(of(&[0, 256, 1024, 2048], pick(4))),
            8 => Fault::NvmlBlock(pick(2) == 0),
            9 => Fault::MpsHang,
            10 => Fault::SensorLie(of(&[0, 50, 100, 150], pick(4))),
            11 => Fault::DcgmError(of(&[0, 21], pick(2))),
            _ => Fault::NvmlError(of(&[0, 15, 999], pick(3))),
        }
    }

    /// As two numbers.
    pub fn to_wire(self) -> [u64; 2] {
        match self {
            Fault::Xid(n) => [1, n.into()],
            Fault::KillPropagates(n) => [2, n.into()],
            Fault::MpsCrash => [3, 0],
            Fault::MpsHang => [4, 0],
            Fault::Throttle(n) => [5, n.into()],
            Fault::MemoryBurst(n) => [6, n.into()],
            Fault::NvmlBlock(on) => [7, on.into()],
            Fault::NvmlError(n) => [8, n.into()],
            Fault::Reset => [9, 0],
            Fault::SensorLie(n) => [10, n.into()],
            Fault::DcgmError(n) => [11, n.into()],
        }
    }

    /// From two numbers.
    pub fn from_wire(kind: u64, value: u64) -> Option<Fault> {
        let n = value as u32;
        Some(match kind {
            1 => Fault::Xid(n),
            2 => Fault::KillPropagates(n),
            3 => Fault::MpsCrash,
            4 => Fault::MpsHang,
            5 => Fault::Throttle(n),
            6 => Fault::MemoryBurst(n),
            7 => Fault::NvmlBlock(n != 0),
            8 => Fault::NvmlError(n),
            9 => Fault::Reset,
            10 => Fault::SensorLie(n),
            11 => Fault::DcgmError(n),
            _ => return None,
        })
    }

    /// Asks the device of a GPU to break, `after_ms` from now; `pid` says whose fault it is, 0
    /// leaves it to the device.
    pub fn inject(
        self,
        node: &Node,
        gpu: usize,
        pid: i32,
        after_ms: u64,
    ) -> Result<(), EmulationError> {
        let path = node.socket(gpu);
        let no_device = |source| EmulationError::NoDevice { path: path.clone(), source };
        let socket = Socket::connect(&path).map_err(no_device)?;
        let [kind, value] = self.to_wire();
        let values = [kind, value, 0, u64::from(pid.unsigned_abs()), after_ms];
        let answer =
            socket.ask(&Message::new(Kind::Inject, &values), &[], &[]).map_err(no_device)?;
        match answer.message.status {
            0 => Ok(()),
            _ => Err(EmulationError::Fault {
                text: self.to_string(),
                reason: "the device refused it: nothing is there that it could strike".to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_read_as_it_is_written() {
        let mut rng = muxflow_gpu_model::Rng::new(1);
        let mut all: Vec<Fault> = (0..500).map(|_| Fault::random(&mut rng, true)).collect();
        all.push(Fault::Reset);
        for fault in all {
            let words: Vec<String> = fault.to_string().split(' ').map(str::to_owned).collect();
            assert_eq!(Fault::parse(&words).unwrap(), fault);
            let [kind, value] = fault.to_wire();
            assert_eq!(Fault::from_wire(kind, value), Some(fault));
        }
        for (bad, says) in [("", "write one of"), ("xid 32", "known XIDs"), ("throttle x", "`x`")] {
            let words: Vec<String> = bad.split(' ').map(str::to_owned).collect();
            assert!(Fault::parse(&words).unwrap_err().to_string().contains(says), "{bad}");
        }
    }

    #[test]
    fn faults_of_all_kinds_come_at_random() {
        let mut rng = muxflow_gpu_model::Rng::new(7);
        let all = (0..500).map(|_| Fault::random(&mut rng, false).to_wire()[0]);
        let drawn: std::collections::BTreeSet<u64> = all.collect();
        let reset = Fault::Reset.to_wire()[0];
        let known = (1..).take_while(|kind| Fault::from_wire(*kind, 0).is_some());
        assert!(drawn.into_iter().eq(known.filter(|kind| *kind != reset)));
    }

    #[test]
    fn all_xids_come_at_random_and_the_deadly_ones_only_when_they_may() {
        let drawn = |deadly: bool| {
            let mut rng = muxflow_gpu_model::Rng::new(7);
            let all = (0..2000).map(|_| Fault::random(&mut rng, deadly));
            let xids = all.filter_map(|f| if let Fault::Xid(x) = f { Some(x) } else { None });
            xids.collect::<std::collections::BTreeSet<u32>>()
        };
        assert_eq!(drawn(true).into_iter().collect::<Vec<_>>(), XIDS);
        assert!([48, 79, 95].iter().all(|x| !drawn(false).contains(x)));
    }
}
