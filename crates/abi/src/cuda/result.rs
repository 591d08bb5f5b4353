//! CUDA result codes. The numbers are the ABI; the names are NVIDIA's.

/// What every driver call returns.
pub type CUresult = u32;

/// success
pub const CUDA_SUCCESS: CUresult = 0;
/// invalid value
pub const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
/// out of memory
pub const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
/// not initialized
pub const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
/// deinitialized
pub const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
/// profiler disabled
pub const CUDA_ERROR_PROFILER_DISABLED: CUresult = 5;
/// profiler not initialized
pub const CUDA_ERROR_PROFILER_NOT_INITIALIZED: CUresult = 6;
/// profiler already started
pub const CUDA_ERROR_PROFILER_ALREADY_STARTED: CUresult = 7;
/// profiler already stopped
pub const CUDA_ERROR_PROFILER_ALREADY_STOPPED: CUresult = 8;
/// stub library
pub const CUDA_ERROR_STUB_LIBRARY: CUresult = 34;
/// call requires newer driver
pub const CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER: CUresult = 36;
/// device unavailable
pub const CUDA_ERROR_DEVICE_UNAVAILABLE: CUresult = 46;
/// multicast resource full
pub const CUDA_ERROR_MULTICAST_RESOURCE_FULL: CUresult = 47;
/// no device
pub const CUDA_ERROR_NO_DEVICE: CUresult = 100;
/// invalid device
pub const CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
/// device not licensed
pub const CUDA_ERROR_DEVICE_NOT_LICENSED: CUresult = 102;
/// invalid image
pub const CUDA_ERROR_INVALID_IMAGE: CUresult = 200;
/// invalid context
pub const CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
/// context already current
pub const CUDA_ERROR_CONTEXT_ALREADY_CURRENT: CUresult = 202;
/// map failed
pub const CUDA_ERROR_MAP_FAILED: CUresult = 205;
/// unmap failed
pub const CUDA_ERROR_UNMAP_FAILED: CUresult = 206;
/// array is mapped
pub const CUDA_ERROR_ARRAY_IS_MAPPED: CUresult = 207;
/// already mapped
pub const CUDA_ERROR_ALREADY_MAPPED: CUresult = 208;
/// no binary for gpu
pub const CUDA_ERROR_NO_BINARY_FOR_GPU: CUresult = 209;
/// already acquired
pub const CUDA_ERROR_ALREADY_ACQUIRED: CUresult = 210;
/// not mapped
pub const CUDA_ERROR_NOT_MAPPED: CUresult = 211;
/// not mapped as array
pub const CUDA_ERROR_NOT_MAPPED_AS_ARRAY: CUresult = 212;
/// not mapped as pointer
pub const CUDA_ERROR_NOT_MAPPED_AS_POINTER: CUresult = 213;
/// ecc uncorrectable
pub const CUDA_ERROR_ECC_UNCORRECTABLE: CUresult = 214;
/// unsupported limit
pub const CUDA_ERROR_UNSUPPORTED_LIMIT: CUresult = 215;
/// context already in use
pub const CUDA_ERROR_CONTEXT_ALREADY_IN_USE: CUresult = 216;
/// peer access unsupported
pub const CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: CUresult = 217;
/// invalid ptx
pub const CUDA_ERROR_INVALID_PTX: CUresult = 218;
/// invalid graphics context
pub const CUDA_ERROR_INVALID_GRAPHICS_CONTEXT: CUresult = 219;
/// nvlink uncorrectable
pub const CUDA_ERROR_NVLINK_UNCORRECTABLE: CUresult = 220;
/// jit compiler not found
pub const CUDA_ERROR_JIT_COMPILER_NOT_FOUND: CUresult = 221;
/// unsupported ptx version
pub const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: CUresult = 222;
/// jit compilation disabled
pub const CUDA_ERROR_JIT_COMPILATION_DISABLED: CUresult = 223;
/// unsupported exec affinity
pub const CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY: CUresult = 224;
/// unsupported devside sync
pub const CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC: CUresult = 225;
/// contained
pub const CUDA_ERROR_CONTAINED: CUresult = 226;
/// insufficient loader version
pub const CUDA_ERROR_INSUFFICIENT_LOADER_VERSION: CUresult = 227;
/// invalid source
pub const CUDA_ERROR_INVALID_SOURCE: CUresult = 300;
/// file not found
pub const CUDA_ERROR_FILE_NOT_FOUND: CUresult = 301;
/// shared object symbol not found
pub const CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND: CUresult = 302;
/// shared object init failed
pub const CUDA_ERROR_SHARED_OBJECT_INIT_FAILED: CUresult = 303;
/// operating system
pub const CUDA_ERROR_OPERATING_SYSTEM: CUresult = 304;
/// invalid handle
pub const CUDA_ERROR_INVALID_HANDLE: CUresult = 400;
/// illegal state
pub const CUDA_ERROR_ILLEGAL_STATE: CUresult = 401;
/// lossy query
pub const CUDA_ERROR_LOSSY_QUERY: CUresult = 402;
/// not found
pub const CUDA_ERROR_NOT_FOUND: CUresult = 500;
/// not ready
pub const CUDA_ERROR_NOT_READY: CUresult = 600;
/// illegal address
pub const CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = 700;
/// launch out of resources
pub const CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: CUresult = 701;
/// launch timeout
pub const CUDA_ERROR_LAUNCH_TIMEOUT: CUresult = 702;
/// launch incompatible texturing
pub const CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING: CUresult = 703;
/// peer access already enabled
pub const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
/// peer access not enabled
pub const CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: CUresult = 705;
/// primary context active
pub const CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE: CUresult = 708;
/// context is destroyed
pub const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
/// assert
pub const CUDA_ERROR_ASSERT: CUresult = 710;
/// too many peers
pub const CUDA_ERROR_TOO_MANY_PEERS: CUresult = 711;
/// host memory already registered
pub const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
/// host memory not registered
pub const CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
/// hardware stack error
pub const CUDA_ERROR_HARDWARE_STACK_ERROR: CUresult = 714;
/// illegal instruction
pub const CUDA_ERROR_ILLEGAL_INSTRUCTION: CUresult = 715;
/// misaligned address
pub const CUDA_ERROR_MISALIGNED_ADDRESS: CUresult = 716;
/// invalid address space
pub const CUDA_ERROR_INVALID_ADDRESS_SPACE: CUresult = 717;
/// invalid pc
pub const CUDA_ERROR_INVALID_PC: CUresult = 718;
/// launch failed
pub const CUDA_ERROR_LAUNCH_FAILED: CUresult = 719;
/// cooperative launch too large
pub const CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: CUresult = 720;
/// tensor memory leak
pub const CUDA_ERROR_TENSOR_MEMORY_LEAK: CUresult = 721;
/// not permitted
pub const CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
/// not supported
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
/// system not ready
pub const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;
/// system driver mismatch
pub const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: CUresult = 803;
/// compat not supported on device
pub const CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult = 804;
/// mps connection failed
pub const CUDA_ERROR_MPS_CONNECTION_FAILED: CUresult = 805;
/// mps rpc failure
pub const CUDA_ERROR_MPS_RPC_FAILURE: CUresult = 806;
/// mps server not ready
pub const CUDA_ERROR_MPS_SERVER_NOT_READY: CUresult = 807;
/// mps max clients reached
pub const CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: CUresult = 808;
/// mps max connections reached
pub const CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED: CUresult = 809;
/// mps client terminated
pub const CUDA_ERROR_MPS_CLIENT_TERMINATED: CUresult = 810;
/// cdp not supported
pub const CUDA_ERROR_CDP_NOT_SUPPORTED: CUresult = 811;
/// cdp version mismatch
pub const CUDA_ERROR_CDP_VERSION_MISMATCH: CUresult = 812;
/// stream capture unsupported
pub const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: CUresult = 900;
/// stream capture invalidated
pub const CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: CUresult = 901;
/// stream capture merge
pub const CUDA_ERROR_STREAM_CAPTURE_MERGE: CUresult = 902;
/// stream capture unmatched
pub const CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: CUresult = 903;
/// stream capture unjoined
pub const CUDA_ERROR_STREAM_CAPTURE_UNJOINED: CUresult = 904;
/// stream capture isolation
pub const CUDA_ERROR_STREAM_CAPTURE_ISOLATION: CUresult = 905;
/// stream capture implicit
pub const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: CUresult = 906;
/// captured event
pub const CUDA_ERROR_CAPTURED_EVENT: CUresult = 907;
/// stream capture wrong thread
pub const CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: CUresult = 908;
/// timeout
pub const CUDA_ERROR_TIMEOUT: CUresult = 909;
/// graph exec update failure
pub const CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE: CUresult = 910;
/// external device
pub const CUDA_ERROR_EXTERNAL_DEVICE: CUresult = 911;
/// invalid cluster size
pub const CUDA_ERROR_INVALID_CLUSTER_SIZE: CUresult = 912;
/// function not loaded
pub const CUDA_ERROR_FUNCTION_NOT_LOADED: CUresult = 913;
/// invalid resource type
pub const CUDA_ERROR_INVALID_RESOURCE_TYPE: CUresult = 914;
/// invalid resource configuration
pub const CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: CUresult = 915;
/// key rotation
pub const CUDA_ERROR_KEY_ROTATION: CUresult = 916;
/// stream detached
pub const CUDA_ERROR_STREAM_DETACHED: CUresult = 917;
/// graph recapture failure
pub const CUDA_ERROR_GRAPH_RECAPTURE_FAILURE: CUresult = 918;
/// fabric not ready
pub const CUDA_ERROR_FABRIC_NOT_READY: CUresult = 919;
/// unknown
pub const CUDA_ERROR_UNKNOWN: CUresult = 999;
