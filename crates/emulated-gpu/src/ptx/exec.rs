//! Runs kernels: block after block, each thread up to the next point where threads must meet.

mod warp;

use super::alu;
use super::cell::{read, write};
use super::ins::{Code, Ins, Join, Kernel, NOWHERE, Space, Special, Src, Ty};
use super::lower::{LOCAL_BASE, SHARED_BASE};

/// Memory that kernels may touch.
pub trait Memory {
    /// The mapped range that holds `address`, as first and one past the last byte. Every byte of
    /// it must stay readable and writable while the kernel runs.
    fn range(&self, address: u64) -> Option<(u64, u64)>;
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y, z.
    pub threads: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// All blocks.
    pub fn block_count(&self) -> u64 {
        self.blocks.iter().map(|b| u64::from(*b)).product()
    }

    /// Threads of one block.
    pub fn block_threads(&self) -> u32 {
        self.threads.iter().product()
    }
}

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Done,
    /// An access outside of everything mapped, at this address.
    IllegalAddress(u64),
    /// An access at an address that is no multiple of its size.
    Misaligned(u64),
    /// `trap`.
    Trapped,
    /// More instructions than allowed.
    TooLong,
}

/// What one thread did, on average over the sample.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sample {
    /// Instructions.
    pub instructions: f64,
    /// Bytes loaded from and stored to global memory.
    pub global_bytes: f64,
}

/// Longest sample.
const SAMPLE_STEPS: u64 = 200_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    Barrier,
    Warp,
    Exit,
    Fault(Outcome),
}

struct Thread {
    pc: usize,
    id: [u32; 3],
    linear: u32,
    state: Option<Pause>,
}

struct Block<'a> {
    kernel: &'a Kernel,
    grid: &'a Grid,
    params: &'a [u8],
    memory: &'a dyn Memory,
    shared: Vec<u8>,
    local: Vec<u8>,
    registers: Vec<u64>,
    ctaid: [u32; 3],
    recent: (u64, u64),
    steps: u64,
    limit: u64,
    dry: bool,
    global_bytes: u64,
}

/// Runs the whole grid, within a limit of instructions.
pub fn run(
    kernel: &Kernel,
    grid: &Grid,
    params: &[u8],
    memory: &dyn Memory,
    limit: u64,
) -> Outcome {
    let mut block = Block::new(kernel, grid, params, memory, limit, false);
    for z in 0..grid.blocks[2] {
        for y in 0..grid.blocks[1] {
            for x in 0..grid.blocks[0] {
                block.ctaid = [x, y, z];
                let outcome = block.run();
                if outcome != Outcome::Done {
                    return outcome;
                }
            }
        }
    }
    Outcome::Done
}

/// Runs a few threads without storing anything, to learn what a thread costs: the first one, and
/// the one in the middle of the middle block. The dearer one counts, so a bounds check at the edge
/// does not make a kernel look free.
pub fn probe(kernel: &Kernel, grid: &Grid, params: &[u8], memory: &dyn Memory) -> Sample {
    let middle = |n: [u32; 3]| [n[0] / 2, n[1] / 2, n[2] / 2];
    let mut dearest = Sample::default();
    for (ctaid, tid) in [([0; 3], [0; 3]), (middle(grid.blocks), middle(grid.threads))] {
        let one = Grid { threads: [1, 1, 1], ..*grid };
        let mut block = Block::new(kernel, &one, params, memory, SAMPLE_STEPS, true);
        block.grid = grid;
        block.ctaid = ctaid;
        let mut thread = Thread { pc: 0, id: tid, linear: 0, state: None };
        while !matches!(thread.state, Some(Pause::Exit | Pause::Fault(_))) {
            thread.state = Some(block.step_thread(&mut thread));
        }
        let sample =
            Sample { instructions: block.steps as f64, global_bytes: block.global_bytes as f64 };
        if sample.instructions > dearest.instructions {
            dearest = sample;
        }
    }
    dearest
}

impl<'a> Block<'a> {
    fn new(
        kernel: &'a Kernel,
        grid: &'a Grid,
        params: &'a [u8],
        memory: &'a dyn Memory,
        limit: u64,
        dry: bool,
    ) -> Self {
        let threads = grid.block_threads() as usize;
        let shared = kernel.shared_bytes.next_multiple_of(16) + grid.shared_bytes as usize;
        Block {
            kernel,
            grid,
            params,
            memory,
            shared: vec![0; shared],
            local: vec![0; kernel.local_bytes * threads],
            registers: vec![0; kernel.registers * threads],
            ctaid: [0; 3],
            recent: (1, 0),
            steps: 0,
            limit,
            dry,
            global_bytes: 0,
        }
    }

