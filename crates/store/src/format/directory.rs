//! Listing the directory of a checkpoint.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{Entry, Files};

use crate::error::{Error, Result};
use crate::format::name::{PROTECTED, is_attempt_file};

/// Lists a directory. Where directories exist only through their files, a missing one counts as
/// empty: somebody else may have removed its last file.
pub(crate) fn entries(path: &Path, files: &dyn Files) -> Result<Vec<Entry>> {
    match files.list(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && !files.has_directories() => {
            Ok(Vec::new())
        }
        entries => entries.map_err(Error::storage("list", path)),
    }
}

/// Whether a list contains a name.
pub(crate) fn has(entries: &[Entry], name: &str) -> bool {
    entries.iter().any(|entry| entry.name == name)
}

/// The names in a directory that are valid UTF-8, as all names of a checkpoint's own files are.
pub(crate) fn names(path: &Path, files: &dyn Files) -> Result<Vec<String>> {
    let names = entries(path, files)?.into_iter();
    Ok(names
        .filter_map(|entry| entry.name.into_string().ok())
        .collect())
}

/// The attempt files of a directory that `select` picks, with their sizes.
pub(crate) fn attempt_files(
    path: &Path,
    files: &dyn Files,
    select: impl Fn(&str) -> bool,
) -> Result<Vec<(PathBuf, u64)>> {
    Ok(attempt_files_among(
        path,
        files,
        &entries(path, files)?,
        select,
    ))
}

/// Finds the same as [`attempt_files`] in a list: where each lookup is a request, one list replaces
/// many.
pub(crate) fn attempt_files_among(
    path: &Path,
    files: &dyn Files,
    entries: &[Entry],
    select: impl Fn(&str) -> bool,
) -> Vec<(PathBuf, u64)> {
    let mut selected = Vec::new();
    for entry in entries {
        let Some(name) = entry.name.to_str() else {
            continue;
        };
        if is_attempt_file(name) && select(name) {
            let file = path.join(name);
            let stat_bytes = || files.stat_file(&file).map_or(0, |found| found.bytes);
            let bytes = entry.bytes.unwrap_or_else(stat_bytes);
            selected.push((file, bytes));
        }
    }
    selected
}

/// Whether the step in a directory is protected, under its own name or as a quarantined one.
pub(crate) fn is_protected_at(path: &Path, files: &dyn Files) -> bool {
    // When in doubt the step counts as protected: if the marker is a dangling link, or cannot be
    // looked up.
    let found = files.stat_file(&path.join(PROTECTED));
    !found
        .is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}
