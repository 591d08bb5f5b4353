//! The messages of the kubelet's device-plugin interface (v1beta1) and of its list of who holds which
//! device (pod resources, v1), as far as they are used.
//!
//! Written by hand from the published numbers of the fields, so that nobody needs a protobuf compiler;
//! fields that are not named here are skipped by the decoder.

use std::collections::HashMap;

/// The version that a plugin says it speaks.
pub const VERSION: &str = "v1beta1";
/// A device that may be given away.
pub const HEALTHY: &str = "Healthy";
/// A device that may not.
pub const UNHEALTHY: &str = "Unhealthy";

/// Plugin to kubelet: here I am.
pub const REGISTER: &str = "/v1beta1.Registration/Register";
/// Kubelet to plugin: what can you do.
pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
/// Kubelet to plugin: tell your devices, and go on telling.
pub const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
/// Kubelet to plugin: which of these would you take.
pub const PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
/// Kubelet to plugin: these are given to a container.
pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
/// Kubelet to plugin: the container that holds these is about to be created.
pub const PRE_START: &str = "/v1beta1.DevicePlugin/PreStartContainer";
/// Anybody to kubelet: who holds what.
pub const LIST_HOLDERS: &str = "/v1.PodResourcesLister/List";

/// Nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// What a plugin can do.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Options {
    /// It wants to be asked before a container is created.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// It can say which devices it would take.
    #[prost(bool, tag = "2")]
    pub preferred_allocation: bool,
}

/// A plugin introduces itself.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterRequest {
    /// Of the interface.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The name of its socket, beside the kubelet's.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// What its devices are requested as.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// What it can do.
    #[prost(message, optional, tag = "4")]
    pub options: Option<Options>,
}

/// One device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    /// Its name.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
}

/// All devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Devices {
    /// All of them, whatever their health.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// Which devices a plugin would take, for each container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerPreferredRequest>,
}

/// The same, for one container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerPreferredRequest {
    /// What there is.
    #[prost(string, repeated, tag = "1")]
    pub available: Vec<String>,
    /// What must be among them.
    #[prost(string, repeated, tag = "2")]
    pub must_include: Vec<String>,
    /// How many.
    #[prost(int32, tag = "3")]
    pub size: i32,
}

/// The answer, for each container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<DeviceIds>,
}

/// Devices by name; the shape of several messages.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceIds {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub ids: Vec<String>,
}

/// Devices are given away.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<DeviceIds>,
}

/// What the containers get.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerAllocation>,
}

/// What one container gets.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocation {
    /// Variables.
    #[prost(map = "string, string", tag = "1")]
    pub envs: HashMap<String, String>,
    /// Files and directories.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    /// Device nodes.
    #[prost(message, repeated, tag = "3")]
    pub devices: Vec<DeviceNode>,
    /// Annotations.
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
    /// Devices that the container runtime looks up when it creates the container.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A file or directory of the host.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Mount {
    /// Where it appears.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Where it is.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Whether it can only be read.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

/// A device node of the host.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DeviceNode {
    /// Where it appears.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Where it is.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// `rw`.
    #[prost(string, tag = "3")]
    pub permissions: String,
}

/// A device of the container device interface.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CdiDevice {
    /// `vendor/class=name`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Who holds what.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Holders {
    /// One for each pod.
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<Holder>,
}

/// What one pod holds.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Holder {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its namespace.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its containers.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<HolderContainer>,
}

/// What one container holds.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HolderContainer {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Devices of plugins.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<HeldDevices>,
}

/// Devices of one resource.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HeldDevices {
    /// Which resource.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// Which devices.
    #[prost(string, repeated, tag = "2")]
    pub ids: Vec<String>,
}
