//! The driver for dynamic resource allocation, beside the device plugin and the cleaner path: a claim
//! names its device and its pod, so nothing has to be found out and nothing can be mixed up.
//!
//! [`mod@slice`] tells the cluster what the node has, in one `ResourceSlice`: two devices for each GPU, one
//! for a service and one for a job beside it. [`driver`] answers the kubelet when a pod with a claim
//! is about to start, and [`claims`] remembers what was given, in files that outlive the agent.
//! [`health`] tells how the devices are, for the status of their pods.
//! It speaks `resource.k8s.io/v1` and the kubelet's `v1.DRAPlugin`: Kubernetes 1.34 and later.

pub mod claims;
pub mod driver;
pub mod health;
pub mod slice;
pub mod wire;

/// The driver's name in slices, claims and classes.
pub const DRIVER: &str = crate::names::GROUP;
/// The version of the API that is spoken.
pub const API: &str = "resource.k8s.io/v1";
