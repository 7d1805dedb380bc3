//! The naming operations that a file system supports, found by trying them in a directory.
//!
//! A checkpoint is published by giving a file a free name, and made durable by syncing a directory.
//! Some file systems cannot do that (in user space, SMB, FAT), and only a failed attempt shows it.

use std::io;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{Change, FileSystem, Native};
use crate::file::Direct;
use crate::{Error, Result};

/// An ability that was tried.
#[derive(Debug)]
pub struct Trial {
    /// The ability's name.
    pub name: &'static str,
    /// Success, or the system's error.
    pub outcome: io::Result<()>,
}

/// A second name for a file.
pub const LINK: &str = "link";
/// A rename that replaces nothing.
pub const RENAME_NEW: &str = "rename without replacing";
/// A rename that lets two files change places.
pub const EXCHANGE: &str = "exchange";
/// Durable entries of a directory.
pub const SYNC_DIRECTORY: &str = "sync of a directory";

/// Tries all abilities in a new directory within this one, which is removed again.
///
/// # Errors
/// [`Error::Storage`] where no directory or no file can be made, or removed.
pub fn try_all(directory: &Path) -> Result<Vec<Trial>> {
    let place = directory.join(format!(".penstock-names-{}", std::process::id()));
    Native.change(Change::CreateDirectory(&place))?;
    let trials = try_in(&place);
    for name in ["file", "other", "linked", "renamed"] {
        match Native.change(Change::RemoveFile(&place.join(name))) {
            Err(error) if error.kind() != Some(io::ErrorKind::NotFound) => return Err(error),
            _ => {}
        }
    }
    Native.change(Change::RemoveDirectory(&place))?;
    trials
}

fn try_in(place: &Path) -> Result<Vec<Trial>> {
    let (file, other) = (&*place.join("file"), &*place.join("other"));
    let (linked, renamed) = (&*place.join("linked"), &*place.join("renamed"));
    drop(Native.create(file, Direct::Off)?);
    drop(Native.create(other, Direct::Off)?);
    let change = |name, change: Change<'_>| Trial {
        name,
        outcome: Native.change(change).map_err(source),
    };
    Ok(vec![
        change(
            LINK,
            Change::Link {
                from: file,
                to: linked,
            },
        ),
        Trial {
            name: EXCHANGE,
            outcome: renameat_with(CWD, file, CWD, other, RenameFlags::EXCHANGE)
                .map_err(io::Error::from),
        },
        change(
            RENAME_NEW,
            Change::RenameNew {
                from: file,
                to: renamed,
            },
        ),
        change(SYNC_DIRECTORY, Change::SyncDirectory(place)),
    ])
}

fn source(error: Error) -> io::Error {
    match error {
        Error::Storage { source, .. } => source,
        error => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_directory_can_do_all_of_it_and_is_left_as_it_was() {
        let root = tempfile::tempdir().unwrap();
        let trials = try_all(root.path()).unwrap();
        assert_eq!(trials.len(), 4);
        for trial in trials {
            assert!(trial.outcome.is_ok(), "{trial:?}");
        }
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
