//! Arithmetic of single instructions on 64-bit registers.

use super::ins::{AtomOp, Cmp, CmpKind, Code, Round, Ty};

fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn bits32(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// Cuts to the width of the type; signed types are kept sign-extended.
pub(crate) fn fit(ty: Ty, bits: u64) -> u64 {
    match ty {
        Ty::Pred => bits & 1,
        Ty::B8 | Ty::U8 => bits & 0xff,
        Ty::S8 => (bits as i8 as i64).cast_unsigned(),
        Ty::B16 | Ty::U16 | Ty::F16 => bits & 0xffff,
        Ty::S16 => (bits as i16 as i64).cast_unsigned(),
        Ty::B32 | Ty::U32 | Ty::F32 => bits & 0xffff_ffff,
        Ty::S32 => (bits as i32 as i64).cast_unsigned(),
        Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => bits,
    }
}

/// A half-precision number.
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let mantissa = f32::from(bits & 0x3ff);
    match exponent {
        0 => sign * mantissa * 2_f32.powi(-24),
        31 if mantissa == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1.0 + mantissa / 1024.0) * 2_f32.powi(exponent - 15),
    }
}

/// To half precision, to the nearest, ties to even.
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    if value.is_nan() {
        return sign | 0x7e00;
    }
    let magnitude = value.abs();
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    if magnitude < 2_f32.powi(-14) {
        let scaled = magnitude * 2_f32.powi(24);
        return sign | scaled.round_ties_even() as u16;
    }
    let exponent = ((magnitude.to_bits() >> 23) as i32) - 127;
    let scaled = (magnitude / 2_f32.powi(exponent) * 1024.0).round_ties_even() as i32;
    let packed = (exponent + 15) * 1024 + scaled - 1024;
    sign | packed as u16
}

/// A double to half precision, to the nearest: on the way through single precision what is cut off
/// leaves its trace in the last bit.
fn f64_to_f16(value: f64) -> u16 {
    let near = value as f32;
    let wide = f64::from(near);
    if !near.is_finite() || wide.to_bits() == value.to_bits() {
        return f32_to_f16(near);
    }
    let below = near.to_bits() - u32::from(wide.abs() > value.abs());
    f32_to_f16(f32::from_bits(below | 1))
}

/// A subnormal single-precision number becomes zero of its sign; all else stays.
pub(crate) fn flush(ty: Ty, bits: u64) -> u64 {
    let subnormal = ty == Ty::F32 && f32_of(bits).is_subnormal();
    if subnormal { bits & 0x8000_0000 } else { bits }
}

/// One, two or three operands to one result, already fitted.
pub(crate) fn compute(code: Code, ty: Ty, a: u64, b: u64, c: u64) -> u64 {
    let result = match ty {
        Ty::F32 => float32(code, f32_of(a), f32_of(b), f32_of(c)).map(bits32),
        Ty::F64 => {
            let f = f64::from_bits;
            float64(code, f(a), f(b), f(c)).map(f64::to_bits)
        }
        Ty::F16 => {
            let f = |x: u64| f16_to_f32(x as u16);
            float32(code, f(a), f(b), f(c)).map(|v| u64::from(f32_to_f16(v)))
        }
        _ => None,
    };
    result.unwrap_or_else(|| integer(code, ty, a, b, c))
}

fn float32(code: Code, a: f32, b: f32, c: f32) -> Option<f32> {
    Some(match code {
        Code::Add => a + b,
        Code::Sub => a - b,
        Code::MulLo => a * b,
        Code::Fma => a.mul_add(b, c),
        Code::Div => a / b,
        Code::Min => a.min(b),
        Code::Max => a.max(b),
        Code::Abs => a.abs(),
        Code::Neg => -a,
        Code::Sqrt => a.sqrt(),
        Code::Rsqrt => 1.0 / a.sqrt(),
        Code::Rcp => 1.0 / a,
        Code::Sin => a.sin(),
        Code::Cos => a.cos(),
        Code::Ex2 => a.exp2(),
        Code::Lg2 => a.log2(),
        Code::Tanh => a.tanh(),
        Code::CopySign => b.copysign(a),
        _ => return None,
    })
}

