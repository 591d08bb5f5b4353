//! Every name that MuxFlow puts into a cluster, in one place: whoever writes a pod or a rule of access
//! needs no other file.

/// The group of the custom resources, and the prefix of annotations and resources.
pub const GROUP: &str = "muxflow.dev";
/// What a pod says in `schedulerName`.
pub const SCHEDULER: &str = "muxflow";
/// What an offline container asks for, once: a place beside an online service.
pub const OFFLINE_RESOURCE: &str = "muxflow.dev/offline";
/// What an online container asks for: a GPU whose idle part may be lent.
pub const ONLINE_RESOURCE: &str = "muxflow.dev/online";

/// Written by the user: device memory that the job needs, such as `6GiB`.
pub const MEMORY: &str = "muxflow.dev/memory";
/// Written by the user: what the job runs, as far as profiles are concerned.
pub const WORKLOAD: &str = "muxflow.dev/workload";
/// Written by the user: GPU types that the job accepts, by commas.
pub const GPU_TYPES: &str = "muxflow.dev/gpu-types";
/// Written by the user or an operator: `true` for a job that has harmed its neighbours; it is kept off
/// critical services.
pub const FAIL_PRONE: &str = "muxflow.dev/fail-prone";
/// Written by the user: `false` for a job that cannot go on from a checkpoint.
pub const MOVABLE: &str = "muxflow.dev/movable";

/// A condition on a pod, written by the scheduler: `False` says why it is not moved to a faster GPU.
pub const MOVABLE_CONDITION: &str = "muxflow.dev/Movable";

/// Written by the user on online pods: the name of the service; by default its Deployment.
pub const SERVICE: &str = "muxflow.dev/service";
/// Written by the user on online pods: `true` keeps jobs away that are fail-prone.
pub const CRITICAL: &str = "muxflow.dev/critical";

/// Written with the binding: the GPU that the plan named.
pub const GPU: &str = "muxflow.dev/gpu";
/// Written with the binding: the SMs that the job is started with, out of how many.
pub const SHARE: &str = "muxflow.dev/sm-share";
/// Written with the binding: the cap on device memory in bytes.
pub const QUOTA: &str = "muxflow.dev/memory-quota-bytes";
/// Written with the binding: the speed that was predicted, against the job alone.
pub const SPEED: &str = "muxflow.dev/predicted-speed";
