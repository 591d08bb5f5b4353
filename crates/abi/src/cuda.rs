//! Types of the CUDA driver API whose layout matters to us. Names and fields are NVIDIA's, so that
//! they can be looked up; the C test of `crates/e2e` holds sizes and offsets to cuda.h 12 and 13.

#![expect(
    non_snake_case,
    missing_docs,
    reason = "the names of cuda.h, so that its documentation applies"
)]

pub mod attribute;
pub mod result;

use core::ffi::{c_char, c_int, c_uint, c_ushort, c_void};

pub use attribute::CUdevice_attribute;
pub use result::CUresult;

/// Ordinal of a device in this process.
pub type CUdevice = c_int;
/// Address in device memory.
pub type CUdeviceptr = u64;
/// Handle of a context.
pub type CUcontext = *mut c_void;
/// Handle of a module.
pub type CUmodule = *mut c_void;
/// Handle of a function or, where the API allows both, of a kernel.
pub type CUfunction = *mut c_void;
/// Handle of a library.
pub type CUlibrary = *mut c_void;
/// Handle of a kernel.
pub type CUkernel = *mut c_void;
/// Handle of a stream; null, 1 and 2 are the default streams.
pub type CUstream = *mut c_void;
/// Handle of an event.
pub type CUevent = *mut c_void;
/// Handle of an array.
pub type CUarray = *mut c_void;
/// Handle of a mipmapped array.
pub type CUmipmappedArray = *mut c_void;
/// Handle of imported memory.
pub type CUexternalMemory = *mut c_void;
/// Handle of a memory pool.
pub type CUmemoryPool = *mut c_void;
/// Handle of physical memory made by `cuMemCreate`.
pub type CUmemGenericAllocationHandle = u64;
/// Handle of a graph.
pub type CUgraph = *mut c_void;
/// Handle of a graph that can be launched.
pub type CUgraphExec = *mut c_void;
/// Handle of a node of a graph.
pub type CUgraphNode = *mut c_void;
/// Handle of a green context.
pub type CUgreenCtx = *mut c_void;
/// A function run on the host by a stream.
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// The legacy default stream, by name.
pub const CU_STREAM_LEGACY: usize = 1;
/// The per-thread default stream, by name.
pub const CU_STREAM_PER_THREAD: usize = 2;
/// `cuGetProcAddress` flag: the per-thread-default-stream variant is wanted.
pub const CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM: u64 = 2;
/// `cuGetProcAddress` status: found.
pub const CU_GET_PROC_ADDRESS_SUCCESS: c_int = 0;
/// `cuGetProcAddress` status: no such name.
pub const CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND: c_int = 1;
/// `cuGetProcAddress` status: the name is newer than the version asked for.
pub const CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT: c_int = 2;
/// Stream capture status: not capturing.
pub const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
/// Stream capture status: capturing.
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_int = 1;
/// Stream capture status: broken.
pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: c_int = 2;
/// Capture mode: calls of this thread never invalidate a capture.
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
/// Event flag: sleep in `cuEventSynchronize` instead of spinning.
pub const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
/// Event flag: no time is recorded.
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;
/// Host memory flag: usable from every context.
pub const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
/// Host memory flag: mapped into the device's address space.
pub const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
/// Context limit: stack of a GPU thread.
pub const CU_LIMIT_STACK_SIZE: c_int = 0;
/// Context limit: buffer of the device's printf.
pub const CU_LIMIT_PRINTF_FIFO_SIZE: c_int = 1;
/// Context limit: heap of the device's malloc.
pub const CU_LIMIT_MALLOC_HEAP_SIZE: c_int = 2;
/// Memory location: a device.
pub const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
/// Memory location: a part of a device's memory.
pub const CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: c_int = 6;
/// Pool attribute: how much memory may stay reserved across synchronisation.
pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: c_int = 4;
/// Pool attribute: bytes that the pool holds.
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: c_int = 5;
/// Pool attribute: highest value of the former.
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: c_int = 6;
/// Pool attribute: bytes in use.
pub const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: c_int = 7;
/// Pool attribute: highest value of the former.
pub const CU_MEMPOOL_ATTR_USED_MEM_HIGH: c_int = 8;
/// Array flag: no physical memory until it is mapped.
pub const CUDA_ARRAY3D_SPARSE: c_uint = 0x40;
/// Array flag: no physical memory until it is mapped.
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: c_uint = 0x80;
/// Node type: kernel.
pub const CU_GRAPH_NODE_TYPE_KERNEL: c_int = 0;
/// Node type: child graph.
pub const CU_GRAPH_NODE_TYPE_GRAPH: c_int = 4;
/// Graph memory attribute: bytes that the driver holds for graphs.
pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: c_int = 2;
/// Node type: memory allocation.
pub const CU_GRAPH_NODE_TYPE_MEM_ALLOC: c_int = 10;
/// Node type: memory free.
pub const CU_GRAPH_NODE_TYPE_MEM_FREE: c_int = 11;
/// Node type: conditional.
pub const CU_GRAPH_NODE_TYPE_CONDITIONAL: c_int = 13;
/// Device reports for `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
pub const CU_COMPUTEMODE_DEFAULT: c_int = 0;

