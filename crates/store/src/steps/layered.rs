//! Setting a step aside whose directory the system does not rename.
//!
//! overlayfs, which containers have for their root, answers `EXDEV` where a directory lies in a lower layer:
//! it renames what is in the upper one only. But a file of a lower layer gets a second name like any other,
//! for which it is copied up. So all files of the step are linked into a new directory, which is durable
//! before it gets its name by one rename; then the files of the step go, the manifest first. At every
//! moment, and after any crash, the step is there whole by one name at least. A crash may leave it by both,
//! or a directory that is not full and that nobody holds the lease of, which a sweep removes.

use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{Change, Kind};

use crate::commit::files::has_no_links;
use crate::error::{Error, Result};
use crate::format::directory::{entries, names};
use crate::format::name::{is_unfinished_aside, unfinished_aside};
use crate::lease::{Exclusive, Lease};
use crate::progress::Progress;
use crate::steps::store::Store;

impl Store {
    /// Puts a step aside in a new directory: `rename` gives that its name. The caller holds the lease of the
    /// step.
    pub(super) fn link_aside(
        &self,
        step: &Path,
        rename: impl Fn(&Path) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let (filling, _lease) = self.begin_filling()?;
        let filled = self.fill(step, &filling).and_then(|()| rename(&filling));
        let aside = match filled {
            Ok(aside) => aside,
            Err(error) => {
                // Best effort: what stays behind is swept.
                let _ = self.remove_whole(&filling);
                return Err(match error.kind() {
                    Some(kind) if has_no_links(kind) => {
                        Error::storage("set aside", step)(io::ErrorKind::CrossesDevices.into())
                    }
                    _ => error,
                });
            }
        };
        self.sync(self.root())?;
        self.remove_whole(step)?;
        Ok(aside)
    }

    /// A new directory, and the lease of it.
    fn begin_filling(&self) -> Result<(PathBuf, Lease)> {
        loop {
            let path = self.root().join(unfinished_aside());
            self.file_system().change(Change::CreateDirectory(&path))?;
            // A sweep may have found it before the lease was on it.
            if let Some(lease) = Lease::share(&path, self.file_system(), &Progress::default())? {
                return Ok((path, lease));
            }
        }
    }

    /// Gives all files of a directory a second name in another one, durably.
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

    /// Removes directories that somebody who died did not fill; returns them, with their bytes.
    pub(crate) fn sweep_unfinished_asides(&self) -> Result<Vec<(PathBuf, u64)>> {
        let mut swept = Vec::new();
        for name in names(self.root(), self.files()).unwrap_or_default() {
            let path = self.root().join(&name);
            if is_unfinished_aside(&name)
                && let Exclusive::Taken(_lease) = Lease::try_exclusive(&path, self.file_system())?
            {
                let bytes = self.remove_whole(&path)?;
                swept.push((path, bytes));
            }
        }
        Ok(swept)
    }
}
