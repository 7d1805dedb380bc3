//! Removing a checkpoint where another host may be at work whose lease nobody here sees.
//!
//! Only what is provably dead goes: the files of the one checkpoint whose manifest was taken away,
//! since whoever saved that has published it and writes to them no more. Files of other attempts may
//! be of a live one.
//!
//! 1. The manifest is renamed to a name that says which checkpoint is meant by it
//!    (`deleted-….ATTEMPT.json`). Of several hosts one gets it.
//! 2. Only then it is known what was taken. If another save has put its own there in between, it is
//!    put back by a link, which replaces nothing; until then readers take it for the manifest that it
//!    is ([`crate::format::taken::misplaced`]), so whoever dies here has taken nothing from anybody. The same goes for a
//!    step that is protected by now: its protection may have been promised before.
//!
//! On a store of objects the first step is two requests: a copy, and a removal on the condition that the
//! manifest is still what was copied, so that no other one is ever taken. One conditional removal would do as much for who lives on. It would
//! leave files that nothing tells from those of a save under way, and nothing to put back, where it is the
//! last that its process does.
//!
//! 3. The directory is synced, the files of the checkpoint are removed, and that is synced; what was
//!    taken goes last. Whoever finds it before goes on with the removal ([`Store::resume_removals`]).

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
use crate::format::taken::{Taken, has_unknown, id_of, taken_among};
use crate::steps::store::Store;

/// How often others may be faster at deleting the same checkpoint.
const TURNS_MAX: usize = 16;

