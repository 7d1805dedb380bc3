//! A file system with faults.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::{Faults, OpClass};
use crate::file::{Direct, File};
use crate::file_system::{Change, FileSystem, Files, OpenUpload};
use crate::{Error, Result};

/// A file system with faults.
#[derive(Debug)]
pub struct FaultyFileSystem {
    inner: Arc<dyn FileSystem>,
    faults: Arc<Faults>,
}

impl FaultyFileSystem {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn FileSystem>, faults: Arc<Faults>) -> FaultyFileSystem {
        FaultyFileSystem { inner, faults }
    }

    fn check(&self, operation: &'static str, path: &Path) -> Result<()> {
        match self.faults.count(OpClass::Change, operation, path) {
            (_, None) => Ok(()),
            (_, Some(errno)) => Err(Error::Storage {
                operation,
                path: path.to_owned(),
                source: io::Error::from_raw_os_error(errno),
            }),
        }
    }
}

impl FileSystem for FaultyFileSystem {
    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        self.check("create", path)?;
        let Some(log) = &self.faults.log else {
            return self.inner.create(path, direct);
        };
        let ticket = log.begin_create(path);
        let created = self.inner.create(path, direct);
        log.end(ticket, created.is_ok());
        created
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        self.check(change.operation(), change.path())?;
        let Some(log) = &self.faults.log else {
            return self.inner.change(change);
        };
        let ticket = log.begin_change(change);
        let changed = self.inner.change(change);
        log.end(ticket, changed.is_ok());
        changed
    }

    fn files(&self) -> &dyn Files {
        self.inner.files()
    }

    fn time_at(&self, path: &Path) -> Result<Option<SystemTime>> {
        self.inner.time_at(path)
    }

    fn open_uploads(&self, path: &Path) -> Result<Vec<OpenUpload>> {
        self.inner.open_uploads(path)
    }

    fn abandon(&self, upload: &OpenUpload) -> Result<()> {
        self.inner.abandon(upload)
    }

    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        self.inner.locks(directory)
    }
}
