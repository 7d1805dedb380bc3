//! The local file system.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::files::{Entry, FileStat, Files, Kind};
use super::{Change, FileSystem};
use crate::file::{Direct, File, check_readable, may_write};
use crate::{Error, Result, trace};

/// The files of the local system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Native;

impl FileSystem for Native {
    fn files(&self) -> &dyn Files {
        self
    }

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
            Change::Replace { .. } | Change::RemoveSeen(..) => {
                Err(io::ErrorKind::Unsupported.into())
            }
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

/// Syncs a directory, and checks that the file system was still running afterwards.
///
/// XFS that shuts itself down, after an error of its log for instance, reports success for the
/// `fsync` of a directory whose changes it has just dropped (seen with Linux 6.18), and the lost
/// changes would be acknowledged. From then on it refuses `fstat`, and a shutdown is final, so a
/// check afterwards is in time.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = fs::File::open(path)?;
    directory.sync_all()?;
    directory.metadata().map(drop)
}

/// `renameat2` with `RENAME_NOREPLACE`: `EINVAL` where the file system does not support it.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let flags = rustix::fs::RenameFlags::NOREPLACE;
    rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags)?;
    Ok(())
}

/// Bytes that an ordinary user can still store on the file system of `path`.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let statistics = rustix::fs::statvfs(path).map_err(|errno| Error::Storage {
        operation: "look at the free space of",
        path: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}

/// The most memory allocated before a file is read: its reported length may be wrong.
const READ_AT_ONCE_MAX: u64 = 1 << 20;

impl Files for Native {
    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        fs::symlink_metadata(path).map(|metadata| found_by(&metadata))
    }

    fn follow(&self, path: &Path) -> io::Result<FileStat> {
        fs::metadata(path).map(|metadata| found_by(&metadata))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let entry = |entry: fs::DirEntry| Entry {
            name: entry.file_name(),
            kind: entry.file_type().ok().map(kind),
            bytes: None,
            modified: None,
        };
        fs::read_dir(path)?
            .map(|found| found.map(entry))
            .collect::<io::Result<Vec<Entry>>>()
    }

    fn resolve(&self, path: &Path) -> io::Result<PathBuf> {
        fs::canonicalize(path)
    }

    fn open(&self, path: &Path, direct: Direct) -> Result<File> {
        File::open(path, direct)
    }

    fn read_range(&self, path: &Path, range: Range<u64>) -> io::Result<Vec<u8>> {
        let mut file: fs::File = match File::open(path, Direct::Off) {
            Ok(file) => file.into(),
            Err(crate::Error::Storage { source, .. }) => return Err(source),
            Err(error) => return Err(io::Error::other(error)),
        };
        if range.start > 0 {
            file.seek(SeekFrom::Start(range.start))?;
        }
        // Allocated at once: into an empty vector it would be read in small pieces.
        let expected = file
            .metadata()?
            .len()
            .min(range.end)
            .saturating_sub(range.start);
        let mut bytes = Vec::with_capacity(expected.min(READ_AT_ONCE_MAX) as usize);
        file.take(range.end.saturating_sub(range.start))
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn check_readable(&self, path: &Path) -> Result<()> {
        check_readable(path)
    }

    fn may_write(&self, directory: &Path) -> bool {
        may_write(directory)
    }

    fn free_bytes(&self, path: &Path) -> Option<u64> {
        free_bytes(path).ok()
    }

    fn open_directory(&self, path: &Path) -> io::Result<fs::File> {
        fs::File::open(path)
    }
}

/// The metadata of an open file or directory.
pub fn found(open: &fs::File) -> io::Result<FileStat> {
    open.metadata().map(|metadata| found_by(&metadata))
}

fn found_by(metadata: &fs::Metadata) -> FileStat {
    FileStat {
        kind: kind(metadata.file_type()),
        bytes: metadata.len(),
        identity: (metadata.dev(), metadata.ino()),
    }
}

fn kind(kind: fs::FileType) -> Kind {
    match kind {
        kind if kind.is_file() => Kind::File,
        kind if kind.is_dir() => Kind::Directory,
        kind if kind.is_symlink() => Kind::Link,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_name_is_told_from_what_it_leads_to() {
        let root = tempfile::tempdir().unwrap();
        let (file, link) = (root.path().join("file"), root.path().join("link"));
        fs::write(&file, b"seven b").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let found = Native.stat(&file).unwrap();
        assert_eq!((found.kind, found.bytes), (Kind::File, 7));
        assert_eq!(Native.stat(&link).unwrap().kind, Kind::Link);
        assert_eq!(Native.follow(&link).unwrap(), found);
        assert!(Native.follow(root.path()).unwrap().is_directory());
        let mut listed = Native.list(root.path()).unwrap();
        listed.sort_by(|one, other| one.name.cmp(&other.name));
        let kinds: Vec<_> = listed.iter().map(|entry| entry.kind).collect();
        assert_eq!(kinds, [Some(Kind::File), Some(Kind::Link)]);
        fs::remove_file(&file).unwrap();
        assert!(Native.is_there(&link) && !Native.leads(&link));
    }

    #[test]
    fn a_range_ends_with_the_file() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, b"0123456789").unwrap();
        assert_eq!(Native.read(&file).unwrap(), b"0123456789");
        assert_eq!(Native.read_range(&file, 3..5).unwrap(), b"34");
        assert_eq!(Native.read_range(&file, 8..64).unwrap(), b"89");
        assert_eq!(Native.read_range(&file, 64..99).unwrap(), b"");
        let missing = Native.read(&root.path().join("none")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
