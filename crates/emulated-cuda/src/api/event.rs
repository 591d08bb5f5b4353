//! `cuEvent*`.

use std::ffi::c_uint;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY};

use crate::capture;
use crate::event::{self, Event};
use crate::ffi::{Handle, Out, api, both};
use crate::graph::Task;
use crate::stream::{self, Stream};

api! {
    fn cuEventCreate(out: Out<Handle<Event>>, flags: c_uint) {
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(event::create(flags)?)
    }
    fn cuEventDestroy_v2(handle: Handle<Event>) {
        handle.destroy()?.end();
        Ok(())
    }
    fn cuEventDestroy(handle: Handle<Event>) {
        handle.destroy()?.end();
        Ok(())
    }
    fn cuEventQuery(handle: Handle<Event>) {
        let it = handle.get()?;
        capture::unsafe_call()?;
        if it.query()? { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    }
    fn cuEventSynchronize(handle: Handle<Event>) {
        let it = handle.get()?;
        capture::unsafe_call()?;
        it.synchronize()
    }
    fn cuEventElapsedTime(out: Out<f32>, start: Handle<Event>, end: Handle<Event>) {
        out.put(start.get()?.elapsed_ms(end.get()?)?)
    }
    fn cuEventElapsedTime_v2(out: Out<f32>, start: Handle<Event>, end: Handle<Event>) {
        out.put(start.get()?.elapsed_ms(end.get()?)?)
    }
}

both! {
    fn cuEventRecord, cuEventRecord_ptsz(which; event: Handle<Event>, handle: Handle<Stream>) {
        event.get()?.record(stream::resolve(handle, which)?)
    }
    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(which; event: Handle<Event>, handle: Handle<Stream>, flags: c_uint) {
        let (it, stream) = (event.get()?, stream::resolve(handle, which)?);
        match stream.external(flags)? {
            true => stream.capture_task(Task::Record(event)),
            false => it.record(stream),
        }
    }
}
