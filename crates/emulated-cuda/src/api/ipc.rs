//! Memory and events of other processes.

use std::ffi::{c_char, c_uint};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MAP_FAILED,
};
use muxflow_abi::cuda::{CUdeviceptr, CUipcEventHandle, CUipcMemHandle};

use crate::context;
use crate::event::{self, Event};
use crate::ffi::{Answer, Handle, Out, api};
use crate::memory::{self, Nature};

/// What is in a handle: mark, client at the device, offset in its heap, bytes, PCI bus.
const MARK: u64 = 0x4970_634d_7546_6c31;

/// The same for events: mark, client at the device, its number there, PCI bus.
const EVENT_MARK: u64 = 0x4970_6345_7546_6c31;

fn words(of: &[c_char; 64]) -> [u64; 5] {
    [0, 1, 2, 3, 4].map(|i| {
        let bytes: Vec<u8> = of[i * 8..i * 8 + 8].iter().map(|b| b.cast_unsigned()).collect();
        bytes.try_into().map_or(0, u64::from_le_bytes)
    })
}

fn from_words(words: &[u64]) -> [c_char; 64] {
    let mut all = [0; 64];
    for (to, from) in all.iter_mut().zip(words.iter().flat_map(|w| w.to_le_bytes())) {
        *to = from.cast_signed();
    }
    all
}

fn open(out: Out<CUdeviceptr>, handle: CUipcMemHandle) -> Answer {
    let it = context::current()?;
    let [mark, client, offset, bytes, bus] = words(&handle.reserved);
    if mark != MARK || bus != u64::from(it.gpu.facts.pci[1]) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if client == u64::from(it.gpu.id) {
        // The real driver refuses handles of the same process.
        return Err(CUDA_ERROR_INVALID_CONTEXT);
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
        out.put(CUipcMemHandle { reserved: from_words(&words) })
    }
    fn cuIpcGetEventHandle(out: Out<CUipcEventHandle>, event: Handle<Event>) {
        let it = event.get()?;
        let [client, number] = it.shared_name()?;
        let words = [EVENT_MARK, client, number, it.gpu.facts.pci[1].into()];
        out.put(CUipcEventHandle { reserved: from_words(&words) })
    }
    fn cuIpcOpenEventHandle(out: Out<Handle<Event>>, handle: CUipcEventHandle) {
        let it = context::current()?;
        let [mark, client, number, bus, _] = words(&handle.reserved);
        if !out.is_given() || mark != EVENT_MARK || bus != u64::from(it.gpu.facts.pci[1]) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if client == u64::from(it.gpu.id) {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        out.put(event::open([client, number])?)
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