    fn run(&mut self) -> Outcome {
        let [nx, ny, nz] = self.grid.threads;
        let mut threads = Vec::with_capacity(self.grid.block_threads() as usize);
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    let linear = threads.len() as u32;
                    threads.push(Thread { pc: 0, id: [x, y, z], linear, state: None });
                }
            }
        }
        loop {
            for warp in threads.chunks_mut(32) {
                if let Err(outcome) = self.run_warp(warp) {
                    return outcome;
                }
            }
            let waiting = threads.iter().any(|t| t.state == Some(Pause::Barrier));
            if !waiting {
                return Outcome::Done;
            }
            for thread in threads.iter_mut().filter(|t| t.state == Some(Pause::Barrier)) {
                thread.state = None;
            }
        }
    }

    /// Runs a warp until all its threads are at a barrier or done.
    fn run_warp(&mut self, warp: &mut [Thread]) -> Result<(), Outcome> {
        loop {
            for thread in warp.iter_mut().filter(|t| t.state.is_none()) {
                let pause = self.step_thread(thread);
                if let Pause::Fault(outcome) = pause {
                    return Err(outcome);
                }
                thread.state = Some(pause);
            }
            if !warp.iter().any(|t| t.state == Some(Pause::Warp)) {
                return Ok(());
            }
            self.meet(warp);
        }
    }

    fn set(&mut self, thread: &Thread, register: u32, value: u64) {
        if register != NOWHERE {
            let at = thread.linear as usize * self.kernel.registers + register as usize;
            self.registers[at] = value;
        }
    }

    fn value(&self, thread: &Thread, source: Src) -> u64 {
        match source {
            Src::Reg(r) => {
                self.registers[thread.linear as usize * self.kernel.registers + r as usize]
            }
            Src::Imm(value) => value,
            Src::Special(special) => self.special(thread, special),
            Src::None => 0,
        }
    }

    fn special(&self, thread: &Thread, special: Special) -> u64 {
        let lane = thread.linear % 32;
        let value = match special {
            Special::Tid(i) => thread.id[i as usize],
            Special::Ntid(i) => self.grid.threads[i as usize],
            Special::Ctaid(i) => self.ctaid[i as usize],
            Special::Nctaid(i) => self.grid.blocks[i as usize],
            Special::Lane => lane,
            Special::Warp => thread.linear / 32,
            Special::WarpCount => self.grid.block_threads().div_ceil(32),
            Special::LaneMaskEq => 1 << lane,
            Special::LaneMaskLt => (1 << lane) - 1,
            Special::LaneMaskLe => u32::MAX >> (31 - lane),
            Special::LaneMaskGt => !(u32::MAX >> (31 - lane)),
            Special::LaneMaskGe => !((1 << lane) - 1),
            Special::DynamicShared => self.kernel.shared_bytes.next_multiple_of(16) as u32,
            Special::SmCount => 1,
            Special::SmId | Special::GridId | Special::Zero => 0,
        };
        u64::from(value)
    }

    /// Runs one thread up to where it must wait or ends.
    fn step_thread(&mut self, thread: &mut Thread) -> Pause {
        loop {
            let Some(ins) = self.kernel.code.get(thread.pc).copied() else { return Pause::Exit };
            self.steps += 1;
            if self.steps > self.limit {
                return Pause::Fault(Outcome::TooLong);
            }
            if let Some((register, sense)) = ins.guard
                && (self.value(thread, Src::Reg(register)) & 1 == 1) != sense
            {
                thread.pc += 1;
                continue;
            }
            match ins.code {
                Code::Exit => return Pause::Exit,
                Code::Trap => return Pause::Fault(Outcome::Trapped),
                Code::Barrier => {
                    thread.pc += 1;
                    if !self.dry {
                        return Pause::Barrier;
                    }
                    continue;
                }
                Code::Shuffle(_) | Code::Vote(_) | Code::ActiveMask if self.dry => {
                    let value = self.value(thread, ins.a);
                    self.set(thread, ins.dst, value);
                }
                Code::WarpSync if self.dry => {}
                Code::Shuffle(_) | Code::Vote(_) | Code::ActiveMask | Code::WarpSync => {
                    return Pause::Warp;
                }
                Code::Branch => {
                    let Src::Imm(target) = ins.a else { return Pause::Exit };
                    thread.pc = target as usize;
                    continue;
                }
                Code::Load(_) | Code::Store(_) | Code::Atom(..) => {
                    if let Err(outcome) = self.access(thread, &ins) {
                        return Pause::Fault(outcome);
                    }
                }
                _ => self.calculate(thread, &ins),
            }
            thread.pc += 1;
        }
    }

    fn calculate(&mut self, thread: &Thread, ins: &Ins) {
        let [a, b, c] = [ins.a, ins.b, ins.c].map(|source| {
            let value = self.value(thread, source);
            if ins.flush { alu::flush(ins.source_ty(), value) } else { value }
        });
        let result = match ins.code {
            Code::Selp => alu::fit(ins.ty, if c & 1 == 1 { a } else { b }),
            Code::Setp(cmp, join) => {
                let plain = alu::compare(cmp, ins.ty, a, b);
                let with = (c & 1 == 1) != (ins.offset != 0);
                let joined = |p: bool| match join {
                    Join::None => p,
                    Join::And => p && with,
                    Join::Or => p || with,
                    Join::Xor => p != with,
                };
                self.set(thread, ins.dst2, u64::from(joined(!plain)));
                u64::from(joined(plain))
            }
            Code::Set(cmp, to) => match (alu::compare(cmp, ins.ty, a, b), to) {
                (false, _) => 0,
                (true, Ty::F32) => 1.0_f32.to_bits().into(),
                (true, _) => alu::fit(to, 0xffff_ffff),
            },
            Code::Cvt { from, round, saturate } => alu::convert(ins.ty, from, round, saturate, a),
            Code::Bfi => alu::insert(ins.ty, a, b, c, self.value(thread, ins.d)),
            Code::Prmt => alu::permute(a, b, c),
            Code::Lop3 => alu::logic3(a, b, c, self.value(thread, ins.d)),
            Code::ShfFunnel { left, wrap } => alu::funnel(left, wrap, a, b, c),
            Code::FromShared => a + SHARED_BASE,
            Code::FromLocal => a + LOCAL_BASE,
            Code::ToShared => a - SHARED_BASE.min(a),
            Code::ToLocal => a - LOCAL_BASE.min(a),
            Code::Fence => return,
            code => alu::compute(code, ins.ty, a, b, c),
        };
        let result = if ins.flush { alu::flush(ins.ty, result) } else { result };
        self.set(thread, ins.dst, result);
    }

    fn access(&mut self, thread: &Thread, ins: &Ins) -> Result<(), Outcome> {
        let (Code::Load(space) | Code::Store(space) | Code::Atom(space, _)) = ins.code else {
            return Ok(());
        };
        let address = self.value(thread, ins.a).wrapping_add_signed(ins.offset);
        let bytes = ins.ty.bytes();
        if !address.is_multiple_of(bytes as u64) {
            return Err(Outcome::Misaligned(address));
        }
        let place = self.locate(thread, space, address, bytes)?;
        // SAFETY: `locate` gave a pointer to that many bytes inside a buffer of this block or
        // inside memory that the caller of `run` vouches for.
        let old = unsafe { read(place, bytes) };
        let old = alu::fit(ins.ty, old);
        let (new, result) = match ins.code {
            Code::Load(_) => (None, Some(old)),
            Code::Store(_) => (Some(self.value(thread, ins.b)), None),
            Code::Atom(_, op) => {
                let (b, c) = (self.value(thread, ins.b), self.value(thread, ins.c));
                (Some(alu::atomic(op, ins.ty, old, b, c)), Some(old))
            }
            _ => (None, None),
        };
        if let Some(new) = new
            && !(self.dry && matches!(space, Space::Global | Space::Generic))
        {
            // SAFETY: as above; a dry run does not come here for memory of others.
            unsafe { write(place, bytes, new) };
        }
        if let Some(result) = result {
            self.set(thread, ins.dst, result);
        }
        Ok(())
    }

    fn locate(
        &mut self,
        thread: &Thread,
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Result<*mut u8, Outcome> {
        let illegal = Outcome::IllegalAddress(address);
        let within = |buffer: &mut [u8], offset: u64| {
            let offset = usize::try_from(offset).ok()?;
            buffer.get_mut(offset..offset.checked_add(bytes)?).map(<[u8]>::as_mut_ptr)
        };
        let (space, address) = match space {
            Space::Generic if (SHARED_BASE..LOCAL_BASE).contains(&address) => {
                (Space::Shared, address - SHARED_BASE)
            }
            Space::Generic if (LOCAL_BASE..LOCAL_BASE << 1).contains(&address) => {
                (Space::Local, address - LOCAL_BASE)
            }
            _ => (space, address),
        };
        match space {
            Space::Shared => within(&mut self.shared, address).ok_or(illegal),
            Space::Local => {
                let size = self.kernel.local_bytes;
                let from = thread.linear as usize * size;
                within(&mut self.local[from..from + size], address).ok_or(illegal)
            }
            Space::Param => {
                let offset = address as usize;
                let range = self.params.get(offset..offset + bytes).ok_or(illegal)?;
                // Parameters are only read.
                Ok(range.as_ptr().cast_mut())
            }
            Space::Global | Space::Const | Space::Generic => {
                self.global_bytes += bytes as u64;
                let end = address.checked_add(bytes as u64).ok_or(illegal)?;
                if address < self.recent.0 || end > self.recent.1 {
                    self.recent = self.memory.range(address).ok_or(illegal)?;
                    if end > self.recent.1 {
                        return Err(illegal);
                    }
                }
                Ok(address as *mut u8)
            }
        }
    }
}
