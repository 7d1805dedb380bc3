//! Removal of a checkpoint where other hosts cannot see our lease.
//!
//! Only provably dead files are removed: those of the checkpoint whose manifest was taken, since
//! its save has published it and no longer writes to them. Files of other attempts may belong to a
//! live one.
//!
//! 1. The manifest is renamed to a name that states which checkpoint is to be deleted
//!    (`deleted-….ATTEMPT.json`). Of several hosts, one succeeds.
//! 2. Only then the renamed manifest is read. If another save has published its own in between,
//!    that one is put back by a link, which replaces nothing; until then readers use it under its
//!    present name ([`crate::format::tombstone::misplaced`]), so a process that dies here destroys
//!    nothing. A manifest whose step is protected by now is put back too, since the protection may
//!    have been acknowledged before.
//!
//! On an object store, step 1 is two requests: a copy, and a removal on condition that the manifest
//! is still the one copied, so that no other manifest is ever taken. A single conditional removal
//! would suffice for a process that survives. If the process died right after it, the remaining
//! files could not be distinguished from those of a save in progress, and there would be no
//! manifest to put back.
//!
//! 3. The directory is synced, the files of the checkpoint are removed, and the directory is synced
//!    again; the taken manifest is removed last. Others that find it earlier resume the removal
//!    ([`Store::resume_removals`]).

use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, Entry};

use crate::commit::fence;
use crate::commit::files::{discard, link_new, remove_file};
use crate::commit::leftovers::remove_attempt_files;
use crate::error::{Error, Result};
use crate::format::description::read_manifest;
use crate::format::directory::{attempt_files, entries, has, is_protected_at};
use crate::format::manifest::Manifest;
use crate::format::name::{self, MANIFEST, PROTECTED, attempt_of};
use crate::format::tombstone::{Tombstone, has_unknown, id_of, tombstones_among};
use crate::steps::store::Store;

/// How often others may delete the same checkpoint first.
const TURNS_MAX: usize = 16;

impl Store {
    /// Removes the checkpoint in a directory, and nothing else; with `expected`, only if it has
    /// that id. Returns the bytes freed, or `None` if another checkpoint is there.
    pub(crate) fn remove_unlocked(
        &self,
        path: &Path,
        expected: Option<&str>,
        is_forced: bool,
    ) -> Result<Option<u64>> {
        let owned = || path.to_owned();
        let listed = entries(path, self.files())?;
        if listed.is_empty() && !self.files().has_directories() {
            // A list may be outdated.
            if !self.files().is_there(&path.join(MANIFEST)) {
                return Err(Error::NotFound { path: owned() });
            }
        }
        // Whether there was a checkpoint at first, or an unfinished deletion of one: if it is gone
        // later, the deletion is done.
        let is_taken = |entry: &Entry| entry.name.to_str().is_some_and(name::is_tombstone);
        let mut was_there = has(&listed, MANIFEST) || listed.iter().any(is_taken);
        let mut freed_bytes = self.resume_listed(path, &listed)?;
        for _ in 0..TURNS_MAX {
            let id = match self.committed(path, was_there) {
                Ok(Some(id)) if expected.is_none_or(|expected| expected == id) => id,
                Ok(None) if expected.is_none() || freed_bytes > 0 => {
                    self.remove_if_empty(path)?;
                    return Ok(Some(freed_bytes));
                }
                Ok(_) => return Ok(None),
                Err(Error::Undecided { .. }) if expected.is_some() => return Ok(None),
                Err(error) => return Err(error),
            };
            if is_protected_at(path, self.files()) {
                if !is_forced {
                    return Err(Error::Protected { path: owned() });
                }
                self.unprotect_at(path)?;
            }
            // The removal of a protection must be durable before that of the manifest.
            self.sync(path)?;
            let Some(tombstone) = self.take_manifest(path, id)? else {
                was_there = true;
                freed_bytes += self.resume_removals(path)?;
                continue;
            };
            let is_protected = is_protected_at(path, self.files());
            if is_protected || !tombstone.is_meant() {
                self.put_back(path, &tombstone)?;
                return match (is_protected, expected) {
                    (true, _) => Err(Error::Protected { path: owned() }),
                    (false, Some(_)) => Ok(None),
                    (false, None) => Err(busy(owned())),
                };
            }
            freed_bytes += self.finish(path, &tombstone)?;
            if !self.files().has_directories() {
                // Copies left by slower deletions, or by ones that died.
                freed_bytes += self.resume_removals(path)?;
            }
            self.remove_if_empty(path)?;
            return Ok(Some(freed_bytes));
        }
        Err(busy(owned()))
    }

    /// Resumes deletions that died, or puts back manifests that they took by mistake; returns the
    /// bytes freed.
    pub(crate) fn resume_removals(&self, path: &Path) -> Result<u64> {
        self.resume_listed(path, &entries(path, self.files())?)
    }

    /// Resumes deletions as [`Self::resume_removals`] does, from a list.
    pub(crate) fn resume_listed(&self, path: &Path, listed: &[Entry]) -> Result<u64> {
        let mut freed_bytes = 0;
        for tombstone in tombstones_among(path, self.files(), listed)? {
            // The deletion may have died before its second check of the protection.
            let manifest = path.join(MANIFEST);
            let there = id_of(&manifest, path, self.files())?;
            let is_there = || there.is_some() || self.files().is_there(&manifest);
            if !self.files().has_directories() && is_there() {
                // Where taking has two steps, another deletion may be between them, or may have
                // found a newer manifest. A copy left by a dead one is harmless: it is removed with
                // the replaced checkpoint, by the next deletion, or by its age.
                continue;
            }
            let is_gone = there.as_ref() != Some(&tombstone.meant);
            let is_protected = has(listed, PROTECTED) || is_protected_at(path, self.files());
            if tombstone.is_meant() && is_gone && !is_protected {
                // The rename may not be durable yet.
                freed_bytes += self.finish(path, &tombstone)?;
            } else if tombstone.found.is_some() {
                self.put_back(path, &tombstone)?;
            }
        }
        Ok(freed_bytes)
    }

