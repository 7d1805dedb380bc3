//! Removing the directory of a checkpoint with all that is in it.
//!
//! A framework puts files of its own beside a checkpoint, and wants the directory gone when it drops that.
//! It goes as a step of a store does: under the lease, so not from under a save or a load; not while it is
//! protected; and its manifest first. A crash leaves an incomplete checkpoint, whose own files go last, so
//! that it is still known for one.
//!
//! Where the lease is not seen by all, only what is provably dead goes (`steps::removal`), and the
//! other files only where no attempt has any beside them.

use std::path::Path;

use penstock_io::file_system::{Change, Entry, Kind};

use crate::commit::files::remove_listed;
use crate::error::{Error, Result};
use crate::format::directory::entries;
use crate::format::name::{MANIFEST, PROTECTED, is_attempt_file};
use crate::steps::store::Store;

/// Removes the directory at a path, a checkpoint or what a save has left of one, with all that is in it;
/// returns the bytes freed. Called again, it goes on where it stopped.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Protected`] unless `is_forced`, [`Error::Storage`] with
/// [`std::io::ErrorKind::ResourceBusy`] while a save or a load is under way in it and with
/// [`std::io::ErrorKind::NotADirectory`] for a link, [`Error::Undecided`] where locks are not seen by all
/// and it has no manifest that can be read, and the system's errors.
pub fn remove_checkpoint(path: &Path, is_forced: bool) -> Result<u64> {
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    Store::at(above)?.remove_directory(path, is_forced)
}

impl Store {
    /// As [`remove_checkpoint`], of a directory in the root.
    ///
    /// # Errors
    /// As [`remove_checkpoint`].
    pub fn remove_directory(&self, path: &Path, is_forced: bool) -> Result<u64> {
        let (path, lease) = self.take_to_delete(path.to_owned())?;
        if lease.is_some() {
            self.release(&path, is_forced)?;
            return self.remove_whole(&path);
        }
        let freed_bytes = self.delete_unlocked(&path, None, is_forced)?;
        let freed_bytes = freed_bytes.unwrap_or_default();
        let listed = match entries(&path, self.files()) {
            // It held nothing else.
            Err(error) if error.kind() == Some(std::io::ErrorKind::NotFound) => {
                return Ok(freed_bytes);
            }
            listed => listed?,
        };
        let is_at_work = |entry: &Entry| {
            entry.name == MANIFEST || entry.name.to_str().is_some_and(is_attempt_file)
        };
        if listed.iter().any(is_at_work) {
            return Ok(freed_bytes);
        }
        let further_bytes = self.remove_others(&path, &listed)?;
        self.remove_if_empty(&path)?;
        Ok(freed_bytes + further_bytes)
    }

    /// Removes a directory with all that is in it, its protection too. The caller holds the lease.
    pub(crate) fn remove_whole(&self, path: &Path) -> Result<u64> {
        remove_listed(&path.join(PROTECTED), 0, self.file_system())?;
        let mut freed_bytes = self.remove_manifest(path)?;
        let listed = entries(path, self.files())?;
        freed_bytes += self.remove_others(path, &listed)?;
        Ok(freed_bytes + self.remove(path)?)
    }

    /// Removes what was listed in a directory, but for files of attempts.
    fn remove_others(&self, path: &Path, listed: &[Entry]) -> Result<u64> {
        let is_of_attempt = |entry: &&Entry| entry.name.to_str().is_some_and(is_attempt_file);
        let mut freed_bytes = 0;
        for entry in listed.iter().filter(|entry| !is_of_attempt(entry)) {
            freed_bytes += self.remove_tree(&path.join(&entry.name), entry)?;
        }
        Ok(freed_bytes)
    }

    fn remove_tree(&self, path: &Path, entry: &Entry) -> Result<u64> {
        let look = || {
            self.files()
                .look(path)
                .map_err(Error::storage("look at", path))
        };
        let kind = entry
            .kind
            .map_or_else(|| look().map(|found| found.kind), Ok)?;
        if kind != Kind::Directory {
            let bytes = entry
                .bytes
                .map_or_else(|| look().map(|found| found.bytes), Ok)?;
            return remove_listed(path, bytes, self.file_system());
        }
        let mut freed_bytes = 0;
        for entry in entries(path, self.files())? {
            freed_bytes += self.remove_tree(&path.join(&entry.name), &entry)?;
        }
        self.file_system().change(Change::RemoveDirectory(path))?;
        Ok(freed_bytes)
    }
}
