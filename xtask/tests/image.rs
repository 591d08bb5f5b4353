//! The container image: each blob is what its name says, the chart and the Containerfile describe the
//! same image, and the program runs in it as the user that the image names.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn xtask(words: &[&str], out: &Path) {
    let status = Command::new(env!("CARGO_BIN_EXE_xtask")).args(words).arg(out).status().unwrap();
    assert!(status.success(), "{words:?}: {status}");
}

/// The content that a descriptor names; size and digest are checked.
fn blob(layout: &Path, descriptor: &Value, media_type: &str) -> (PathBuf, Vec<u8>) {
    assert_eq!(descriptor["mediaType"], media_type);
    let digest = descriptor["digest"].as_str().unwrap();
    let path = layout.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap());
    let bytes = fs::read(&path).unwrap();
    assert_eq!(descriptor["size"].as_u64(), Some(bytes.len() as u64), "{digest}");
    assert_eq!(sha256(&bytes), digest);
    (path, bytes)
}

fn sha256(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// A program in the image, with nothing of this machine in reach but the kernel.
fn inside(rootfs: &Path, user: &str, words: &[&str]) -> String {
    // SAFETY: a plain system call without arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut command = if is_root {
        let mut command = Command::new("chroot");
        command.arg(format!("--userspec={user}")).arg(rootfs);
        command
    } else {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--root"]).arg(rootfs);
        command
    };
    let output = command.args(words).env_clear().env("PATH", "/usr/sbin:/usr/bin").output();
    text(&output.unwrap(), words)
}

fn text(output: &Output, words: &[&str]) -> String {
    let text = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b).into_owned());
    assert!(output.status.success(), "{words:?}: {}: {text:?}", output.status);
    text.concat()
}

fn lines(file: &str) -> Vec<String> {
    fs::read_to_string(root().join(file)).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn the_image_is_whole_and_the_program_runs_in_it() {
    let dir = tempfile::tempdir().unwrap();
    xtask(&["image", "--profile", "dev", "--out"], dir.path());
    let layout = dir.path().join("oci");
    assert_eq!(json(&fs::read(layout.join("oci-layout")).unwrap())["imageLayoutVersion"], "1.0.0");
    let index = json(&fs::read(layout.join("index.json")).unwrap());
    let entry = &index["manifests"][0];
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1);
    let kind = |name: &str| format!("application/vnd.oci.image.{name}");
    let (_, manifest) = blob(&layout, entry, &kind("manifest.v1+json"));
    let manifest = json(&manifest);
    let (config_path, config) = blob(&layout, &manifest["config"], &kind("config.v1+json"));
    let config = json(&config);
    assert_eq!(config["os"], "linux");
    assert_eq!(config["architecture"], entry["platform"]["architecture"]);

    let rootfs = dir.path().join("rootfs");
    fs::create_dir(&rootfs).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let contents = config["rootfs"]["diff_ids"].as_array().unwrap();
    assert_eq!((layers.len(), contents.len()), (2, 2));
    let mut paths = vec![config_path];
    for (layer, content) in layers.iter().zip(contents) {
        let (path, _) = blob(&layout, layer, &kind("layer.v1.tar+gzip"));
        let plain = Command::new("gzip").args(["-dc"]).arg(&path).output().unwrap();
        assert_eq!(sha256(&plain.stdout), content.as_str().unwrap());
        let archive = dir.path().join("layer.tar");
        fs::write(&archive, &plain.stdout).unwrap();
        let unpack = Command::new("tar").arg("-xpf").arg(&archive).arg("-C").arg(&rootfs).status();
        assert!(unpack.unwrap().success());
        paths.push(path);
    }

    // Nothing in the layout but what is named, and all of it in the one file too.
    let blobs = fs::read_dir(layout.join("blobs/sha256")).unwrap().count();
    assert_eq!(blobs, 4, "a manifest, a configuration and two layers");
    let old = json(&fs::read(layout.join("manifest.json")).unwrap());
    assert_eq!(layout.join(old[0]["Config"].as_str().unwrap()), paths[0]);
    assert_eq!(old[0]["RepoTags"], serde_json::json!(["muxflow:0.1.0"]));
    let architecture = config["architecture"].as_str().unwrap();
    let file = dir.path().join(format!("muxflow-{}-{architecture}.tar", env!("CARGO_PKG_VERSION")));
    let listed = Command::new("tar").arg("-tf").arg(file).output().unwrap();
    let listed = text(&listed, &["tar"]);
    for part in ["index.json", "oci-layout", "manifest.json"] {
        assert!(listed.lines().any(|line| line == part), "{part} not in {listed}");
    }
    assert_eq!(listed.lines().filter(|line| line.starts_with("blobs/sha256/")).count(), 5);

    let user = config["config"]["User"].as_str().unwrap();
    let program = config["config"]["Entrypoint"][0].as_str().unwrap();
    let version = inside(&rootfs, user, &[program, "--version"]);
    assert_eq!(version.trim(), format!("muxflow {}", env!("CARGO_PKG_VERSION")));
    for (words, said) in
        [(["scheduler", "--help"], "--stale-after"), (["agent", "--help"], "--kubelet-dir")]
    {
        let help = inside(&rootfs, user, &[program, words[0], words[1]]);
        assert!(help.contains(said), "{help}");
    }
    // What the agent hands to pods.
    assert!(fs::metadata(rootfs.join("usr/lib/muxflow/libxcuda.so")).unwrap().len() > 0);
    for absent in
        ["bin/sh", "usr/bin/nvidia-cuda-mps-control", "usr/lib/muxflow/muxflow-emulated-node"]
    {
        assert!(!rootfs.join(absent).exists(), "{absent} has no business in the image");
    }
    agrees(&config, entry);
}

/// The chart and the Containerfile name the same image, user and program.
fn agrees(config: &Value, entry: &Value) {
    let rendered = lines("deploy/kubernetes/muxflow.yaml");
    let named: Vec<&str> =
        rendered.iter().filter_map(|line| line.trim().strip_prefix("image: ")).collect();
    assert_eq!(named.len(), 2, "{named:?}");
    for name in named {
        let full = format!("docker.io/library/{}", name.trim_matches('"'));
        assert_eq!(entry["annotations"]["io.containerd.image.name"], full.as_str());
    }
    let recipe = lines("deploy/image/Containerfile");
    let of = |word: &str| {
        let found: Vec<&str> = recipe.iter().filter_map(|line| line.strip_prefix(word)).collect();
        assert_eq!(found.len(), 1, "{word} in the Containerfile: {found:?}");
        found[0].trim().to_owned()
    };
    assert_eq!(config["config"]["User"], of("USER ").as_str());
    assert_eq!(config["config"]["Entrypoint"].to_string(), of("ENTRYPOINT "));
    let toolchain = of("ENV RUSTUP_TOOLCHAIN=");
    assert!(lines("rust-toolchain.toml").contains(&format!("channel = \"{toolchain}\"")));
    // The image's user is nobody, so the agent's pod must say that it is root.
    let user = config["config"]["User"].as_str().unwrap().split(':').next().unwrap();
    assert!(rendered.iter().any(|line| line.trim() == format!("runAsUser: {user}")));
    let agent = rendered.iter().position(|line| line.trim() == "privileged: true").unwrap();
    assert_eq!(rendered[agent + 1].trim(), "runAsUser: 0");
}
