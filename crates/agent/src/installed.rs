//! Where the interposer is when no setting says so: beside the program, or where it is installed.

use std::path::{Path, PathBuf};

const NAME: &str = "libxcuda.so";
/// Where a package of a distribution would put it.
const PACKAGED: &str = "/usr/lib/muxflow/libxcuda.so";

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
}
