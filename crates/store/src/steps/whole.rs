//! Removing the directory of a checkpoint with all that is in it.
//!
//! A framework puts files of its own beside a checkpoint, and wants the directory gone when it drops that.
//! It goes as a step of a store does: under the lease, so not from under a save or a load; not while it is
//! protected; and its manifest first. A crash leaves an incomplete checkpoint, whose own files go last, so
//! that it is still known for one.
//!
//! Checkpoints below it go with it, and only if each may go (`steps::nested`): that is known before anything
//! is removed. A directory that is no checkpoint itself and holds some, as a store does, is refused.
//!
//! Where the lease is not seen by all, only what is provably dead goes (`steps::removal`), and the
//! other files only where no attempt has any beside them.

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

/// Which directories a removal takes that it would refuse otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Removal {
    /// Protected checkpoints.
    pub is_forced: bool,
    /// A directory that is no checkpoint itself and holds some: another library wrote it.
    pub is_foreign: bool,
}

/// Removes the directory at a path, a checkpoint or what a save has left of one, with all that is in it;
/// returns the bytes freed. Called again, it goes on where it stopped.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Protected`] unless `is_forced`, [`Error::Storage`] with
/// [`io::ErrorKind::ResourceBusy`] while a save or a load is under way in it, with
/// [`io::ErrorKind::NotADirectory`] for a link and with [`io::ErrorKind::InvalidInput`] for a path that ends
/// in `.` or `..` and for a store, [`Error::Undecided`] where locks are not seen by all and it has no manifest
/// that can be read, and the system's errors. The path in the error may be that of a checkpoint below.
pub fn remove_checkpoint(path: &Path, allowed: Removal) -> Result<u64> {
    let path = named(path)?;
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    Store::at(above)?.remove_directory(path, allowed)
}

/// A path without the separators at its end, by which the system would follow a link.
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
    /// As [`remove_checkpoint`], of a directory in the root.
    ///
    /// # Errors
    /// As [`remove_checkpoint`].
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
            // It held nothing else.
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(freed_bytes),
            listed => {
                freed_bytes += self.remove_others(&path, &listed?)?;
                self.remove_if_empty(&path)?;
                Ok(freed_bytes)
            }
        }
    }

    /// Whether a directory whose checkpoint was removed without its lease holds another one, or files that a
    /// save may be at work on.
    fn is_at_work(&self, path: &Path) -> Result<bool> {
        match entries(path, self.files()) {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(false),
            listed => listed.map(|listed| has(&listed, MANIFEST) || holds_attempts(&listed)),
        }
    }

    /// Removes a directory with all that is in it, its protection too. The caller holds the lease.
    pub(crate) fn remove_whole(&self, path: &Path) -> Result<u64> {
        self.remove_with(path, &[])
    }

    /// The same, with checkpoints below it that were taken.
    fn remove_with(&self, path: &Path, nested: &[Nested]) -> Result<u64> {
        remove_listed(&path.join(PROTECTED), 0, self.file_system())?;
        let mut freed_bytes = self.remove_manifest(path)?;
        // No one of these looks whole while its other files go.
        freed_bytes += self.remove_nested(nested, true)?;
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
        if self.kind_of(path, entry)? != Kind::Directory {
            let look = || {
                let found = self.files().look(path);
                found.map_err(Error::storage("look at", path))
            };
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
