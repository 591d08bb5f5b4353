//! The messages by which a kubelet finds a driver (plugin registration, v1) and asks it for the devices
//! of claims (DRA plugin, v1), written by hand from the published numbers of the fields.

use std::collections::HashMap;

/// Kubelet to driver: who are you.
pub const INFO: &str = "/pluginregistration.Registration/GetInfo";
/// Kubelet to driver: you were taken, or why not.
pub const REGISTERED: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
/// Kubelet to driver: a pod with these claims is about to start.
pub const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
/// Kubelet to driver: no pod of this node uses these claims any more.
pub const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";

/// The kind of plugin.
pub const KIND: &str = "DRAPlugin";
/// The service that it offers.
pub const SERVICE: &str = "v1.DRAPlugin";

/// A driver introduces itself.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Info {
    /// [`KIND`].
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The driver.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The socket on which it serves.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// What it serves there.
    #[prost(string, repeated, tag = "4")]
    pub versions: Vec<String>,
}

/// What came of the introduction.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Registered {
    /// Whether it was taken.
    #[prost(bool, tag = "1")]
    pub taken: bool,
    /// Why not.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A claim by all its names.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Claim {
    /// Its namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Its uid: a name can come back.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Its name.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Claims to prepare, or no longer to hold.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Claims {
    /// One or more.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// The devices of each claim, by its uid.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PrepareAnswers {
    /// One for each claim that was asked for.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, PrepareAnswer>,
}

/// The devices of one claim, or why there are none.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PrepareAnswer {
    /// What the pod gets.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PreparedDevice>,
    /// Empty when all went well.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device that is ready.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreparedDevice {
    /// The requests of the claim that it serves.
    #[prost(string, repeated, tag = "1")]
    pub requests: Vec<String>,
    /// The pool that it is of.
    #[prost(string, tag = "2")]
    pub pool: String,
    /// Its name there.
    #[prost(string, tag = "3")]
    pub device: String,
    /// What the runtime looks up when it creates a container.
    #[prost(string, repeated, tag = "4")]
    pub cdi_devices: Vec<String>,
}

/// What came of letting go, by the uid of the claim.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UnprepareAnswers {
    /// One for each claim that was named.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, UnprepareAnswer>,
}

/// The same, for one claim.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UnprepareAnswer {
    /// Empty when all went well.
    #[prost(string, tag = "1")]
    pub error: String,
}
