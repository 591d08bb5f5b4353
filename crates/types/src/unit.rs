//! Units as newtypes with checked constructors, so that a share of 140 % or a negative memory size
//! is an error where it enters and not a surprise where it is used.

use std::fmt;

/// A value that does not fit its unit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UnitError {
    /// Not between 0 and 100, or not a number.
    #[error("{value} is not a percentage: it must lie between 0 and 100")]
    Percent {
        /// What was given.
        value: f64,
    },
    /// Negative, infinite or not a number.
    #[error("{value} {unit} is not a quantity: it must be finite and not negative")]
    Quantity {
        /// What was given.
        value: f64,
        /// The unit it was meant in.
        unit: &'static str,
    },
    /// A size in bytes that could not be read.
    #[error("`{text}` is not a size: write a number and a unit, such as 6GiB, 512MiB or 1000000")]
    Size {
        /// What was given.
        text: String,
    },
    /// More streaming multiprocessors than the GPU has, or a GPU without any.
    #[error("{sms} SMs do not fit a GPU of {total} SMs")]
    Sms {
        /// What was given.
        sms: u32,
        /// What the GPU has.
        total: u32,
    },
}

/// Per cent, 0 to 100, never NaN.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Percent(f64);

impl Percent {
    /// Nothing.
    pub const ZERO: Percent = Percent(0.0);
    /// Everything.
    pub const FULL: Percent = Percent(100.0);

    /// A percentage; refused outside 0 to 100.
    pub fn new(value: f64) -> Result<Self, UnitError> {
        if (0.0..=100.0).contains(&value) {
            Ok(Percent(value + 0.0))
        } else {
            Err(UnitError::Percent { value })
        }
    }

    /// A percentage from a fraction of one; refused outside 0 to 1.
    pub fn from_fraction(fraction: f64) -> Result<Self, UnitError> {
        Self::new(fraction * 100.0)
    }

    /// The nearest percentage to any number; NaN becomes `None`.
    pub fn clamped(value: f64) -> Option<Self> {
        (!value.is_nan()).then(|| Percent(value.clamp(0.0, 100.0) + 0.0))
    }

    /// 0 to 100.
    pub fn value(self) -> f64 {
        self.0
    }

    /// 0 to 1.
    pub fn fraction(self) -> f64 {
        self.0 / 100.0
    }

    /// What is left to 100.
    pub fn complement(self) -> Self {
        Percent(100.0 - self.0)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} %", self.0)
    }
}

/// A size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No memory.
    pub const ZERO: Bytes = Bytes(0);

    /// So many mebibytes.
    pub const fn from_mib(mib: u64) -> Self {
        Bytes(mib << 20)
    }

    /// So many gibibytes.
    pub const fn from_gib(gib: u64) -> Self {
        Bytes(gib << 30)
    }

    /// Reads `6GiB`, `512 MiB`, `1.5GB`, `4096`.
    pub fn parse(text: &str) -> Result<Self, UnitError> {
        let bad = || UnitError::Size { text: text.to_owned() };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "kb" => 1e3,
            "m" | "mib" => 1024.0 * 1024.0,
            "mb" => 1e6,
            "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
            "gb" => 1e9,
            "t" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            "tb" => 1e12,
            _ => return Err(bad()),
        };
        let bytes = number * factor;
        if !(0.0..9.0e18).contains(&bytes) {
            return Err(bad());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "range checked above"
        )]
        Ok(Bytes(bytes.round() as u64))
    }

    /// This share of the size, rounded down.
    pub fn scaled(self, share: Percent) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a u64 is not larger than that u64; memory sizes are far below 2^53"
        )]
        Bytes((self.0 as f64 * share.fraction()).floor() as u64)
    }

    /// The sum, held at the largest value instead of wrapping.
    pub fn saturating_add(self, other: Self) -> Self {
        Bytes(self.0.saturating_add(other.0))
    }

    /// The difference, held at zero instead of wrapping.
    pub fn saturating_sub(self, other: Self) -> Self {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// This size as a share of `total`; `None` when `total` is zero, held at 100 %.
    pub fn share_of(self, total: Self) -> Option<Percent> {
        #[expect(clippy::cast_precision_loss, reason = "memory sizes are far below 2^53")]
        (total.0 > 0).then(|| Percent::clamped(self.0 as f64 / total.0 as f64 * 100.0)).flatten()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "for people")]
        let v = self.0 as f64;
        match self.0 {
            0..0x400 => write!(f, "{} B", self.0),
            0x400..0x10_0000 => write!(f, "{:.1} KiB", v / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", v / 1_048_576.0),
            _ => write!(f, "{:.1} GiB", v / 1_073_741_824.0),
        }
    }
}

/// A clock frequency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MegaHertz(pub u32);

impl fmt::Display for MegaHertz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MHz", self.0)
    }
}

/// A duration, or a point in time since an epoch that the caller chose, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Micros(pub u64);

impl Micros {
    /// No time, or the epoch.
    pub const ZERO: Micros = Micros(0);

