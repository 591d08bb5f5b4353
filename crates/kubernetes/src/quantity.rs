//! Kubernetes quantities (`500m`, `1Gi`, `2`) as whole thousandths, so that sums do not drift.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Amounts of named resources, in thousandths of their unit.
pub(crate) type Amounts = BTreeMap<String, i128>;

/// Reads a quantity, rounding up to a thousandth as Kubernetes does. `None` when it is not one.
pub(crate) fn milli(quantity: &str) -> Option<i128> {
    let split = quantity
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(quantity.len());
    let (number, suffix) = quantity.split_at(split);
    let (factor, divisor): (i128, i128) = match suffix {
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "" => (1, 1),
        "k" => (1_000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: u32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            (10i128.checked_pow(power)?, 1)
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    let value: i128 = digits.parse().ok()?;
    let scale = 10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?.checked_mul(divisor)?;
    let numerator = value.checked_mul(factor)?.checked_mul(1000)?;
    Some(numerator.div_euclid(scale) + i128::from(numerator.rem_euclid(scale) != 0))
}

/// Reads a list of resources; an amount that cannot be read counts as 0, the API server lets none in.
pub(crate) fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    list.into_iter().flatten().map(|(name, q)| (name.clone(), milli(&q.0).unwrap_or(0))).collect()
}

/// Adds all of `more` to `to`.
pub(crate) fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *to.entry(name.clone()).or_default() += amount;
    }
}

/// Takes all of `less` from `from`.
pub(crate) fn subtract(from: &mut Amounts, less: &Amounts) {
    for (name, amount) in less {
        *from.entry(name.clone()).or_default() -= amount;
    }
}

/// The larger of each.
pub(crate) fn maximum(of: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let entry = of.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

/// The first resource of which `asked` wants more than `free` has.
pub(crate) fn first_lacking<'a>(asked: &'a Amounts, free: &Amounts) -> Option<&'a str> {
    asked
        .iter()
        .find(|(name, amount)| **amount > 0 && **amount > free.get(*name).copied().unwrap_or(0))
        .map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("0", 0),
            ("2", 2_000),
            ("500m", 500),
            ("1.5", 1_500),
            ("100u", 1),
            ("1Ki", 1_024_000),
            ("1.5Gi", 1_610_612_736_000),
            ("2e3", 2_000_000),
            ("12E", 12_000_000_000_000_000_000_000),
            ("-1", -1_000),
        ] {
            assert_eq!(milli(text), Some(expected), "{text}");
        }
        for text in ["", "x", "1Zi", "1.2.3", "--1", "m"] {
            assert_eq!(milli(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_lacking_is_named() {
        let asked = Amounts::from([("cpu".into(), 500), ("memory".into(), 10)]);
        let mut free = Amounts::from([("cpu".into(), 600), ("memory".into(), 10)]);
        assert_eq!(first_lacking(&asked, &free), None);
        subtract(&mut free, &asked);
        assert_eq!(first_lacking(&asked, &free), Some("cpu"));
    }
}
