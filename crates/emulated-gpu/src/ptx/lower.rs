//! Statements into numbered instructions.

mod warp;

use std::collections::BTreeMap;

use super::ins::{
    AtomOp, Code, Ins, Join, Kernel, Module, NOWHERE, Space, Special, Src, Ty, VARIABLE_TAG,
};
use super::parse::{Entry, Statement, Text, immediate};
use super::words::{comparison, plain_code, refuse_unknown, space, special};

/// Shared and local memory as generic addresses.
pub(crate) const SHARED_BASE: u64 = 0x0000_0100_0000_0000;
pub(crate) const LOCAL_BASE: u64 = 0x0000_0200_0000_0000;

pub(crate) fn lower(text: &Text) -> Result<Module, String> {
    let kernels = text.entries.iter().map(|entry| kernel(entry, text)).collect();
    Ok(Module { kernels, variables: text.variables.clone(), target: text.target })
}

fn kernel(entry: &Entry, text: &Text) -> Kernel {
    let mut params = Vec::new();
    let mut offset = 0_usize;
    for (align, bytes, _) in &entry.params {
        offset = offset.next_multiple_of((*align).max(1));
        params.push((offset, *bytes));
        offset += bytes;
    }
    let mut kernel = Kernel {
        name: entry.name.clone(),
        params,
        param_bytes: offset,
        shared_bytes: 0,
        local_bytes: 0,
        max_threads: entry.max_threads,
        unknown: None,
        static_instructions: 0,
        static_accesses: 0,
        registers: 0,
        code: Vec::new(),
    };
    let body = match &entry.body {
        Ok(body) => body,
        Err(reason) => {
            kernel.unknown = Some(reason.clone());
            return kernel;
        }
    };
    count(body, &mut kernel);
    let mut lowering = Lowering::new(entry, text, &mut kernel);
    let result = lowering.body(body);
    let (code, registers) = (lowering.code, lowering.registers);
    kernel.registers = registers;
    match result {
        Ok(()) => kernel.code = code,
        Err(reason) => kernel.unknown = Some(reason),
    }
    kernel
}

fn count(body: &[Statement], kernel: &mut Kernel) {
    for statement in body {
        if let Statement::Instruction { op, .. } = statement {
            kernel.static_instructions += 1;
            let global = op.contains(".global") || op == "ld" || op == "st";
            kernel.static_accesses += usize::from(global);
        }
    }
}

struct Lowering<'a> {
    text: &'a Text,
    kernel: &'a mut Kernel,
    params: BTreeMap<&'a str, usize>,
    names: Vec<BTreeMap<String, u32>>,
    arrays: BTreeMap<String, u64>,
    labels: BTreeMap<String, usize>,
    patches: Vec<(usize, String)>,
    code: Vec<Ins>,
    registers: usize,
}

