//! What kind of code a program hands over, and what can be read from machine code.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;

/// Where the bytes are. The length is not known for images in memory: each format says it itself.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    Memory(*const u8),
    File(Vec<u8>),
}

/// Machine code of one kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct MachineKernel {
    /// Instructions of sixteen bytes.
    pub instructions: usize,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
}

/// What was found.
#[derive(Debug)]
pub(crate) enum Image {
    Ptx(String),
    /// Kernels, and variables with their sizes.
    Machine(BTreeMap<String, MachineKernel>, Vec<(String, u64)>),
    /// Nothing in it could be read.
    Opaque,
}

const FATBIN: u32 = 0xba55_ed50;
const WRAPPER: u32 = 0x4662_43b1;

/// How a part of a fat binary is packed: a block of LZ4, or a frame of Zstandard.
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// Bytes that a part may come to.
const LARGEST: usize = 1 << 30;

/// Reads an image.
pub(crate) fn read(source: Source) -> Option<Image> {
    match source {
        Source::File(bytes) => read_bytes(&bytes),
        Source::Memory(start) => {
            if start.is_null() {
                return None;
            }
            read_bytes(&gather(start))
        }
    }
}

/// Copies an image out of the caller's memory, as long as its own header says.
fn gather(start: *const u8) -> Vec<u8> {
    // SAFETY: the caller of the C interface promises a whole image; its first four bytes say of
    // which kind, and each kind says or marks its own length, so no byte beyond it is read.
    unsafe {
        let magic = start.cast::<u32>().read_unaligned();
        if magic == WRAPPER {
            let inner = start.add(8).cast::<*const u8>().read_unaligned();
            return gather(inner);
        }
        let length = if magic == FATBIN {
            let header = usize::from(start.add(6).cast::<u16>().read_unaligned());
            let body = start.add(8).cast::<u64>().read_unaligned();
            header + body as usize
        } else if magic.to_le_bytes() == *b"\x7fELF" {
            elf_length(start)
        } else {
            std::ffi::CStr::from_ptr(start.cast()).count_bytes()
        };
        std::slice::from_raw_parts(start, length).to_vec()
    }
}

/// # Safety
/// `start` is the header of a whole ELF image.
unsafe fn elf_length(start: *const u8) -> usize {
    // SAFETY: offsets inside the 64-byte header, and inside the section table it points to.
    unsafe {
        let sections = start.add(40).cast::<u64>().read_unaligned() as usize;
        let size = usize::from(start.add(58).cast::<u16>().read_unaligned());
        let count = usize::from(start.add(60).cast::<u16>().read_unaligned());
        let segments = start.add(32).cast::<u64>().read_unaligned() as usize;
        let segment_size = usize::from(start.add(54).cast::<u16>().read_unaligned());
        let segment_count = usize::from(start.add(56).cast::<u16>().read_unaligned());
        let mut end = (sections + size * count).max(segments + segment_size * segment_count);
        for i in 0..count {
            let section = start.add(sections + i * size);
            let kind = section.add(4).cast::<u32>().read_unaligned();
            let offset = section.add(24).cast::<u64>().read_unaligned() as usize;
            let bytes = section.add(32).cast::<u64>().read_unaligned() as usize;
            // Sections without bits in the file have only a size.
            if kind != 8 {
                end = end.max(offset + bytes);
            }
        }
        end
    }
}

fn read_bytes(bytes: &[u8]) -> Option<Image> {
    let magic = number(bytes, 0, 4)? as u32;
    if magic == FATBIN {
        return Some(fatbin(bytes).unwrap_or(Image::Opaque));
    }
    if bytes.starts_with(b"\x7fELF") {
        return elf(bytes);
    }
    let text = String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    text.contains(".version").then_some(Image::Ptx(text))
}

/// Unpacks a part of a fat binary; none when it does not come to the size that it says.
fn open(packed: &[u8], size: u64, how: u64) -> Option<Vec<u8>> {
    let size = usize::try_from(size).ok().filter(|size| *size <= LARGEST)?;
    let all = if how == LZ4 {
        lz4_flex::block::decompress(packed, size).ok()?
    } else {
        let decoder = ruzstd::decoding::StreamingDecoder::new(packed).ok()?;
        let mut all = Vec::new();
        decoder.take(size as u64 + 1).read_to_end(&mut all).ok()?;
        all
    };
    (all.len() == size).then_some(all)
}

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let mut all = [0; 8];
    all[..size].copy_from_slice(bytes.get(at..at.checked_add(size)?)?);
    Some(u64::from_le_bytes(all))
}

