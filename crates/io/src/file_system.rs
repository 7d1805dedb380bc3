//! The seam through which files and directories are changed.
//!
//! Everything above that creates, names, cuts, syncs or removes something does it through a
//! [`FileSystem`], and moves data through an [`Engine`](crate::engine::Engine). So a decorator of
//! the two sees every change in order: it can log them, fail one of them, or stop the world between
//! two. Reading does not pass here: it changes nothing.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::file::{Direct, File, locks_directories};
use crate::trace;
use crate::{Error, Result};

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
}

impl Change<'_> {
    /// The change as a verb, for messages.
    pub fn operation(&self) -> &'static str {
        match self {
            Change::CreateDirectory(_) => "create",
            Change::RemoveDirectory(_) | Change::RemoveFile(_) => "remove",
            Change::SyncDirectory(_) => "sync",
            Change::Allocate(..) => "allocate",
            Change::Write(..) => "write",
            Change::Truncate(..) => "truncate",
            Change::Clone { .. } => "clone to",
            Change::SyncData(_) => "fdatasync",
            Change::Rename { .. } | Change::RenameNew { .. } => "rename to",
            Change::Link { .. } => "link to",
        }
    }

    /// What is changed; of two names, the new one.
    pub fn path(&self) -> &Path {
        match self {
            Change::CreateDirectory(path)
            | Change::RemoveDirectory(path)
            | Change::SyncDirectory(path)
            | Change::RemoveFile(path) => path,
            Change::Allocate(file, _)
            | Change::Write(file, _)
            | Change::Truncate(file, _)
            | Change::Clone { to: file, .. }
            | Change::SyncData(file) => file.path(),
            Change::Rename { to, .. } | Change::RenameNew { to, .. } | Change::Link { to, .. } => {
                to
            }
        }
    }
}

/// Something that changes files and directories.
pub trait FileSystem: fmt::Debug + Send + Sync {
    /// Creates a file that must not exist yet ([`File::create`]).
    ///
    /// # Errors
    /// As [`File::create`].
    fn create(&self, path: &Path, direct: Direct) -> Result<File>;

    /// Carries out a change.
    ///
    /// # Errors
    /// [`Error::Storage`] with the system's answer.
    fn change(&self, change: Change<'_>) -> Result<()>;

    /// Whether a lock on this directory excludes everybody who could take one
    /// ([`locks_directories`]).
    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        locks_directories(directory)
    }
}

/// The system's own files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Native;

impl FileSystem for Native {
    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        let _span = trace::span_of("create", path);
        File::create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        let _span = trace::span_of(change.operation(), change.path());
        let done = match change {
            Change::Allocate(file, len) => return file.allocate(len),
            Change::Write(file, bytes) => return file.write_all(0, bytes),
            Change::Truncate(file, len) => return file.truncate(len),
            Change::Clone { from, to } => return to.reflink(from),
            Change::SyncData(file) => return file.sync_data(),
            Change::CreateDirectory(path) => fs::create_dir(path),
            Change::RemoveDirectory(path) => fs::remove_dir(path),
            Change::SyncDirectory(path) => sync_directory(path),
            Change::Rename { from, to } => fs::rename(from, to),
            Change::RenameNew { from, to } => rename_new(from, to),
            Change::Link { from, to } => fs::hard_link(from, to),
            Change::RemoveFile(path) => fs::remove_file(path),
        };
        done.map_err(|source| Error::Storage {
            operation: change.operation(),
            path: change.path().to_owned(),
            source,
        })
    }
}

/// Syncs a directory, and asks whether the file system was still at work when it said so.
///
/// XFS that shuts itself down, after an error of its log for instance, reports success for the
/// `fsync` of a directory whose changes it has just dropped (seen with Linux 6.18), and what is lost
/// would be acknowledged. From then on it refuses `fstat`, and a shutdown is for good: asking
/// afterwards is in time.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = fs::File::open(path)?;
    directory.sync_all()?;
    directory.metadata().map(drop)
}

/// `renameat2` with `RENAME_NOREPLACE`: `EINVAL` where the file system cannot.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let flags = rustix::fs::RenameFlags::NOREPLACE;
    rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags)?;
    Ok(())
}

/// Bytes that an ordinary user can still store on the file system of `path`.
///
/// # Errors
/// [`Error::Storage`] with the system's answer.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let statistics = rustix::fs::statvfs(path).map_err(|errno| Error::Storage {
        operation: "look at the free space of",
        path: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}
