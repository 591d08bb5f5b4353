//! The image as files: an OCI layout, where each blob's name is the digest of its content. Times and
//! owners are not those of the machine that builds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::rootfs::Base;
use super::{Name, USER};
use crate::dist::run_program;

/// What the program is started as.
const ENTRYPOINT: &str = "/usr/bin/muxflow";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Of GNU tar: the same folder makes the same archive.
const REPEATABLE: [&str; 6] =
    ["--format=gnu", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"];

/// A layout of one image with a layer for each folder, lowest first; gives the manifest's digest.
pub(super) fn write(
    to: &Path,
    name: &Name,
    base: &Base,
    folders: &[PathBuf],
) -> anyhow::Result<String> {
    let blobs = to.join("blobs/sha256");
    fs::create_dir_all(&blobs).with_context(|| format!("cannot make {}", blobs.display()))?;
    let (mut layers, mut contents) = (Vec::new(), Vec::new());
    for folder in folders {
        let (layer, content) = layer(&blobs, folder)?;
        layers.push(layer);
        contents.push(content);
    }
    let labels = json!({
        "org.opencontainers.image.title": "muxflow",
        "org.opencontainers.image.version": name.tag,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "dev.muxflow.debian-packages": base.packages.join(", "),
    });
    let config = json!({
        "architecture": base.architecture,
        "os": "linux",
        "config": {
            "User": format!("{USER}:{USER}"),
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": [ENTRYPOINT],
            "WorkingDir": "/",
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": contents},
        "history": [
            {"created_by": format!("files of {}", base.packages.join(", "))},
            {"created_by": "cargo xtask image"},
        ],
    });
    let config = json_blob(&blobs, CONFIG, &config)?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers,
    });
    let mut entry = json_blob(&blobs, MANIFEST, &manifest)?;
    let digest = entry["digest"].as_str().unwrap_or_default().to_owned();
    entry["platform"] = json!({"architecture": base.architecture, "os": "linux"});
    // The first for containerd, the second for everybody else.
    entry["annotations"] = json!({
        "io.containerd.image.name": name.full(), "org.opencontainers.image.ref.name": name.tag,
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    });
    save(&to.join("index.json"), &index)?;
    save(&to.join("oci-layout"), &json!({"imageLayoutVersion": "1.0.0"}))?;
    // Readers older than the standard look for this file.
    let path = |blob: &Value| {
        blob["digest"].as_str().unwrap_or_default().replacen("sha256:", "blobs/sha256/", 1)
    };
    let layers: Vec<String> = layers.iter().map(path).collect();
    let tag = format!("{}:{}", name.repository, name.tag);
    save(
        &to.join("manifest.json"),
        &json!([{"Config": path(&config), "RepoTags": [tag], "Layers": layers}]),
    )?;
    Ok(digest)
}

/// The layout as one file.
pub(super) fn pack(layout: &Path, file: &Path) -> anyhow::Result<()> {
    run_program(
        Command::new("tar").args(REPEATABLE).arg("-cf").arg(file).arg("-C").arg(layout).args([
            "blobs",
            "index.json",
            "manifest.json",
            "oci-layout",
        ]),
    )
}

/// A layer's descriptor, and the digest of its content before it is compressed.
fn layer(blobs: &Path, folder: &Path) -> anyhow::Result<(Value, String)> {
    let file = blobs.join("layer.tar");
    run_program(
        Command::new("tar").args(REPEATABLE).arg("-cf").arg(&file).arg("-C").arg(folder).arg("."),
    )?;
    let content = digest(&read(&file)?);
    run_program(Command::new("gzip").args(["-n", "-6"]).arg(&file))?;
    let packed = blobs.join("layer.tar.gz");
    let bytes = read(&packed)?;
    let named = digest(&bytes);
    fs::rename(&packed, blobs.join(named.trim_start_matches("sha256:")))?;
    Ok((descriptor(LAYER, &named, bytes.len()), content))
}

fn json_blob(blobs: &Path, media_type: &str, value: &Value) -> anyhow::Result<Value> {
    let bytes = serde_json::to_vec(value)?;
    let named = digest(&bytes);
    let path = blobs.join(named.trim_start_matches("sha256:"));
    fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(descriptor(media_type, &named, bytes.len()))
}

fn descriptor(media_type: &str, digest: &str, size: usize) -> Value {
    json!({"mediaType": media_type, "digest": digest, "size": size})
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn save(path: &Path, value: &Value) -> anyhow::Result<()> {
    fs::write(path, serde_json::to_vec(value)?)
        .with_context(|| format!("cannot write {}", path.display()))
}
