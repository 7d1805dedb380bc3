//! Sweeping: removes the files of saves that died.
//!
//! Where the kernel drops the lease of a process that dies, only the lock distinguishes a dead
//! attempt from a live one. Where there are no locks, but the storage reports the ages of files,
//! the ages decide (`steps::aged`). Elsewhere nothing is swept.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::commit::leftovers::remove_attempt_files;
use crate::commit::renewal::AGE_MIN;
use crate::error::{Error, Result};
use crate::format::directory::attempt_files;
use crate::format::tombstone::has_unknown;
use crate::lease::{Exclusive, Lease};
use crate::steps::store::{StepState, Store};

/// Limits of a sweep that goes by the age of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Younger attempts stay; at least 15 minutes.
    pub age: Duration,
    /// Whether a lower age is accepted: for a caller who knows that no save is in progress.
    pub is_forced: bool,
}

impl Default for Sweep {
    /// A day: longer than a machine that returns is usually away.
    fn default() -> Sweep {
        Sweep {
            age: Duration::from_secs(24 * 60 * 60),
            is_forced: false,
        }
    }
}

impl Sweep {
    /// The effective age limit.
    pub(crate) fn age(&self) -> Duration {
        match self.is_forced {
            true => self.age,
            false => self.age.max(AGE_MIN),
        }
    }
}

impl Store {
    /// Removes the files of dead saves, and returns the paths with the bytes removed. Skips
    /// directories whose lease a live save holds, and those on a file system without locks. On an
    /// object store, attempts older than a day are dead.
    pub fn sweep(&self) -> Result<Vec<(PathBuf, u64)>> {
        self.sweep_as(&Sweep::default())
    }

    /// Sweeps as [`Store::sweep`] does, with another age.
    pub fn sweep_as(&self, sweep: &Sweep) -> Result<Vec<(PathBuf, u64)>> {
        if !self.files().has_directories() {
            return self.sweep_aged(sweep.age(), true);
        }
        let mut swept = Vec::new();
        let mut failed = None;
        for step in self.steps()? {
            match self.sweep_step(step, true) {
                Ok(found) => swept.extend(found),
                // The other steps are still swept.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        swept.extend(self.sweep_unfinished_quarantines()?);
        match self.sweep_marks()? {
            0 => {}
            freed_bytes => swept.push((self.root().to_owned(), freed_bytes)),
        }
        failed.map_or(Ok(swept), Err)
    }

    /// The paths that [`Store::sweep`] would remove from the steps, with their bytes. Nothing is
    /// changed.
    pub fn orphans(&self) -> Result<Vec<(PathBuf, u64)>> {
        self.orphans_as(&Sweep::default())
    }

    /// The paths that [`Store::sweep_as`] would remove, with their bytes.
    pub fn orphans_as(&self, sweep: &Sweep) -> Result<Vec<(PathBuf, u64)>> {
        if !self.files().has_directories() {
            return self.sweep_aged(sweep.age(), false);
        }
        let mut found = Vec::new();
        for step in self.steps()? {
            found.extend(self.sweep_step(step, false)?);
        }
        Ok(found)
    }

    /// Sweeps one step, or only returns what it would free.
    fn sweep_step(&self, step: u64, removes: bool) -> Result<Option<(PathBuf, u64)>> {
        let path = self.step_path(step);
        let _lease = match Lease::try_exclusive(&path, self.file_system()) {
            Ok(Exclusive::Tombstone(lease)) => lease,
            Err(error) if error.is_of_process() => return Err(error),
            // A directory that cannot be read leaves nothing to remove.
            Ok(_) | Err(_) => return Ok(None),
        };
        if removes {
            self.resume_removals(&path)?;
        }
        if has_unknown(&path, self.files()) {
            return Ok(None);
        }
        let referenced: HashSet<String> = match self.state(step) {
            Ok(StepState::Complete(checkpoint)) => checkpoint
                .files()
                .into_iter()
                .map(|(name, _)| name.to_owned())
                .collect(),
            Ok(StepState::Incomplete) => HashSet::new(),
            // Others may be able to read or repair it, unless its files are gone.
            Ok(StepState::Damaged(_) | StepState::Newer(_) | StepState::Unreadable(_)) | Err(_) => {
                return Ok(None);
            }
        };
        let is_orphan = |name: &str| !referenced.contains(name);
        if !removes {
            let orphans = attempt_files(&path, self.files(), is_orphan)?;
            let entries = self.files().list(&path);
            let entries = entries.map_err(Error::storage("list", &path))?;
            let goes = !orphans.is_empty() || (referenced.is_empty() && entries.is_empty());
            let bytes = orphans.iter().map(|(_, bytes)| bytes).sum();
            return Ok(goes.then_some((path, bytes)));
        }
        // An attempt may have published the manifest and died before it was durable.
        self.sync(&path)?;
        let freed_bytes = remove_attempt_files(&path, self.file_system(), is_orphan)?;
        if referenced.is_empty() {
            self.remove_if_empty(&path)?;
        }
        let is_swept = freed_bytes > 0 || !self.files().leads(&path);
        Ok(is_swept.then_some((path, freed_bytes)))
    }
}
