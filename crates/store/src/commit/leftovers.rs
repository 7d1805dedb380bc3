//! Removal of attempt files together with the copies of removed sidecars.

use std::path::Path;

use penstock_io::file_system::{Entry, FileSystem};

use super::files::remove_listed;
use super::sidecar::reconcile;
use crate::error::Result;
use crate::format::directory::{attempt_files_among, entries};

/// Removes the attempt files of a directory that `select` picks, and updates the copies of sidecars
/// among them ([`reconcile`]); returns the removed bytes. A file that somebody else removes at the
/// same time counts as removed.
pub(crate) fn remove_attempt_files(
    path: &Path,
    file_system: &dyn FileSystem,
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    let entries = entries(path, file_system.files())?;
    remove_attempt_files_among(path, file_system, &entries, select)
}

/// Removes files as [`remove_attempt_files`] does, from a list: files created since then stay.
pub(crate) fn remove_attempt_files_among(
    path: &Path,
    file_system: &dyn FileSystem,
    entries: &[Entry],
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    reconcile(path, file_system, entries, |name| select(name))?;
    let mut removed_bytes = 0;
    for (file, bytes) in attempt_files_among(path, file_system.files(), entries, select) {
        removed_bytes += remove_listed(&file, bytes, file_system)?;
    }
    Ok(removed_bytes)
}
