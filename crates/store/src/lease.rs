//! The lease: distinguishes a live save from a dead one without a clock.
//!
//! A save or a reader holds a shared lock (`flock`) on its checkpoint directory, a process that
//! removes files there an exclusive one. The kernel drops the lock when the process dies. The lock
//! belongs to the open file, which a forked child inherits. It is therefore released explicitly,
//! not by the last close, and only by the process that took it.
//!
//! Saves take it in `commit::take_lease`, loads in `Checkpoint::open`; sweeps and deletions ask for
//! it exclusively.
//!
//! Only local file systems are trusted with it. On others, `flock` on a directory may succeed on
//! every host at once.

use std::fs::{self, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use penstock_io::file_system::{self, FileSystem, Files};

use crate::error::{Error, Result};
use crate::progress::Progress;

/// Pause between attempts to lock a directory that somebody removes files from.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// How often a reader tries: for 10 seconds.
const READ_RETRIES_MAX: usize = 1000;

/// A lock on a directory, held until dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    /// `None` if there is nothing to lock.
    directory: Option<fs::File>,
    /// Whether it excludes every process that asks for an exclusive lock.
    is_seen_by_all: bool,
    /// The process that took it. A forked child inherits the open file and must not release the
    /// lock.
    process: u32,
}

/// The outcome of asking for an exclusive lock.
#[derive(Debug)]
pub(crate) enum Exclusive {
    /// Locked: nobody saves or reads in the directory until this is dropped.
    Tombstone(Lease),
    /// A save or a load is using the directory.
    Live,
    /// The directory is gone, or another one has its name.
    Gone,
    /// The file system has no locks that every process sees, so the answer is unknown.
    NoLocks,
}

impl Lease {
    fn on(directory: impl Into<Option<fs::File>>, is_seen_by_all: bool) -> Lease {
        Lease {
            directory: directory.into(),
            is_seen_by_all,
            process: std::process::id(),
        }
    }

