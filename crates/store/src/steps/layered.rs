//! Quarantine of a step whose directory the system cannot rename.
//!
//! overlayfs, the usual root file system of containers, returns `EXDEV` for a rename of a directory
//! in a lower layer: it renames only those in the upper one. But a file of a lower layer can be
//! hard-linked, which copies it up. So all files of the step are linked into a new directory, which
//! is made durable and then renamed; then the files of the step are removed, the manifest first. At
//! every moment, and after any crash, the whole step exists under at least one name. A crash may
//! leave it under both, or leave an incomplete directory without a lease, which a sweep removes.

use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{Change, Kind};

use crate::commit::files::has_no_links;
use crate::error::{Error, Result};
use crate::format::directory::{entries, names};
use crate::format::name::{is_unfinished_quarantine, unfinished_quarantine};
use crate::lease::{Exclusive, Lease};
use crate::progress::Progress;
use crate::steps::store::Store;

impl Store {
    /// Quarantines a step by linking its files into a new directory, which `rename` then names. The
    /// caller holds the lease of the step.
    pub(super) fn link_quarantined(
        &self,
        step: &Path,
        rename: impl Fn(&Path) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let (filling, _lease) = self.begin_filling()?;
        let filled = self.fill(step, &filling).and_then(|()| rename(&filling));
        let quarantined = match filled {
            Ok(quarantined) => quarantined,
            Err(error) => {
                // Best effort: a sweep removes what stays behind.
                let _ = self.remove_whole(&filling);
                return Err(match error.kind() {
                    Some(kind) if has_no_links(kind) => {
                        Error::storage("quarantine", step)(io::ErrorKind::CrossesDevices.into())
                    }
                    _ => error,
                });
            }
        };
        self.sync(self.root())?;
        self.remove_whole(step)?;
        Ok(quarantined)
    }

    /// Creates a new directory, and takes its lease.
    fn begin_filling(&self) -> Result<(PathBuf, Lease)> {
        loop {
            let path = self.root().join(unfinished_quarantine());
            self.file_system().change(Change::CreateDirectory(&path))?;
            // A sweep may have removed it before the lease was taken.
            if let Some(lease) = Lease::share(&path, self.file_system(), &Progress::default())? {
                return Ok((path, lease));
            }
        }
    }

    /// Hard-links all files of a directory into another one, durably.
    fn fill(&self, from: &Path, to: &Path) -> Result<()> {
        for entry in entries(from, self.files())? {
            let (from, to) = (&*from.join(&entry.name), &*to.join(&entry.name));
            if self.kind_of(from, &entry)? == Kind::Directory {
                self.file_system().change(Change::CreateDirectory(to))?;
                self.fill(from, to)?;
            } else {
                self.file_system().change(Change::Link { from, to })?;
            }
        }
        self.sync(to)
    }

    /// Removes directories left incomplete by processes that died; returns them with their sizes.
    pub(crate) fn sweep_unfinished_quarantines(&self) -> Result<Vec<(PathBuf, u64)>> {
        let mut swept = Vec::new();
        for name in names(self.root(), self.files()).unwrap_or_default() {
            let path = self.root().join(&name);
            if is_unfinished_quarantine(&name)
                && let Exclusive::Tombstone(_lease) =
                    Lease::try_exclusive(&path, self.file_system())?
            {
                let bytes = self.remove_whole(&path)?;
                swept.push((path, bytes));
            }
        }
        Ok(swept)
    }
}
