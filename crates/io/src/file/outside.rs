//! Files that others have made: opened by a path whose links are followed, or by an open
//! descriptor.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Access, Direct, File, Of, storage};
use crate::Result;

impl File {
    /// Opens a regular file for reads; links are followed.
    pub fn reach(path: &Path, direct: Direct) -> Result<File> {
        File::reach_as(path, path, Access::Read, direct)
    }

    /// Opens a regular file for reads and writes; links are followed.
    pub fn reach_to_write(path: &Path, direct: Direct) -> Result<File> {
        File::reach_as(path, path, Access::Write, direct)
    }

    /// Opens the file at `way`, and calls it `path`.
    fn reach_as(way: &Path, path: &Path, access: Access, direct: Direct) -> Result<File> {
        let flags = access.flags() | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = rustix::fs::open(way, flags, Mode::empty())
            .map_err(|errno| storage("open", path, errno))?;
        File::of_regular(fd, path, access, direct)
    }

    /// Opens the file of a descriptor of this process again, with the same access, so that flags
    /// set here do not affect the owner's descriptor.
    pub fn reopen(fd: RawFd, direct: Direct) -> Result<File> {
        let way = PathBuf::from(format!("/proc/self/fd/{fd}"));
        let Ok(path) = std::fs::read_link(&way) else {
            let nobody = PathBuf::from(format!("descriptor {fd}"));
            return Err(storage("open", &nobody, Errno::BADF));
        };
        let access = match is_read_only(fd) {
            true => Access::Read,
            false => Access::Write,
        };
        let stat = rustix::fs::stat(&way).map_err(|errno| storage("open", &path, errno))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            return File::reach_as(&way, &path, access, direct);
        }
        // Opening a device or a FIFO could have side effects, so it is refused unopened.
        Err(File::not_regular(&path, stat.st_mode))
    }

    /// The same file, direct or buffered as requested; this one is unchanged.
    pub fn again(&self, direct: Direct) -> Result<File> {
        if let Of::Elsewhere(of) = &self.of {
            return Ok(File::elsewhere(&self.path, Arc::clone(of)));
        }
        let way = PathBuf::from(format!("/proc/self/fd/{}", self.as_fd().as_raw_fd()));
        let access = match self.is_writable()? {
            true => Access::Write,
            false => Access::Read,
        };
        File::reach_as(&way, self.path(), access, direct)
    }

    /// Whether it is open for writes.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage) from the system.
    pub fn is_writable(&self) -> Result<bool> {
        let flags = rustix::fs::fcntl_getfl(self.as_fd());
        let flags = flags.map_err(|errno| storage("open", self.path(), errno))?;
        Ok(flags & OFlags::RWMODE != OFlags::RDONLY)
    }

    /// Syncs the entry in the file's directory, which a new file needs in addition to its content.
    /// This uses the directory where the file is now: the path that it was opened by may be a link,
    /// or be relative to a working directory that has changed.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage) from the system.
    pub fn sync_entry(&self) -> Result<()> {
        let stat = rustix::fs::fstat(self.as_fd()).map_err(|e| storage("stat", self.path(), e))?;
        if stat.st_nlink == 0 {
            // No entry is left.
            return Ok(());
        }
        let way = format!("/proc/self/fd/{}", self.as_fd().as_raw_fd());
        let path = std::fs::read_link(way).unwrap_or_else(|_| self.path().to_owned());
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent, flags, Mode::empty());
        directory
            .and_then(rustix::fs::fsync)
            .map_err(|errno| storage("fsync", parent, errno))
    }

    /// Extends it to at least `end` bytes and reserves storage for the new part; never shortens it.
    /// Where the file system cannot reserve, the file grows as it is written.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage), notably with `ENOSPC`.
    pub fn extend_to(&self, end: u64) -> Result<()> {
        let len = self.len()?;
        if len >= end {
            return Ok(());
        }
        match self.allocate_range(len, end - len) {
            Err(error) if error.kind() == Some(std::io::ErrorKind::Unsupported) => Ok(()),
            result => result,
        }
    }
}

/// Whether a descriptor is read-only, by the kernel's description of it.
fn is_read_only(fd: RawFd) -> bool {
    let described = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let flags = described
        .lines()
        .find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    flags.is_some_and(|flags| OFlags::from_bits_retain(flags) & OFlags::RWMODE == OFlags::RDONLY)
}
