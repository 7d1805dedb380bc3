//! Files for direct I/O, with a recorded reason where it is not used.
//!
//! Direct I/O moves bytes between the device and our buffers without a copy through the page cache,
//! at the price of alignment. [`File`] asks the kernel for the alignment that a file needs
//! (`statx(STATX_DIOALIGN)`), switches direct I/O on where it works, and otherwise stays buffered
//! and records the reason. Callers use [`File::alignment`], which is 1 for a buffered file, and
//! need no other distinction.
//!
//! Opening never blocks, and succeeds on regular files only. A symbolic link in the last component
//! is not followed: within a directory of Penstock, a name means the file that has it. Links in the
//! directories of the path are followed.

mod direct;
mod outside;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::{Error, Result};
pub use direct::{Alignment, Direct};
use direct::{TMPFS_MAGIC, direct_alignment};

/// File systems of one host: ext2 to ext4, XFS, Btrfs, F2FS, tmpfs, ramfs, overlayfs, ZFS,
/// bcachefs. From `linux/magic.h` and the projects' own headers.
const LOCAL_MAGICS: [u32; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    TMPFS_MAGIC,
    0x8584_58f6,
    0x794c_7630,
    0x2fc1_2fc1,
    0xca45_1a4e,
];

/// The access that a file is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    /// Reads and writes of an existing file.
    Write,
    /// Reads and writes of a new file.
    Create,
}

impl Access {
    fn flags(self) -> OFlags {
        match self {
            Access::Create => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            Access::Write => OFlags::RDWR,
            Access::Read => OFlags::RDONLY,
        }
    }
}

/// An open regular file, or a remote one.
#[derive(Debug)]
pub struct File {
    of: Of,
    path: Arc<Path>,
    alignment: Alignment,
    direct: bool,
    fallback: Option<String>,
}

/// The owner of a file's bytes.
#[derive(Debug)]
enum Of {
    System(OwnedFd),
    Elsewhere(Arc<dyn Elsewhere>),
}

/// A file without a descriptor, in a bucket for instance. Only the engine of its creator moves its
/// bytes.
pub trait Elsewhere: Any + fmt::Debug + Send + Sync {
    /// The file's length in bytes.
    fn bytes(&self) -> io::Result<u64>;

    /// Receives the CRC-64/NVME of the bytes that the next write at an offset has.
    fn expect(&self, offset: u64, crc64nvme: u64) {
        let _ = (offset, crc64nvme);
    }
}

impl File {
    /// A remote file.
    pub fn elsewhere(path: &Path, of: Arc<dyn Elsewhere>) -> File {
        File {
            of: Of::Elsewhere(of),
            path: path.into(),
            alignment: Alignment::NONE,
            direct: false,
            fallback: None,
        }
    }

    /// The remote file, if this is one of type `T`.
    pub fn stands_for<T: Any>(&self) -> Option<&T> {
        match &self.of {
            Of::System(_) => None,
            Of::Elsewhere(of) => (&**of as &dyn Any).downcast_ref(),
        }
    }

