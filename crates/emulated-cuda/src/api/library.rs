//! `cuLibrary*` and `cuKernel*`: modules and functions under newer names.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND};
use muxflow_abi::cuda::{CUdevice, CUdeviceptr};

use crate::api::function;
use crate::api::module;
use crate::context;
use crate::driver;
use crate::ffi::{Answer, Handle, Kind, Out, Text, api};
use crate::image::Source;
use crate::module::{Function, Module};

/// A library: loaded into a context when something of it is first wanted there.
#[derive(Debug)]
pub(crate) struct Library {
    source: Vec<u8>,
    module: OnceLock<Handle<Module>>,
}

impl Kind for Library {
    const MAGIC: u64 = 0x0c0d_a00b_11b7_000b;
}

impl Library {
    /// The module; without a current context the first device's primary context is used.
    fn module(&self) -> Answer<Handle<Module>> {
        if let Some(module) = self.module.get() {
            return Ok(*module);
        }
        let context = match context::current() {
            Ok(context) => context,
            Err(_) => {
                let device = driver::device(0)?;
                match device.primary.present() {
                    Some(handle) => handle.get()?,
                    None => device.primary.retain(device)?.get()?,
                }
            }
        };
        let module = crate::module::load(context, Source::File(self.source.clone()))?;
        Ok(*self.module.get_or_init(|| module))
    }
}

fn load(out: Out<Handle<Library>>, source: Source) -> Answer {
    driver::devices()?;
    let source = crate::image::own(source).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    // What cannot be read is refused at once.
    crate::image::read(Source::File(source.clone()))
        .ok_or(muxflow_abi::cuda::result::CUDA_ERROR_INVALID_IMAGE)?;
    out.put(Handle::new(Library { source, module: OnceLock::new() }))
}

api! {
    fn cuLibraryLoadData(out: Out<Handle<Library>>, image: *const u8, _jit: *const c_int, _values: *const c_void, _count: c_uint, _options: *const c_int, _option_values: *const c_void, _option_count: c_uint) {
        load(out, Source::Memory(image))
    }
    fn cuLibraryLoadFromFile(out: Out<Handle<Library>>, name: Text, _jit: *const c_int, _values: *const c_void, _count: c_uint, _options: *const c_int, _option_values: *const c_void, _option_count: c_uint) {
        load(out, module::file(name)?)
    }
    fn cuLibraryUnload(handle: Handle<Library>) {
        let it = handle.destroy()?;
        if let Some(module) = it.module.get() {
            module.destroy()?.unload();
        }
        Ok(())
    }
    fn cuLibraryGetKernel(out: Out<Handle<Function>>, handle: Handle<Library>, name: Text) {
        let module = handle.get()?.module()?;
        out.put(module.get()?.function(module, &name.get()?)?)
    }
    fn cuLibraryGetKernelCount(out: Out<c_uint>, handle: Handle<Library>) {
        out.put(handle.get()?.module()?.get()?.names().len() as c_uint)
    }
    fn cuLibraryEnumerateKernels(out: Out<Handle<Function>>, count: c_uint, handle: Handle<Library>) {
        let module = handle.get()?.module()?;
        for (i, name) in module.get()?.names().iter().take(count as usize).enumerate() {
            out.put_at(i, module.get()?.function(module, name)?);
        }
        Ok(())
    }
    fn cuLibraryGetModule(out: Out<Handle<Module>>, handle: Handle<Library>) {
        out.put(handle.get()?.module()?)
    }
    fn cuLibraryGetGlobal(address: Out<CUdeviceptr>, bytes: Out<usize>, handle: Handle<Library>, name: Text) {
        module::variable(handle.get()?.module()?, name, address, bytes)
    }
    fn cuLibraryGetManaged(address: Out<CUdeviceptr>, bytes: Out<usize>, handle: Handle<Library>, name: Text) {
        module::variable(handle.get()?.module()?, name, address, bytes)
    }
    fn cuLibraryGetUnifiedFunction(_out: Out<*const c_void>, handle: Handle<Library>, _name: Text) {
        handle.get()?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuKernelGetFunction(out: Out<Handle<Function>>, handle: Handle<Function>) {
        handle.get()?;
        out.put(handle)
    }
    fn cuKernelGetLibrary(_out: Out<Handle<Library>>, handle: Handle<Function>) {
        handle.get()?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuKernelGetAttribute(out: Out<c_int>, attribute: c_int, handle: Handle<Function>, device: CUdevice) {
        driver::device(device)?;
        out.put(function::attribute(handle.get()?, attribute)?)
    }
    fn cuKernelSetAttribute(attribute: c_int, value: c_int, handle: Handle<Function>, device: CUdevice) {
        driver::device(device)?;
        function::set_attribute(handle.get()?, attribute, value)
    }
    fn cuKernelSetCacheConfig(handle: Handle<Function>, _config: c_int, _device: CUdevice) {
        handle.get().map(drop)
    }
    fn cuKernelGetName(out: Out<*const c_char>, handle: Handle<Function>) {
        out.put(handle.get()?.c_name.as_ptr())
    }
    fn cuKernelGetParamInfo(handle: Handle<Function>, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        function::param(handle.get()?, index, offset, bytes)
    }
    fn cuKernelGetParamCount(handle: Handle<Function>, out: Out<usize>) {
        out.put(handle.get()?.params.len())
    }
}
