//! What is in the image: Debian's C library and what our program needs beside it, and our own files.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use super::USER;
use crate::ci::root;
use crate::dist::{copy, interposer, run_program};

/// Packages whose libraries the program and the driver's libraries are linked with.
const PACKAGES: [&str; 2] = ["libc6", "libgcc-s1"];
/// Where runtimes mount things.
const FOLDERS: [&str; 6] = ["dev", "etc", "proc", "run", "sys", "tmp"];
/// Debian has these as links since all of them moved below `/usr`.
const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// The part that is Debian's.
#[derive(Debug)]
pub(super) struct Base {
    /// As Debian and OCI both name it.
    pub(super) architecture: String,
    /// Each package with its version.
    pub(super) packages: Vec<String>,
    files: Vec<PathBuf>,
}

impl Base {
    /// From the packages that are installed here. They are what the program was linked with just now,
    /// so the image can never have an older C library than the program needs.
    pub(super) fn of_this_machine() -> anyhow::Result<Self> {
        let architecture = said("dpkg", &["--print-architecture"])?.trim().to_owned();
        let mut verify = vec!["--verify"];
        verify.extend(PACKAGES);
        let changed: Vec<String> = said("dpkg", &verify)?
            .lines()
            .filter(|line| line.contains("/lib/") || line.contains("/lib64/"))
            .map(str::to_owned)
            .collect();
        ensure!(
            changed.is_empty(),
            "files of Debian's packages were changed on this machine; install them again: {}",
            changed.join("; ")
        );
        let (mut packages, mut files) = (Vec::new(), Vec::new());
        for package in PACKAGES {
            let format = "--showformat=${Package} ${Version}";
            packages.push(said("dpkg-query", &["--show", format, package])?);
            let list = said("dpkg-query", &["--listfiles", package])?;
            files.extend(list.lines().filter(|file| is_wanted(file)).map(PathBuf::from));
        }
        files.sort();
        ensure!(
            files.iter().any(|file| file.ends_with("libc.so.6")),
            "the package libc6 has no libc.so.6 here"
        );
        Ok(Base { architecture, packages, files })
    }

    /// Writes it into a new folder.
    pub(super) fn lay_out(&self, to: &Path) -> anyhow::Result<()> {
        for folder in FOLDERS {
            make(&to.join(folder))?;
        }
        for merged in MERGED {
            make(&to.join("usr").join(merged))?;
            link(Path::new("usr").join(merged).as_path(), &to.join(merged))?;
        }
        for file in &self.files {
            place(file, to)?;
        }
        for package in PACKAGES {
            let file = Path::new("/usr/share/doc").join(package).join("copyright");
            // Machines are set up without documentation too.
            if file.is_file() {
                copy(&file, &to.join(file.strip_prefix("/").unwrap_or(&file)))?;
            }
        }
        // By this file, NVIDIA's container runtime knows where libraries go in this image.
        copy(Path::new("/etc/debian_version"), &to.join("etc/debian_version"))?;
        copy(Path::new("/usr/lib/os-release"), &to.join("usr/lib/os-release"))?;
        link(Path::new("../usr/lib/os-release"), &to.join("etc/os-release"))?;
        let write = |name: &str, text: String| {
            let path = to.join("etc").join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        write(
            "passwd",
            format!(
                "root:x:0:0:root:/:/nonexistent\nmuxflow:x:{USER}:{USER}:muxflow:/:/nonexistent\n"
            ),
        )?;
        write("group", format!("root:x:0:\nmuxflow:x:{USER}:\n"))?;
        write("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n".to_owned())?;
        settle(to)
    }
}

/// Shared libraries and the loader; none of the character tables.
fn is_wanted(file: &str) -> bool {
    let Some((folder, name)) = file.rsplit_once('/') else { return false };
    let library = name.contains(".so");
    let inner = folder.contains("/gconv") || folder.contains("/audit");
    library && !inner && (format!("{folder}/").contains("/lib/") || folder.ends_with("/lib64"))
}

/// Our own files, as the tarball has them but below `/usr`.
pub(super) fn program(built: &Path, to: &Path) -> anyhow::Result<()> {
    let program = to.join("usr/bin/muxflow");
    copy(&built.join("muxflow"), &program)?;
    // Names of functions stay, so that a broken program can still say where.
    run_program(Command::new("strip").arg("--strip-debug").arg(&program))
        .context("install binutils, which Rust's linker needs too")?;
    copy(&interposer(), &to.join("usr/lib/muxflow/libxcuda.so"))?;
    copy(&root().join("LICENSE"), &to.join("usr/share/doc/muxflow/LICENSE"))?;
    settle(to)
}

/// A file of this machine to its place below `/usr`, a link as a link.
fn place(file: &Path, to: &Path) -> anyhow::Result<()> {
    let inside = file.strip_prefix("/").unwrap_or(file);
    let merged = MERGED.iter().any(|folder| inside.starts_with(folder));
    let target = if merged { to.join("usr").join(inside) } else { to.join(inside) };
    let kind = fs::symlink_metadata(file)
        .with_context(|| format!("cannot read {}, which dpkg lists", file.display()))?;
    if kind.is_symlink() {
        make(target.parent().unwrap_or(to))?;
        return link(&fs::read_link(file)?, &target);
    }
    copy(file, &target)
}

fn make(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn link(content: &Path, at: &Path) -> anyhow::Result<()> {
    symlink(content, at).with_context(|| format!("cannot make the link {}", at.display()))
}

/// Everybody may read everything, whatever the umask of who builds.
fn settle(folder: &Path) -> anyhow::Result<()> {
    let mut open = BTreeSet::from([folder.to_owned()]);
    while let Some(path) = open.pop_first() {
        let kind = fs::symlink_metadata(&path)?;
        if kind.is_symlink() {
            continue;
        }
        let executable = kind.is_dir() || kind.permissions().mode() & 0o100 != 0;
        let mode = match (path == folder.join("tmp"), executable) {
            (true, _) => 0o1777,
            (false, true) => 0o755,
            (false, false) => 0o644,
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        if kind.is_dir() {
            for entry in fs::read_dir(&path)? {
                open.insert(entry?.path());
            }
        }
    }
    Ok(())
}

/// What a program of Debian's says. Their absence has one remedy.
fn said(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let output = match Command::new(program).args(words).output() {
        Ok(output) => output,
        Err(error) => bail!(
            "cannot run {program} ({error}): the image is made from Debian's packages; on another system build it with deploy/image/Containerfile"
        ),
    };
    // `dpkg --verify` fails where it finds something to tell.
    let told = words.first() == Some(&"--verify") || output.status.success();
    ensure!(told, "{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_wanted_and_tables_are_not() {
        for (file, wanted) in [
            ("/lib/x86_64-linux-gnu/libc.so.6", true),
            ("/usr/lib/x86_64-linux-gnu/libm.so.6", true),
            ("/lib64/ld-linux-x86-64.so.2", true),
            ("/usr/lib64/ld-linux-x86-64.so.2", true),
            ("/lib/ld-linux-aarch64.so.1", true),
            ("/usr/lib/x86_64-linux-gnu/gconv/CP737.so", false),
            ("/usr/share/doc/libc6/copyright", false),
            ("/etc/ld.so.conf.d/x86_64-linux-gnu.conf", false),
        ] {
            assert_eq!(is_wanted(file), wanted, "{file}");
        }
    }
}
