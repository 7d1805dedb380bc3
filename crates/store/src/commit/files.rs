//! Files of attempts: naming one without replacing another, and removing them.

use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, FileSystem};

use crate::error::{Error, Result};

/// Gives a file a new name unless the name exists: with a hard link, which POSIX file systems
/// create atomically, or with a rename that does not replace.
pub(crate) fn link_new(file_system: &dyn FileSystem, from: &Path, to: &Path) -> Result<()> {
    match file_system.change(Change::Link { from, to }) {
        // Buckets support the operation, so their errors are real failures.
        Err(error)
            if error.kind().is_some_and(has_no_links) && file_system.files().has_directories() => {}
        result => return Ok(result?),
    }
    match file_system.change(Change::RenameNew { from, to }) {
        Err(penstock_io::Error::Storage { path, source, .. }) if replaces_always(source.kind()) => {
            Err(Error::NoFreeNames { path, source })
        }
        result => Ok(result?),
    }
}

/// Removes a file, if it exists, without counting its bytes.
pub(crate) fn discard(path: &Path, file_system: &dyn FileSystem) -> Result<()> {
    remove_listed(path, 0, file_system).map(drop)
}

/// Whether the error is one that file systems without hard links return (FAT, SMB, some FUSE ones):
/// EPERM, ENOSYS, EOPNOTSUPP, EINVAL.
pub(crate) fn has_no_links(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
    )
}

/// Whether the error is one that file systems without rename flags return: EINVAL, ENOSYS,
/// EOPNOTSUPP.
fn replaces_always(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
    )
}

/// Removes a file, if it exists, and returns its size.
pub(crate) fn remove_file(path: &Path, file_system: &dyn FileSystem) -> Result<u64> {
    let bytes = file_system
        .files()
        .stat_file(path)
        .map_or(0, |found| found.bytes);
    remove_listed(path, bytes, file_system)
}

/// Removes a file of known size, if it exists, and returns the size. Where removing a missing file
/// is no error, a file that somebody else removed meanwhile counts as well.
pub(crate) fn remove_listed(path: &Path, bytes: u64, file_system: &dyn FileSystem) -> Result<u64> {
    match file_system.change(Change::RemoveFile(path)) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
