//! Attempt files that are removed, and the copies of those that lie under other names as well.

use std::path::Path;

use penstock_io::file_system::FileSystem;

use super::beside::settle;
use super::files::remove_file;
use crate::error::Result;
use crate::format::directory::attempt_files;

/// Removes the attempt files of a directory that `select` picks, and the copies of those that lie
/// under other names as well ([`settle`]), and returns their bytes. Files
/// that somebody else removes at the same time are as good as removed.
pub(crate) fn remove_attempt_files(
    path: &Path,
    file_system: &dyn FileSystem,
    select: impl Fn(&str) -> bool,
) -> Result<u64> {
    settle(path, file_system, |name| select(name))?;
    let mut removed_bytes = 0;
    for (file, _) in attempt_files(path, file_system.files(), select)? {
        removed_bytes += remove_file(&file, file_system)?;
    }
    Ok(removed_bytes)
}
