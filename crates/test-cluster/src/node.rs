//! A real node for a cluster on this machine: a kubelet, containerd and runc.
//!
//! A kubelet wants a machine of its own: its folder of plugins has a fixed path, it changes settings
//! of the kernel, and what it starts outlives it. So both run in a namespace of mounts and one of
//! processes. In there `/run`, `/var/lib/kubelet`, `/var/lib/muxflow` and `/var/log` are empty, the settings of the
//! kernel have the values that a kubelet wants, and when the first process ends, which is with the
//! test, the kernel ends every container and takes off every mount.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Error;
use crate::cluster::{Cluster, free_ports};
use crate::groups::Groups;
use crate::program::{self, tail};

/// The one image of the node: no more than a pod's first process and links to the host's programs,
/// which a pod mounts at `/usr`.
pub const IMAGE: &str = "muxflow.test/host:1";

/// How long a part may take to come up.
const PATIENCE: Duration = Duration::from_secs(120);
const SOCKET: &str = "run/containerd/containerd.sock";

/// What the kubelet would otherwise write, for the whole machine.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// A plugin that gives every pod an address and no network: nothing here talks over one.
const NO_NETWORK: &str = r#"#!/bin/sh
cat > /dev/null
case "$CNI_COMMAND" in
ADD) echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'"$CNI_IFNAME"'", "sandbox": "'"$CNI_NETNS"'"}], "ips": [{"address": "10.88.0.2/16", "interface": 0}]}' ;;
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
esac
"#;

/// A node that runs until it is dropped, or until this process ends, however it ends.
#[derive(Debug)]
pub struct Node {
    name: String,
    folder: PathBuf,
    kubernetes: PathBuf,
    runtime: PathBuf,
    kubeconfig: PathBuf,
    groups: Groups,
    /// The first process of the namespaces, by its id here.
    first: u32,
    holder: Child,
    containerd: Option<Child>,
    kubelet: Option<Child>,
}

impl Node {
    /// Starts a node of this name, which registers itself with the cluster; it is not ready yet.
    pub fn start(cluster: &Cluster, name: &str) -> Result<Self, Error> {
        let runc = preconditions()?;
        let (kubernetes, runtime) = (program::find_or_build()?, program::find_or_build_runtime()?);
        let folder = cluster.folder().join(name);
        for part in ["kubelet", "muxflow", "containerd", "pods", "cni/bin", "cni/conf", "kernel"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(file("create", &path))?;
        }
        let groups = Groups::create(&format!("muxflow-test-{}", std::process::id()))?;
        let mut holder = hold(&folder, &runtime)?;
        let first = first_process(&mut holder, &folder)?;
        let kubeconfig = cluster.kubeconfig();
        let name = name.to_owned();
        let (containerd, kubelet) = (None, None);
        let mut node = Node {
            name,
            folder,
            kubernetes,
            runtime,
            kubeconfig,
            groups,
            first,
            holder,
            containerd,
            kubelet,
        };
        node.start_containerd(&runc)?;
        let root = node.host_image()?;
        node.put_image(IMAGE, &root)?;
        node.write_kubelet_config()?;
        node.start_kubelet()?;
        Ok(node)
    }

    /// Its name in the cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a control group that is removed with the node.
    pub fn group(&self, name: &str) -> String {
        format!("{}/{name}", self.groups.root().trim_start_matches('/'))
    }

    /// A file of the node as this process sees it.
    pub fn inside(&self, path: &str) -> PathBuf {
        Path::new("/proc").join(self.first.to_string()).join("root").join(path)
    }

