//! Instructions between the lanes of a warp, and values packed from several registers.

use super::Lowering;
use crate::ptx::ins::NOWHERE;
use crate::ptx::ins::{Code, Ins, Shuffle, Src, Ty, Vote};

const SHUFFLES: [(&str, Shuffle); 4] = [
    ("up", Shuffle::Up),
    ("down", Shuffle::Down),
    ("bfly", Shuffle::Butterfly),
    ("idx", Shuffle::Index),
];

const VOTES: [(&str, Vote); 4] =
    [("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)];

/// What one of the parts of an instruction's name says.
fn named<T: Copy>(parts: &[&str], names: &[(&str, T)]) -> Option<T> {
    parts.iter().find_map(|part| names.iter().find(|(name, _)| name == part).map(|(_, it)| *it))
}

impl Lowering<'_> {
    pub(super) fn shuffle(
        &mut self,
        blank: Ins,
        parts: &[&str],
        operands: &[String],
    ) -> Result<(), String> {
        let kind = named(parts, &SHUFFLES).ok_or("this shuffle is not understood")?;
        let (dst, dst2) = match operands[0].split_once('|') {
            Some((a, b)) => (self.destination(a.trim())?, self.destination(b.trim())?),
            None => (self.destination(&operands[0])?, NOWHERE),
        };
        let source = |i: usize| -> Result<Src, String> {
            self.source(operands.get(i).ok_or("no operand")?, Ty::U32)
        };
        let (a, b, c) = (source(1)?, source(2)?, source(3)?);
        self.emit(Ins { code: Code::Shuffle(kind), dst, dst2, a, b, c, ..blank });
        Ok(())
    }

    /// `bar.warp.sync MASK`.
    pub(super) fn warp_sync(&mut self, blank: Ins, operands: &[String]) -> Result<(), String> {
        let a = self.source(operands.first().ok_or("no mask")?, Ty::U32)?;
        self.emit(Ins { code: Code::WarpSync, ty: Ty::U32, a, ..blank });
        Ok(())
    }

    pub(super) fn vote(
        &mut self,
        blank: Ins,
        parts: &[&str],
        operands: &[String],
    ) -> Result<(), String> {
        let kind = named(parts, &VOTES).ok_or("this vote is not understood")?;
        let dst = self.destination(&operands[0])?;
        let a = self.source(operands.get(1).ok_or("no operand")?, Ty::Pred)?;
        self.emit(Ins { code: Code::Vote(kind), dst, a, ..blank });
        Ok(())
    }

    /// `mov.b64 %rd, {%r1, %r2}` and back.
    pub(super) fn pack(&mut self, blank: Ins, operands: &[String]) -> Result<(), String> {
        let list = |t: &str| -> Vec<String> {
            t.trim_matches(['{', '}']).split(',').map(|s| s.trim().to_owned()).collect()
        };
        let joining = operands[1].starts_with('{');
        let pieces = list(&operands[usize::from(joining)]);
        let width = (blank.ty.bytes() * 8 / pieces.len()) as u64;
        let kept = self.registers as u32;
        self.registers += 2;
        let b64 = Ins { ty: Ty::B64, ..blank };
        let mask = Src::Imm((1 << width) - 1);
        if joining {
            let dst = self.destination(&operands[0])?;
            self.emit(Ins { code: Code::Mov, dst: kept, a: Src::Imm(0), ..b64 });
            for (i, piece) in pieces.iter().enumerate() {
                let a = self.source(piece, Ty::B32)?;
                let shift = Src::Imm(width * i as u64);
                let (one, all) = (Src::Reg(kept + 1), Src::Reg(kept));
                self.emit(Ins { code: Code::And, dst: kept + 1, a, b: mask, ..b64 });
                self.emit(Ins { code: Code::Shl, dst: kept + 1, a: one, b: shift, ..b64 });
                self.emit(Ins { code: Code::Or, dst: kept, a: all, b: one, ..b64 });
            }
            self.emit(Ins { code: Code::Mov, dst, a: Src::Reg(kept), ..blank });
        } else {
            let a = self.source(&operands[1], blank.ty)?;
            self.emit(Ins { code: Code::Mov, dst: kept, a, ..b64 });
            for (i, piece) in pieces.iter().enumerate() {
                let dst = self.destination(piece)?;
                let (shift, all) = (Src::Imm(width * i as u64), Src::Reg(kept));
                let one = Src::Reg(kept + 1);
                let unsigned = Ins { ty: Ty::U64, ..blank };
                self.emit(Ins { code: Code::Shr, dst: kept + 1, a: all, b: shift, ..unsigned });
                self.emit(Ins { code: Code::And, dst, a: one, b: mask, ..b64 });
            }
        }
        Ok(())
    }
}
