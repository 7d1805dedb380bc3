//! Tombstones: manifests that a deletion has renamed, and neither finished with nor put back
//! ([`crate::steps::removal`]).

use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{Entry, Files};

use crate::error::{Error, Result};
use crate::format::directory::{attempt_files_among, entries, is_protected_at};
use crate::format::manifest::Manifest;
use crate::format::name::{self, attempt_of};

/// A manifest that a deletion has renamed.
pub(crate) struct Tombstone {
    pub(crate) file: PathBuf,
    /// Identity of the checkpoint that was to be deleted.
    pub(crate) meant: String,
    /// Identity of the checkpoint whose manifest it is; `None` if unknown.
    pub(crate) found: Option<String>,
}

impl Tombstone {
    /// Whether it is the manifest that was to be deleted.
    pub(crate) fn is_meant(&self) -> bool {
        self.found.as_ref() == Some(&self.meant)
    }

    /// Whether it is the manifest of another checkpoint.
    fn is_misplaced(&self) -> bool {
        self.found.is_some() && !self.is_meant()
    }
}

/// Finds a manifest that a deletion took by mistake: that of another checkpoint, or of one that was
/// protected in time.
pub(crate) fn misplaced(path: &Path, files: &dyn Files) -> Option<PathBuf> {
    misplaced_among(path, files, &entries(path, files).ok()?)
}

/// Finds the same as [`misplaced`] in a list.
pub(crate) fn misplaced_among(
    path: &Path,
    files: &dyn Files,
    entries: &[Entry],
) -> Option<PathBuf> {
    let tombstone = tombstones_among(path, files, entries).ok()?;
    let is_protected = !tombstone.is_empty() && is_protected_at(path, files);
    let is_found =
        |tombstone: &Tombstone| tombstone.is_misplaced() || (is_protected && tombstone.is_meant());
    let mut tombstone = tombstone.into_iter();
    tombstone.find(is_found).map(|tombstone| tombstone.file)
}

/// Finds in a list the manifests that deletions took and neither finished with nor put back.
pub(crate) fn tombstones_among(
    path: &Path,
    files: &dyn Files,
    entries: &[Entry],
) -> Result<Vec<Tombstone>> {
    let is_taken = |name: &str| name::is_tombstone(name);
    let mut all = Vec::new();
    for (file, _) in attempt_files_among(path, files, entries, is_taken) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let meant = attempt_of(&name).unwrap_or_default().to_owned();
        let found = id_of(&file, path, files)?;
        if found.is_none() && !files.is_there(&file) {
            // The deletion has finished since.
            continue;
        }
        all.push(Tombstone { file, meant, found });
    }
    Ok(all)
}

/// Whether there is a taken manifest that cannot be attributed to a checkpoint.
pub(crate) fn has_unknown(path: &Path, files: &dyn Files) -> bool {
    let all = entries(path, files).and_then(|entries| tombstones_among(path, files, &entries));
    !all.is_ok_and(|all| all.iter().all(|tombstone| tombstone.found.is_some()))
}

/// The id in a manifest; `None` if two reads found no file, or no valid manifest.
pub(crate) fn id_of(file: &Path, path: &Path, files: &dyn Files) -> Result<Option<String>> {
    for _ in 0..2 {
        let text = match files.read(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // A failed read does not prove that the manifest belongs to no checkpoint.
            text => text.map_err(Error::storage("read", file))?,
        };
        match Manifest::parse(&text, path) {
            Err(Error::Corrupt { .. }) => {}
            manifest => return manifest.map(|manifest| Some(manifest.id)),
        }
    }
    Ok(None)
}
