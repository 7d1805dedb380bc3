//! `Lock`: who has a table has it alone.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The file that is locked. It is not the directory, which checkpoints in it lock.
const NAME: &str = "table.lock";

/// Held until it is dropped, by the process that has taken it.
#[derive(Debug)]
pub(super) struct Lock {
    home: PathBuf,
    file: File,
    process: u32,
}

impl Lock {
    /// Has a table for itself.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::NoTable`] where there is no such directory.
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
                process: std::process::id(),
            }),
            Err(TryLockError::WouldBlock) => Err(Error::Busy {
                path: home.to_owned(),
            }),
            Err(TryLockError::Error(source)) => Err(storage("lock")(source).into()),
        }
    }

    /// That the directory by this name is still the one that is locked: names are all that files are
    /// made and removed by.
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

    /// Whether a file of a directory is the one that is locked.
    pub(super) fn is_it(name: &str) -> bool {
        name == NAME
    }
}

impl Drop for Lock {
    /// A fork has the open file too, and would hold the lock for as long as it lives.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            drop(self.file.unlock());
        }
    }
}
