//! What lies in the directory of a checkpoint beside what its manifest names.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::name::{PROTECTED, is_attempt_file};

/// The attempt files of a directory that `select` picks, with their bytes.
pub(crate) fn attempt_files(
    path: &Path,
    select: impl Fn(&str) -> bool,
) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(Error::storage("list", path))? {
        let entry = entry.map_err(Error::storage("list", path))?;
        let file_name = entry.file_name();
        let is_selected = |name: &str| is_attempt_file(name) && select(name);
        if file_name.to_str().is_some_and(is_selected) {
            let bytes = entry.metadata().map_or(0, |metadata| metadata.len());
            files.push((entry.path(), bytes));
        }
    }
    Ok(files)
}

/// Whether the step in a directory is protected, by whatever name.
pub(crate) fn is_protected_at(path: &Path) -> bool {
    // When in doubt, it is protected: a link to nothing counts, and what cannot be looked at.
    let found = path.join(PROTECTED).symlink_metadata();
    !found.is_err_and(|error| {
        matches!(
            error.kind(),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
        )
    })
}