    /// The checkpoint to be removed; `None` if there is neither a checkpoint nor a rest of one. If
    /// one `was_there`, somebody else has removed it, and the remaining files belong to another
    /// save, live or dead.
    pub(super) fn committed(&self, path: &Path, was_there: bool) -> Result<Option<String>> {
        let undecided = |detail: String| Error::Undecided {
            path: path.to_owned(),
            detail,
        };
        match read_manifest(path, self.files()) {
            Ok((manifest, _)) => Ok(Some(manifest.id)),
            Err(Error::Incomplete { .. } | Error::NotFound { .. } | Error::Store { .. }) => {
                let is_left = match was_there {
                    true => has_unknown(path, self.files()),
                    false => !attempt_files(path, self.files(), |_| true)?.is_empty(),
                };
                match is_left {
                    true => Err(undecided(format!("it has no {MANIFEST}"))),
                    false => Ok(None),
                }
            }
            Err(Error::Corrupt { detail, .. }) => Err(undecided(format!(
                "its {MANIFEST} cannot be read ({detail})"
            ))),
            Err(Error::Version { found, .. }) => Err(undecided(format!(
                "its {MANIFEST} has format version {found}"
            ))),
            Err(error) => Err(error),
        }
    }

    /// Takes the manifest; `None` if somebody else has.
    fn take_manifest(&self, path: &Path, id: String) -> Result<Option<Tombstone>> {
        let file = path.join(name::tombstone_file(&id));
        let (from, to) = (&*path.join(MANIFEST), file.as_path());
        let tombstone = match self.files().has_directories() {
            true => self.file_system().change(Change::Rename { from, to }),
            false => self.take_seen(path, &id, to),
        };
        match tombstone {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let found = match self.files().has_directories() {
                    // A manifest that cannot be attributed is put back.
                    true => id_of(&file, path, self.files()).unwrap_or_default(),
                    // It was read before it was taken.
                    false => Some(id.clone()),
                };
                Ok(Some(Tombstone {
                    file,
                    meant: id,
                    found,
                }))
            }
        }
    }

    /// Copies the manifest, and removes it if it is still the same version.
    fn take_seen(&self, path: &Path, id: &str, to: &Path) -> penstock_io::Result<()> {
        let manifest = path.join(MANIFEST);
        let gone = || penstock_io::Error::Storage {
            operation: "remove",
            path: manifest.clone(),
            source: io::ErrorKind::NotFound.into(),
        };
        let (_, seen) = self
            .files()
            .stat_and_read(&manifest, u64::MAX)
            .map_err(|source| penstock_io::Error::Storage {
                operation: "read",
                path: manifest.clone(),
                source,
            })?;
        if !Manifest::parse(&seen.bytes, path).is_ok_and(|manifest| manifest.id == id) {
            return Err(gone());
        }
        let copy = self.file_system().create(to, Direct::Off)?;
        self.file_system()
            .change(Change::Write(&copy, &seen.bytes))?;
        self.file_system().change(Change::SyncData(&copy))?;
        match self
            .file_system()
            .change(Change::RemoveSeen(&manifest, &seen))
        {
            Err(error) if error.kind().is_some_and(fence::is_gone) => {
                // If there is no manifest at all, the request may have been duplicated on its way
                // and refused because of its own first execution: then this copy is the only one.
                if self.files().is_there(&manifest) {
                    self.file_system().change(Change::RemoveFile(to))?;
                }
                Err(gone())
            }
            result => result,
        }
    }

    /// Puts back a manifest taken by mistake, unless a newer one has its place.
    fn put_back(&self, path: &Path, tombstone: &Tombstone) -> Result<()> {
        match link_new(self.file_system(), &tombstone.file, &path.join(MANIFEST)) {
            Ok(()) => self.sync(path)?,
            Err(error) => match error.kind() {
                // Somebody else has put it back.
                Some(io::ErrorKind::NotFound) => return Ok(()),
                Some(io::ErrorKind::AlreadyExists) => self.sync(path)?,
                _ => return Err(error),
            },
        }
        discard(&tombstone.file, self.file_system())
    }

    /// Removes the files of a checkpoint whose manifest was taken, and the taken manifest last.
    fn finish(&self, path: &Path, tombstone: &Tombstone) -> Result<u64> {
        self.sync(path)?;
        let is_of_it =
            |name: &str| attempt_of(name) == Some(&*tombstone.meant) && !name::is_tombstone(name);
        let mut freed_bytes = remove_attempt_files(path, self.file_system(), is_of_it)?;
        // Without the taken manifest, nothing would show that files restored by a crash are dead.
        self.sync(path)?;
        freed_bytes += remove_file(&tombstone.file, self.file_system())?;
        Ok(freed_bytes)
    }
}

fn busy(path: PathBuf) -> Error {
    Error::Storage {
        operation: "delete",
        path,
        source: io::ErrorKind::ResourceBusy.into(),
    }
}
