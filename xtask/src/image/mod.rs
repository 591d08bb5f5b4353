//! `cargo xtask image`: the container image that the Helm chart names, made without a daemon.
//!
//! The root file system holds the program, the interposer that the agent hands to pods, and the few
//! libraries of Debian that both are linked with, taken from the packages of the machine that builds.
//! No shell, no package manager, nothing of the emulated GPU. `deploy/image/Containerfile` has the same
//! root file system made by this task and wraps it with docker, podman or buildah instead.

mod layout;
mod rootfs;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::ci::root;
use crate::dist;

/// Who the program is when the cluster does not say: nobody in particular, as the chart has it too.
pub(crate) const USER: u32 = 65532;

/// How to build and where to put it.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// Cargo profile of the program; the interposer has its own.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Directory for the image, as an OCI layout and as one file.
    #[arg(long, default_value = "target/image")]
    out: PathBuf,
    /// Only the root file system, into this new directory; for a Containerfile.
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    rootfs: Option<PathBuf>,
}

/// The name that the chart gives the image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) repository: String,
    pub(crate) tag: String,
}

impl Name {
    /// Read from the chart, so that the two cannot differ.
    fn of_chart(root: &Path) -> anyhow::Result<Self> {
        let chart = root.join("deploy/helm/muxflow");
        let values = read(&chart.join("values.yaml"))?;
        let image = values.split_once("\nimage:\n").map(|(_, rest)| rest);
        let repository = image.and_then(|rest| field(rest, "  repository: "));
        let tag = field(&read(&chart.join("Chart.yaml"))?, "appVersion: ");
        let name = Name {
            repository: repository.context("values.yaml of the chart has no image.repository")?,
            tag: tag.context("Chart.yaml has no appVersion")?,
        };
        let own = env!("CARGO_PKG_VERSION");
        ensure!(
            name.tag == own,
            "Chart.yaml has appVersion {}, but this is version {own}: make them equal",
            name.tag
        );
        Ok(name)
    }

    /// With the registry that is meant when none is named.
    pub(crate) fn full(&self) -> String {
        let prefix = match self.repository.split_once('/') {
            Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => "",
            Some(_) => "docker.io/",
            None => "docker.io/library/",
        };
        format!("{prefix}{}:{}", self.repository, self.tag)
    }
}

fn field(text: &str, start: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(start))?;
    Some(value.trim().trim_matches('"').to_owned())
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Builds, lays out and writes; prints where it is.
pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<()> {
    let name = Name::of_chart(&root())?;
    let base = rootfs::Base::of_this_machine()?;
    let built = dist::build(&args.profile)?;
    let absolute = |path: &Path| if path.is_absolute() { path.into() } else { root().join(path) };
    if let Some(folder) = &args.rootfs {
        let folder: PathBuf = absolute(folder);
        ensure!(!folder.exists(), "{} exists: name a new directory", folder.display());
        base.lay_out(&folder)?;
        rootfs::program(&built, &folder)?;
        println!("{}", folder.display());
        return Ok(());
    }
    let out: PathBuf = absolute(&args.out);
    let work = out.join("work");
    for old in [&work, &out.join("oci")] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    // What changes seldom is a layer of its own: an upgrade fetches the other one.
    let (below, above) = (work.join("base"), work.join("program"));
    base.lay_out(&below)?;
    rootfs::program(&built, &above)?;
    let layout = layout::write(&out.join("oci"), &name, &base, &[below, above])?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    let file = out.join(format!("muxflow-{}-{}.tar", name.tag, base.architecture));
    layout::pack(&out.join("oci"), &file)?;
    let bytes = fs::metadata(&file)?.len();
    println!("{} ({:.1} MB)", file.display(), bytes as f64 / 1e6);
    println!("{} {layout}", name.full());
    println!("docker load -i FILE, podman load -i FILE, ctr -n k8s.io images import FILE");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_registry() {
        for (repository, full) in [
            ("muxflow", "docker.io/library/muxflow:1"),
            ("someone/muxflow", "docker.io/someone/muxflow:1"),
            ("registry.example:5000/muxflow", "registry.example:5000/muxflow:1"),
            ("localhost/muxflow", "localhost/muxflow:1"),
        ] {
            let name = Name { repository: repository.to_owned(), tag: "1".to_owned() };
            assert_eq!(name.full(), full);
        }
    }

    #[test]
    fn the_chart_names_this_version() {
        let name = Name::of_chart(&root()).unwrap();
        assert_eq!(name.tag, env!("CARGO_PKG_VERSION"));
        assert_eq!(name.repository, "muxflow");
    }
}
