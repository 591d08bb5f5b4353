//! Directories that nobody else may look into or put something in.
//!
//! State holds the environments and the output of all users' jobs; the control blocks and sockets of
//! a run directory are trusted by whoever finds them.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use crate::sys::own_uid;

/// Makes a directory with this mode that nobody but its owner can write to, or takes one that is
/// there. One that belongs to somebody other than this user or root is refused: he could look at
/// what is put there, or put something there himself.
pub fn own_directory(dir: &Path, mode: u32) -> io::Result<()> {
    if let Some(above) = dir.parent() {
        std::fs::create_dir_all(above)?;
    }
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let (link, there) = (std::fs::symlink_metadata(dir)?, std::fs::metadata(dir)?);
    if !there.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let strange = |uid: u32| uid != 0 && uid != own_uid();
    if let Some(owner) = [link.uid(), there.uid()].into_iter().find(|&uid| strange(uid)) {
        let text = format!("it belongs to user {owner}: remove it, or name another directory");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let has = there.permissions().mode() & 0o777;
    if has & !mode & 0o077 != 0 && there.uid() == own_uid() {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(has & (mode | 0o700)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(dir: &Path) -> u32 {
        std::fs::metadata(dir).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn it_is_made_closed_and_closed_when_it_was_open() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/state");
        own_directory(&dir, 0o700).unwrap();
        assert_eq!(mode(&dir), 0o700);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
        own_directory(&dir, 0o700).unwrap();
        assert_eq!(mode(&dir), 0o700);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
        own_directory(&dir, 0o755).unwrap();
        assert_eq!(mode(&dir), 0o755);
        let file = base.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(own_directory(&file, 0o700).is_err(), "a file is no directory");
    }

    #[test]
    fn one_of_somebody_else_is_refused() {
        if own_uid() != 0 {
            println!("SKIPPED: only root can make a directory of somebody else");
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("theirs");
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(65_534), None).unwrap();
        let link = base.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        for path in [&dir, &link] {
            let error = own_directory(path, 0o700).unwrap_err().to_string();
            assert!(error.contains("65534") && error.contains("remove it"), "{error}");
        }
    }
}
