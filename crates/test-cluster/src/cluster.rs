//! Starts, restarts and stops the parts of one cluster.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::pki::Pki;
use crate::program::tail;
use crate::{Error, program, ready};

/// A program of the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The store.
    Etcd,
    /// The API server.
    ApiServer,
    /// Jobs, namespaces, garbage collection, disruption budgets, service accounts. No node
    /// controller: nodes written by a test have no heartbeat.
    ControllerManager,
    /// The scheduler that Kubernetes ships, for comparison.
    Scheduler,
}

impl Part {
    /// The name under which Kubernetes ships it.
    pub fn name(self) -> &'static str {
        match self {
            Part::Etcd => "etcd",
            Part::ApiServer => "kube-apiserver",
            Part::ControllerManager => "kube-controller-manager",
            Part::Scheduler => "kube-scheduler",
        }
    }
}

/// How long the cluster lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the value is dropped or the process that made it ends, however it ends.
    WithThisProcess,
    /// Until its processes are stopped by somebody else; their ids are in `pids`.
    Detached,
}

/// How long a part may take to come up. Generous: a busy machine with few cores is common in CI.
const PATIENCE: Duration = Duration::from_secs(120);

/// Only what service accounts ask for: tests compare it with the rights that they were given.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- level: Metadata\n  userGroups: ['system:serviceaccounts']\n- level: None\n";

/// Those that tests rely on; no node controller, because nodes written by a test have no heartbeat.
const CONTROLLERS: [&str; 8] = [
    "disruption-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "resourceclaim-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
];

/// A running control plane.
#[derive(Debug)]
pub struct Cluster {
    folder: PathBuf,
    program: PathBuf,
    pki: Pki,
    lifetime: Lifetime,
    /// Controllers beside [`CONTROLLERS`].
    more: &'static [&'static str],
    api_port: u16,
    etcd_port: u16,
    peer_port: u16,
    running: BTreeMap<Part, Child>,
}

impl Cluster {
    /// Starts etcd, the API server and the controller manager in a folder of its own under the
    /// system's folder for temporary files.
    pub fn start() -> Result<Self, Error> {
        Self::start_with(&[])
    }