fn float64(code: Code, a: f64, b: f64, c: f64) -> Option<f64> {
    Some(match code {
        Code::Add => a + b,
        Code::Sub => a - b,
        Code::MulLo => a * b,
        Code::Fma => a.mul_add(b, c),
        Code::Div => a / b,
        Code::Min => a.min(b),
        Code::Max => a.max(b),
        Code::Abs => a.abs(),
        Code::Neg => -a,
        Code::Sqrt => a.sqrt(),
        Code::Rsqrt => 1.0 / a.sqrt(),
        Code::Rcp => 1.0 / a,
        Code::CopySign => b.copysign(a),
        _ => return None,
    })
}

fn integer(code: Code, ty: Ty, a: u64, b: u64, c: u64) -> u64 {
    let bits = (ty.bytes() * 8) as u32;
    let (a, b, c) = (fit(ty, a), fit_shift(code, ty, b), c);
    let signed = ty.is_signed();
    let (sa, sb) = (a.cast_signed(), b.cast_signed());
    let result = match code {
        Code::Mov | Code::Selp => a,
        Code::Add => a.wrapping_add(b),
        Code::Sub => a.wrapping_sub(b),
        Code::MulLo => a.wrapping_mul(b),
        Code::MadLo | Code::Fma => a.wrapping_mul(b).wrapping_add(c),
        Code::MulHi => high(ty, a, b),
        Code::MadHi => high(ty, a, b).wrapping_add(c),
        // The result is twice as wide: not cut here.
        Code::MulWide => return a.wrapping_mul(b),
        Code::MadWide => return a.wrapping_mul(b).wrapping_add(c),
        Code::Div if b == 0 => u64::MAX,
        Code::Rem if b == 0 => a,
        Code::Div if signed => sa.wrapping_div(sb).cast_unsigned(),
        Code::Div => a / b,
        Code::Rem if signed => sa.wrapping_rem(sb).cast_unsigned(),
        Code::Rem => a % b,
        Code::Min if signed => sa.min(sb).cast_unsigned(),
        Code::Min => a.min(b),
        Code::Max if signed => sa.max(sb).cast_unsigned(),
        Code::Max => a.max(b),
        Code::Abs => sa.wrapping_abs().cast_unsigned(),
        Code::Neg => a.wrapping_neg(),
        Code::And => a & b,
        Code::Or => a | b,
        Code::Xor => a ^ b,
        Code::Not if ty == Ty::Pred => a ^ 1,
        Code::Not => !a,
        Code::Cnot => u64::from(a == 0),
        Code::Shl if b >= u64::from(bits) => 0,
        Code::Shl => a << b,
        Code::Shr if signed => sa.checked_shr(b.min(63) as u32).unwrap_or(0).cast_unsigned(),
        Code::Shr if b >= u64::from(bits) => 0,
        Code::Shr => a >> b,
        Code::Popc => return u64::from((a & width_mask(ty)).count_ones()),
        Code::Clz => return u64::from((a & width_mask(ty)).leading_zeros() - (64 - bits)),
        Code::Brev => (a & width_mask(ty)).reverse_bits() >> (64 - bits),
        Code::Bfe => extract(ty, a, b as u32 & 0xff, c as u32 & 0xff),
        _ => a,
    };
    fit(ty, result)
}

/// Shift counts are 32 bits whatever the type.
fn fit_shift(code: Code, ty: Ty, b: u64) -> u64 {
    if matches!(code, Code::Shl | Code::Shr | Code::Bfe) { b & 0xffff_ffff } else { fit(ty, b) }
}

fn width_mask(ty: Ty) -> u64 {
    if ty.bytes() == 8 { u64::MAX } else { (1 << (ty.bytes() * 8)) - 1 }
}

