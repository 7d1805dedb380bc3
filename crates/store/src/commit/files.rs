//! Files of attempts: given a name that is free, and removed.

use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, FileSystem};

use crate::error::{Error, Result};

/// Gives a file a name unless that is taken: by a link, which every POSIX file system with hard links
/// makes in one step, or by a rename that does not replace.
///
/// # Errors
/// [`Error::NoFreeNames`] where the file system has neither, and the system's errors.
pub(crate) fn link_new(file_system: &dyn FileSystem, from: &Path, to: &Path) -> Result<()> {
    match file_system.change(Change::Link { from, to }) {
        // A bucket has no abilities to lack: its refusals say what they are.
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

/// Removes a file, if it is there, whose bytes nobody asks for.
pub(crate) fn discard(path: &Path, file_system: &dyn FileSystem) -> Result<()> {
    remove_listed(path, 0, file_system).map(drop)
}

/// Whether it is an answer of file systems without hard links (FAT, SMB, some in user space): EPERM, ENOSYS,
/// EOPNOTSUPP, EINVAL.
pub(crate) fn has_no_links(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
    )
}

/// Whether it is an answer of file systems that know no flags of a rename: EINVAL, ENOSYS, EOPNOTSUPP.
fn replaces_always(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
    )
}

/// Removes a file, if it is there, and returns its bytes.
pub(crate) fn remove_file(path: &Path, file_system: &dyn FileSystem) -> Result<u64> {
    let bytes = file_system
        .files()
        .look_at_file(path)
        .map_or(0, |found| found.bytes);
    remove_listed(path, bytes, file_system)
}

/// The same of a file whose bytes are known. Where removing what is gone is no error, those of one that
/// somebody else has removed meanwhile count as well.
pub(crate) fn remove_listed(path: &Path, bytes: u64, file_system: &dyn FileSystem) -> Result<u64> {
    match file_system.change(Change::RemoveFile(path)) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
