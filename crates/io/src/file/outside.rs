//! Files that others have made: by a path whose links are followed, or by a descriptor that is open
//! already.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Access, Direct, File, Of, storage};
use crate::Result;

impl File {
    /// Opens a regular file to read, also by a link to one.
    ///
    /// # Errors
    /// As [`open`](File::open), but for links.
    pub fn reach(path: &Path, direct: Direct) -> Result<File> {
        File::reach_as(path, path, Access::Read, direct)
    }

    /// Opens a regular file to read and write, also by a link to one.
    ///
    /// # Errors
    /// As [`reach`](File::reach).
    pub fn reach_to_write(path: &Path, direct: Direct) -> Result<File> {
        File::reach_as(path, path, Access::Write, direct)
    }

    /// Opens what `way` leads to, which is called `path`.
    fn reach_as(way: &Path, path: &Path, access: Access, direct: Direct) -> Result<File> {
        let flags = access.flags() | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = rustix::fs::open(way, flags, Mode::empty())
            .map_err(|errno| storage("open", path, errno))?;
        File::of_regular(fd, path, access, direct)
    }

    /// Opens the file of a descriptor of this process once more, for as much as that allows, so that
    /// what is set on ours changes nothing on its owner's.
    ///
    /// # Errors
    /// As [`open`](File::open); also where there is no such descriptor, or the file may not be
    /// opened any more.
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
        // To open a device or a FIFO may do something to it.
        Err(File::not_regular(&path, stat.st_mode))
    }

    /// The same file past the page cache or through it, as asked for; the open file stays as it is.
    ///
    /// # Errors
    /// As [`reopen`](File::reopen).
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

    /// Whether it may be written to.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage) from the system.
    pub fn is_writable(&self) -> Result<bool> {
        let flags = rustix::fs::fcntl_getfl(self.as_fd());
        let flags = flags.map_err(|errno| storage("open", self.path(), errno))?;
        Ok(flags & OFlags::RWMODE != OFlags::RDONLY)
    }

    /// Makes its entry in its directory durable, as a new file needs it beside its content. It is
    /// the directory where the file is now: the path that it was opened by may be a link, or lead
    /// from a working directory that has changed.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage) from the system.
    pub fn sync_entry(&self) -> Result<()> {
        let stat = rustix::fs::fstat(self.as_fd()).map_err(|e| storage("stat", self.path(), e))?;
        if stat.st_nlink == 0 {
            // There is no entry any more.
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

    /// Makes it at least so long and reserves storage for what is new; never shortens it. A file
    /// system that cannot reserve lets it grow as it is written.
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

/// Whether a descriptor is for reading only, as the kernel describes it.
fn is_read_only(fd: RawFd) -> bool {
    let described = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let flags = described
        .lines()
        .find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    flags.is_some_and(|flags| OFlags::from_bits_retain(flags) & OFlags::RWMODE == OFlags::RDONLY)
}
