//! Files that are whole or not there: others read them at any moment.

use std::fs;
use std::path::Path;

/// Writes a file and the folders above it; an error names the path.
pub(crate) fn write(path: &Path, text: &[u8]) -> Result<(), String> {
    let failed = |error| format!("cannot write {}: {error}", path.display());
    let beside = path.with_extension("new");
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    fs::write(&beside, text).map_err(failed)?;
    fs::rename(&beside, path).map_err(failed)
}

/// Removes a file; one that is not there is removed already.
pub(crate) fn remove(path: &Path) -> Result<(), String> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}
