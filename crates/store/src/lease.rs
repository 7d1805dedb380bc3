//! The lease: how a live save is told from a dead one without a clock.
//!
//! A save holds a shared lock (`flock`) on its checkpoint directory, whoever removes files there an
//! exclusive one. The kernel drops the lock when the process dies. It belongs to the open file, which
//! a forked child inherits, so it is given back explicitly and not left to the last close.

use std::fs::{self, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Error, Result};

/// A lock on a directory, held until dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    directory: fs::File,
}

/// What came of asking for a directory alone.
#[derive(Debug)]
pub(crate) enum Exclusive {
    /// No save is live in it, and none begins before this is dropped.
    Taken(Lease),
    /// A save is under way in it.
    Live,
    /// It is gone, or the file system has no locks to tell by.
    Unknown,
}

impl Lease {
    /// Shares the directory with other saves; `None` if it is gone. Waits for a removal at work in
    /// it, which is over in a moment. A file system without locks does not stop a save: it leaves
    /// sweeping to an operator.
    pub(crate) fn share(path: &Path) -> Result<Option<Lease>> {
        let Some(directory) = open(path)? else {
            return Ok(None);
        };
        let is_interrupted = |error: io::Error| error.kind() == io::ErrorKind::Interrupted;
        while directory.lock_shared().is_err_and(is_interrupted) {}
        Ok(is_at(&directory, path).then_some(Lease { directory }))
    }

    /// Asks for the directory alone, without waiting.
    pub(crate) fn try_exclusive(path: &Path) -> Result<Exclusive> {
        let Some(directory) = open(path)? else {
            return Ok(Exclusive::Unknown);
        };
        Ok(match directory.try_lock() {
            // Somebody may have removed it, and made a new one by that name.
            Ok(()) if is_at(&directory, path) => Exclusive::Taken(Lease { directory }),
            Ok(()) | Err(TryLockError::Error(_)) => Exclusive::Unknown,
            Err(TryLockError::WouldBlock) => Exclusive::Live,
        })
    }

    /// Turns a shared lease into an exclusive one, if nobody else holds any.
    pub(crate) fn try_upgrade(&self) -> bool {
        self.directory.try_lock().is_ok()
    }

    /// Makes the directory's entries durable.
    pub(crate) fn sync_directory(&self) -> io::Result<()> {
        self.directory.sync_all()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = self.directory.unlock();
    }
}

fn open(path: &Path) -> Result<Option<fs::File>> {
    match fs::File::open(path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::storage("open", path)(source)),
    }
}

/// Whether the open directory is still the one at the path.
fn is_at(directory: &fs::File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (directory.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => identity(open) == identity(named),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_leases_exclude_an_exclusive_one_and_not_each_other() {
        let root = tempfile::tempdir().unwrap();
        let first = Lease::share(root.path()).unwrap().unwrap();
        let second = Lease::share(root.path()).unwrap().unwrap();
        assert!(matches!(
            Lease::try_exclusive(root.path()).unwrap(),
            Exclusive::Live
        ));
        assert!(!first.try_upgrade());
        drop(first);
        assert!(second.try_upgrade());
        drop(second);
        assert!(matches!(
            Lease::try_exclusive(root.path()).unwrap(),
            Exclusive::Taken(_)
        ));
    }

    #[test]
    fn a_lease_given_back_is_given_back_by_forked_children_too() {
        let root = tempfile::tempdir().unwrap();
        let lease = Lease::share(root.path()).unwrap().unwrap();
        // A child that inherits the open file keeps it open after the lease was given back.
        let inherited = lease.directory.try_clone().unwrap();
        drop(lease);
        assert!(matches!(
            Lease::try_exclusive(root.path()).unwrap(),
            Exclusive::Taken(_)
        ));
        drop(inherited);
    }

    #[test]
    fn a_directory_that_is_gone_has_no_lease() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("gone");
        assert!(Lease::share(&path).unwrap().is_none());
        assert!(matches!(
            Lease::try_exclusive(&path).unwrap(),
            Exclusive::Unknown
        ));
    }
}