/// PTX first, machine code else.
fn fatbin(bytes: &[u8]) -> Option<Image> {
    let mut at = number(bytes, 6, 2)? as usize;
    let mut machine = None;
    while at + 64 <= bytes.len() {
        let kind = number(bytes, at, 2)?;
        let header = number(bytes, at + 4, 4)? as usize;
        let size = number(bytes, at + 8, 8)? as usize;
        let flags = number(bytes, at + 40, 8)?;
        let payload = bytes.get(at + header..(at + header).checked_add(size)?)?;
        let packed = number(bytes, at + 16, 4)? as usize;
        let unpacked = number(bytes, at + 56, 8)?;
        let opened = match flags & (LZ4 | ZSTD) {
            0 => Some(Cow::Borrowed(payload)),
            how => open(payload.get(..packed)?, unpacked, how).map(Cow::Owned),
        };
        if opened.is_none() {
            crate::ffi::log("a part of a fat binary could not be unpacked");
        }
        match (kind, opened) {
            (1, Some(text)) => return read_bytes(&text),
            (2, Some(code)) => machine = machine.or_else(|| elf(&code)),
            _ => {}
        }
        at += header + size;
    }
    machine
}

/// Kernels are sections named `.text.NAME`; their parameters are in `.nv.info.NAME`.
fn elf(bytes: &[u8]) -> Option<Image> {
    let table = number(bytes, 40, 8)? as usize;
    let size = number(bytes, 58, 2)? as usize;
    let count = number(bytes, 60, 2)? as usize;
    let names_at = number(bytes, 62, 2)? as usize;
    let section = |i: usize| -> Option<(usize, u64, usize, usize, usize)> {
        let at = table + i * size;
        Some((
            number(bytes, at, 4)? as usize,
            number(bytes, at + 4, 4)?,
            number(bytes, at + 24, 8)? as usize,
            number(bytes, at + 32, 8)? as usize,
            number(bytes, at + 40, 4)? as usize,
        ))
    };
    let names = section(names_at)?.2;
    let text_at = |at: usize| -> Option<String> {
        let tail = bytes.get(at..)?;
        let end = tail.iter().position(|b| *b == 0)?;
        Some(String::from_utf8_lossy(&tail[..end]).into_owned())
    };
    let mut kernels: BTreeMap<String, MachineKernel> = BTreeMap::new();
    let mut variables = Vec::new();
    for i in 0..count {
        let (name, kind, offset, length, link) = section(i)?;
        let name = text_at(names + name)?;
        if let Some(kernel) = name.strip_prefix(".text.") {
            kernels.entry(kernel.to_owned()).or_default().instructions = length / 16;
        } else if let Some(kernel) = name.strip_prefix(".nv.info.") {
            let info = bytes.get(offset..offset + length)?;
            kernels.entry(kernel.to_owned()).or_default().params = parameters(info);
        } else if kind == 2 {
            // Symbols: objects are variables.
            let strings = section(link)?.2;
            for at in (offset..offset + length).step_by(24) {
                let info = number(bytes, at + 4, 1)?;
                let home = number(bytes, at + 6, 2)?;
                let bytes_long = number(bytes, at + 16, 8)?;
                if info & 0xf == 1 && home != 0 && bytes_long > 0 {
                    variables
                        .push((text_at(strings + number(bytes, at, 4)? as usize)?, bytes_long));
                }
            }
        }
    }
    kernels.retain(|_, k| k.instructions > 0);
    Some(Image::Machine(kernels, variables))
}

/// Entries of format 4 and kind 0x17 describe one parameter each: its number, offset and size.
fn parameters(info: &[u8]) -> Vec<(usize, usize)> {
    let mut found: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
    let mut at = 0;
    while at + 4 <= info.len() {
        let (format, kind) = (info[at], info[at + 1]);
        let length = if format == 4 { number(info, at + 2, 2).unwrap_or(0) as usize } else { 0 };
        if format == 4 && kind == 0x17 && length >= 12 {
            let ordinal = number(info, at + 8, 2).unwrap_or(0);
            let offset = number(info, at + 10, 2).unwrap_or(0) as usize;
            let bytes = (number(info, at + 14, 2).unwrap_or(0) >> 2) as usize;
            found.insert(ordinal, (offset, bytes));
        }
        at += 4 + length;
    }
    found.into_values().collect()
}

/// The bytes of an image, copied.
pub(crate) fn own(source: Source) -> Option<Vec<u8>> {
    match source {
        Source::File(bytes) => Some(bytes),
        Source::Memory(start) => (!start.is_null()).then(|| gather(start)),
    }
}