    /// The same with these controllers too, such as `daemonset-controller`.
    pub fn start_with(more: &'static [&'static str]) -> Result<Self, Error> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("muxflow-kubernetes-{}-{number}", std::process::id());
        Self::start_parts(&std::env::temp_dir().join(name), Lifetime::WithThisProcess, more)
    }

    /// Starts the same parts in a given folder, which must be new or empty.
    pub fn start_in(folder: &Path, lifetime: Lifetime) -> Result<Self, Error> {
        Self::start_parts(folder, lifetime, &[])
    }

    fn start_parts(
        folder: &Path,
        lifetime: Lifetime,
        more: &'static [&'static str],
    ) -> Result<Self, Error> {
        let program = program::find_or_build()?;
        let mut cluster = Cluster {
            folder: folder.to_owned(),
            program,
            pki: Pki::create(&folder.join("pki"))?,
            lifetime,
            more,
            api_port: 0,
            etcd_port: 0,
            peer_port: 0,
            running: BTreeMap::new(),
        };
        [cluster.api_port, cluster.etcd_port, cluster.peer_port] = free_ports()?;
        cluster.write("admin.kubeconfig", &cluster.kubeconfig_text())?;
        cluster.write("audit.yaml", AUDIT_POLICY)?;
        cluster.write("scheduler.yaml", &cluster.scheduler_text())?;
        for part in [Part::Etcd, Part::ApiServer, Part::ControllerManager] {
            cluster.start_part(part)?;
        }
        Ok(cluster)
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("admin.kubeconfig")
    }

    /// The port of the API server on this machine.
    pub fn port(&self) -> u16 {
        self.api_port
    }

    /// The address of the API server.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.api_port)
    }

    /// The certificate that clients trust.
    pub fn authority(&self) -> PathBuf {
        self.pki.path("ca.crt")
    }

    /// The API server's log of what service accounts asked for, one JSON object a line.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    /// Renders a Helm chart with Helm's own engine, as for an installation in a namespace; the error is
    /// what Helm says.
    pub fn render_chart(
        &self,
        chart: &Path,
        namespace: &str,
        values: Option<&Path>,
    ) -> Result<String, String> {
        let words = [Path::new("helm-template"), chart, Path::new(namespace)];
        self.printed(words.into_iter().chain(values))
    }

    /// What `kubectl apply -k` would send, by kustomize's own engine; the error is what that says.
    pub fn kustomize(&self, folder: &Path) -> Result<String, String> {
        self.printed([Path::new("kustomize-build"), folder].into_iter())
    }

    fn printed<'a>(&self, words: impl Iterator<Item = &'a Path>) -> Result<String, String> {
        let output =
            Command::new(&self.program).args(words).output().map_err(|error| error.to_string())?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// The folder with logs and state.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts a part and, for the API server, waits until it is ready.
    pub fn start_part(&mut self, part: Part) -> Result<(), Error> {
        let log_path = self.log(part);
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .map_err(|source| Error::File { action: "open", path: log_path.clone(), source })?;
        let also = log.try_clone().map_err(|source| Error::File {
            action: "open",
            path: log_path.clone(),
            source,
        })?;
        let mut command = Command::new(&self.program);
        command.arg(part.name()).args(self.arguments(part)).stdout(log).stderr(also);
        match self.lifetime {
            Lifetime::WithThisProcess => {
                command.stdin(Stdio::piped()).env("EXIT_WITH_STDIN", "1");
            }
            Lifetime::Detached => {
                command.stdin(Stdio::null());
            }
        }
        let child = command.spawn().map_err(|source| Error::File {
            action: "start",
            path: self.program.clone(),
            source,
        })?;
        if self.lifetime == Lifetime::Detached {
            self.record(part, child.id())?;
        }
        self.running.insert(part, child);
        self.wait_until_ready(part)
    }

    /// The process of a part that runs.
    pub fn process(&self, part: Part) -> Option<u32> {
        self.running.get(&part).map(Child::id)
    }

    /// Kills a part at once, as a crash would.
    pub fn kill_part(&mut self, part: Part) {
        if let Some(mut child) = self.running.remove(&part) {
            // A part that is already dead is what was asked for.
            drop(child.kill());
            drop(child.wait());
        }
    }

    fn wait_until_ready(&mut self, part: Part) -> Result<(), Error> {
        let started = Instant::now();
        loop {
            let up = match part {
                Part::Etcd => ready::listens(self.etcd_port),
                Part::ApiServer => ready::says_ok(self.api_port, &self.authority()),
                // Nobody asks these for anything; tests wait for what they do.
                Part::ControllerManager | Part::Scheduler => true,
            };
            if up {
                return Ok(());
            }
            let ended = self
                .running
                .get_mut(&part)
                .is_none_or(|child| matches!(child.try_wait(), Ok(Some(_)) | Err(_)));
            if ended || started.elapsed() > PATIENCE {
                let log = self.log(part);
                let output = tail(&fs::read_to_string(&log).unwrap_or_default(), 15);
                let waited_s = started.elapsed().as_secs();
                return Err(Error::NotReady { part: part.name(), waited_s, log, output });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn log(&self, part: Part) -> PathBuf {
        self.folder.join(format!("{}.log", part.name()))
    }

    fn record(&self, part: Part, id: u32) -> Result<(), Error> {
        use std::io::Write as _;
        let path = self.folder.join("pids");
        let failed = |source| Error::File { action: "write", path: path.clone(), source };
        let mut file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        writeln!(file, "{id} {}", part.name()).map_err(failed)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(|source| Error::File { action: "write", path, source })
    }

    fn kubeconfig_text(&self) -> String {
        let file = |name: &str| self.pki.path(name).display().to_string();
        format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: test\n  cluster:\n    server: {}\n    certificate-authority: {}\nusers:\n- name: admin\n  user:\n    client-certificate: {}\n    client-key: {}\ncontexts:\n- name: test\n  context: {{cluster: test, user: admin}}\ncurrent-context: test\n",
            self.url(),
            file("ca.crt"),
            file("admin.crt"),
            file("admin.key"),
        )
    }

    /// Its usual limit of 50 requests per second would be all that a comparison measures.
    fn scheduler_text(&self) -> String {
        format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nclientConnection: {{kubeconfig: {}, qps: 5000, burst: 5000}}\nleaderElection: {{leaderElect: false}}\n",
            self.kubeconfig().display()
        )
    }

    fn arguments(&self, part: Part) -> Vec<String> {
        let file = |name: &str| self.pki.path(name).display().to_string();
        let folder = |name: &str| self.folder.join(name).display().to_string();
        let kubeconfig = self.kubeconfig().display().to_string();
        let etcd = format!("http://127.0.0.1:{}", self.etcd_port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let pairs: Vec<(&str, String)> = match part {
            Part::Etcd => vec![
                ("data-dir", folder("etcd")),
                ("listen-client-urls", etcd.clone()),
                ("advertise-client-urls", etcd),
                ("listen-peer-urls", peer.clone()),
                ("initial-advertise-peer-urls", peer.clone()),
                ("initial-cluster", format!("default={peer}")),
                ("unsafe-no-fsync", "true".to_owned()),
                ("log-level", "warn".to_owned()),
            ],
            Part::ApiServer => vec![
                ("etcd-servers", etcd),
                ("bind-address", "127.0.0.1".to_owned()),
                ("secure-port", self.api_port.to_string()),
                ("cert-dir", folder("apiserver")),
                ("endpoint-reconciler-type", "none".to_owned()),
                ("service-cluster-ip-range", "10.0.0.0/24".to_owned()),
                ("tls-cert-file", file("server.crt")),
                ("tls-private-key-file", file("server.key")),
                ("client-ca-file", file("ca.crt")),
                ("service-account-key-file", file("accounts.pub")),
                ("service-account-signing-key-file", file("accounts.key")),
                ("service-account-issuer", "https://kubernetes.default.svc".to_owned()),
                ("authorization-mode", "RBAC".to_owned()),
                ("allow-privileged", "true".to_owned()),
                ("audit-policy-file", folder("audit.yaml")),
                ("audit-log-path", folder("audit.log")),
            ],
            Part::ControllerManager => vec![
                ("kubeconfig", kubeconfig),
                ("service-account-private-key-file", file("accounts.key")),
                ("root-ca-file", file("ca.crt")),
                ("leader-elect", "false".to_owned()),
                ("secure-port", "0".to_owned()),
                ("controllers", [&CONTROLLERS, self.more].concat().join(",")),
                ("horizontal-pod-autoscaler-sync-period", "2s".to_owned()),
            ],
            Part::Scheduler => {
                vec![("config", folder("scheduler.yaml")), ("secure-port", "0".to_owned())]
            }
        };
        pairs.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.lifetime == Lifetime::Detached {
            return;
        }
        for part in [Part::Scheduler, Part::ControllerManager, Part::ApiServer, Part::Etcd] {
            self.kill_part(part);
        }
        // The logs of a test that fails are what one wants to read.
        if !std::thread::panicking() {
            drop(fs::remove_dir_all(&self.folder));
        }
    }
}

/// Ports that are free now. Somebody may take one before it is used; then the part that wanted it
/// does not come up, and says so.
pub fn free_ports() -> Result<[u16; 3], Error> {
    let failed = |source| Error::File { action: "bind", path: "127.0.0.1:0".into(), source };
    let mut sockets = Vec::new();
    let mut ports = [0; 3];
    for port in &mut ports {
        let socket = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        *port = socket.local_addr().map_err(failed)?.port();
        sockets.push(socket);
    }
    Ok(ports)
}