    /// Whether it is a remote file.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.of, Of::Elsewhere(_))
    }

    /// Announces the CRC-64/NVME of the bytes about to be written at an offset to a remote file,
    /// which then need not compute it again, and sends exactly the digested bytes. For local files
    /// it is not computed.
    pub fn expect(&self, offset: u64, crc64nvme: impl FnOnce() -> u64) {
        if let Of::Elsewhere(of) = &self.of {
            of.expect(offset, crc64nvme());
        }
    }

    /// The descriptor, for operations that only local files support.
    fn fd(&self, operation: &'static str) -> Result<&OwnedFd> {
        match &self.of {
            Of::System(fd) => Ok(fd),
            Of::Elsewhere(_) => Err(storage(operation, &self.path, Errno::OPNOTSUPP)),
        }
    }

    /// Creates a file that must not exist yet, for reads and writes, with mode 0666 under the
    /// umask.
    ///
    /// # Errors
    /// [`Error::Storage`] from the file system; [`Error::DirectUnavailable`] for [`Direct::On`]
    /// where direct I/O does not work; the file is removed again then.
    pub fn create(path: &Path, direct: Direct) -> Result<File> {
        let flags = Access::Create.flags() | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o666);
        let fd = rustix::fs::open(path, flags, mode).map_err(|e| storage("create", path, e))?;
        File::with_direct(fd, path, direct, Access::Create).inspect_err(|_| {
            // If removing the empty file fails as well, the first error is the more useful one.
            drop(std::fs::remove_file(path));
        })
    }

    /// Opens an existing regular file for reads.
    ///
    /// # Errors
    /// [`Error::Storage`] from the file system and for anything but a regular file, a link to one
    /// included;
    /// [`Error::DirectUnavailable`] for [`Direct::On`] where direct I/O does not work.
    pub fn open(path: &Path, direct: Direct) -> Result<File> {
        File::open_as(path, Access::Read, direct)
    }

    fn open_as(path: &Path, access: Access, direct: Direct) -> Result<File> {
        // O_NONBLOCK keeps open from waiting for the other end of a FIFO. It is cleared below,
        // because on a file with that flag io_uring fails instead of waiting.
        let kept_out = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
        let flags = access.flags() | OFlags::CLOEXEC | kept_out;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| Error::Storage {
            operation: "open",
            path: path.to_owned(),
            source: refusal(path, errno),
        })?;
        File::of_regular(fd, path, access, direct)
    }

    /// Wraps a descriptor just opened, if it is a regular file's.
    fn of_regular(fd: OwnedFd, path: &Path, access: Access, direct: Direct) -> Result<File> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| storage("open", path, e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(File::not_regular(path, stat.st_mode));
        }
        File::with_direct(fd, path, direct, access)
    }

    fn not_regular(path: &Path, mode: u32) -> Error {
        let source = match FileType::from_raw_mode(mode) {
            FileType::Directory => io::Error::from(Errno::ISDIR),
            other => io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("not a regular file but {}", describe(other)),
            ),
        };
        Error::Storage {
            operation: "open",
            path: path.to_owned(),
            source,
        }
    }

    /// Opens an existing regular file for reads and writes.
    pub fn open_to_write(path: &Path, direct: Direct) -> Result<File> {
        File::open_as(path, Access::Write, direct)
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same path, for holders that outlive the file.
    pub(crate) fn shared_path(&self) -> Arc<Path> {
        Arc::clone(&self.path)
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// The alignment that transfers need.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Why [`Direct::Auto`] chose buffered I/O.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Reserves storage for the first `len` bytes and extends the file to at least that length, so
    /// that a full device fails now and writes find their blocks allocated.
    ///
    /// # Errors
    /// [`Error::Storage`], notably with `ENOSPC`, and with [`io::ErrorKind::Unsupported`] where the
    /// file system cannot reserve: the file is unchanged then.
    pub fn allocate(&self, len: u64) -> Result<()> {
        self.allocate_range(0, len)
    }

    fn allocate_range(&self, start: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let fd = self.fd("allocate")?;
        let allocate = || rustix::fs::fallocate(fd, FallocateFlags::empty(), start, len);
        match rustix::io::retry_on_intr(allocate) {
            // The answer of a file system that has the call but not this mode.
            Err(Errno::NOSYS) => Err(storage("allocate", &self.path, Errno::OPNOTSUPP)),
            result => result.map_err(|errno| storage("allocate", &self.path, errno)),
        }
    }

    /// Writes all of `bytes` at `offset`, for small texts in buffered files; larger writes use an
    /// engine.
    pub fn write_all(&self, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
        let fd = self.fd("write")?;
        while !bytes.is_empty() {
            let write = || rustix::io::pwrite(fd, bytes, offset);
            let written = match rustix::io::retry_on_intr(write) {
                Ok(0) => return Err(storage("write", &self.path, Errno::NOSPC)),
                result => result.map_err(|errno| storage("write", &self.path, errno))?,
            };
            bytes = &bytes[written..];
            offset += written as u64;
        }
        Ok(())
    }

    /// Truncates or extends the file to `len` bytes.
    pub fn truncate(&self, len: u64) -> Result<()> {
        let fd = self.fd("truncate")?;
        rustix::io::retry_on_intr(|| rustix::fs::ftruncate(fd, len))
            .map_err(|errno| storage("truncate", &self.path, errno))
    }

    /// Shares the blocks of another file of the same file system (`FICLONE`): this one gets its
    /// bytes and its length; later changes of one do not affect the other.
    ///
    /// # Errors
    /// [`Error::Storage`] from the file system, notably where it has no reflinks; the file is
    /// unchanged then.
    pub fn reflink(&self, other: &File) -> Result<()> {
        let (to, from) = (self.fd("clone to")?, other.fd("clone")?);
        rustix::io::retry_on_intr(|| rustix::fs::ioctl_ficlone(to, from))
            .map_err(|errno| storage("clone to", &self.path, errno))
    }

    /// Makes completed writes durable (`fdatasync`). After an error the file's content on the
    /// medium is unknown and a second call proves nothing: write a new file.
    pub fn sync_data(&self) -> Result<()> {
        let fd = self.fd("fdatasync")?;
        rustix::io::retry_on_intr(|| rustix::fs::fdatasync(fd))
            .map_err(|errno| storage("fdatasync", &self.path, errno))
    }

    /// The file's present length.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a question to the file system, not a field"
    )]
    pub fn len(&self) -> Result<u64> {
        let fd = match &self.of {
            Of::System(fd) => fd,
            Of::Elsewhere(of) => {
                return of.bytes().map_err(|source| Error::Storage {
                    operation: "stat",
                    path: self.path.to_path_buf(),
                    source,
                });
            }
        };
        let stat = rustix::fs::fstat(fd).map_err(|e| storage("stat", &self.path, e))?;
        Ok(u64::try_from(stat.st_size).expect("a regular file has no negative length"))
    }

    /// Asks the kernel to drop the file's clean pages from the page cache. Dirty pages stay: sync
    /// first.
    pub fn drop_cache(&self) -> Result<()> {
        let fd = self.fd("drop the page cache of")?;
        rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|errno| storage("drop the page cache of", &self.path, errno))
    }

    /// Switches direct I/O on if it is wanted and possible, and O_NONBLOCK off.
    fn with_direct(fd: OwnedFd, path: &Path, direct: Direct, access: Access) -> Result<File> {
        let operation = match access {
            Access::Create => "create",
            Access::Read | Access::Write => "open",
        };
        let alignment = match direct {
            Direct::Off => Ok(Alignment::NONE),
            Direct::Auto | Direct::On => direct_alignment(&fd, access == Access::Read),
        };
        // The flag is set on the open file, as opening the path again could find another file.
        let flags = if direct != Direct::Off && alignment.is_ok() {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        let alignment = match rustix::fs::fcntl_setfl(&fd, flags) {
            Ok(()) => alignment,
            Err(Errno::INVAL) if flags == OFlags::DIRECT => {
                let buffered = rustix::fs::fcntl_setfl(&fd, OFlags::empty());
                buffered.map_err(|errno| storage(operation, path, errno))?;
                Err("the file system refuses O_DIRECT".to_owned())
            }
            Err(errno) => return Err(storage(operation, path, errno)),
        };
        match alignment {
            Ok(alignment) => Ok(File {
                of: Of::System(fd),
                path: path.into(),
                alignment,
                direct: direct != Direct::Off,
                fallback: None,
            }),
            Err(reason) if direct == Direct::On => Err(Error::DirectUnavailable {
                path: path.to_owned(),
                reason,
            }),
            Err(reason) => Ok(File {
                of: Of::System(fd),
                path: path.into(),
                alignment: Alignment::NONE,
                direct: false,
                fallback: Some(reason),
            }),
        }
    }
}

