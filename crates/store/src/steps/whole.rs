//! Removal of a checkpoint's directory with all of its contents.
//!
//! A framework puts its own files next to a checkpoint, and removes the whole directory when it
//! drops the checkpoint. The directory is removed like a step of a store: under the exclusive
//! lease, so never during a save or a load; not while it is protected; and the manifest first. A
//! crash leaves an incomplete checkpoint; its own files are removed last, so that the directory is
//! still recognized as one.
//!
//! Nested checkpoints are removed too, and only if each of them may be (`steps::nested`): that is
//! checked before anything is removed. A directory that contains checkpoints without being one, as
//! a store does, is refused.
//!
//! If the lease is not visible to all hosts, only provably dead files are removed
//! (`steps::removal`), and other files only if no attempt has files in the directory.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use penstock_io::file_system::{Change, Entry, Kind};

use crate::commit::files::remove_listed;
use crate::error::{Error, Result};
use crate::format::directory::{entries, has};
use crate::format::name::{MANIFEST, PROTECTED, is_attempt_file};
use crate::steps::nested::{Nested, holds_attempts};
use crate::steps::store::Store;

/// Directories that a removal accepts although it refuses them by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Removal {
    /// Protected checkpoints.
    pub is_forced: bool,
    /// A directory that contains checkpoints without being one: another library wrote it.
    pub is_foreign: bool,
}

/// Removes a checkpoint's directory, or one with the remains of a save, with all of its contents;
/// returns the bytes freed. Another call resumes an interrupted removal.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Protected`] unless `is_forced`, [`Error::Storage`] with
/// [`io::ErrorKind::ResourceBusy`] during a save or a load in it, with
/// [`io::ErrorKind::NotADirectory`] for a link and with [`io::ErrorKind::InvalidInput`] for a
/// store, and for a path that ends in `.` or `..`, [`Error::Undecided`] if locks are not visible to
/// all hosts and it has no readable manifest, and system errors. The path in the error may be that
/// of a nested checkpoint.
pub fn remove_checkpoint(path: &Path, allowed: Removal) -> Result<u64> {
    let path = named(path)?;
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    Store::at(above)?.remove_directory(path, allowed)
}

/// A path without its trailing separators, which would make the system follow a link.
fn named(path: &Path) -> Result<&Path> {
    let bytes = path.as_os_str().as_bytes();
    let end = bytes.iter().rposition(|&byte| byte != b'/');
    let bytes = &bytes[..end.map_or(0, |last| last + 1)];
    match bytes.rsplit(|&byte| byte == b'/').next() {
        None | Some(b"" | b"." | b"..") => Err(refused(path, "its path does not end in a name")),
        Some(_) => Ok(Path::new(OsStr::from_bytes(bytes))),
    }
}

fn refused(path: &Path, why: impl Into<String>) -> Error {
    let source = io::Error::new(io::ErrorKind::InvalidInput, why.into());
    Error::storage("delete", path)(source)
}

impl Store {
    /// Removes a directory in the root as [`remove_checkpoint`] does.
    pub fn remove_directory(&self, path: &Path, allowed: Removal) -> Result<u64> {
        let (path, lease) = self.take_to_delete(path.to_owned())?;
        let nested = self.take_nested(&path, allowed.is_forced)?;
        let first = nested.iter().find(|one| one.is_checkpoint);
        if let Some(first) = first.filter(|_| !allowed.is_foreign) {
            let listed = entries(&path, self.files())?;
            if !has(&listed, MANIFEST) && !holds_attempts(&listed) {
                let first = first.path.display();
                let why = format!("it is no checkpoint, and holds some, such as {first}");
                return Err(refused(&path, why));
            }
        }
        if lease.is_some() {
            self.release(&path, allowed.is_forced)?;
            return self.remove_with(&path, &nested);
        }
        let freed_bytes = self.delete_unlocked(&path, None, allowed.is_forced)?;
        let mut freed_bytes = freed_bytes.unwrap_or_default();
        if self.is_at_work(&path)? {
            return Ok(freed_bytes);
        }
        freed_bytes += self.remove_nested(&nested, allowed.is_forced)?;
        for one in nested.iter().filter(|one| !one.is_leased()) {
            if self.is_at_work(&one.path)? {
                return Ok(freed_bytes);
            }
        }
        match entries(&path, self.files()) {
            // The directory held nothing else.
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(freed_bytes),
            listed => {
                freed_bytes += self.remove_others(&path, &listed?)?;
                self.remove_if_empty(&path)?;
                Ok(freed_bytes)
            }
        }
    }

    /// Whether a directory whose checkpoint was removed without a lease holds another one, or files
    /// that a save may be writing.
    fn is_at_work(&self, path: &Path) -> Result<bool> {
        match entries(path, self.files()) {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(false),
            listed => listed.map(|listed| has(&listed, MANIFEST) || holds_attempts(&listed)),
        }
    }

    /// Removes a directory with all of its contents, including its protection. The caller holds the
    /// lease.
    pub(crate) fn remove_whole(&self, path: &Path) -> Result<u64> {
        self.remove_with(path, &[])
    }

    /// Removes a directory as [`Self::remove_whole`] does, with the nested checkpoints that were
    /// locked.
    fn remove_with(&self, path: &Path, nested: &[Nested]) -> Result<u64> {
        remove_listed(&path.join(PROTECTED), 0, self.file_system())?;
        let mut freed_bytes = self.remove_manifest(path)?;
        // None of these may look complete while its other files are removed.
        freed_bytes += self.remove_nested(nested, true)?;
        let listed = entries(path, self.files())?;
        freed_bytes += self.remove_others(path, &listed)?;
        Ok(freed_bytes + self.remove(path)?)
    }

    /// Removes the listed entries of a directory, except files of attempts.
    fn remove_others(&self, path: &Path, listed: &[Entry]) -> Result<u64> {
        let is_of_attempt = |entry: &&Entry| entry.name.to_str().is_some_and(is_attempt_file);
        let mut freed_bytes = 0;
        for entry in listed.iter().filter(|entry| !is_of_attempt(entry)) {
            freed_bytes += self.remove_tree(&path.join(&entry.name), entry)?;
        }
        Ok(freed_bytes)
    }

    fn remove_tree(&self, path: &Path, entry: &Entry) -> Result<u64> {
        if self.kind_of(path, entry)? != Kind::Directory {
            let stat_path = || {
                let found = self.files().stat(path);
                found.map_err(Error::storage("look at", path))
            };
            let bytes = entry
                .bytes
                .map_or_else(|| stat_path().map(|found| found.bytes), Ok)?;
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
