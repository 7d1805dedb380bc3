//! Finding, opening and reading files.
//!
//! Results are of the moment of the call: other processes may be changing the same directories.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Result;
use crate::device::{self, Device};
use crate::file::{Direct, File};

/// The type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// No storage: a FIFO, a socket, a device.
    Other,
}

/// The metadata of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Its type.
    pub kind: Kind,
    /// Its length in bytes, if it is a file.
    pub bytes: u64,
    /// Device and inode number: equal for two names of one file, and for no two files at one time.
    pub identity: (u64, u64),
}

impl FileStat {
    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == Kind::Directory
    }
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The last part of its path.
    pub name: OsString,
    /// Its type; `None` where finding it out takes a call of its own.
    pub kind: Option<Kind>,
    /// Its length in bytes, where the listing has the lengths of files.
    pub bytes: Option<u64>,
    /// When it was last modified, by the storage's clock, where the listing has that.
    pub modified: Option<SystemTime>,
}

/// A small file as it was read, for a change that requires it to be unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Distinguishes it from other files that have its name at other times, where the storage has
    /// such a version. With it, a change saves the look at the present file.
    pub version: Option<String>,
}

impl Seen {
    /// A file of which only the bytes are known.
    pub fn of(bytes: &[u8]) -> Seen {
        Seen {
            bytes: bytes.to_owned(),
            version: None,
        }
    }
}

/// Finds, opens and reads files, and changes none.
pub trait Files: fmt::Debug + Send + Sync {
    /// The metadata of a name; of a link itself, not of its target.
    ///
    /// # Errors
    /// The system's error, for instance [`io::ErrorKind::NotFound`].
    fn stat(&self, path: &Path) -> io::Result<FileStat>;

    /// As [`stat`](Files::stat), for a name that no directory has: a storage without directories then
    /// requests only the file.
    fn stat_file(&self, path: &Path) -> io::Result<FileStat> {
        self.stat(path)
    }

    /// As [`stat_file`](Files::stat_file), again, for a file that is not as it has to be.
    /// Where a look is a request, a single answer may be wrong: "not found" is believed after it
    /// was repeated for a while.
    fn stat_again(&self, path: &Path) -> io::Result<FileStat> {
        self.stat_file(path)
    }

    /// As [`follow`](Files::follow), for a name that no file has.
    fn stat_directory(&self, path: &Path) -> io::Result<FileStat> {
        self.follow(path)
    }

    /// The metadata of a name, of a link's target.
    fn follow(&self, path: &Path) -> io::Result<FileStat>;

    /// The names in a directory, in any order.
    fn list(&self, path: &Path) -> io::Result<Vec<Entry>>;

    /// The path without links and without `..`.
    ///
    /// # Errors
    /// The system's error, also where nothing has the path.
    fn resolve(&self, path: &Path) -> io::Result<PathBuf>;

    /// Opens a regular file for reads through an engine ([`File::open`]).
    fn open(&self, path: &Path, direct: Direct) -> Result<File>;

    /// As [`open`](Files::open), for a file whose length is known. Where opening would be a
    /// request, none is made: if the file is missing, or has another length, the reads fail.
    fn open_known(&self, path: &Path, direct: Direct, bytes: u64) -> Result<File> {
        let _ = bytes;
        self.open(path, direct)
    }

    /// Bytes of a regular file, fewer where it ends early; for small texts.
    fn read_range(&self, path: &Path, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// All bytes of a small regular file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.read_range(path, 0..u64::MAX)
    }

    /// The metadata of a name, as by [`stat_file`](Files::stat_file), and its bytes if it is
    /// a regular file of at most `bytes_max`, else none. A single request, where each look is one.
    fn stat_and_read(&self, path: &Path, bytes_max: u64) -> io::Result<(FileStat, Seen)> {
        let found = self.stat_file(path)?;
        let bytes = match found.kind == Kind::File && found.bytes <= bytes_max {
            true => self.read(path)?,
            false => Vec::new(),
        };
        let version = None;
        Ok((found, Seen { bytes, version }))
    }

    /// Checks that this process may read a file, without opening it.
    fn check_readable(&self, path: &Path) -> Result<()>;

    /// Whether this process may create and remove entries in a directory.
    fn may_write(&self, directory: &Path) -> bool;

    /// Bytes that can still be stored at a path, if that is known.
    fn free_bytes(&self, path: &Path) -> Option<u64>;

    /// The device behind a path; `None` where none is known, or the storage is remote.
    fn device(&self, path: &Path) -> Option<Device> {
        Device::behind(path)
    }

    /// Whether files at a path are only in memory.
    fn is_memory(&self, path: &Path) -> bool {
        device::is_memory(path)
    }

    /// Whether directories exist by themselves: they are created, synced and removed. Elsewhere
    /// they are only common prefixes of names.
    fn has_directories(&self) -> bool {
        true
    }

    /// Opens a directory, to lock it.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::Unsupported`] where directories cannot be locked.
    fn open_directory(&self, path: &Path) -> io::Result<fs::File>;

    /// Whether a file has this name; a dangling link counts.
    fn is_there(&self, path: &Path) -> bool {
        self.stat_file(path).is_ok()
    }

    /// Whether this name, or the target of a link, exists.
    fn leads(&self, path: &Path) -> bool {
        self.follow(path).is_ok()
    }
}