    /// A command that runs on the node: it sees the node's mounts and processes.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--pid", "--target", &self.first.to_string(), "--"]).arg(program);
        command
    }

    /// Starts the kubelet. It takes its time to be ready; tests wait for what it does.
    pub fn start_kubelet(&mut self) -> Result<(), Error> {
        let mut command = self.command(&self.kubernetes);
        let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
        command.arg("kubelet");
        command.arg(option("config", &self.folder.join("kubelet.yaml")));
        command.arg(option("kubeconfig", &self.kubeconfig));
        command.arg(option("cert-dir", &self.folder.join("kubelet-certificates")));
        command.arg(format!("--hostname-override={}", self.name));
        self.kubelet = Some(self.spawn(command, "kubelet")?);
        Ok(())
    }

    /// Ends the kubelet at once, as a crash would.
    pub fn kill_kubelet(&mut self) {
        end(self.kubelet.take());
    }

    /// The end of what a part wrote.
    pub fn log(&self, part: &str, lines: usize) -> String {
        tail(&fs::read_to_string(self.log_path(part)).unwrap_or_default(), lines)
    }

    fn log_path(&self, part: &str) -> PathBuf {
        self.folder.join(format!("{part}.log"))
    }

    /// Starts a command that ends with this process.
    fn spawn(&self, mut command: Command, part: &str) -> Result<Child, Error> {
        let path = self.log_path(part);
        let log = File::options().create(true).append(true).open(&path);
        let log = log.map_err(file("open", &path))?;
        let also = log.try_clone().map_err(file("open", &path))?;
        command.stdin(Stdio::piped()).stdout(log).stderr(also).env("EXIT_WITH_STDIN", "1");
        command.spawn().map_err(file("start", Path::new(command.get_program())))
    }

    fn start_containerd(&mut self, runc: &Path) -> Result<(), Error> {
        let cni = self.folder.join("cni");
        let plugin = cni.join("bin/address-only");
        fs::write(&plugin, NO_NETWORK).map_err(file("write", &plugin))?;
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755))
            .map_err(file("change", &plugin))?;
        let network =
            r#"{"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "address-only"}]}"#;
        self.write("cni/conf/10-none.conflist", network)?;
        let shown = |path: &Path| path.display().to_string();
        // The native snapshotter works on every file system; without CAP_SYS_RESOURCE nobody may
        // lower the score by which the kernel chooses whom to kill.
        let config = format!(
            "version = 3\nroot = '{root}'\nstate = '/run/containerd'\n\
             [grpc]\naddress = '/{SOCKET}'\n\
             [plugins.'io.containerd.cri.v1.images']\nsnapshotter = 'native'\n\
             [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = '{IMAGE}'\n\
             [plugins.'io.containerd.cri.v1.runtime']\nrestrict_oom_score_adj = true\n\
             [plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['{bin}']\nconf_dir = '{conf}'\nuse_internal_loopback = true\n\
             [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n\
             [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nBinaryName = '{runc}'\n\
             [plugins.'io.containerd.transfer.v1.local']\nunpack_config = [{{platform = 'linux', snapshotter = 'native'}}]\n",
            root = shown(&self.folder.join("containerd")),
            bin = shown(&cni.join("bin")),
            conf = shown(&cni.join("conf")),
            runc = shown(runc),
        );
        self.write("containerd.toml", &config)?;
        let mut command = self.command(&self.runtime.join("containerd"));
        command.arg("--config").arg(self.folder.join("containerd.toml"));
        self.containerd = Some(self.spawn(command, "containerd")?);
        let began = Instant::now();
        let socket = self.inside(SOCKET);
        while UnixStream::connect(&socket).is_err() {
            let ended = self.containerd.as_mut().is_none_or(has_ended);
            if ended || began.elapsed() > PATIENCE {
                return Err(Error::NotReady {
                    part: "containerd",
                    waited_s: began.elapsed().as_secs(),
                    log: self.log_path("containerd"),
                    output: self.log("containerd", 15),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The folder of an image that has nothing of its own.
    fn host_image(&self) -> Result<PathBuf, Error> {
        let root = self.folder.join("image");
        for folder in ["dev", "etc", "proc", "run", "sys", "tmp", "usr"] {
            let path = root.join(folder);
            fs::create_dir_all(&path).map_err(file("create", &path))?;
        }
        for link in ["bin", "lib", "lib64", "sbin"] {
            let path = root.join(link);
            symlink(Path::new("usr").join(link), &path).map_err(file("create", &path))?;
        }
        let pause = self.runtime.join("pause");
        fs::copy(&pause, root.join("pause")).map_err(file("copy", &pause))?;
        Ok(root)
    }

    /// Gives containerd an image: all that is in a folder, of which `/pause` is started.
    pub fn put_image(&self, name: &str, root: &Path) -> Result<(), Error> {
        let containerd = self.runtime.join("containerd");
        let mut command = self.command(&containerd);
        command.args(["image", &format!("/{SOCKET}"), name]).arg(root);
        let output = command.output().map_err(file("start", &containerd))?;
        if output.status.success() {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&output.stderr).into_owned();
        let log = self.log_path("containerd");
        Err(Error::NotReady { part: "the image", waited_s: 0, log, output })
    }

    fn write_kubelet_config(&self) -> Result<(), Error> {
        let [port, ..] = free_ports()?;
        // Pods that are told to leave, and capacity that changes, are seen within a second. Pressure
        // on the machine's disk is none of this node's business.
        let config = serde_json::json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false},
                "x509": {"clientCAFile": self.folder.join("../pki/ca.crt")}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": format!("unix:///{SOCKET}"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.groups.root(),
            "failCgroupV1": false,
            "failSwapOn": false,
            "localStorageCapacityIsolation": false,
            "makeIPTablesUtilChains": false,
            "maxOpenFiles": most_open_files(),
            "oomScoreAdj": 0,
            "podLogsDir": self.folder.join("pods"),
            "volumePluginDir": self.folder.join("volume-plugins"),
            "resolvConf": "",
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%",
                "imagefs.available": "0%"},
            "syncFrequency": "1s",
            "nodeStatusUpdateFrequency": "1s",
        });
        self.write("kubelet.yaml", &config.to_string())
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(file("write", &path))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill_kubelet();
        end(self.containerd.take());
        // With its first process, everything in the namespace ends.
        drop(self.holder.stdin.take());
        drop(self.holder.wait());
        self.groups.remove();
    }
}

