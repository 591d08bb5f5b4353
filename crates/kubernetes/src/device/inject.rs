//! What a container gets: variables, mounts and device nodes, as the kubelet takes them or as a device
//! of the container device interface (CDI), which the runtime looks up when it creates the container.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use muxflow_agent::environment::{self, GpuSide, Restraint};
use muxflow_types::SmShare;
use serde_json::{Value, json};

use super::wire::{ContainerAllocation, DeviceNode, Mount};
use crate::node::executor::LocalGpu;

/// Where a container finds its MPS daemon.
const MPS_PIPE: &str = "/run/muxflow/mps";
/// Where an offline container finds its control block.
const CONTROL: &str = "/run/muxflow/control";
/// Where an offline container finds the interposer.
const INTERPOSER: &str = "/run/muxflow/libxcuda.so";
/// How the interposer is told how long to wait for an agent.
const HOLD_VARIABLE: &str = "MUXFLOW_ABANDONED_MS";
/// What MPS clients and servers share beside the pipe.
const SHARED_MEMORY: &str = "/dev/shm";
/// Nodes that every GPU container needs, where they exist.
const COMMON_NODES: [&str; 4] =
    ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// Paths of the host that containers get, and how long they wait for its agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPaths {
    /// The interposer.
    pub interposer: PathBuf,
    /// Shared memory, the same that the MPS daemons use.
    pub shared_memory: PathBuf,
    /// Device nodes.
    pub dev: PathBuf,
    /// What the driver says of its GPUs.
    pub driver: PathBuf,
    /// How long an offline process whose agent is gone waits at its gate for the next one before it
    /// ends: longer than it takes to update an agent, its image included.
    pub hold_for: Duration,
}

impl Default for HostPaths {
    fn default() -> Self {
        HostPaths {
            interposer: "/var/lib/muxflow/lib/libxcuda.so".into(),
            shared_memory: SHARED_MEMORY.into(),
            dev: "/dev".into(),
            driver: "/proc/driver/nvidia".into(),
            hold_for: Duration::from_secs(900),
        }
    }
}

/// Everything that one container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    env: BTreeMap<String, String>,
    mounts: Vec<Mount>,
    nodes: Vec<DeviceNode>,
}

fn mount(container_path: &str, host_path: &Path, read_only: bool) -> Mount {
    let host_path = host_path.display().to_string();
    Mount { container_path: container_path.to_owned(), host_path, read_only }
}

/// The variables of the GPU's side are the same for both kinds of work.
fn side(gpu: &LocalGpu) -> GpuSide<'_> {
    let mps_pipe_dir = gpu.mps_pipe.as_ref().map(|_| Path::new(MPS_PIPE));
    GpuSide { uuid: &gpu.uuid, mps_pipe_dir, mps_log_dir: None }
}

impl Injection {
    fn new(gpu: &LocalGpu, paths: &HostPaths, mut env: BTreeMap<String, String>) -> Self {
        // NVIDIA's container runtime, where it is used, puts the driver's libraries in by this.
        env.insert("NVIDIA_VISIBLE_DEVICES".into(), gpu.uuid.clone());
        let mut mounts = Vec::new();
        if let Some(pipe) = &gpu.mps_pipe {
            mounts.push(mount(MPS_PIPE, pipe, false));
            mounts.push(mount(SHARED_MEMORY, &paths.shared_memory, false));
        }
        Injection { env, mounts, nodes: nodes(gpu, paths) }
    }

    /// For an online service: the GPU and its MPS daemon.
    pub fn online(gpu: &LocalGpu, paths: &HostPaths) -> Self {
        let none = BTreeMap::new();
        Self::new(gpu, paths, environment::online(BTreeMap::new(), &none, side(gpu)))
    }

    /// For an offline job: the same, under the interposer.
    pub fn offline(gpu: &LocalGpu, paths: &HostPaths, share: SmShare, control: &Path) -> Self {
        let none = BTreeMap::new();
        let restraint = Restraint {
            interposer: Path::new(INTERPOSER),
            control_dir: Path::new(CONTROL),
            share,
            driver_memory_limit: None,
            sm_partition: None,
        };
        let mut env = environment::offline(BTreeMap::new(), &none, side(gpu), &restraint);
        env.insert(HOLD_VARIABLE.to_owned(), paths.hold_for.as_millis().to_string());
        let mut injection = Self::new(gpu, paths, env);
        injection.mounts.push(mount(CONTROL, control, false));
        injection.mounts.push(mount(INTERPOSER, &paths.interposer, true));
        injection
    }

    /// As the kubelet takes it.
    pub fn allocation(self) -> ContainerAllocation {
        ContainerAllocation {
            envs: self.env.into_iter().collect(),
            mounts: self.mounts,
            devices: self.nodes,
            ..ContainerAllocation::default()
        }
    }

