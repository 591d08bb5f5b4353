//! Finds functions in libraries that are loaded already, without asking `dlsym`: that name is ours.

#![expect(clippy::cast_possible_truncation, reason = "addresses have 64 bits here")]

use core::ffi::{CStr, c_char, c_int, c_void};

/// A loaded library.
#[derive(Clone, Copy)]
pub(crate) struct Library {
    pub(crate) base: usize,
    pub(crate) name: *const c_char,
    dynamic: *const Dyn,
}

/// `Elf64_Dyn`, `Elf64_Sym` and the tags below are of the System V ABI.
mod tag {
    pub(super) const STRTAB: i64 = 5;
    pub(super) const SYMTAB: i64 = 6;
    pub(super) const GNU_HASH: i64 = 0x6fff_fef5;
}

#[repr(C)]
struct Dyn {
    tag: i64,
    value: usize,
}

struct Search<'a> {
    wanted: &'a dyn Fn(&CStr, &Library) -> bool,
    found: Option<Library>,
}

/// The first loaded library for which `wanted` holds, in load order.
pub(crate) fn find_library(wanted: &dyn Fn(&CStr, &Library) -> bool) -> Option<Library> {
    let mut search = Search { wanted, found: None };
    // SAFETY: the callback gets the pointer back that is given here, while `search` lives.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
    // SAFETY: both pointers are valid during the callback, by dl_iterate_phdr and find_library.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: program headers of a loaded object.
    let headers =
        unsafe { core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else {
        return 0;
    };
    let base = info.dlpi_addr as usize;
    let dynamic = base.wrapping_add(dynamic.p_vaddr as usize) as *const Dyn;
    let library = Library { base, name: info.dlpi_name, dynamic };
    // SAFETY: the loader's names are C strings.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) };
    if (search.wanted)(name, &library) {
        search.found = Some(library);
        return 1;
    }
    0
}

/// The last part of a path.
pub(crate) fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

/// A function of the C library (of whichever of its files has it).
pub(crate) fn libc_function(name: &CStr) -> *const c_void {
    const FILES: [&[u8]; 3] = [b"libc.so.6", b"libdl.so.2", b"libpthread.so.0"];
    for file in FILES {
        let library = find_library(&|path, _| file_name(path.to_bytes()) == file);
        if let Some(address) = library.and_then(|library| library.symbol(name)) {
            return address;
        }
    }
    core::ptr::null()
}

impl Library {
    /// Address of a function that the library defines.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*const c_void> {
        let strings: *const u8 = self.entry(tag::STRTAB)? as *const u8;
        let symbols = self.entry(tag::SYMTAB)? as *const libc::Elf64_Sym;
        let table = self.entry(tag::GNU_HASH)? as *const u32;
        // SAFETY: the layout of DT_GNU_HASH: four words, a bloom filter, buckets, chains.
        unsafe {
            let (buckets, first, bloom) = (*table, *table.add(1), *table.add(2));
            let bucket_base = table.add(4).cast::<u64>().add(bloom as usize).cast::<u32>();
            let chains = bucket_base.add(buckets as usize);
            let hash = gnu_hash(name.to_bytes());
            let mut index = *bucket_base.add((hash % buckets) as usize);
            if index < first {
                return None;
            }
            loop {
                let chain = *chains.add((index - first) as usize);
                let symbol = &*symbols.add(index as usize);
                let same = (chain | 1) == (hash | 1)
                    && CStr::from_ptr(strings.add(symbol.st_name as usize).cast()) == name;
                // A function with a value; what is undefined or resolved by an ifunc is not for us.
                if same && symbol.st_value != 0 && symbol.st_info & 0xf == 2 {
                    let address = self.base.wrapping_add(symbol.st_value as usize);
                    return Some(address as *const c_void);
                }
                if chain & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// An entry of the dynamic section; glibc has made the addresses absolute.
    fn entry(&self, tag: i64) -> Option<usize> {
        let mut entry = self.dynamic;
        loop {
            // SAFETY: the dynamic section ends with a null tag.
            let Dyn { tag: found, value } = unsafe { entry.read() };
            if found == tag {
                let absolute = value >= self.base;
                return Some(if absolute { value } else { self.base + value });
            }
            if found == 0 {
                return None;
            }
            // SAFETY: not the last entry.
            entry = unsafe { entry.add(1) };
        }
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()))
}
