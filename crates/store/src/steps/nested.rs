//! Checkpoints below a directory that is to be removed.
//!
//! A framework's hook may save into the directory of a checkpoint, which then contains another one,
//! or a whole store. Each has its own lease and its own protection. A removal takes all of them
//! before it removes anything, so a removal that one of them forbids changes nothing. An empty
//! directory is taken as well: a save may have just created it.
//!
//! A save that begins below the directory after that is not detected: its files are removed, and it
//! fails.

use std::path::{Path, PathBuf};

use penstock_io::file_system::{Entry, Kind};

use crate::error::{Error, Result};
use crate::format::directory::{entries, has, is_protected_at};
use crate::format::name::{MANIFEST, is_attempt_file, is_tombstone};
use crate::lease::Lease;
use crate::steps::store::Store;

/// A directory that was locked for its removal.
#[derive(Debug)]
pub(crate) struct Nested {
    pub(crate) path: PathBuf,
    /// Whether it holds a checkpoint, or the remains of one.
    pub(crate) is_checkpoint: bool,
    /// `None` if locks are not visible to all hosts.
    lease: Option<Lease>,
}

impl Nested {
    /// Whether nobody else can be using it.
    pub(crate) fn is_leased(&self) -> bool {
        self.lease.is_some()
    }
}

/// Whether a directory holds files of saves, as that of every checkpoint does.
pub(crate) fn holds_attempts(listed: &[Entry]) -> bool {
    let names = listed.iter().filter_map(|entry| entry.name.to_str());
    names.into_iter().any(is_attempt_file)
}

impl Store {
    /// Locks the checkpoints below a directory; links are not followed. Fails if one is protected
    /// and `is_forced` is not set, or is in use.
    pub(crate) fn take_nested(&self, directory: &Path, is_forced: bool) -> Result<Vec<Nested>> {
        let mut taken = Vec::new();
        self.take_below(directory, is_forced, &mut taken)?;
        Ok(taken)
    }

    fn take_below(&self, directory: &Path, is_forced: bool, taken: &mut Vec<Nested>) -> Result<()> {
        for entry in entries(directory, self.files())? {
            let path = directory.join(&entry.name);
            if self.kind_of(&path, &entry)? != Kind::Directory {
                continue;
            }
            let listed = entries(&path, self.files())?;
            if listed.is_empty() || holds_attempts(&listed) {
                taken.push(self.take_one(path.clone(), &listed, is_forced)?);
            }
            self.take_below(&path, is_forced, taken)?;
        }
        Ok(())
    }

    fn take_one(&self, path: PathBuf, listed: &[Entry], is_forced: bool) -> Result<Nested> {
        let is_checkpoint = !listed.is_empty();
        let (path, lease) = self.take_to_delete(path)?;
        if !is_forced && is_protected_at(&path, self.files()) {
            return Err(Error::Protected { path });
        }
        if lease.is_none() && is_checkpoint {
            let is_taken = |entry: &Entry| entry.name.to_str().is_some_and(is_tombstone);
            self.committed(&path, has(listed, MANIFEST) || listed.iter().any(is_taken))?;
        }
        Ok(Nested {
            path,
            is_checkpoint,
            lease,
        })
    }

    /// Removes at least the manifest of each nested checkpoint, durably; returns the bytes freed.
    pub(crate) fn remove_nested(&self, nested: &[Nested], is_forced: bool) -> Result<u64> {
        let mut freed_bytes = 0;
        for one in nested.iter().filter(|one| one.is_checkpoint) {
            if one.is_leased() {
                self.release(&one.path, is_forced)?;
                freed_bytes += self.remove_manifest(&one.path)?;
                continue;
            }
            match self.delete_unlocked(&one.path, None, is_forced) {
                // Another host has removed it.
                Err(Error::NotFound { .. }) => {}
                removed => freed_bytes += removed?.unwrap_or_default(),
            }
        }
        Ok(freed_bytes)
    }

    /// Whether a listed entry is a directory, a file or a link.
    pub(crate) fn kind_of(&self, path: &Path, entry: &Entry) -> Result<Kind> {
        match entry.kind {
            Some(kind) => Ok(kind),
            None => {
                let found = self.files().stat(path);
                found
                    .map(|found| found.kind)
                    .map_err(Error::storage("look at", path))
            }
        }
    }
}