/// Whether this process may create and remove entries in a directory.
pub fn may_write(directory: &Path) -> bool {
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(directory, access).is_ok()
}

/// Checks, with the effective user, that this process may read a file, without opening it.
pub fn check_readable(path: &Path) -> Result<()> {
    let (access, flags) = (rustix::fs::Access::READ_OK, AtFlags::EACCESS);
    rustix::fs::accessat(rustix::fs::CWD, path, access, flags).map_err(|e| storage("open", path, e))
}

/// Whether a lock (`flock`) on this directory excludes all other processes that could take one.
/// Network and user-space file systems grant one on each host, or have none.
pub fn locks_directories(directory: impl AsFd) -> bool {
    rustix::fs::fstatfs(directory).is_ok_and(|fs| LOCAL_MAGICS.contains(&(fs.f_type as u32)))
}

/// The reason that a path could not be opened. For a link in the last component, the system's "too
/// many levels of symbolic links" is replaced, as one is too many here.
fn refusal(path: &Path, errno: Errno) -> io::Error {
    match errno {
        Errno::LOOP if path.is_symlink() => io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file but a symbolic link",
        ),
        errno => errno.into(),
    }
}

/// Converts to a standard file, for reads without an engine.
impl From<File> for std::fs::File {
    fn from(file: File) -> std::fs::File {
        match file.of {
            Of::System(fd) => fd.into(),
            Of::Elsewhere(_) => panic!("a file that is elsewhere has no descriptor"),
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.of {
            Of::System(fd) => fd.as_fd(),
            Of::Elsewhere(_) => panic!("an engine of this system gets files of this system"),
        }
    }
}

fn storage(operation: &'static str, path: &Path, errno: Errno) -> Error {
    Error::Storage {
        operation,
        path: path.to_owned(),
        source: errno.into(),
    }
}

fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        _ => "something else",
    }
}