impl Store {
    /// Removes the checkpoint in a directory, and nothing else; with `expected`, only if it is that one.
    /// Tells the bytes freed, or that another one is in its place.
    ///
    /// # Errors
    /// [`Error::NotFound`] in a bucket that has nothing of it,
    /// [`Error::Undecided`] where nothing tells which files are dead, [`Error::Protected`] unless
    /// `is_forced`, and the system's errors.
    pub(crate) fn remove_unlocked(
        &self,
        path: &Path,
        expected: Option<&str>,
        is_forced: bool,
    ) -> Result<Option<u64>> {
        let owned = || path.to_owned();
        let listed = entries(path, self.files())?;
        if listed.is_empty() && !self.files().has_directories() {
            // A list may be behind.
            if !self.files().is_there(&path.join(MANIFEST)) {
                return Err(Error::NotFound { path: owned() });
            }
        }
        // Whether there was a checkpoint when this began, or one that a deletion was at: where there is none
        // any more, that is done.
        let is_taken = |entry: &Entry| entry.name.to_str().is_some_and(name::is_taken_manifest);
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
            // A protection that was taken away is gone before the manifest is.
            self.sync(path)?;
            let Some(taken) = self.take_manifest(path, id)? else {
                was_there = true;
                freed_bytes += self.resume_removals(path)?;
                continue;
            };
            let is_protected = is_protected_at(path, self.files());
            if is_protected || !taken.is_meant() {
                self.put_back(path, &taken)?;
                return match (is_protected, expected) {
                    (true, _) => Err(Error::Protected { path: owned() }),
                    (false, Some(_)) => Ok(None),
                    (false, None) => Err(busy(owned())),
                };
            }
            freed_bytes += self.finish(path, &taken)?;
            if !self.files().has_directories() {
                // Copies of those who were slower, or died.
                freed_bytes += self.resume_removals(path)?;
            }
            self.remove_if_empty(path)?;
            return Ok(Some(freed_bytes));
        }
        Err(busy(owned()))
    }

    /// Goes on with what deletions began that died, or puts back what they took by mistake; returns
    /// the bytes freed.
    pub(crate) fn resume_removals(&self, path: &Path) -> Result<u64> {
        self.resume_listed(path, &entries(path, self.files())?)
    }

    /// The same, of what was listed.
    pub(crate) fn resume_listed(&self, path: &Path, listed: &[Entry]) -> Result<u64> {
        let mut freed_bytes = 0;
        for taken in taken_among(path, self.files(), listed)? {
            // Whoever took it may have died before the second look at the protection.
            let manifest = path.join(MANIFEST);
            let there = id_of(&manifest, path, self.files())?;
            let is_there = || there.is_some() || self.files().is_there(&manifest);
            if !self.files().has_directories() && is_there() {
                // Where taking has two steps, somebody may be between them, or may have found that a save
                // was faster. What is left of one who died there changes nothing: it goes with what
                // replaces the checkpoint, with the next deletion, or by its age.
                continue;
            }
            let is_gone = there.as_ref() != Some(&taken.meant);
            let is_protected = has(listed, PROTECTED) || is_protected_at(path, self.files());
            if taken.is_meant() && is_gone && !is_protected {
                // It may have been taken and not be durable.
                freed_bytes += self.finish(path, &taken)?;
            } else if taken.found.is_some() {
                self.put_back(path, &taken)?;
            }
        }
        Ok(freed_bytes)
    }

    /// The checkpoint that is to be removed; `None` where there is none, and nothing left of one. Where one
    /// `was_there` somebody else has removed it, and what is left is of a save that is under way or died.
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

    /// Takes the manifest away; `None` where somebody else has.
    fn take_manifest(&self, path: &Path, id: String) -> Result<Option<Taken>> {
        let file = path.join(name::taken_manifest(&id));
        let (from, to) = (&*path.join(MANIFEST), file.as_path());
        let taken = match self.files().has_directories() {
            true => self.file_system().change(Change::Rename { from, to }),
            false => self.take_seen(path, &id, to),
        };
        match taken {
            Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let found = match self.files().has_directories() {
                    // One that cannot be made out is put back.
                    true => id_of(&file, path, self.files()).unwrap_or_default(),
                    // It was read before it was taken.
                    false => Some(id.clone()),
                };
                Ok(Some(Taken {
                    file,
                    meant: id,
                    found,
                }))
            }
        }
    }

    /// Copies the manifest, and removes it if it is still the same one.
    fn take_seen(&self, path: &Path, id: &str, to: &Path) -> penstock_io::Result<()> {
        let manifest = path.join(MANIFEST);
        let gone = || penstock_io::Error::Storage {
            operation: "remove",
            path: manifest.clone(),
            source: io::ErrorKind::NotFound.into(),
        };
        let (_, seen) = self
            .files()
            .look_into(&manifest, u64::MAX)
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
                // Where there is none at all, the request may have been doubled on its way, and been
                // refused for its own sake: then this copy is all there is.
                if self.files().is_there(&manifest) {
                    self.file_system().change(Change::RemoveFile(to))?;
                }
                Err(gone())
            }
            result => result,
        }
    }

    /// Puts a manifest back that was not to be taken, unless a newer one has its place by now.
    fn put_back(&self, path: &Path, taken: &Taken) -> Result<()> {
        match link_new(self.file_system(), &taken.file, &path.join(MANIFEST)) {
            Ok(()) => self.sync(path)?,
            Err(error) => match error.kind() {
                // Somebody else has put it back.
                Some(io::ErrorKind::NotFound) => return Ok(()),
                Some(io::ErrorKind::AlreadyExists) => self.sync(path)?,
                _ => return Err(error),
            },
        }
        discard(&taken.file, self.file_system())
    }

    /// Removes the files of a checkpoint whose manifest was taken away, and that last.
    fn finish(&self, path: &Path, taken: &Taken) -> Result<u64> {
        self.sync(path)?;
        let is_of_it =
            |name: &str| attempt_of(name) == Some(&*taken.meant) && !name::is_taken_manifest(name);
        let mut freed_bytes = remove_attempt_files(path, self.file_system(), is_of_it)?;
        // Without it, nothing would tell any more that what a crash brings back is dead.
        self.sync(path)?;
        freed_bytes += remove_file(&taken.file, self.file_system())?;
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
