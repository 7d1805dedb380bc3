//! Protection of steps against accidental deletion.
//!
//! A protected step has a file `protected` in its directory. So the protection moves and is copied
//! with the checkpoint, needs no list shared between processes, and is visible with `ls`. It is
//! created and checked under the step's lease: a deletion either sees it or came first.

use std::path::Path;

use penstock_io::file::Direct;
use penstock_io::file_system::Change;

use crate::commit::files::remove_file;
use crate::error::{Error, Result};
use crate::format::directory::is_protected_at;
use crate::format::name::{MANIFEST, PROTECTED};
use crate::lease::Lease;
use crate::progress::Progress;
use crate::steps::store::Store;

impl Store {
    /// Protects a step from retention and deletion, durably, until [`Store::unprotect`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Incomplete`] for a step without a manifest, and the system's
    /// errors.
    pub fn protect(&self, step: u64) -> Result<()> {
        let path = self.step_path(step);
        let Some(_lease) = Lease::share(&path, self.file_system(), &Progress::default())? else {
            return Err(Error::NotFound { path });
        };
        if !self.files().is_there(&path.join(MANIFEST)) {
            let detail = format!("it has no {MANIFEST}");
            return Err(Error::Incomplete { path, detail });
        }
        // A protected step must be durable: its save may have died before its sync.
        self.sync(&path)?;
        match self
            .file_system()
            .create(&path.join(PROTECTED), Direct::Off)
        {
            Ok(file) => {
                self.file_system().change(Change::SyncData(&file))?;
                if !self.files().is_there(&path.join(MANIFEST)) {
                    // A process to which the lease is invisible is deleting it.
                    self.unprotect(step)?;
                    return Err(Error::NotFound { path });
                }
            }
            // Its creator may have died before it was durable.
            Err(error) if error.kind() == Some(std::io::ErrorKind::AlreadyExists) => {}
            Err(error) => return Err(error.into()),
        }
        self.sync(&path)
    }

    /// Removes the protection of a step, durably. A step without one stays unchanged.
    ///
    /// # Errors
    /// [`Error::NotFound`] and the system's errors.
    pub fn unprotect(&self, step: u64) -> Result<()> {
        let path = self.step_path(step);
        if !self.is_directory(&path) {
            return Err(Error::NotFound { path });
        }
        self.unprotect_at(&path)
    }

    /// Removes the protection of the checkpoint in a directory.
    pub(crate) fn unprotect_at(&self, path: &Path) -> Result<()> {
        remove_file(&path.join(PROTECTED), self.file_system())?;
        self.sync(path)
    }

    /// Whether a step is protected.
    pub fn is_protected(&self, step: u64) -> bool {
        is_protected_at(&self.step_path(step), self.files())
    }

    /// The protected steps, ascending.
    pub fn protected(&self) -> Result<Vec<u64>> {
        let mut steps = self.steps()?;
        steps.retain(|&step| self.is_protected(step));
        Ok(steps)
    }
}
