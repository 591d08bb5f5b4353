//! Sets up a whole node: directory, libraries under their real names, one device process per GPU.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::EmulationError;
use crate::node::{DIRECTORY_VARIABLE, GpuSource, Node};
use crate::wire::Socket;

/// Names under which clients look for the libraries, and the files that answer.
const LIBRARIES: [(&str, &str); 6] = [
    ("libcuda.so.1", "libmuxflow_emulated_cuda.so"),
    ("libcuda.so", "libmuxflow_emulated_cuda.so"),
    ("libnvidia-ml.so.1", "libmuxflow_emulated_nvml.so"),
    ("libnvidia-ml.so", "libmuxflow_emulated_nvml.so"),
    ("libdcgm.so.4", "libmuxflow_emulated_dcgm.so"),
    ("libdcgm.so", "libmuxflow_emulated_dcgm.so"),
];

/// Programs that go into the node's `bin`.
const PROGRAMS: [&str; 3] =
    ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "muxflow-emulated-fault"];

/// What to set up.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The GPUs.
    pub gpus: Vec<GpuSource>,
    /// Device seconds per second.
    pub time_factor: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// Where; made and removed again when it is not given.
    pub directory: Option<PathBuf>,
    /// Where the built libraries and programs are.
    pub built: PathBuf,
}

/// A node that runs until it is dropped.
#[derive(Debug)]
pub struct Running {
    node: Node,
    devices: Vec<Child>,
    remove: bool,
}

/// Sets a node up and starts its devices.
pub fn start(plan: &Plan) -> Result<Running, EmulationError> {
    let (root, remove) = match &plan.directory {
        // Programs under it may change their directory.
        Some(directory) => {
            let absolute = std::path::absolute(directory);
            let read = |source| EmulationError::Read { path: directory.clone(), source };
            (absolute.map_err(read)?, false)
        }
        None => (fresh_directory()?, true),
    };
    let node = Node::at(&root);
    node.create(&plan.gpus)?;
    for (folder, mode) in [("lib", 0o755), ("bin", 0o755)] {
        make_folder(&root.join(folder), mode)?;
    }
    for (name, file) in LIBRARIES {
        link(&plan.built.join(file), &root.join("lib").join(name))?;
    }
    for name in PROGRAMS {
        link(&plan.built.join(name), &root.join("bin").join(name))?;
    }
    let mut running = Running { node, devices: Vec::new(), remove };
    let program = plan.built.join("muxflow-emulated-device");
    for index in 0..plan.gpus.len() {
        let child = Command::new(&program)
            .arg("--dir")
            .arg(&root)
            .args(["--index", &index.to_string()])
            .args(["--time-factor", &plan.time_factor.to_string()])
            .args(["--seed", &plan.seed.to_string()])
            .args(["--parent", &std::process::id().to_string()])
            .spawn()
            .map_err(|source| EmulationError::Read { path: program.clone(), source })?;
        running.devices.push(child);
    }
    running.wait_until_up()?;
    Ok(running)
}

/// A directory that was not there before: another one may have been left with the same number.
fn fresh_directory() -> Result<PathBuf, EmulationError> {
    let name = format!("muxflow-gpus-{}", std::process::id());
    let mut root = std::env::temp_dir().join(&name);
    for more in 1_u32.. {
        match std::fs::create_dir(&root) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                root = std::env::temp_dir().join(format!("{name}-{more}"));
            }
            Err(source) => return Err(EmulationError::Write { path: root, source }),
            Ok(()) => break,
        }
    }
    Ok(root)
}

fn make_folder(path: &Path, mode: u32) -> Result<(), EmulationError> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |source| EmulationError::Write { path: path.to_owned(), source };
    std::fs::create_dir_all(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed)
}

fn link(from: &Path, to: &Path) -> Result<(), EmulationError> {
    // What was not built is left out: a client that needs it says so itself.
    if !from.exists() {
        return Ok(());
    }
    if to.symlink_metadata().is_ok() {
        let failed = |source| EmulationError::Write { path: to.to_owned(), source };
        std::fs::remove_file(to).map_err(failed)?;
    }
    symlink(from, to).map_err(|source| EmulationError::Write { path: to.to_owned(), source })
}

impl Running {
    /// The node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    fn wait_until_up(&mut self) -> Result<(), EmulationError> {
        let deadline = Instant::now() + Duration::from_secs(20);
        for index in 0..self.devices.len() {
            let path = self.node.socket(index);
            loop {
                match Socket::connect(&path) {
                    Ok(_) => break,
                    Err(source) => {
                        let dead = self.devices[index].try_wait().ok().flatten().is_some();
                        if dead || Instant::now() > deadline {
                            return Err(EmulationError::NoDevice { path, source });
                        }
                    }
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// Environment that makes a program see this node's GPUs.
    pub fn environment(&self) -> Vec<(String, std::ffi::OsString)> {
        environment(&self.node)
    }

    /// Process ids of the devices.
    pub fn device_pids(&self) -> Vec<u32> {
        self.devices.iter().map(Child::id).collect()
    }
}

/// Environment that makes a program see a node's GPUs.
pub fn environment(node: &Node) -> Vec<(String, std::ffi::OsString)> {
    let root = node.root();
    let before = |name: &str, first: PathBuf| {
        let mut value = first.into_os_string();
        if let Some(old) = std::env::var_os(name).filter(|v| !v.is_empty()) {
            value.push(":");
            value.push(old);
        }
        (name.to_owned(), value)
    };
    let mut variables = vec![
        (DIRECTORY_VARIABLE.to_owned(), root.as_os_str().to_owned()),
        before("LD_LIBRARY_PATH", root.join("lib")),
        before("PATH", root.join("bin")),
    ];
    let own = [("CUDA_MPS_PIPE_DIRECTORY", "mps"), ("CUDA_MPS_LOG_DIRECTORY", "mps-log")];
    for (name, folder) in own {
        if std::env::var_os(name).is_none() {
            variables.push((name.to_owned(), root.join(folder).into_os_string()));
        }
    }
    variables
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.devices {
            if child.kill().is_ok() && child.wait().is_err() {
                // Already gone.
            }
        }
        if self.remove && std::fs::remove_dir_all(self.node.root()).is_err() {
            // Somebody else still writes there; the directory stays.
        }
    }
}