impl<'a> Lowering<'a> {
    fn new(entry: &'a Entry, text: &'a Text, kernel: &'a mut Kernel) -> Lowering<'a> {
        let offsets = kernel.params.iter().map(|(offset, _)| *offset);
        let params = entry.params.iter().map(|(_, _, n)| n.as_str()).zip(offsets).collect();
        let mut lowering = Lowering {
            text,
            kernel,
            params,
            names: vec![BTreeMap::new()],
            arrays: BTreeMap::new(),
            labels: BTreeMap::new(),
            patches: Vec::new(),
            code: Vec::new(),
            registers: 0,
        };
        for (align, bytes, name, external) in &text.shared {
            lowering.array("shared", *align, *bytes, name, *external);
        }
        lowering
    }

    fn array(&mut self, space: &str, align: usize, bytes: usize, name: &str, external: bool) {
        let used = if space == "local" {
            &mut self.kernel.local_bytes
        } else {
            &mut self.kernel.shared_bytes
        };
        *used = used.next_multiple_of(align.max(1));
        let base = if space == "local" { LOCAL_BASE } else { SHARED_BASE };
        let place = if external { u64::MAX } else { base + *used as u64 };
        *used += bytes;
        self.arrays.insert(name.to_owned(), place);
    }

    fn body(&mut self, body: &[Statement]) -> Result<(), String> {
        for statement in body {
            match statement {
                Statement::Open => self.names.push(BTreeMap::new()),
                Statement::Close => {
                    self.names.pop();
                    if self.names.is_empty() {
                        self.names.push(BTreeMap::new());
                    }
                }
                Statement::Label(name) => {
                    self.labels.insert(name.clone(), self.code.len());
                }
                Statement::Register { ty, name, count } => self.declare(ty, name, *count)?,
                Statement::Array { space, align, bytes, name, external } => {
                    if space == "param" {
                        return Err("calls of functions are not understood".to_owned());
                    }
                    self.array(space, *align, *bytes, name, *external);
                }
                Statement::Instruction { guard, op, operands } => {
                    let guard = match guard {
                        Some((name, sense)) => Some((self.register(name)?, *sense)),
                        None => None,
                    };
                    self.instruction(guard, op, operands)
                        .map_err(|e| format!("`{op} {}`: {e}", operands.join(", ")))?;
                }
            }
        }
        for (at, label) in std::mem::take(&mut self.patches) {
            let target = self.labels.get(&label).ok_or_else(|| format!("no label `{label}`"))?;
            self.code[at].a = Src::Imm(*target as u64);
        }
        Ok(())
    }

    fn declare(&mut self, ty: &str, name: &str, count: Option<usize>) -> Result<(), String> {
        if Ty::from_name(ty).is_none() {
            return Err(format!("registers of type .{ty} are not understood"));
        }
        let names: Vec<String> = match count {
            Some(count) => (0..count).map(|i| format!("{name}{i}")).collect(),
            None => vec![name.to_owned()],
        };
        for name in names {
            let number = self.registers as u32;
            self.registers += 1;
            if let Some(scope) = self.names.last_mut() {
                scope.insert(name, number);
            }
        }
        if self.registers > 1 << 16 {
            return Err("too many registers".to_owned());
        }
        Ok(())
    }

    fn register(&self, name: &str) -> Result<u32, String> {
        let found = self.names.iter().rev().find_map(|scope| scope.get(name));
        found.copied().ok_or_else(|| format!("no register `{name}`"))
    }

    fn destination(&self, name: &str) -> Result<u32, String> {
        if name == "_" { Ok(NOWHERE) } else { self.register(name) }
    }

    fn source(&self, text: &str, ty: Ty) -> Result<Src, String> {
        let (negated, text) = match text.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if negated {
            return Err("negated operands are not understood".to_owned());
        }
        if let Ok(register) = self.register(text) {
            return Ok(Src::Reg(register));
        }
        if let Some(special) = special(text) {
            return Ok(Src::Special(special));
        }
        if let Some(place) = self.address_of(text) {
            return Ok(place);
        }
        let bits = immediate(text).ok_or_else(|| format!("`{text}` is not understood"))?;
        let hex_float = text.contains("0f") || text.contains("0F");
        let hex_double = text.contains("0d") || text.contains("0D");
        Ok(Src::Imm(match ty {
            Ty::F32 if hex_double || text.contains('.') => {
                u64::from((f64::from_bits(bits) as f32).to_bits())
            }
            Ty::F32 | Ty::F64 if hex_float || hex_double => bits,
            _ => bits,
        }))
    }

    /// The address of a shared or local array, a module variable or a parameter.
    fn address_of(&self, name: &str) -> Option<Src> {
        if let Some(place) = self.arrays.get(name) {
            let dynamic = *place == u64::MAX;
            return Some(if dynamic {
                Src::Special(Special::DynamicShared)
            } else {
                // Windows are entered by `cvta`; a plain `mov` gives the offset.
                Src::Imm(place & 0xff_ffff_ffff)
            });
        }
        if let Some(i) = self.text.variables.iter().position(|v| v.name == name) {
            return Some(Src::Imm(VARIABLE_TAG | i as u64));
        }
        self.params.get(name).map(|offset| Src::Imm(*offset as u64))
    }

    fn emit(&mut self, ins: Ins) {
        self.code.push(ins);
    }

    fn instruction(
        &mut self,
        guard: Option<(u32, bool)>,
        op: &str,
        operands: &[String],
    ) -> Result<(), String> {
        let parts: Vec<&str> = op.split('.').collect();
        refuse_unknown(&parts)?;
        let tys: Vec<Ty> = parts.iter().filter_map(|p| Ty::from_name(p)).collect();
        let ty = tys.last().copied().unwrap_or(Ty::B32);
        let blank = Ins {
            code: Code::Fence,
            ty,
            guard,
            dst: NOWHERE,
            dst2: NOWHERE,
            a: Src::None,
            b: Src::None,
            c: Src::None,
            d: Src::None,
            offset: 0,
            flush: parts.contains(&"ftz"),
        };
        let has = |word: &str| parts.contains(&word);
        match parts[0] {
            "ld" | "ldu" => return self.load_store(blank, &parts, operands, true),
            "st" => return self.load_store(blank, &parts, operands, false),
            "atom" | "red" => return self.atomic(blank, &parts, operands),
            "bra" => {
                self.patches.push((self.code.len(), operands.first().cloned().unwrap_or_default()));
                self.emit(Ins { code: Code::Branch, ..blank });
                return Ok(());
            }
            "ret" | "exit" => {
                self.emit(Ins { code: Code::Exit, ..blank });
                return Ok(());
            }
            "trap" => {
                self.emit(Ins { code: Code::Trap, ..blank });
                return Ok(());
            }
            "bar" | "barrier" if has("warp") => return self.warp_sync(blank, operands),
            "bar" | "barrier" if has("sync") && operands.len() == 1 => {
                self.emit(Ins { code: Code::Barrier, ..blank });
                return Ok(());
            }
            "bar" | "barrier" => {
                return Err(
                    "only barriers of a warp or of the whole block are understood".to_owned()
                );
            }
            "membar" | "fence" | "prefetch" | "prefetchu" | "discard" | "nanosleep" => {
                return Ok(());
            }
            "cvta" => return self.convert_address(blank, &parts, operands),
            "setp" => return self.setp(blank, &parts, operands),
            "shfl" => return self.shuffle(blank, &parts, operands),
            "vote" => return self.vote(blank, &parts, operands),
            "mov" if operands.iter().any(|o| o.starts_with('{')) => {
                return self.pack(blank, operands);
            }
            _ => {}
        }
        let code = plain_code(&parts, &tys)?;
        // Some operands have a type of their own.
        let narrow = match code {
            Code::Cvt { from, .. } => from,
            _ => ty,
        };
        let dst = operands.first().ok_or("no operand")?;
        let (dst, dst2) = match dst.split_once('|') {
            Some((a, b)) => (self.destination(a.trim())?, self.destination(b.trim())?),
            None => (self.destination(dst)?, NOWHERE),
        };
        let result = match code {
            Code::Cvt { .. } => tys.first().copied().unwrap_or(ty),
            _ => ty,
        };
        let mut ins = Ins { code, ty: result, dst, dst2, ..blank };
        let places = [&mut ins.a, &mut ins.b, &mut ins.c, &mut ins.d];
        if operands.len() > 5 {
            return Err("too many operands".to_owned());
        }
        for (i, (place, operand)) in places.into_iter().zip(&operands[1..]).enumerate() {
            let count_ty = matches!(code, Code::Shl | Code::Shr) && i == 1;
            let ty = if count_ty { Ty::U32 } else { narrow };
            *place = self.source(operand, ty)?;
        }
        self.emit(ins);
        Ok(())
    }

    /// `[%rd1+16]`, `[name]`, `[name+4]`.
    fn address(&self, text: &str) -> Result<(Src, i64), String> {
        let inner = text.trim_start_matches('[').trim_end_matches(']').trim();
        let (base, offset) = match inner.rfind(['+', '-']).filter(|at| *at > 0) {
            Some(at) => {
                let digits = inner[at + 1..].trim();
                let value = immediate(digits).ok_or("bad offset")?.cast_signed();
                (inner[..at].trim(), if inner.as_bytes()[at] == b'-' { -value } else { value })
            }
            None => (inner, 0),
        };
        Ok((self.source(base, Ty::U64)?, offset))
    }

    fn load_store(
        &mut self,
        blank: Ins,
        parts: &[&str],
        operands: &[String],
        load: bool,
    ) -> Result<(), String> {
        let space = space(parts);
        let [first, second] = operands else { return Err("two operands expected".to_owned()) };
        let (values, place) = if load { (first, second) } else { (second, first) };
        let (address, offset) = self.address(place)?;
        let list: Vec<&str> = values.trim_matches(['{', '}']).split(',').map(str::trim).collect();
        // The address register may be one of those loaded: keep it until the last.
        let mut address = address;
        if load && list.len() > 1 {
            let kept = self.registers as u32;
            self.registers += 1;
            self.emit(Ins { code: Code::Mov, ty: Ty::B64, dst: kept, a: address, ..blank });
            address = Src::Reg(kept);
        }
        for (i, value) in list.iter().enumerate() {
            let offset = offset + (i * blank.ty.bytes()) as i64;
            let ins = Ins { a: address, offset, ..blank };
            if load {
                let dst = self.destination(value)?;
                self.emit(Ins { code: Code::Load(space), dst, ..ins });
            } else {
                let b = self.source(value, blank.ty)?;
                self.emit(Ins { code: Code::Store(space), b, ..ins });
            }
        }
        Ok(())
    }

    fn atomic(&mut self, blank: Ins, parts: &[&str], operands: &[String]) -> Result<(), String> {
        let op = parts.iter().find_map(|p| {
            Some(match *p {
                "add" => AtomOp::Add,
                "min" => AtomOp::Min,
                "max" => AtomOp::Max,
                "and" => AtomOp::And,
                "or" => AtomOp::Or,
                "xor" => AtomOp::Xor,
                "exch" => AtomOp::Exchange,
                "cas" => AtomOp::Compare,
                "inc" => AtomOp::Inc,
                "dec" => AtomOp::Dec,
                _ => return None,
            })
        });
        let op = op.ok_or("this atomic is not understood")?;
        let with_result = parts[0] == "atom";
        let skip = usize::from(with_result);
        let dst = if with_result { self.destination(&operands[0])? } else { NOWHERE };
        let (a, offset) = self.address(operands.get(skip).ok_or("no address")?)?;
        let b = self.source(operands.get(skip + 1).ok_or("no value")?, blank.ty)?;
        let c = match operands.get(skip + 2) {
            Some(text) => self.source(text, blank.ty)?,
            None => Src::None,
        };
        self.emit(Ins { code: Code::Atom(space(parts), op), dst, a, b, c, offset, ..blank });
        Ok(())
    }

    fn convert_address(
        &mut self,
        blank: Ins,
        parts: &[&str],
        operands: &[String],
    ) -> Result<(), String> {
        let to = parts.contains(&"to");
        let code = match (space(parts), to) {
            (Space::Shared, true) => Code::ToShared,
            (Space::Shared, false) => Code::FromShared,
            (Space::Local, true) => Code::ToLocal,
            (Space::Local, false) => Code::FromLocal,
            _ => Code::Mov,
        };
        let dst = self.destination(&operands[0])?;
        let a = self.source(operands.get(1).ok_or("no source")?, Ty::U64)?;
        self.emit(Ins { code, ty: Ty::B64, dst, a, ..blank });
        Ok(())
    }

    fn setp(&mut self, blank: Ins, parts: &[&str], operands: &[String]) -> Result<(), String> {
        let cmp = comparison(parts.get(1).copied().unwrap_or(""), blank.ty)?;
        let join = match parts.get(2).copied() {
            Some("and") => Join::And,
            Some("or") => Join::Or,
            Some("xor") => Join::Xor,
            _ => Join::None,
        };
        let (first, second) = match operands[0].split_once('|') {
            Some((a, b)) => (self.destination(a.trim())?, self.destination(b.trim())?),
            None => (self.destination(&operands[0])?, NOWHERE),
        };
        let a = self.source(operands.get(1).ok_or("no operand")?, blank.ty)?;
        let b = self.source(operands.get(2).ok_or("no operand")?, blank.ty)?;
        let (c, negated) = match operands.get(3) {
            Some(text) => {
                let (negated, name) =
                    text.strip_prefix('!').map_or((false, text.as_str()), |n| (true, n));
                (self.source(name, Ty::Pred)?, negated)
            }
            None => (Src::None, false),
        };
        let code = Code::Setp(cmp, join);
        self.emit(Ins { code, dst: first, dst2: second, a, b, c, offset: negated.into(), ..blank });
        Ok(())
    }
}
