//! `Lock`: exclusive use of a table.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The locked file. Not the directory, which checkpoints in it lock.
const NAME: &str = "table.lock";

/// Held by the process that took it, until it is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    home: PathBuf,
    file: File,
    process: u32,
}

impl Lock {
    /// Locks a table.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::NoTable`] if there is no such directory.
    pub(super) fn take(home: &Path) -> Result<Lock> {
        let storage = |operation: &'static str| {
            move |source| penstock_io::Error::Storage {
                operation,
                path: home.join(NAME),
                source,
            }
        };
        let path = home.join(NAME);
        let opened = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path),
            opened => opened,
        };
        let file = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::NoTable {
                    path: home.to_owned(),
                });
            }
            opened => opened.map_err(storage("open"))?,
        };
        match file.try_lock() {
            Ok(()) => Ok(Lock {
                home: home.to_owned(),
                file,
                process: penstock_io::process::id(),
            }),
            Err(TryLockError::WouldBlock) => Err(Error::Busy {
                path: home.to_owned(),
            }),
            Err(TryLockError::Error(source)) => Err(storage("lock")(source).into()),
        }
    }

    /// Checks that the path still leads to the locked directory, because files are created and
    /// removed by path.
    ///
    /// # Errors
    /// [`Error::Moved`].
    pub(super) fn check(&self) -> Result<()> {
        let place = |found: std::io::Result<std::fs::Metadata>| {
            found.ok().map(|found| (found.dev(), found.ino()))
        };
        let here = place(std::fs::metadata(self.home.join(NAME)));
        match here.is_some() && here == place(self.file.metadata()) {
            true => Ok(()),
            false => Err(Error::Moved {
                path: self.home.clone(),
            }),
        }
    }

    /// Whether a file of a directory is the locked one.
    pub(super) fn is_it(name: &str) -> bool {
        name == NAME
    }
}

impl Drop for Lock {
    /// A forked child shares the open file and would hold the lock for as long as it lives.
    fn drop(&mut self) {
        if self.process == penstock_io::process::id() {
            drop(self.file.unlock());
        }
    }
}
