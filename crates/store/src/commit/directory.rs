//! Creating the checkpoint directory and making it durable.

use std::io;
use std::path::Path;

use penstock_io::file_system::{Change, FileSystem};

use crate::error::{Error, Result};

/// Creates a directory and its parents; returns whether the last one is new.
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
                // A sweep has removed it since, or it is a dangling link, which occupies the name.
                Err(_)
                    if files
                        .stat(path)
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

/// Makes the entry of a directory durable, and those of all directories above it on the same file
/// system: this save, a concurrent one, or one that died before its sync may have created any of
/// them. Without new entries this takes a fraction of a millisecond per directory.
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
            // A process that may not write to the parent created nothing there. A directory that is
            // writable but not readable cannot be synced, so nothing created in it could be
            // promised.
            Err(error)
                if error.kind() == Some(io::ErrorKind::PermissionDenied)
                    && !files.may_write(parent) => {}
            result => result?,
        }
    }
    Ok(())
}
