//! Where the interposer is when no setting says so: beside the program, or where it is installed; and
//! whether a program can load it. A loader goes on without a library that it cannot preload, so nobody
//! else would notice.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

const NAME: &str = "libxcuda.so";
/// Where a package of a distribution would put it.
const PACKAGED: &str = "/usr/lib/muxflow/libxcuda.so";

/// What to do about an interposer that no program can load.
pub const REMEDY: &str = "build it with `cargo build --profile xcuda -p muxflow-xcuda` and set `interposer` to libxcuda.so";

/// The one that `MUXFLOW_XCUDA` names, or the one of this installation or build.
pub fn interposer() -> PathBuf {
    if let Some(set) = std::env::var_os("MUXFLOW_XCUDA") {
        return set.into();
    }
    // An installed program is often reached through a link.
    let own = std::env::current_exe().and_then(|own| own.canonicalize());
    own.ok().and_then(|own| beside(own.parent()?)).unwrap_or_else(|| PACKAGED.into())
}

/// In the directory of the program, where `cargo xtask dist` puts it, or where cargo does.
fn beside(dir: &Path) -> Option<PathBuf> {
    let places = [".", "../lib/muxflow", "../xcuda"].map(|place| dir.join(place).join(NAME));
    places.into_iter().find(|path| path.is_file()).and_then(|path| path.canonicalize().ok())
}

/// Why no program could load this interposer; none when one could.
pub fn flaw(path: &Path) -> Option<String> {
    let name = path.display();
    match head_of(path) {
        Err(error) => Some(format!("{name}: {error}")),
        Ok(head) if !head.starts_with(b"\x7fELF") => Some(format!("{name} is no library")),
        Ok(head) if !is_for_this_machine(&head) => {
            Some(format!("{name} is for another machine: no program loads it"))
        }
        Ok(_) => None,
    }
}

/// The first bytes of a file: fewer when it is shorter.
fn head_of(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    File::open(path)?.take(64).read_to_end(&mut head)?;
    Ok(head)
}

/// Whether a library is of the class and for the processor of this very program.
fn is_for_this_machine(library: &[u8]) -> bool {
    let kind = |elf: &[u8]| Some((elf.get(4..6)?.to_vec(), elf.get(18..20)?.to_vec()));
    head_of(Path::new("/proc/self/exe")).map_or(true, |own| kind(library) == kind(&own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_where_a_tarball_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, lib) = (dir.path().join("bin"), dir.path().join("lib/muxflow"));
        for made in [&bin, &lib] {
            std::fs::create_dir_all(made).unwrap();
        }
        assert_eq!(beside(&bin), None);
        std::fs::write(lib.join(NAME), "").unwrap();
        assert_eq!(beside(&bin), lib.join(NAME).canonicalize().ok());
    }

    #[test]
    fn one_that_no_program_can_load_has_a_flaw() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        assert!(flaw(&path).unwrap().contains("No such file"));
        let mut elf = std::fs::read("/proc/self/exe").unwrap();
        std::fs::write(&path, &elf).unwrap();
        assert_eq!(flaw(&path), None);
        // 32 bits where this program has 64, or the other way about.
        elf[4] = 3 - elf[4];
        std::fs::write(&path, &elf).unwrap();
        assert!(flaw(&path).unwrap().contains("another machine"));
        std::fs::write(&path, "text").unwrap();
        assert!(flaw(&path).unwrap().contains("no library"));
    }
}
