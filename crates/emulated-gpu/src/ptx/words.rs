//! What the words of an instruction mean: spaces, comparisons, operations, special registers.

use super::ins::{Cmp, CmpKind, Code, Round, Space, Special, Ty};

pub(crate) fn space(parts: &[&str]) -> Space {
    let found = parts.iter().find_map(|p| {
        let name = p.split("::").next().unwrap_or(p);
        Some(match name {
            "global" => Space::Global,
            "shared" => Space::Shared,
            "local" => Space::Local,
            "param" => Space::Param,
            "const" => Space::Const,
            _ => return None,
        })
    });
    found.unwrap_or(Space::Generic)
}

pub(crate) fn comparison(name: &str, ty: Ty) -> Result<Cmp, String> {
    let unordered = ty.is_float() && name.len() == 3 && name.ends_with('u');
    let kind = match name {
        "eq" | "equ" => CmpKind::Eq,
        "ne" | "neu" => CmpKind::Ne,
        "lt" | "ltu" | "lo" => CmpKind::Lt,
        "le" | "leu" | "ls" => CmpKind::Le,
        "gt" | "gtu" | "hi" => CmpKind::Gt,
        "ge" | "geu" | "hs" => CmpKind::Ge,
        "num" => CmpKind::Num,
        "nan" => CmpKind::Nan,
        _ => return Err(format!("comparison .{name} is not understood")),
    };
    Ok(Cmp { kind, unordered })
}

pub(crate) fn plain_code(parts: &[&str], tys: &[Ty]) -> Result<Code, String> {
    let has = |word: &str| parts.contains(&word);
    let wide = |lo: Code, hi: Code, wide: Code, float: Code| {
        if has("wide") {
            wide
        } else if has("hi") {
            hi
        } else if has("lo") {
            lo
        } else {
            float
        }
    };
    Ok(match parts[0] {
        "mov" => Code::Mov,
        "add" => Code::Add,
        "sub" => Code::Sub,
        "mul" => wide(Code::MulLo, Code::MulHi, Code::MulWide, Code::MulLo),
        "mad" => wide(Code::MadLo, Code::MadHi, Code::MadWide, Code::Fma),
        "mul24" => Code::MulLo,
        "fma" => Code::Fma,
        "div" => Code::Div,
        "rem" => Code::Rem,
        "min" => Code::Min,
        "max" => Code::Max,
        "abs" => Code::Abs,
        "neg" => Code::Neg,
        "and" => Code::And,
        "or" => Code::Or,
        "xor" => Code::Xor,
        "not" => Code::Not,
        "cnot" => Code::Cnot,
        "shl" => Code::Shl,
        "shr" => Code::Shr,
        "popc" => Code::Popc,
        "clz" => Code::Clz,
        "brev" => Code::Brev,
        "bfe" => Code::Bfe,
        "bfi" => Code::Bfi,
        "sqrt" => Code::Sqrt,
        "rsqrt" => Code::Rsqrt,
        "rcp" => Code::Rcp,
        "sin" => Code::Sin,
        "cos" => Code::Cos,
        "ex2" => Code::Ex2,
        "lg2" => Code::Lg2,
        "tanh" => Code::Tanh,
        "copysign" => Code::CopySign,
        "selp" => Code::Selp,
        "activemask" => Code::ActiveMask,
        "prmt" => Code::Prmt,
        "lop3" => Code::Lop3,
        "shf" => Code::ShfFunnel { left: has("l"), wrap: has("wrap") },
        "set" => Code::Set(comparison(parts[1], *tys.last().unwrap_or(&Ty::S32))?),
        "cvt" => {
            let [_, from] = tys else { return Err("two types expected".to_owned()) };
            let round = if has("rni") || has("rn") {
                Round::Nearest
            } else if has("rzi") || has("rz") {
                Round::Zero
            } else if has("rmi") || has("rm") {
                Round::Down
            } else if has("rpi") || has("rp") {
                Round::Up
            } else {
                Round::None
            };
            Code::Cvt { from: *from, round, saturate: has("sat") }
        }
        other => return Err(format!("instruction {other} is not understood")),
    })
}

pub(crate) fn special(name: &str) -> Option<Special> {
    let axis = |rest: &str| match rest {
        ".x" => Some(0),
        ".y" => Some(1),
        ".z" => Some(2),
        _ => None,
    };
    let name = name.strip_prefix('%')?;
    for (prefix, make) in [
        ("tid", Special::Tid as fn(u8) -> Special),
        ("ntid", Special::Ntid),
        ("ctaid", Special::Ctaid),
        ("nctaid", Special::Nctaid),
    ] {
        if let Some(a) = name.strip_prefix(prefix).and_then(axis) {
            return Some(make(a));
        }
    }
    Some(match name {
        "laneid" => Special::Lane,
        "warpid" => Special::Warp,
        "nwarpid" => Special::WarpCount,
        "lanemask_lt" => Special::LaneMaskLt,
        "lanemask_le" => Special::LaneMaskLe,
        "lanemask_gt" => Special::LaneMaskGt,
        "lanemask_ge" => Special::LaneMaskGe,
        "lanemask_eq" => Special::LaneMaskEq,
        "smid" => Special::SmId,
        "nsmid" => Special::SmCount,
        "gridid" => Special::GridId,
        "clock" | "clock64" | "globaltimer" | "clock_hi" => Special::Zero,
        _ => return None,
    })
}