    /// So many milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Micros(ms.saturating_mul(1_000))
    }

    /// So many seconds.
    pub const fn from_secs(s: u64) -> Self {
        Micros(s.saturating_mul(1_000_000))
    }

    /// Seconds as a float; refused when negative, infinite or not a number.
    pub fn from_secs_f64(s: f64) -> Result<Self, UnitError> {
        if s.is_finite() && (0.0..1.0e13).contains(&s) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "range checked above"
            )]
            Ok(Micros((s * 1e6).round() as u64))
        } else {
            Err(UnitError::Quantity { value: s, unit: "s" })
        }
    }

    /// In seconds.
    pub fn as_secs_f64(self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "2^53 microseconds are 285 years")]
        let us = self.0 as f64;
        us / 1e6
    }

    /// The later point, held at the end of time.
    pub fn saturating_add(self, other: Self) -> Self {
        Micros(self.0.saturating_add(other.0))
    }

    /// How long since `earlier`; zero when `earlier` is later.
    pub fn since(self, earlier: Self) -> Self {
        Micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.as_secs_f64();
        match self.0 {
            0..1_000 => write!(f, "{} µs", self.0),
            1_000..1_000_000 => write!(f, "{:.1} ms", s * 1e3),
            1_000_000..120_000_000 => write!(f, "{s:.1} s"),
            120_000_000..7_200_000_000 => write!(f, "{:.1} min", s / 60.0),
            _ => write!(f, "{:.1} h", s / 3600.0),
        }
    }
}

/// Electrical power.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Watts(f64);

impl Watts {
    /// A power; refused when negative, infinite or not a number.
    pub fn new(value: f64) -> Result<Self, UnitError> {
        if value.is_finite() && value >= 0.0 {
            Ok(Watts(value))
        } else {
            Err(UnitError::Quantity { value, unit: "W" })
        }
    }

    /// In watts.
    pub fn value(self) -> f64 {
        self.0
    }
}

/// A number of streaming multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SmCount(pub u32);

/// How many of a GPU's SMs offline work may use: whole SMs, so that equal GPUs compare equal.
///
/// MPS takes a percentage and rounds it down to whole SMs; [`SmShare::percent`] gives the percentage
/// that MPS turns back into exactly this many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SmShare {
    sms: u32,
    total: u32,
}

impl SmShare {
    /// So many SMs of so many; refused when there are not so many, or none at all.
    pub fn new(sms: SmCount, total: SmCount) -> Result<Self, UnitError> {
        if total.0 == 0 || sms.0 > total.0 {
            return Err(UnitError::Sms { sms: sms.0, total: total.0 });
        }
        Ok(SmShare { sms: sms.0, total: total.0 })
    }

    /// The largest whole number of SMs within a percentage, as MPS rounds.
    pub fn from_percent(share: Percent, total: SmCount) -> Result<Self, UnitError> {
        let exact = share.fraction() * f64::from(total.0);
        // A percentage that came from a whole number of SMs must give that number back.
        let nearest = exact.round();
        let sms = if (exact - nearest).abs() < 1e-6 { nearest } else { exact.floor() };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to total, a u32"
        )]
        Self::new(SmCount(sms as u32), total)
    }

    /// How many SMs.
    pub fn sms(self) -> SmCount {
        SmCount(self.sms)
    }

    /// Of how many.
    pub fn total(self) -> SmCount {
        SmCount(self.total)
    }

    /// As a percentage of the GPU.
    pub fn percent(self) -> Percent {
        Percent(f64::from(self.sms) / f64::from(self.total) * 100.0)
    }
}

impl fmt::Display for SmShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} % ({}/{} SMs)", self.percent().value(), self.sms, self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percent_refuses_what_is_not_a_percentage() {
        for bad in [-0.1, 100.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(Percent::new(bad).is_err(), "{bad}");
        }
        assert!(Percent::clamped(f64::NAN).is_none());
        assert_eq!(Percent::clamped(250.0), Some(Percent::FULL));
        assert_eq!(Percent::clamped(f64::NEG_INFINITY), Some(Percent::ZERO));
        assert!(Percent::new(-0.0).unwrap().value().is_sign_positive());
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(Bytes::parse("6GiB").unwrap(), Bytes::from_gib(6));
        assert_eq!(Bytes::parse(" 1.5 GB ").unwrap(), Bytes(1_500_000_000));
        assert_eq!(Bytes::parse("4096").unwrap(), Bytes(4096));
        for bad in ["", "GiB", "-1", "6 parsecs", "1e3", "nan", "99999999999TB"] {
            let err = Bytes::parse(bad).unwrap_err();
            assert!(err.to_string().contains("6GiB"), "{err} must say how to write it");
        }
    }

    #[test]
    fn shares_need_a_gpu_with_sms() {
        assert!(SmShare::new(SmCount(0), SmCount(0)).is_err());
        assert!(SmShare::new(SmCount(41), SmCount(40)).is_err());
        assert_eq!(
            SmShare::from_percent(Percent::new(39.9).unwrap(), SmCount(40)).unwrap().sms(),
            SmCount(15)
        );
    }

    #[test]
    fn seconds_out_of_range_are_refused() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(Micros::from_secs_f64(bad).is_err(), "{bad}");
        }
        assert_eq!(Micros::from_secs_f64(1.5).unwrap(), Micros(1_500_000));
        assert_eq!(Micros(5).since(Micros(9)), Micros::ZERO);
    }

    proptest! {
        #[test]
        fn a_share_survives_the_trip_through_its_percentage(total in 1u32..200, part in 0u32..200) {
            let share = SmShare::new(SmCount(part.min(total)), SmCount(total)).unwrap();
            prop_assert_eq!(SmShare::from_percent(share.percent(), SmCount(total)).unwrap(), share);
        }

        #[test]
        fn a_scaled_size_never_grows(bytes in 0u64..1 << 50, pct in 0.0f64..=100.0) {
            prop_assert!(Bytes(bytes).scaled(Percent::new(pct).unwrap()) <= Bytes(bytes));
        }
    }
}