    /// As a file of the container device interface, with one device.
    pub fn cdi(&self, kind: &str, device: &str) -> Value {
        let env: Vec<String> =
            self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mounts: Vec<Value> = self
            .mounts
            .iter()
            .map(|m| {
                let access = if m.read_only { "ro" } else { "rw" };
                json!({"hostPath": m.host_path, "containerPath": m.container_path,
                    "options": ["rbind", access, "nosuid", "nodev"]})
            })
            .collect();
        let nodes: Vec<Value> = self
            .nodes
            .iter()
            .map(|n| json!({"path": n.container_path, "hostPath": n.host_path, "permissions": n.permissions}))
            .collect();
        json!({"cdiVersion": "0.6.0", "kind": kind, "devices": [{"name": device,
            "containerEdits": {"env": env, "mounts": mounts, "deviceNodes": nodes}}]})
    }
}

/// The nodes that are there. An emulated GPU and a GPU under some virtual machines have none.
fn nodes(gpu: &LocalGpu, paths: &HostPaths) -> Vec<DeviceNode> {
    let own = minor(gpu, &paths.driver).map(|minor| format!("/dev/nvidia{minor}"));
    let wanted = COMMON_NODES.iter().map(|node| (*node).to_owned()).chain(own);
    wanted
        .filter_map(|container_path| {
            let host = paths.dev.join(container_path.strip_prefix("/dev/")?);
            host.exists().then(|| DeviceNode {
                container_path,
                host_path: host.display().to_string(),
                permissions: "rw".to_owned(),
            })
        })
        .collect()
}

/// The number in the name of the GPU's node, which is not its place in any list.
fn minor(gpu: &LocalGpu, driver: &Path) -> Option<u32> {
    let file = driver.join("gpus").join(format!("{}.0", gpu.pci)).join("information");
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_types::SmCount;

    fn gpu() -> LocalGpu {
        LocalGpu {
            uuid: "GPU-1".into(),
            gpu_type: "T4".into(),
            pci: "0000:3b:00".into(),
            memory_bytes: 1 << 34,
            mps_pipe: Some("/run/muxflow/mps/GPU-1/pipe".into()),
            multi_user: false,
        }
    }

    #[test]
    fn an_offline_container_gets_its_gpu_its_share_and_the_interposer() {
        let dir = tempfile::tempdir().unwrap();
        let info = dir.path().join("driver/gpus/0000:3b:00.0");
        std::fs::create_dir_all(&info).unwrap();
        std::fs::write(info.join("information"), "Model: T4\nDevice Minor: \t 3\n").unwrap();
        for node in ["nvidiactl", "nvidia3", "nvidia0"] {
            std::fs::write(dir.path().join(node), "").unwrap();
        }
        let paths = HostPaths {
            dev: dir.path().to_owned(),
            driver: dir.path().join("driver"),
            ..HostPaths::default()
        };
        let share = SmShare::new(SmCount(20), SmCount(40)).unwrap();
        let injection = Injection::offline(&gpu(), &paths, share, Path::new("/run/c/pod"));
        let cdi = injection.cdi("muxflow.dev/offline", "GPU-1.7");
        let edits = &cdi["devices"][0]["containerEdits"];
        let env: Vec<&str> =
            edits["env"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
        for wanted in [
            "CUDA_VISIBLE_DEVICES=GPU-1",
            "CUDA_MPS_PIPE_DIRECTORY=/run/muxflow/mps",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50.01",
            "LD_PRELOAD=/run/muxflow/libxcuda.so",
            "MUXFLOW_CONTROL=/run/muxflow/control",
            // An update of the agent takes longer than the half minute that a job of one machine waits.
            "MUXFLOW_ABANDONED_MS=900000",
        ] {
            assert!(env.contains(&wanted), "{wanted} not in {env:?}");
        }
        let given = injection.allocation();
        let paths: Vec<&str> = given.devices.iter().map(|n| n.container_path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia3"], "no node of another GPU");
        assert!(given.mounts.iter().any(|m| m.host_path == "/run/c/pod" && !m.read_only));
        assert!(given.mounts.iter().any(|m| m.container_path == INTERPOSER && m.read_only));
    }

    #[test]
    fn an_online_container_is_under_no_restraint() {
        let given = Injection::online(&gpu(), &HostPaths::default()).allocation();
        assert_eq!(given.envs["CUDA_VISIBLE_DEVICES"], "GPU-1");
        assert!(!given.envs.contains_key("LD_PRELOAD"));
        assert!(given.mounts.iter().any(|m| m.container_path == "/dev/shm"));
    }
}