    /// Takes a shared lock for a save; returns `None` if the directory is gone. Waits while
    /// somebody removes files there. On a file system without locks the save continues, and
    /// sweeping is left to an operator.
    pub(crate) fn share(
        path: &Path,
        file_system: &dyn FileSystem,
        progress: &Progress,
    ) -> Result<Option<Lease>> {
        let files = file_system.files();
        let directory = match open(path, files)? {
            Opened::Directory(directory) => directory,
            Opened::Gone => return Ok(None),
            Opened::NoLocks => return Ok(Some(Lease::on(None, false))),
        };
        let is_seen_by_all = file_system.locks(directory.as_fd());
        // Not a blocking lock in the kernel: that would not notice a cancelled call.
        loop {
            match directory.try_lock_shared() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    progress.check()?;
                    std::thread::sleep(RETRY_PAUSE);
                }
                // Other processes may lock the directory here, and would conclude that nobody uses
                // it.
                Err(TryLockError::Error(source)) if is_seen_by_all => {
                    return Err(Error::storage("lock", path)(source));
                }
                Err(TryLockError::Error(_)) => break,
            }
        }
        let is_there = is_at(&directory, path, files)?;
        Ok(is_there.then(|| Lease::on(directory, is_seen_by_all)))
    }

    /// Takes a shared lock for reading, so that nobody removes files meanwhile. Waits for a removal
    /// in progress, but not indefinitely: a reader can continue without the lock, as on a file
    /// system without locks, and then reports missing files.
    pub(crate) fn share_to_read(path: &Path, files: &dyn Files) -> Option<Lease> {
        for _ in 0..READ_RETRIES_MAX {
            let Ok(Opened::Directory(directory)) = open(path, files) else {
                return None;
            };
            match directory.try_lock_shared() {
                // The directory may have been removed and a new one made with its name.
                Ok(()) if is_at(&directory, path, files).ok()? => {
                    // Only processes that remove files need to know whether everybody sees the
                    // lock.
                    return Some(Lease::on(directory, false));
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => std::thread::sleep(RETRY_PAUSE),
                Err(TryLockError::Error(_)) => break,
            }
        }
        None
    }

    /// Tries to take an exclusive lock, without waiting.
    pub(crate) fn try_exclusive(path: &Path, file_system: &dyn FileSystem) -> Result<Exclusive> {
        let files = file_system.files();
        let directory = match open(path, files)? {
            Opened::Directory(directory) => directory,
            Opened::Gone => return Ok(Exclusive::Gone),
            Opened::NoLocks => return Ok(Exclusive::NoLocks),
        };
        if !file_system.locks(directory.as_fd()) {
            return Ok(Exclusive::NoLocks);
        }
        Ok(match directory.try_lock() {
            // The directory may have been removed and a new one made with its name.
            Ok(()) if is_at(&directory, path, files)? => {
                Exclusive::Tombstone(Lease::on(directory, true))
            }
            Ok(()) => Exclusive::Gone,
            Err(TryLockError::Error(_)) => Exclusive::NoLocks,
            Err(TryLockError::WouldBlock) => Exclusive::Live,
        })
    }

    /// Whether it excludes every process that asks for an exclusive lock.
    pub(crate) fn is_seen_by_all(&self) -> bool {
        self.is_seen_by_all
    }

    /// Turns a shared or released lease into an exclusive one on the directory at `path`, if it is
    /// certain that nobody else holds one.
    pub(crate) fn try_upgrade(&self, path: &Path, files: &dyn Files) -> bool {
        let upgrades = |directory: &fs::File| {
            directory.try_lock().is_ok() && is_at(directory, path, files).unwrap_or(false)
        };
        self.is_seen_by_all && self.directory.as_ref().is_some_and(upgrades)
    }

    /// Releases the lock, so that others may remove files once nobody holds one.
    pub(crate) fn give_back(&self) {
        if self.process == std::process::id()
            && let Some(directory) = &self.directory
        {
            let _ = directory.unlock();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// The outcome of opening a directory to lock it.
enum Opened {
    Directory(fs::File),
    Gone,
    NoLocks,
}

fn open(path: &Path, files: &dyn Files) -> Result<Opened> {
    match files.open_directory(path) {
        Ok(directory) => Ok(Opened::Directory(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Opened::Gone),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Opened::NoLocks),
        Err(source) => Err(Error::storage("open", path)(source)),
    }
}

/// Whether the open directory is still the one at the path.
fn is_at(directory: &fs::File, path: &Path, files: &dyn Files) -> Result<bool> {
    let failed = |source| Error::storage("look at", path)(source);
    let open = file_system::found(directory).map_err(failed)?;
    match files.follow(path) {
        Ok(named) => Ok(open.identity == named.identity),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(failed(source)),
    }
}

#[cfg(test)]
mod tests {
    use penstock_io::file_system::Native;

    use super::*;

    #[test]
    fn shared_leases_exclude_an_exclusive_one_and_not_each_other() {
        let root = tempfile::tempdir().unwrap();
        let first = Lease::share(root.path(), &Native, &Progress::default())
            .unwrap()
            .unwrap();
        let second = Lease::share(root.path(), &Native, &Progress::default())
            .unwrap()
            .unwrap();
        assert!(matches!(
            Lease::try_exclusive(root.path(), &Native).unwrap(),
            Exclusive::Live
        ));
        assert!(!first.try_upgrade(root.path(), &Native));
        drop(first);
        assert!(second.try_upgrade(root.path(), &Native));
        drop(second);
        assert!(matches!(
            Lease::try_exclusive(root.path(), &Native).unwrap(),
            Exclusive::Tombstone(_)
        ));
    }

    #[test]
    fn a_lease_given_back_is_given_back_by_forked_children_too() {
        let root = tempfile::tempdir().unwrap();
        let lease = Lease::share(root.path(), &Native, &Progress::default())
            .unwrap()
            .unwrap();
        // A child that inherits the open file keeps it open after the lease is released.
        let inherited = lease.directory.as_ref().unwrap().try_clone().unwrap();
        drop(lease);
        assert!(matches!(
            Lease::try_exclusive(root.path(), &Native).unwrap(),
            Exclusive::Tombstone(_)
        ));
        drop(inherited);
    }

    #[test]
    fn a_save_that_waits_for_a_removal_can_be_cancelled() {
        let root = tempfile::tempdir().unwrap();
        let removing = Lease::try_exclusive(root.path(), &Native).unwrap();
        assert!(matches!(removing, Exclusive::Tombstone(_)));
        let progress = Progress::default();
        progress.cancel();
        let waited = Lease::share(root.path(), &Native, &progress);
        assert!(matches!(waited, Err(Error::Interrupted)));
    }

    #[test]
    fn a_directory_that_is_gone_has_no_lease() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("gone");
        assert!(
            Lease::share(&path, &Native, &Progress::default())
                .unwrap()
                .is_none()
        );
        assert!(matches!(
            Lease::try_exclusive(&path, &Native).unwrap(),
            Exclusive::Gone
        ));
    }
}
