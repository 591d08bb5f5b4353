//! `cuModule*` and `cuLink*`.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;

use muxflow_abi::cuda::CUdeviceptr;
use muxflow_abi::cuda::result::{
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND,
};

use crate::context::{self, lock};
use crate::ffi::{Answer, Handle, Kind, Out, Text, api};
use crate::image::Source;
use crate::module::{self, Function, Module};

/// Loads into the current context.
pub(crate) fn load(source: Source) -> Answer<Handle<Module>> {
    module::load(context::current()?, source)
}

/// A file's bytes.
pub(crate) fn file(name: Text) -> Answer<Source> {
    let bytes = std::fs::read(name.get()?).map_err(|_| CUDA_ERROR_FILE_NOT_FOUND)?;
    Ok(Source::File(bytes))
}

/// Address and size of a variable.
pub(crate) fn variable(
    handle: Handle<Module>,
    name: Text,
    address: Out<CUdeviceptr>,
    bytes: Out<usize>,
) -> Answer {
    let (at, size) = handle.get()?.variable(&name.get()?)?;
    address.offer(at);
    bytes.offer(size as usize);
    Ok(())
}

/// What a linker was given so far: the last piece that can be loaded is its result.
#[derive(Debug)]
pub(crate) struct Link {
    pieces: Mutex<Vec<Vec<u8>>>,
}

impl Kind for Link {
    const MAGIC: u64 = 0x0c0d_a00a_1177_000a;
}

fn add(handle: Handle<Link>, bytes: Vec<u8>) -> Answer {
    lock(&handle.get()?.pieces).push(bytes);
    Ok(())
}

fn add_data(handle: Handle<Link>, data: *const u8, size: usize) -> Answer {
    if data.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller promises that many bytes.
    add(handle, unsafe { std::slice::from_raw_parts(data, size) }.to_vec())
}

api! {
    fn cuModuleLoad(out: Out<Handle<Module>>, name: Text) { out.put(load(file(name)?)?) }
    fn cuModuleLoadData(out: Out<Handle<Module>>, image: *const u8) {
        out.put(load(Source::Memory(image))?)
    }
    fn cuModuleLoadDataEx(out: Out<Handle<Module>>, image: *const u8, _count: c_uint, _options: *const c_int, _values: *const c_void) {
        out.put(load(Source::Memory(image))?)
    }
    fn cuModuleLoadFatBinary(out: Out<Handle<Module>>, image: *const u8) {
        out.put(load(Source::Memory(image))?)
    }
    fn cuModuleUnload(handle: Handle<Module>) {
        context::current()?;
        handle.destroy()?.unload();
        Ok(())
    }
    fn cuModuleGetLoadingMode(out: Out<c_int>) { out.put(2) }
    fn cuModuleGetFunction(out: Out<Handle<Function>>, handle: Handle<Module>, name: Text) {
        let found = module::in_current(handle, &name.get()?)?;
        out.put(found)
    }
    fn cuModuleGetFunctionCount(out: Out<c_uint>, handle: Handle<Module>) {
        out.put(handle.get()?.names().len() as c_uint)
    }
    fn cuModuleEnumerateFunctions(out: Out<Handle<Function>>, count: c_uint, handle: Handle<Module>) {
        let it = handle.get()?;
        for (i, name) in it.names().iter().take(count as usize).enumerate() {
            out.put_at(i, it.function(handle, name)?);
        }
        Ok(())
    }
    fn cuModuleGetGlobal_v2(address: Out<CUdeviceptr>, bytes: Out<usize>, handle: Handle<Module>, name: Text) {
        context::current()?;
        variable(handle, name, address, bytes)
    }
    fn cuModuleGetTexRef(_out: Out<usize>, handle: Handle<Module>, _name: Text) {
        handle.get()?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuModuleGetSurfRef(_out: Out<usize>, handle: Handle<Module>, _name: Text) {
        handle.get()?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuLinkCreate_v2(_count: c_uint, _options: *const c_int, _values: *const c_void, out: Out<Handle<Link>>) {
        context::current()?;
        out.put(Handle::new(Link { pieces: Mutex::new(Vec::new()) }))
    }
    fn cuLinkCreate(_count: c_uint, _options: *const c_int, _values: *const c_void, out: Out<Handle<Link>>) {
        context::current()?;
        out.put(Handle::new(Link { pieces: Mutex::new(Vec::new()) }))
    }
    fn cuLinkAddData_v2(handle: Handle<Link>, _kind: c_int, data: *const u8, size: usize, _name: Text, _count: c_uint, _options: *const c_int, _values: *const c_void) {
        add_data(handle, data, size)
    }
    fn cuLinkAddData(handle: Handle<Link>, _kind: c_int, data: *const u8, size: usize, _name: Text, _count: c_uint, _options: *const c_int, _values: *const c_void) {
        add_data(handle, data, size)
    }
    fn cuLinkAddFile_v2(handle: Handle<Link>, _kind: c_int, name: Text, _count: c_uint, _options: *const c_int, _values: *const c_void) {
        let Source::File(bytes) = file(name)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        add(handle, bytes)
    }
    fn cuLinkAddFile(handle: Handle<Link>, _kind: c_int, name: Text, _count: c_uint, _options: *const c_int, _values: *const c_void) {
        let Source::File(bytes) = file(name)? else { return Err(CUDA_ERROR_INVALID_VALUE) };
        add(handle, bytes)
    }
    fn cuLinkComplete(handle: Handle<Link>, out: Out<*const c_void>, size: Out<usize>) {
        let pieces = lock(&handle.get()?.pieces);
        let last = pieces.iter().rev().find(|p| p.starts_with(b"\x7fELF") || p.contains(&b'.'));
        let last = last.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Zero-ended, so that text loads as well; it lives as long as the process.
        let kept: &'static mut Vec<u8> = Box::leak(Box::new(last.clone()));
        kept.push(0);
        size.offer(last.len());
        out.put(kept.as_ptr().cast())
    }
    fn cuLinkDestroy(handle: Handle<Link>) { handle.destroy().map(drop) }
}