fn high(ty: Ty, a: u64, b: u64) -> u64 {
    let bits = ty.bytes() * 8;
    if ty.is_signed() {
        let wide = i128::from(a.cast_signed()) * i128::from(b.cast_signed());
        (wide >> bits) as u64
    } else {
        ((u128::from(a) * u128::from(b)) >> bits) as u64
    }
}

fn extract(ty: Ty, a: u64, position: u32, length: u32) -> u64 {
    let width = ty.bytes() as u32 * 8;
    if length == 0 || position >= width {
        return 0;
    }
    let length = length.min(width - position);
    let field = (a & width_mask(ty)) >> position;
    let unused = 64 - length;
    if ty.is_signed() {
        ((field << unused).cast_signed() >> unused).cast_unsigned()
    } else {
        field << unused >> unused
    }
}

/// `bfi`: puts the low `length` bits of `a` into `b`.
pub(crate) fn insert(ty: Ty, a: u64, b: u64, position: u64, length: u64) -> u64 {
    let width = ty.bytes() as u64 * 8;
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= width || length == 0 {
        return fit(ty, b);
    }
    let length = length.min(width - position);
    let ones = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
    fit(ty, b & !(ones << position) | (a & ones) << position)
}

/// `prmt` in its default mode.
pub(crate) fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let all = a & 0xffff_ffff | b << 32;
    let mut result = 0;
    for i in 0..4 {
        let pick = selector >> (4 * i) & 0xf;
        let byte = all >> (8 * (pick & 7)) & 0xff;
        let byte = if pick & 8 == 0 {
            byte
        } else if byte & 0x80 == 0 {
            0
        } else {
            0xff
        };
        result |= byte << (8 * i);
    }
    result
}

/// `lop3` by its table.
pub(crate) fn logic3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let mut result = 0;
    for bit in 0..32 {
        let row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
        result |= (table >> row & 1) << bit;
    }
    result
}

/// `shf`: shifts the pair (b:a).
pub(crate) fn funnel(left: bool, wrap: bool, a: u64, b: u64, count: u64) -> u64 {
    let count = if wrap { count & 31 } else { (count & 0xffff_ffff).min(32) };
    let pair = b << 32 | a & 0xffff_ffff;
    let shifted = if left { pair << count >> 32 } else { pair >> count };
    shifted & 0xffff_ffff
}

/// A comparison.
pub(crate) fn compare(cmp: Cmp, ty: Ty, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = match ty {
        Ty::F32 => f32_of(a).partial_cmp(&f32_of(b)),
        Ty::F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        Ty::F16 => f16_to_f32(a as u16).partial_cmp(&f16_to_f32(b as u16)),
        _ if ty.is_signed() => Some(fit(ty, a).cast_signed().cmp(&fit(ty, b).cast_signed())),
        _ => Some(fit(ty, a).cmp(&fit(ty, b))),
    };
    let Some(order) = order else {
        return cmp.unordered || matches!(cmp.kind, CmpKind::Nan);
    };
    match cmp.kind {
        CmpKind::Eq => order == Equal,
        CmpKind::Ne => order != Equal,
        CmpKind::Lt => order == Less,
        CmpKind::Le => order != Greater,
        CmpKind::Gt => order == Greater,
        CmpKind::Ge => order != Less,
        CmpKind::Num => true,
        CmpKind::Nan => false,
    }
}

/// A conversion.
pub(crate) fn convert(to: Ty, from: Ty, round: Round, saturate: bool, bits: u64) -> u64 {
    if from.is_float() {
        let value = match from {
            Ty::F16 => f64::from(f16_to_f32(bits as u16)),
            Ty::F32 => f64::from(f32_of(bits)),
            _ => f64::from_bits(bits),
        };
        let value = match saturate && to.is_float() {
            true if value.is_nan() => 0.0,
            true => value.clamp(0.0, 1.0),
            false => value,
        };
        return if to.is_float() {
            // Rounding a float to an integer of the same type is written as such a conversion.
            let value = if to == from { rounded(value, round) } else { value };
            from_f64(to, value)
        } else {
            to_integer(to, rounded(value, if round == Round::None { Round::Zero } else { round }))
        };
    }
    let fitted = fit(from, bits);
    if to.is_float() {
        let signed = from.is_signed();
        let bits = match (to, signed) {
            (Ty::F32, true) => bits32(fitted.cast_signed() as f32),
            (Ty::F32, false) => bits32(fitted as f32),
            (_, true) => from_f64(to, fitted.cast_signed() as f64),
            (_, false) => from_f64(to, fitted as f64),
        };
        return bits;
    }
    if saturate {
        let value =
            if from.is_signed() { i128::from(fitted.cast_signed()) } else { i128::from(fitted) };
        let (low, high) = range(to);
        return fit(to, value.clamp(low, high) as u64);
    }
    fit(to, fitted)
}

