//! Files as they are found: listed, looked at, opened and read.
//!
//! What comes back is of the moment of the call: others may be at work in the same directories.

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

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// Something that is no storage: a FIFO, a socket, a device.
    Other,
}

/// What has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub kind: Kind,
    /// Its length in bytes, if it is a file.
    pub bytes: u64,
    /// Device and number: the same for two names of one thing, and for nothing else at a time.
    pub identity: (u64, u64),
}

impl Found {
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
    /// What it is; `None` where that takes a look at it.
    pub kind: Option<Kind>,
    /// Its length in bytes, where the list tells that of a file.
    pub bytes: Option<u64>,
    /// When it was put there, by the clock of the storage, where the list tells that.
    pub modified: Option<SystemTime>,
}

/// A small file as it was read, for a change that is to be made only if it is still this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// What tells it from others that have its name at another time, where the storage says so. Who gives
    /// it spares a look at what is there.
    pub version: Option<String>,
}

impl Seen {
    /// One of which nothing but its bytes is known.
    pub fn of(bytes: &[u8]) -> Seen {
        Seen {
            bytes: bytes.to_owned(),
            version: None,
        }
    }
}

/// Something that has files, which can be looked at; nothing of this changes them.
pub trait Files: fmt::Debug + Send + Sync {
    /// What has this name; a link itself, not what it leads to.
    ///
    /// # Errors
    /// The system's, [`io::ErrorKind::NotFound`] among them.
    fn look(&self, path: &Path) -> io::Result<Found>;

    /// As [`look`](Files::look), of a name that is nothing or a file's: where a directory is no thing of its
    /// own, nobody asks for one.
    ///
    /// # Errors
    /// As [`look`](Files::look).
    fn look_at_file(&self, path: &Path) -> io::Result<Found> {
        self.look(path)
    }

    /// As [`look_at_file`](Files::look_at_file), once more, of a file that is not as it has to be. Where looks are
    /// requests an answer may be wrong by itself: that nothing is there is believed when it is said for a while.
    ///
    /// # Errors
    /// As [`look`](Files::look).
    fn look_again(&self, path: &Path) -> io::Result<Found> {
        self.look_at_file(path)
    }

    /// As [`follow`](Files::follow), of a name that is nothing or a directory's.
    ///
    /// # Errors
    /// As [`look`](Files::look).
    fn look_at_directory(&self, path: &Path) -> io::Result<Found> {
        self.follow(path)
    }

    /// What this name leads to.
    ///
    /// # Errors
    /// As [`look`](Files::look).
    fn follow(&self, path: &Path) -> io::Result<Found>;

    /// The names in a directory, in any order.
    ///
    /// # Errors
    /// The system's.
    fn list(&self, path: &Path) -> io::Result<Vec<Entry>>;

    /// The path without links and without `..`.
    ///
    /// # Errors
    /// The system's, and where nothing is there.
    fn resolve(&self, path: &Path) -> io::Result<PathBuf>;

    /// Opens a regular file to read it through an engine ([`File::open`]).
    ///
    /// # Errors
    /// As [`File::open`].
    fn open(&self, path: &Path, direct: Direct) -> Result<File>;

    /// As [`open`](Files::open), of a file whose length is known. Where opening would be a request none is
    /// made: a file that is missing, or has another length, is an error of what is read of it.
    ///
    /// # Errors
    /// As [`open`](Files::open).
    fn open_known(&self, path: &Path, direct: Direct, bytes: u64) -> Result<File> {
        let _ = bytes;
        self.open(path, direct)
    }

    /// Bytes of a regular file, fewer where it ends; for small texts.
    ///
    /// # Errors
    /// The system's.
    fn read_range(&self, path: &Path, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// All bytes of a small regular file.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.read_range(path, 0..u64::MAX)
    }

    /// What has this name, as [`look_at_file`](Files::look_at_file) tells it, and all bytes of that if it is a
    /// regular file of no more than `bytes_max`; none of anything else. One request, where each look is one.
    ///
    /// # Errors
    /// The system's.
    fn look_into(&self, path: &Path, bytes_max: u64) -> io::Result<(Found, Seen)> {
        let found = self.look_at_file(path)?;
        let bytes = match found.kind == Kind::File && found.bytes <= bytes_max {
            true => self.read(path)?,
            false => Vec::new(),
        };
        let version = None;
        Ok((found, Seen { bytes, version }))
    }

    /// Checks that this process may read a file, without opening it.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] with the system's answer.
    fn check_readable(&self, path: &Path) -> Result<()>;

    /// Whether this process may make and remove entries in a directory.
    fn may_write(&self, directory: &Path) -> bool;

    /// Bytes that can still be stored where a path is, if that is known.
    fn free_bytes(&self, path: &Path) -> Option<u64>;

    /// The device behind a path; `None` where none is known, or nothing of this machine.
    fn device(&self, path: &Path) -> Option<Device> {
        Device::behind(path)
    }

    /// Whether files at a path are in memory and nowhere else.
    fn is_memory(&self, path: &Path) -> bool {
        device::is_memory(path)
    }

    /// Whether directories are things of their own: made, made durable, and removed. Elsewhere they
    /// are what names have in common.
    fn has_directories(&self) -> bool {
        true
    }

    /// Opens a directory to lock it.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::Unsupported`] where no directory can be locked.
    fn open_directory(&self, path: &Path) -> io::Result<fs::File>;

    /// Whether a file has this name, a link to nothing included.
    fn is_there(&self, path: &Path) -> bool {
        self.look_at_file(path).is_ok()
    }

    /// Whether this name leads to something.
    fn leads(&self, path: &Path) -> bool {
        self.follow(path).is_ok()
    }
}
