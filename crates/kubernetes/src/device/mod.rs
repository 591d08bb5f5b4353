//! The device plugin: what the kubelet of a node asks before it starts a container with a GPU.
//!
//! The scheduler has decided which GPU a pod gets, but the kubelet asks for devices without saying for
//! which pod. Two pods that start at the same moment can so be given each other's device. Therefore
//! a device of the offline resource is only a place, and which GPU is behind it is settled as late
//! as possible: when the container is about to be created, the kubelet's own list says which pod
//! holds the place, the pod's annotations name the GPU, and what the container gets is written then,
//! as a device of the container device interface ([`inject`]). Nothing is locked, and nothing is
//! remembered that could leak: a place is free when the kubelet says so.
//!
//! [`wire`] has the messages, [`grpc`] carries them (through `lenient`, which reads requests as kubelets
//! write them), [`plugin`] answers, [`registration`] introduces the plugin to
//! the kubelet, again each time the kubelet restarts.

pub mod grpc;
pub mod inject;
mod lenient;
pub mod plugin;
pub mod registration;
pub mod wire;
