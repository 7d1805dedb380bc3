//! Attempt files that are removed, and the copies of those that lie under other names as well.

use std::path::Path;

use penstock_io::file_system::{Entry, FileSystem};

use super::beside::settle;
use super::files::remove_listed;
use crate::error::Result;
use crate::format::directory::{attempt_files_among, entries};

/// Removes the attempt files of a directory that `select` picks, and the copies of those that lie
/// under other names as well ([`settle`]), and returns their bytes. Files
/// that somebody else removes at the same time are as good as removed.
pub(crate) fn remove_attempt_files(
    path: &Path,
    file_system: &dyn FileSystem,
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    let entries = entries(path, file_system.files())?;
    remove_attempt_files_among(path, file_system, &entries, select)
}

/// The same, of what was listed: what is there since then stays.
pub(crate) fn remove_attempt_files_among(
    path: &Path,
    file_system: &dyn FileSystem,
    entries: &[Entry],
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    settle(path, file_system, entries, |name| select(name))?;
    let mut removed_bytes = 0;
    for (file, bytes) in attempt_files_among(path, file_system.files(), entries, select) {
        removed_bytes += remove_listed(&file, bytes, file_system)?;
    }
    Ok(removed_bytes)
}
