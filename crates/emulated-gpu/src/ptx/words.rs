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

/// Words of accesses to memory: where, how strongly ordered, how cached, how many.
const ACCESS: &[&str] = &[
    "global",
    "shared",
    "shared::cta",
    "local",
    "param",
    "param::entry",
    "const",
    "volatile",
    "weak",
    "relaxed",
    "acquire",
    "release",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "v2",
    "v4",
    "v8",
];
const ATOMIC: &[&str] = &[
    "global",
    "shared",
    "shared::cta",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "add",
    "min",
    "max",
    "and",
    "or",
    "xor",
    "exch",
    "cas",
    "inc",
    "dec",
    "noftz",
];
const COMPARE: &[&str] = &[
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "lo", "ls", "hi",
    "hs", "num", "nan", "ftz",
];

/// The words that an instruction may have beside its types.
fn modifiers(name: &str) -> &'static [&'static str] {
    match name {
        "ld" | "ldu" | "st" => ACCESS,
        "atom" | "red" => ATOMIC,
        "set" => COMPARE,
        "bra" | "ret" => &["uni"],
        "bar" | "barrier" => &["warp", "cta", "sync", "aligned"],
        "cvta" => &["to", "global", "shared", "shared::cta", "local", "param", "const"],
        "shfl" => &["sync", "up", "down", "bfly", "idx"],
        "vote" => &["sync", "all", "any", "uni", "ballot"],
        "shf" => &["l", "r", "clamp", "wrap"],
        "mul" | "mad" => &["lo", "hi", "wide", "rn", "ftz"],
        "add" | "sub" | "fma" => &["rn", "ftz"],
        "div" => &["rn", "approx", "full", "ftz"],
        "sqrt" | "rsqrt" | "rcp" => &["rn", "approx", "ftz"],
        "sin" | "cos" | "ex2" | "lg2" | "tanh" => &["approx", "ftz"],
        "min" | "max" | "abs" | "neg" => &["ftz"],
        "cvt" => &["rn", "rni", "rzi", "rmi", "rpi", "ftz", "sat"],
        _ => &[],
    }
}

/// Refuses an instruction with a word that it is not known to have here: a type or a rounding that
/// were passed over would give wrong numbers without a word.
pub(crate) fn refuse_unknown(parts: &[&str]) -> Result<(), String> {
    let name = parts[0];
    if matches!(name, "membar" | "fence" | "prefetch" | "prefetchu" | "discard" | "nanosleep") {
        // They order and fetch; nothing here depends on them.
        return Ok(());
    }
    let known = |part: &&str| {
        let cache = matches!(name, "ld" | "ldu" | "st") && part.starts_with(['L']);
        let join = name == "setp" && matches!(*part, "and" | "or" | "xor");
        let comparison = name == "setp" && COMPARE.contains(part);
        Ty::from_name(part).is_some()
            || modifiers(name).contains(part)
            || cache
            || join
            || comparison
    };
    match parts[1..].iter().find(|part| !known(part)) {
        Some(part) => Err(format!("{name} with .{part} is not understood")),
        None => Ok(()),
    }
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
        "set" => {
            let [to @ (Ty::U32 | Ty::S32 | Ty::F32), from] = tys else {
                return Err("this kind of result is not understood".to_owned());
            };
            Code::Set(comparison(parts[1], *from)?, *to)
        }
        "cvt" => {
            let [_, from] = tys else { return Err("two types expected".to_owned()) };
            let round = if has("rni") || has("rn") {
                Round::Nearest
            } else if has("rzi") {
                Round::Zero
            } else if has("rmi") {
                Round::Down
            } else if has("rpi") {
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
