//! The instructions that the interpreter knows, and modules made of them.

/// How bits are to be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F32,
    F64,
}

impl Ty {
    pub(crate) fn from_name(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "b8" => Ty::B8,
            "b16" => Ty::B16,
            "b32" => Ty::B32,
            "b64" => Ty::B64,
            "u8" => Ty::U8,
            "u16" => Ty::U16,
            "u32" => Ty::U32,
            "u64" => Ty::U64,
            "s8" => Ty::S8,
            "s16" => Ty::S16,
            "s32" => Ty::S32,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Ty::Pred | Ty::B8 | Ty::U8 | Ty::S8 => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 => 2,
            Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32 => 4,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::F32 | Ty::F64)
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }
}

/// What an instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    Mov,
    Add,
    Sub,
    MulLo,
    MulHi,
    MulWide,
    MadLo,
    MadHi,
    MadWide,
    Fma,
    Div,
    Rem,
    Min,
    Max,
    Abs,
    Neg,
    And,
    Or,
    Xor,
    Not,
    Shl,
    Shr,
    Cnot,
    Popc,
    Clz,
    Brev,
    Bfe,
    Bfi,
    Sqrt,
    Rsqrt,
    Rcp,
    Sin,
    Cos,
    Ex2,
    Lg2,
    Tanh,
    CopySign,
    Selp,
    Setp(Cmp, Join),
    /// The result is a number of this kind: all ones, or one.
    Set(Cmp, Ty),
    Cvt {
        from: Ty,
        round: Round,
        saturate: bool,
    },
    Load(Space),
    Store(Space),
    Atom(Space, AtomOp),
    Branch,
    Exit,
    Barrier,
    Shuffle(Shuffle),
    Vote(Vote),
    ActiveMask,
    /// Waits for the other lanes of its mask.
    WarpSync,
    Fence,
    ToShared,
    ToLocal,
    FromShared,
    FromLocal,
    Trap,
    ShfFunnel {
        left: bool,
        wrap: bool,
    },
    Prmt,
    Lop3,
}

/// Comparisons; the second letter of unordered ones is dropped into the flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cmp {
    pub kind: CmpKind,
    pub unordered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CmpKind {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Num,
    Nan,
}

/// How `setp` joins its result with a predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Join {
    None,
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    None,
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    Compare,
    Inc,
    Dec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Values that belong to the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    WarpCount,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskGt,
    LaneMaskGe,
    LaneMaskEq,
    SmId,
    SmCount,
    GridId,
    DynamicShared,
    Zero,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Src {
    None,
    Reg(u32),
    Imm(u64),
    Special(Special),
}

/// One instruction. Memory: `a` is the address, `offset` is added; stores take `b`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ins {
    pub code: Code,
    pub ty: Ty,
    pub guard: Option<(u32, bool)>,
    pub dst: u32,
    pub dst2: u32,
    pub a: Src,
    pub b: Src,
    pub c: Src,
    pub d: Src,
    pub offset: i64,
    /// Subnormal single-precision numbers count as zero, on the way in and out.
    pub flush: bool,
}

impl Ins {
    /// How its operands are to be understood.
    pub(crate) fn source_ty(&self) -> Ty {
        if let Code::Cvt { from, .. } = self.code { from } else { self.ty }
    }
}

/// No register.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Its name as exported.
    pub name: String,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    /// Bytes of all parameters.
    pub param_bytes: usize,
    /// Static shared memory.
    pub shared_bytes: usize,
    /// Local memory of a thread.
    pub local_bytes: usize,
    /// Largest block it was compiled for, or 0.
    pub max_threads: u32,
    /// Why it cannot be run, when it cannot.
    pub unknown: Option<String>,
    /// Instructions as written: what a static count sees.
    pub static_instructions: usize,
    /// Of these, accesses to global memory.
    pub static_accesses: usize,
    pub(crate) registers: usize,
    pub(crate) code: Vec<Ins>,
}

/// A variable of the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub bytes: usize,
    /// Start value; zeros where it is shorter.
    pub init: Vec<u8>,
    /// Where the caller has put it.
    pub address: u64,
}

/// What a PTX text holds.
#[derive(Debug, Clone, Default)]
pub struct Module {
    /// Kernels by their place in the text.
    pub kernels: Vec<Kernel>,
    /// Variables in global and constant memory.
    pub variables: Vec<Variable>,
    /// Architecture that the text was made for, such as 75.
    pub target: u32,
}

impl Module {
    /// Puts the variables at their addresses: code that names them is changed.
    pub fn place(&mut self, addresses: &[u64]) {
        for (variable, address) in self.variables.iter_mut().zip(addresses) {
            variable.address = *address;
        }
        let placed: Vec<u64> = self.variables.iter().map(|v| v.address).collect();
        for kernel in &mut self.kernels {
            for ins in &mut kernel.code {
                for source in [&mut ins.a, &mut ins.b, &mut ins.c] {
                    if let Src::Imm(value) = source
                        && *value & VARIABLE_MASK == VARIABLE_TAG
                        && let Some(address) = placed.get((*value & 0xffff) as usize)
                    {
                        *source = Src::Imm(*address);
                    }
                }
            }
        }
    }
}

/// Marks an immediate that stands for the address of a module variable.
pub(crate) const VARIABLE_TAG: u64 = 0xfeed_5ca1_ab1e_0000;
pub(crate) const VARIABLE_MASK: u64 = 0xffff_ffff_ffff_0000;