fn range(ty: Ty) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    if ty.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

fn rounded(value: f64, round: Round) -> f64 {
    match round {
        Round::None => value,
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

fn from_f64(ty: Ty, value: f64) -> u64 {
    match ty {
        Ty::F16 => u64::from(f64_to_f16(value)),
        Ty::F32 => bits32(value as f32),
        _ => value.to_bits(),
    }
}

fn to_integer(ty: Ty, value: f64) -> u64 {
    if value.is_nan() {
        return 0;
    }
    let (low, high) = range(ty);
    fit(ty, (value as i128).clamp(low, high) as u64)
}

/// What an atomic leaves in memory.
pub(crate) fn atomic(op: AtomOp, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
    match op {
        AtomOp::Add => compute(Code::Add, ty, old, b, 0),
        AtomOp::Min => compute(Code::Min, ty, old, b, 0),
        AtomOp::Max => compute(Code::Max, ty, old, b, 0),
        AtomOp::And => old & b,
        AtomOp::Or => old | b,
        AtomOp::Xor => old ^ b,
        AtomOp::Exchange => b,
        AtomOp::Compare => {
            if fit(ty, old) == fit(ty, b) {
                c
            } else {
                old
            }
        }
        AtomOp::Inc => {
            if fit(ty, old) >= fit(ty, b) {
                0
            } else {
                old + 1
            }
        }
        AtomOp::Dec => {
            if fit(ty, old) == 0 || fit(ty, old) > fit(ty, b) {
                b
            } else {
                old - 1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn integers_wrap_as_the_machine_does(a: u32, b: u32) {
            let (x, y) = (u64::from(a), u64::from(b));
            prop_assert_eq!(compute(Code::Add, Ty::U32, x, y, 0), u64::from(a.wrapping_add(b)));
            prop_assert_eq!(compute(Code::MulHi, Ty::U32, x, y, 0), (x * y) >> 32);
            prop_assert_eq!(compute(Code::MulWide, Ty::U32, x, y, 0), x * y);
            let (sa, sb) = (a.cast_signed(), b.cast_signed());
            let wide = i64::from(sa) * i64::from(sb);
            prop_assert_eq!(compute(Code::MulWide, Ty::S32, x, y, 0), wide.cast_unsigned());
            let shifted = i64::from(sa >> (b & 31)).cast_unsigned();
            prop_assert_eq!(compute(Code::Shr, Ty::S32, x, y & 31, 0), shifted);
        }

        #[test]
        fn halves_survive_the_way_through_floats(bits: u16) {
            let value = f16_to_f32(bits);
            prop_assume!(!value.is_nan());
            prop_assert_eq!(f32_to_f16(value), bits);
        }

        #[test]
        fn comparisons_agree_with_rust(a: f32, b: f32) {
            let (x, y) = (bits32(a), bits32(b));
            let lt = Cmp { kind: CmpKind::Lt, unordered: false };
            prop_assert_eq!(compare(lt, Ty::F32, x, y), a < b);
        }

        #[test]
        fn floats_saturate_into_integers(a: f32) {
            let got = convert(Ty::S32, Ty::F32, Round::Zero, false, bits32(a));
            prop_assert_eq!(got, i64::from(a as i32).cast_unsigned());
        }
    }
}
