//! The container image: each blob is what its name says, the chart and the Containerfile describe the
//! same image, and the program runs in it as the user that the image names.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
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
    a_builder_agrees(dir.path(), &rootfs, &config);
}

/// The Containerfile in a real builder gives the same image. In its builder's image the task has been
/// done already: to compile everything once more would take minutes and show nothing of the recipe.
#[expect(clippy::print_stdout, reason = "a test that is skipped must be seen")]
fn a_builder_agrees(dir: &Path, rootfs: &Path, config: &Value) {
    // SAFETY: a plain system call without arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root || Command::new("buildah").arg("--version").output().is_err() {
        let why = "the Containerfile was not built: that needs root and Debian's package buildah";
        assert!(std::env::var_os("CI").is_none(), "{why}");
        println!("SKIPPED: {why}");
        return;
    }
    let buildah = |words: &[&str]| {
        let mut command = Command::new("buildah");
        command.args(["--storage-driver", "vfs", "--root"]).arg(dir.join("storage"));
        command.arg("--runroot").arg(dir.join("runroot")).args(words);
        text(&command.output().unwrap(), words).trim().to_owned()
    };
    let shown = |path: &Path| path.display().to_string();
    let base = dir.join("builder");
    fs::create_dir_all(base.join("bin")).unwrap();
    for program in ["sh", "cp"] {
        let words = format!("p=$(command -v {program}); echo $p; ldd $p");
        let needed = Command::new("sh").args(["-c", &words]).output().unwrap();
        for file in text(&needed, &["ldd"]).split_whitespace().filter(|w| w.starts_with('/')) {
            let file = Path::new(file);
            let to = match file.file_name().filter(|name| *name == program) {
                Some(name) => base.join("bin").join(name),
                None => base.join(file.strip_prefix("/").unwrap()),
            };
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(file, to).unwrap();
        }
    }
    let done = "#!/bin/sh\n[ \"$*\" = \"xtask image --profile release --rootfs /image\" ] || exit 9\ncp -a /made /image\n";
    fs::write(base.join("bin/cargo"), done).unwrap();
    fs::set_permissions(base.join("bin/cargo"), fs::Permissions::from_mode(0o755)).unwrap();
    let builder = buildah(&["from", "scratch"]);
    buildah(&["copy", "--quiet", &builder, &shown(&base), "/"]);
    buildah(&["copy", "--quiet", &builder, &shown(rootfs), "/made"]);
    buildah(&["commit", "--quiet", &builder, "localhost/builder"]);
    let context = dir.join("context");
    fs::create_dir(&context).unwrap();
    let recipe = shown(&root().join("deploy/image/Containerfile"));
    let (chroot, builder) = ("--isolation=chroot", "--build-arg=BUILDER=localhost/builder");
    let build = ["build", "--quiet", chroot, "--pull-never", builder, "--tag=muxflow:test"];
    buildah(&[&build[..], &["--file", &recipe, &shown(&context)]].concat());
    let layout = dir.join("built");
    buildah(&["push", "--quiet", "muxflow:test", &format!("oci:{}:test", shown(&layout))]);

    let kind = |name: &str| format!("application/vnd.oci.image.{name}");
    let index = json(&fs::read(layout.join("index.json")).unwrap());
    let manifest = json(&blob(&layout, &index["manifests"][0], &kind("manifest.v1+json")).1);
    let built = json(&blob(&layout, &manifest["config"], &kind("config.v1+json")).1);
    for field in ["User", "Entrypoint"] {
        assert_eq!(built["config"][field], config["config"][field]);
    }
    let unpacked = dir.join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    for layer in manifest["layers"].as_array().unwrap() {
        let (path, _) = blob(&layout, layer, &kind("layer.v1.tar+gzip"));
        let unpack = Command::new("tar").arg("-xpzf").arg(path).arg("-C").arg(&unpacked).status();
        assert!(unpack.unwrap().success());
    }
    let words = ["-r", "--no-dereference"];
    let differ = Command::new("diff").args(words).args([rootfs, &unpacked]).output().unwrap();
    assert_eq!(text(&differ, &["diff"]), "");
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
