//! Fences: safe removal of an attempt's files where no lock shows whether the attempt is live.
//!
//! Taking an attempt for dead, by its age or because its checkpoint was replaced, can be wrong: a
//! clock was set, a process was stopped for a day, a request arrived late. No acknowledged data
//! depends on that guess. The remover first creates a *fence*, a file that names the attempt, and
//! only then checks whether a manifest names the attempt. The committer first publishes the
//! manifest, and only then checks for a fence and for missing files. If both act at once, at least
//! one sees the other: either nothing is removed, or the commit is revoked before it is
//! acknowledged.
//!
//! A deletion needs no fence: its copy of the manifest exists before the original is removed, and
//! until the files are gone ([`crate::steps::removal`]). That copy acts as a fence against a
//! manifest that is put again because a response was lost.
//!
//! The fence is removed last, after the files that it was created for. The fence of a remover that
//! dies stays; once it is old, the next remover deletes it together with the attempt's remaining
//! files, which include all that the first one meant to remove.
//!
//! A committer that dies between the manifest and the check, while files are being removed, leaves
//! a checkpoint without some of its files: it was never acknowledged, and a load reports it. A
//! checkpoint that it was to replace is gone then.
//!
//! Fences rely on strongly consistent storage, as object stores are. They do not keep a live
//! attempt from losing its files, which makes it fail; the lease of [`super::renewal`] does.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, Entry, FileSystem, Files};

use super::files::discard;
use super::leftovers::remove_attempt_files_among;
use crate::error::{Error, Result};
use crate::format::description::read_manifest;
use crate::format::directory::entries;
use crate::format::name::{self, attempt_of, is_fence, is_tombstone};

/// Removes the files of an attempt behind a fence, if no manifest names the attempt and its files
/// still look dead; returns the removed bytes, or `None` if the attempt is not dead. `dead_fences`
/// are removed too.
pub(crate) fn clear(
    path: &Path,
    file_system: &dyn FileSystem,
    id: &str,
    is_dead: impl Fn(&[Entry]) -> bool,
    dead_fences: &[String],
) -> Result<Option<u64>> {
    let fence = path.join(name::fence(id));
    let file = file_system.create(&fence, Direct::Off)?;
    file_system.change(Change::Write(&file, b"{}"))?;
    file_system.change(Change::SyncData(&file))?;
    drop(file);
    let files = file_system.files();
    let is_its = |name: &str| attempt_of(name) == Some(id) && !is_fence(name);
    let looked = entries(path, files);
    let looked = looked.map(|entries| {
        let mut own = entries.clone();
        own.retain(|entry| entry.name.to_str().is_some_and(is_its));
        (is_dead(&own) && is_free(path, files, id)).then_some(entries)
    });
    let listed = match looked {
        Ok(Some(listed)) => listed,
        looked => {
            let removed = discard(&fence, file_system);
            return looked.and(removed).map(|()| None);
        }
    };
    // Only listed files are removed, since only those were seen to be dead. If one cannot be
    // removed, the fence stays for the next remover.
    let removed_bytes = remove_attempt_files_among(path, file_system, &listed, is_its)?;
    for dead in dead_fences {
        discard(&path.join(dead), file_system)?;
    }
    discard(&fence, file_system)?;
    Ok(Some(removed_bytes))
}

/// Whether it is certain that no manifest names the attempt.
fn is_free(path: &Path, files: &dyn Files, id: &str) -> bool {
    match read_manifest(path, files) {
        Ok((manifest, _)) => manifest.id != id,
        Err(Error::Incomplete { .. } | Error::NotFound { .. } | Error::Store { .. }) => true,
        Err(_) => false,
    }
}

/// Whether the error says that the file no longer exists, or was changed meanwhile.
pub(crate) fn is_gone(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

/// Finds the reason why a commit does not count: a fence, a manifest that a deletion has taken, or
/// the first of the attempt's files that is missing.
pub(crate) fn flaw<'a>(
    path: &Path,
    files: &dyn Files,
    id: &str,
    expected: impl Iterator<Item = &'a str>,
) -> Result<Option<PathBuf>> {
    Ok(flaw_among(
        path,
        files,
        &entries(path, files)?,
        id,
        expected,
    ))
}

/// Finds the same as [`flaw`] in a list. A file that the list lacks is looked up by name before it
/// counts as missing, since a list can be incomplete.
pub(crate) fn flaw_among<'a>(
    path: &Path,
    files: &dyn Files,
    entries: &[Entry],
    id: &str,
    mut expected: impl Iterator<Item = &'a str>,
) -> Option<PathBuf> {
    let there: HashSet<&str> = entries
        .iter()
        .filter_map(|entry| entry.name.to_str())
        .collect();
    let is_raised =
        |name: &&&str| (is_fence(name) || is_tombstone(name)) && attempt_of(name) == Some(id);
    if let Some(fence) = there.iter().find(is_raised) {
        return Some(path.join(fence));
    }
    let is_there = |name: &str| there.contains(name) || files.is_there(&path.join(name));
    let missing = expected.find(|name| !is_there(name));
    missing.map(|name| path.join(name))
}
