//! The directory that is saved to: made where it is not there, and made durable.

use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, FileSystem};

use crate::error::{Error, Result};

/// Creates a directory and its parents; tells whether the last one is new.
pub(super) fn make_directory(path: &Path, file_system: &dyn FileSystem) -> Result<bool> {
    let parent = parent_of(path);
    let create = || file_system.change(Change::CreateDirectory(path));
    let created = match create() {
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) && parent != path => {
            make_directory(parent, file_system)?;
            create()
        }
        result => result,
    };
    match created {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == Some(io::ErrorKind::AlreadyExists) => {
            let files = file_system.files();
            match files.follow(path) {
                Ok(found) if found.is_directory() => Ok(false),
                Ok(_) => {
                    let source = io::Error::from(io::ErrorKind::NotADirectory);
                    Err(Error::storage("save to", path)(source))
                }
                // Removed since by a sweep; or a link to nothing, which has a name.
                Err(_)
                    if files
                        .look(path)
                        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound) =>
                {
                    make_directory(path, file_system)
                }
                Err(source) => Err(Error::storage("save to", path)(source)),
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the entry of a directory durable, and those of all above it on the same file system: any
/// of them may have been made just now, by this save, by one beside it, or by one that died before
/// it came to this. Where nothing is new that is a fraction of a millisecond for each.
pub(super) fn sync_ancestors(path: &Path, file_system: &dyn FileSystem) -> Result<()> {
    let files = file_system.files();
    if !files.has_directories() {
        return Ok(());
    }
    let absolute = files
        .resolve(path)
        .map_err(Error::storage("look at", path))?;
    let device = |path: &Path| files.follow(path).map(|found| found.identity.0).ok();
    let own = device(&absolute);
    for parent in absolute.ancestors().skip(1) {
        if device(parent) != own {
            break;
        }
        match file_system.change(Change::SyncDirectory(parent)) {
            // Who may not write there made nothing there. A directory that may be written to and
            // not read cannot be synced: nothing that is made in it could be promised.
            Err(error)
                if error.kind() == Some(io::ErrorKind::PermissionDenied)
                    && !files.may_write(parent) => {}
            result => result?,
        }
    }
    Ok(())
}