/// Ends a process that ends with its standard input.
fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        drop(child.stdin.take());
        drop(child.wait());
    }
}

fn has_ended(child: &mut Child) -> bool {
    matches!(child.try_wait(), Ok(Some(_)) | Err(_))
}

/// Starts the first process of the namespaces.
fn hold(folder: &Path, runtime: &Path) -> Result<Child, Error> {
    let shown = |path: &Path| path.display().to_string();
    let mut script =
        String::from("set -e\nmount -t tmpfs none /run\nmount -t tmpfs none /var/log\n");
    for own in ["kubelet", "muxflow"] {
        let from = shown(&folder.join(own));
        script += &format!("mkdir -p /var/lib/{own}\nmount --bind '{from}' /var/lib/{own}\n");
    }
    for (setting, value) in KERNEL {
        let path = folder.join("kernel").join(setting.replace('/', "-"));
        fs::write(&path, value).map_err(file("write", &path))?;
        let (from, to) = (shown(&path), format!("/proc/sys/{setting}"));
        script += &format!("[ ! -e {to} ] || mount --bind '{from}' {to}\n");
    }
    script += &format!(
        "touch '{}'\nexec '{}'\n",
        shown(&folder.join("held")),
        shown(&runtime.join("pause"))
    );
    let log_path = folder.join("namespaces.log");
    let log = File::create(&log_path).map_err(file("create", &log_path))?;
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        &script,
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).env("EXIT_WITH_STDIN", "1");
    command.spawn().map_err(file("start", Path::new("unshare")))
}

/// Waits until the namespaces are there; their first process by its id here.
fn first_process(holder: &mut Child, folder: &Path) -> Result<u32, Error> {
    let began = Instant::now();
    loop {
        if folder.join("held").exists()
            && let Some(first) = child_of(holder.id())
        {
            return Ok(first);
        }
        if has_ended(holder) || began.elapsed() > PATIENCE {
            let said = fs::read_to_string(folder.join("namespaces.log")).unwrap_or_default();
            let why = format!("no namespaces of mounts and processes: {}", said.trim());
            return Err(Error::Refused { why });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn child_of(parent: u32) -> Option<u32> {
    let wanted = format!("PPid:\t{parent}");
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let id: u32 = entry.file_name().to_str()?.parse().ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        status.lines().any(|line| line == wanted).then_some(id)
    })
}

/// What must be here before anything is tried: the path of runc, or what is missing.
fn preconditions() -> Result<PathBuf, Error> {
    let missing = |why: &str| Error::Program(program::Error::Unavailable { why: why.to_owned() });
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    if uid.and_then(|ids| ids.split_ascii_whitespace().nth(1)) != Some("0") {
        return Err(missing("a kubelet and containers need root; run the scenarios as root"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join("runc")).find(|runc| runc.is_file()).ok_or_else(|| {
        missing("there is no runc to start containers with; install Debian's package runc")
    })
}

/// Without CAP_SYS_RESOURCE nobody may have more than this.
fn most_open_files() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let hard = line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok());
    hard.unwrap_or(4096).min(1_000_000)
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}
