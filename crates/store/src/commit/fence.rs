//! Fences: how files of an attempt are removed where no lock tells whether it is live.
//!
//! Whoever takes an attempt for dead, by its age or because its checkpoint was replaced, may be wrong: a
//! clock was set, a process was stopped for a day, a request came late. So nothing that is acknowledged
//! hangs on that. Who removes puts a *fence* first, a file that names the attempt, and only then looks
//! whether a manifest does. Who commits publishes the manifest first, and only then looks whether there is
//! a fence, and whether its files are all there. Of two who are at it at one moment at least one sees the
//! other: either nothing is removed, or the commit is taken back before anybody is told of it.
//!
//! A deletion has no need of one: the copy of the manifest that it takes away is there before that is gone, and
//! until the files are ([`crate::steps::removal`]). It counts as a fence, for a manifest that is put again
//! because an answer was lost.
//!
//! A fence goes last, after all that it was put up for. Of a remover that dies it stays, and whoever
//! takes its place, once the fence is old, removes it with the rest: what the first one had meant to remove
//! is among that.
//!
//! Who commits and dies between the manifest and the look leaves, if files were removed in that moment, a
//! checkpoint that lacks files: a load says so, and nobody was told of it. If it was to replace another
//! one, that is gone then.
//!
//! It takes storage that shows everybody the same at one moment, as stores of objects do. It does not keep
//! a live attempt from losing its files, which then fails; the lease of [`super::renewal`] does.

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
use crate::format::name::{self, attempt_of, is_fence, is_taken_manifest};

/// Removes the files of an attempt behind a fence, if no manifest names it and its files still look dead;
/// returns their bytes, or that it is not. Fences of others that are known to be dead go with them.
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
    // What it makes since it was listed stays: it was not seen to be dead. Where one of them cannot be
    // removed, the fence stays for whoever goes on.
    let removed_bytes = remove_attempt_files_among(path, file_system, &listed, is_its)?;
    for dead in dead_fences {
        discard(&path.join(dead), file_system)?;
    }
    discard(&fence, file_system)?;
    Ok(Some(removed_bytes))
}

/// Whether no manifest names an attempt, for certain.
fn is_free(path: &Path, files: &dyn Files, id: &str) -> bool {
    match read_manifest(path, files) {
        Ok((manifest, _)) => manifest.id != id,
        Err(Error::Incomplete { .. } | Error::NotFound { .. } | Error::Store { .. }) => true,
        Err(_) => false,
    }
}

/// Whether something is not there any more.
pub(crate) fn is_gone(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

/// Why a commit is none: a fence, a manifest that a deletion is about to take away, or the first of these
/// files of an attempt that is not there.
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

/// The same, by what was listed. A file that the list lacks is looked for by its name before it counts as
/// missing: a list may be wrong, and what it is wrong about is as good as ever.
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
        |name: &&&str| (is_fence(name) || is_taken_manifest(name)) && attempt_of(name) == Some(id);
    if let Some(fence) = there.iter().find(is_raised) {
        return Some(path.join(fence));
    }
    let is_there = |name: &str| there.contains(name) || files.is_there(&path.join(name));
    let missing = expected.find(|name| !is_there(name));
    missing.map(|name| path.join(name))
}
