//! The interface through which files and directories are found and changed.
//!
//! All code above creates, renames, truncates, syncs and removes through a [`FileSystem`], lists
//! and opens through its [`Files`], and moves data through an [`Engine`](crate::engine::Engine). So
//! a decorator of the three sees every change in order: it can log changes, fail one of them, or
//! stop the process between two. Code that only reads takes [`Files`], and so cannot change
//! anything.

pub mod abilities;
mod files;
mod native;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Result;
use crate::file::{Direct, File, locks_directories};
pub use files::{Entry, FileStat, Files, Kind, Seen};
pub use native::{Native, found, free_bytes};

/// One change of storage.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Makes a directory; its parent must exist, and its name be free.
    CreateDirectory(&'a Path),
    /// Removes an empty directory.
    RemoveDirectory(&'a Path),
    /// Makes the entries of a directory durable.
    SyncDirectory(&'a Path),
    /// Reserves storage for the first bytes of a file ([`File::allocate`]).
    Allocate(&'a File, u64),
    /// Writes bytes at the start of a buffered file ([`File::write_all`]).
    Write(&'a File, &'a [u8]),
    /// Truncates a file ([`File::truncate`]).
    Truncate(&'a File, u64),
    /// Shares all bytes of a file with an empty one ([`File::reflink`]).
    Clone {
        /// The file with the bytes.
        from: &'a File,
        /// The empty file.
        to: &'a File,
    },
    /// Makes a file's completed writes durable ([`File::sync_data`]).
    SyncData(&'a File),
    /// Renames a file, replacing the one with the new name.
    Rename {
        /// The present name.
        from: &'a Path,
        /// The new name.
        to: &'a Path,
    },
    /// Renames a small file over another one, if that is still the one seen:
    /// [`std::io::ErrorKind::AlreadyExists`] where it is another, [`std::io::ErrorKind::NotFound`]
    /// where there is none, and [`std::io::ErrorKind::Unsupported`] where the storage cannot
    /// compare and replace in one step.
    Replace {
        /// The present name.
        from: &'a Path,
        /// The new name.
        to: &'a Path,
        /// The file seen under the new name.
        seen: &'a Seen,
    },
    /// Renames a file; fails if the new name is taken.
    RenameNew {
        /// The present name.
        from: &'a Path,
        /// The new name.
        to: &'a Path,
    },
    /// Gives a file a second name; fails if it is taken.
    Link {
        /// The present name.
        from: &'a Path,
        /// The second name.
        to: &'a Path,
    },
    /// Removes a name of a file.
    RemoveFile(&'a Path),
    /// Removes a small file, if it is still the one seen; refused as [`Change::Replace`] is, and
    /// where it is another file possibly with [`std::io::ErrorKind::NotFound`].
    RemoveSeen(&'a Path, &'a Seen),
}

impl Change<'_> {
    /// The change as a verb, for messages.
    pub fn operation(&self) -> &'static str {
        match self {
            Change::CreateDirectory(_) => "create",
            Change::RemoveDirectory(_) | Change::RemoveFile(_) | Change::RemoveSeen(..) => "remove",
            Change::SyncDirectory(_) => "sync",
            Change::Allocate(..) => "allocate",
            Change::Write(..) => "write",
            Change::Truncate(..) => "truncate",
            Change::Clone { .. } => "clone to",
            Change::SyncData(_) => "fdatasync",
            Change::Rename { .. } | Change::RenameNew { .. } | Change::Replace { .. } => {
                "rename to"
            }
            Change::Link { .. } => "link to",
        }
    }

    /// The changed path; of two names, the new one.
    pub fn path(&self) -> &Path {
        match self {
            Change::CreateDirectory(path)
            | Change::RemoveDirectory(path)
            | Change::SyncDirectory(path)
            | Change::RemoveFile(path)
            | Change::RemoveSeen(path, _) => path,
            Change::Allocate(file, _)
            | Change::Write(file, _)
            | Change::Truncate(file, _)
            | Change::Clone { to: file, .. }
            | Change::SyncData(file) => file.path(),
            Change::Rename { to, .. }
            | Change::RenameNew { to, .. }
            | Change::Replace { to, .. }
            | Change::Link { to, .. } => to,
        }
    }
}

/// An upload that was begun and neither completed nor aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The destination.
    pub path: PathBuf,
    /// The storage's id of the upload.
    pub id: String,
    /// When it began, by the storage's clock.
    pub begun: SystemTime,
}

/// Changes files and directories.
pub trait FileSystem: fmt::Debug + Send + Sync {
    /// Creates a file that must not exist yet ([`File::create`]).
    fn create(&self, path: &Path, direct: Direct) -> Result<File>;

    /// Creates a small buffered file that is about to be renamed or removed: nobody looks for it by
    /// this name.
    fn create_temporary(&self, path: &Path) -> Result<File> {
        self.create(path, Direct::Off)
    }

    /// Makes a change.
    fn change(&self, change: Change<'_>) -> Result<()>;

    /// The interface for reads.
    fn files(&self) -> &dyn Files;

    /// The present time of the clock behind [`Entry::modified`], where another machine keeps it:
    /// makes a file at `path`, reads its time, and removes it.
    fn time_at(&self, _path: &Path) -> Result<Option<SystemTime>> {
        Ok(None)
    }

    /// Uploads below a path that were begun and neither completed nor aborted: invisible as files,
    /// but they occupy storage.
    fn open_uploads(&self, _path: &Path) -> Result<Vec<OpenUpload>> {
        Ok(Vec::new())
    }

    /// Aborts an upload.
    fn abandon(&self, _upload: &OpenUpload) -> Result<()> {
        Ok(())
    }

    /// Whether a lock on this directory excludes all other processes that could take one
    /// ([`locks_directories`]).
    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        locks_directories(directory)
    }
}