/// Identity of a device or of an export table.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUuuid {
    pub bytes: [u8; 16],
}

/// What one process gives another so that it can open its memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUipcMemHandle {
    pub reserved: [c_char; 64],
}

/// What one process gives another so that it can open its event.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUipcEventHandle {
    pub reserved: [c_char; 64],
}

/// A pointer exported from a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUmemPoolPtrExportData {
    pub reserved: [u8; 64],
}

/// Old properties of a device.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CUdevprop {
    pub maxThreadsPerBlock: c_int,
    pub maxThreadsDim: [c_int; 3],
    pub maxGridSize: [c_int; 3],
    pub sharedMemPerBlock: c_int,
    pub totalConstantMemory: c_int,
    pub SIMDWidth: c_int,
    pub memPitch: c_int,
    pub regsPerBlock: c_int,
    pub clockRate: c_int,
    pub textureAlign: c_int,
}

/// Where memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CUmemLocation {
    pub type_: c_int,
    pub id: c_int,
}

/// Who may touch a mapping.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CUmemAccessDesc {
    pub location: CUmemLocation,
    pub flags: c_int,
}

/// Flags of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CUmemAllocationFlags {
    pub compressionType: u8,
    pub gpuDirectRDMACapable: u8,
    pub usage: c_ushort,
    pub reserved: [u8; 4],
}

/// What `cuMemCreate` is to make.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUmemAllocationProp {
    pub type_: c_int,
    pub requestedHandleTypes: c_int,
    pub location: CUmemLocation,
    pub win32HandleMetaData: *mut c_void,
    pub allocFlags: CUmemAllocationFlags,
}

/// What `cuMemPoolCreate` is to make.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUmemPoolProps {
    pub allocType: c_int,
    pub handleTypes: c_int,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: c_ushort,
    pub reserved: [u8; 54],
}

/// A multicast object.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUmulticastObjectProp {
    pub numDevices: c_uint,
    pub size: usize,
    pub handleTypes: u64,
    pub flags: u64,
}

/// A 1D or 2D array.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_ARRAY_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Format: c_uint,
    pub NumChannels: c_uint,
}

/// A 1D or 2D array, as before CUDA 3.2.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_ARRAY_DESCRIPTOR_v1 {
    pub Width: c_uint,
    pub Height: c_uint,
    pub Format: c_uint,
    pub NumChannels: c_uint,
}

/// A 3D, layered or cube array.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_ARRAY3D_DESCRIPTOR {
    pub Width: usize,
    pub Height: usize,
    pub Depth: usize,
    pub Format: c_uint,
    pub NumChannels: c_uint,
    pub Flags: c_uint,
}

/// A 3D array, as before CUDA 3.2.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_ARRAY3D_DESCRIPTOR_v1 {
    pub Width: c_uint,
    pub Height: c_uint,
    pub Depth: c_uint,
    pub Format: c_uint,
    pub NumChannels: c_uint,
    pub Flags: c_uint,
}

/// What an array will need.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_ARRAY_MEMORY_REQUIREMENTS {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [c_uint; 4],
}

/// A 2D copy.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_MEMCPY2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: c_uint,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: c_uint,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

/// A 3D copy.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_MEMCPY3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: c_uint,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub reserved0: *mut c_void,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: c_uint,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub reserved1: *mut c_void,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

/// Memory of another API that is to be imported.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
    pub type_: c_int,
    pub handle: [usize; 2],
    pub size: u64,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}

/// A window of imported memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC {
    pub offset: u64,
    pub size: u64,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}

/// One attribute of a launch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUlaunchAttribute {
    pub id: c_uint,
    pub pad: [c_char; 4],
    pub value: [u64; 8],
}

/// A launch by `cuLaunchKernelEx`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUlaunchConfig {
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub numAttrs: c_uint,
}

/// One launch of a cooperative multi-device launch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_LAUNCH_PARAMS {
    pub function: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub kernelParams: *mut *mut c_void,
}

/// A kernel node; `kern` and `ctx` came with version 2.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS {
    pub func: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kern: CUkernel,
    pub ctx: CUcontext,
}

/// A memory allocation node.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS {
    pub poolProps: CUmemPoolProps,
    pub accessDescs: *const CUmemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: CUdeviceptr,
}

/// Any node, for `cuGraphAddNode`: the part behind `type_` depends on it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUgraphNodeParams {
    pub type_: c_int,
    pub reserved0: [c_int; 3],
    pub params: [u64; 29],
    pub reserved2: i64,
}

/// How `cuGraphInstantiateWithParams` is to work, and what came of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    pub flags: u64,
    pub hUploadStream: CUstream,
    pub hErrNode_out: CUgraphNode,
    pub result_out: c_int,
}
