//! The seam through which files and directories are changed, and through which they are found.
//!
//! Everything above that creates, names, cuts, syncs or removes something does it through a
//! [`FileSystem`], lists, looks at and opens through its [`Files`], and moves data through an
//! [`Engine`](crate::engine::Engine). So a decorator of the three sees every change in order: it can
//! log them, fail one of them, or stop the world between two. What only looks takes [`Files`], and so
//! cannot change anything.

pub mod abilities;
mod files;
mod native;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Result;
use crate::file::{Direct, File, locks_directories};
pub use files::{Entry, Files, Found, Kind, Seen};
pub use native::{Native, found, free_bytes};

/// One change of what is stored.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Makes a directory; its parent must be there, and nothing by its name.
    CreateDirectory(&'a Path),
    /// Removes an empty directory.
    RemoveDirectory(&'a Path),
    /// Makes the entries of a directory durable.
    SyncDirectory(&'a Path),
    /// Reserves storage for the first bytes of a file ([`File::allocate`]).
    Allocate(&'a File, u64),
    /// Writes bytes at the start of a buffered file ([`File::write_all`]).
    Write(&'a File, &'a [u8]),
    /// Cuts a file ([`File::truncate`]).
    Truncate(&'a File, u64),
    /// Has an empty file share the bytes of another one, all of them ([`File::reflink`]).
    Clone {
        /// The file that has them.
        from: &'a File,
        /// The file that gets them as well.
        to: &'a File,
    },
    /// Makes a file's completed writes durable ([`File::sync_data`]).
    SyncData(&'a File),
    /// Renames a file, replacing what has the new name.
    Rename {
        /// The name it has.
        from: &'a Path,
        /// The name it gets.
        to: &'a Path,
    },
    /// Renames a small file in the place of another one, if that is still the one that was seen:
    /// [`std::io::ErrorKind::AlreadyExists`] where it is another, [`std::io::ErrorKind::NotFound`]
    /// where there is none, and [`std::io::ErrorKind::Unsupported`] where nothing compares and
    /// replaces in one step.
    Replace {
        /// The name it has.
        from: &'a Path,
        /// The name it gets.
        to: &'a Path,
        /// What has that name.
        seen: &'a Seen,
    },
    /// Renames a file unless something has the new name.
    RenameNew {
        /// The name it has.
        from: &'a Path,
        /// The name it gets.
        to: &'a Path,
    },
    /// Gives a file a second name unless something has it.
    Link {
        /// The name it has.
        from: &'a Path,
        /// The name it gets as well.
        to: &'a Path,
    },
    /// Removes a name of a file.
    RemoveFile(&'a Path),
    /// Removes a small file, if it is still the one that was seen; refused as [`Change::Replace`] is, or,
    /// also where it is another, with [`std::io::ErrorKind::NotFound`].
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

    /// What is changed; of two names, the new one.
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

/// A file that somebody has begun to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// Where it is to be.
    pub path: PathBuf,
    /// What the storage calls it.
    pub id: String,
    /// When it was begun, by the clock of the storage.
    pub begun: SystemTime,
}

/// Something that changes files and directories.
pub trait FileSystem: fmt::Debug + Send + Sync {
    /// Creates a file that must not exist yet ([`File::create`]).
    ///
    /// # Errors
    /// As [`File::create`].
    fn create(&self, path: &Path, direct: Direct) -> Result<File>;

    /// Creates a small buffered file that is about to get another name, or to be removed: nobody looks
    /// for it by this one.
    ///
    /// # Errors
    /// As [`File::create`].
    fn create_temporary(&self, path: &Path) -> Result<File> {
        self.create(path, Direct::Off)
    }

    /// Carries out a change.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] with the system's answer.
    fn change(&self, change: Change<'_>) -> Result<()>;

    /// What is there already.
    fn files(&self) -> &dyn Files;

    /// The time by the clock that [`Entry::modified`] is of, where another machine keeps it: a file is made
    /// at `path`, looked at and removed.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] with the system's answer.
    fn time_at(&self, _path: &Path) -> Result<Option<SystemTime>> {
        Ok(None)
    }

    /// Files below a path that somebody has begun to send and not ended, of which nothing is to be seen,
    /// and which take room.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] with the system's answer.
    fn open_uploads(&self, _path: &Path) -> Result<Vec<OpenUpload>> {
        Ok(Vec::new())
    }

    /// Gives up what somebody has begun to send.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] with the system's answer.
    fn abandon(&self, _upload: &OpenUpload) -> Result<()> {
        Ok(())
    }

    /// Whether a lock on this directory excludes everybody who could take one
    /// ([`locks_directories`]).
    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        locks_directories(directory)
    }
}
