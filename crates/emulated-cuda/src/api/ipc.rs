//! Memory of other processes.

use std::ffi::c_uint;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MAP_FAILED};
use muxflow_abi::cuda::{CUdeviceptr, CUipcMemHandle};

use crate::context;
use crate::ffi::{Answer, Out, api};
use crate::memory::{self, Nature};

/// What is in a handle: mark, client at the device, offset in its heap, bytes, PCI bus.
const MARK: u64 = 0x4970_634d_7546_6c31;

fn open(out: Out<CUdeviceptr>, handle: CUipcMemHandle) -> Answer {
    let it = context::current()?;
    let word = |i: usize| {
        let bytes: Vec<u8> =
            handle.reserved[i * 8..i * 8 + 8].iter().map(|b| b.cast_unsigned()).collect();
        bytes.try_into().map_or(0, u64::from_le_bytes)
    };
    let [mark, client, offset, bytes, bus] = [0, 1, 2, 3, 4].map(word);
    if mark != MARK || bus != u64::from(it.gpu.facts.pci[1]) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if client == u64::from(it.gpu.id) {
        // The real driver refuses handles of the same process.
        return Err(muxflow_abi::cuda::result::CUDA_ERROR_INVALID_CONTEXT);
    }
    let file = it.gpu.open_heap(client as u32).map_err(|_| CUDA_ERROR_MAP_FAILED)?;
    out.put(memory::import(it, &file, offset, bytes)?)
}

api! {
    fn cuIpcGetMemHandle(out: Out<CUipcMemHandle>, address: CUdeviceptr) {
        context::current()?;
        let found = memory::look(address, |r| {
            matches!(r.nature, Nature::Device).then(|| {
                let offset = r.gpu.heap.offset(r.start);
                [MARK, r.gpu.id.into(), offset, r.bytes, r.gpu.facts.pci[1].into()]
            })
        });
        let words = found.flatten().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        let bytes = words.iter().flat_map(|w| w.to_le_bytes());
        for (to, from) in handle.reserved.iter_mut().zip(bytes) {
            *to = from.cast_signed();
        }
        out.put(handle)
    }
    fn cuIpcOpenMemHandle(out: Out<CUdeviceptr>, handle: CUipcMemHandle, _flags: c_uint) {
        open(out, handle)
    }
    fn cuIpcOpenMemHandle_v2(out: Out<CUdeviceptr>, handle: CUipcMemHandle, _flags: c_uint) {
        open(out, handle)
    }
    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        context::current()?;
        let found = memory::remove(address, |r| matches!(r.nature, Nature::Imported { .. }));
        found.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}
