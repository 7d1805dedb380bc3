//! Files of attempts: given a name that is free, and removed.

use std::fs;
use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, FileSystem};

use super::beside::settle;
use crate::error::Result;
use crate::format::directory::attempt_files;

/// Gives a file a name unless that is taken: by a link, which every POSIX file system with hard links
/// makes in one step, or by a rename that does not replace.
pub(crate) fn link_new(
    file_system: &dyn FileSystem,
    from: &Path,
    to: &Path,
) -> penstock_io::Result<()> {
    match file_system.change(Change::Link { from, to }) {
        Err(error) if error.kind().is_some_and(has_no_links) => {
            file_system.change(Change::RenameNew { from, to })
        }
        result => result,
    }
}

/// What file systems without hard links answer (FAT, some in user space): EPERM, ENOSYS,
/// EOPNOTSUPP.
fn has_no_links(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
    )
}

/// Removes the attempt files of a directory that `select` picks, and the copies of those that lie
/// under other names as well ([`settle`]), and returns their bytes. Files
/// that somebody else removes at the same time are as good as removed.
pub(crate) fn remove_attempt_files(
    path: &Path,
    file_system: &dyn FileSystem,
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    settle(path, file_system, |name| select(name))?;
    let mut removed_bytes = 0;
    for (file, _) in attempt_files(path, select)? {
        removed_bytes += remove_file(&file, file_system)?;
    }
    Ok(removed_bytes)
}

/// Removes a file, if it is there, and returns its bytes.
pub(crate) fn remove_file(path: &Path, file_system: &dyn FileSystem) -> Result<u64> {
    let bytes = fs::symlink_metadata(path).map_or(0, |metadata| metadata.len());
    match file_system.change(Change::RemoveFile(path)) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
