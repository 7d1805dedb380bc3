//! A store: a directory of checkpoints, one per step.
//!
//! Steps are ordered by number, never by time. A removal deletes the manifest first, so that it
//! leaves an incomplete checkpoint at most, never a broken one. [`crate::steps::retention`] decides
//! which steps are kept.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_io::file_system::{Change, Entry, FileSystem, Files, Kind, Native};

use crate::commit::files::remove_file;
use crate::commit::leftovers::remove_attempt_files;
use crate::error::{Error, Result};
use crate::format::description::read_manifest;
use crate::format::directory::{attempt_files, is_protected_at};
use crate::format::manifest::Manifest;
use crate::format::name::{MANIFEST, parse_step, step_directory};
use crate::lease::{Exclusive, Lease};
use crate::load::checkpoint::Checkpoint;
use crate::tier;

/// A directory of checkpoints. It need not exist before the first save.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    file_system: Arc<dyn FileSystem>,
}

/// The state of a step.
#[derive(Debug)]
pub enum StepState<T = Checkpoint> {
    /// A checkpoint whose manifest and parts are right and whose files have their sizes; if only
    /// the manifest was read, that is right.
    Complete(Box<T>),
    /// No manifest: a save in progress or one that died.
    Incomplete,
    /// A manifest, but no checkpoint that can be opened, or one that holds only what was salvaged
    /// from another ([`Error::Partial`]).
    Damaged(Error),
    /// A checkpoint that needs a newer Penstock.
    Newer(Error),
    /// The system cannot read it, or refuses to: its state is unknown.
    Unreadable(Error),
}

impl StepState {
    /// Reduces a complete checkpoint to its manifest.
    pub(crate) fn into_manifest(self) -> StepState<Manifest> {
        match self {
            StepState::Complete(checkpoint) => {
                StepState::Complete(Box::new(checkpoint.into_manifest()))
            }
            StepState::Incomplete => StepState::Incomplete,
            StepState::Damaged(error) => StepState::Damaged(error),
            StepState::Newer(error) => StepState::Newer(error),
            StepState::Unreadable(error) => StepState::Unreadable(error),
        }
    }
}

impl Store {
    /// The store in this local directory.
    pub fn new(root: impl Into<PathBuf>) -> Store {
        Store {
            root: root.into(),
            file_system: Arc::new(Native),
        }
    }

    /// The store at a local path, or at a URL of a bucket.
    pub fn at(root: impl Into<PathBuf>) -> Result<Store> {
        let store = Store::new(root);
        let file_system = tier::file_system(&store.root)?;
        Ok(store.with_file_system(file_system))
    }

    /// The same store on another file system.
    #[must_use]
    pub fn with_file_system(self, file_system: Arc<dyn FileSystem>) -> Store {
        Store {
            file_system,
            ..self
        }
    }

    pub(crate) fn file_system(&self) -> &dyn FileSystem {
        self.file_system.as_ref()
    }

    pub(crate) fn files(&self) -> &dyn Files {
        self.file_system.files()
    }

    /// Opens the checkpoint at a path without a lease that keeps others from removing its files.
    pub(crate) fn open_unleased(&self, path: &Path) -> Result<Checkpoint> {
        Checkpoint::open_unleased(path, &self.file_system)
    }

    pub(crate) fn sync(&self, path: &Path) -> Result<()> {
        Ok(self.file_system.change(Change::SyncDirectory(path))?)
    }

    pub(crate) fn is_directory(&self, path: &Path) -> bool {
        self.files()
            .stat_directory(path)
            .is_ok_and(|found| found.is_directory())
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a step's checkpoint, whether it exists or not.
    pub fn step_path(&self, step: u64) -> PathBuf {
        self.root.join(step_directory(step))
    }

    /// All steps that have a directory, ascending. A root that does not exist has none.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        for entry in self.list_root()? {
            let step = entry.name.to_str().and_then(parse_step);
            steps.extend(step.filter(|_| self.may_be_directory(&entry)));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// The entries of the root; none if it does not exist.
    pub(crate) fn list_root(&self) -> Result<Vec<Entry>> {
        match self.files().list(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(Error::storage("list", &self.root)),
        }
    }

    /// Whether an entry is, or may be, a directory or a link to one: an unknown kind counts as one.
    fn may_be_directory(&self, entry: &Entry) -> bool {
        if entry.kind == Some(Kind::Directory) {
            return true;
        }
        match self.files().follow(&self.root.join(&entry.name)) {
            Ok(found) => found.is_directory(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    /// The state of a step.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a step without a directory, and errors for exhausted limits of this
    /// process.
    pub fn state(&self, step: u64) -> Result<StepState> {
        let found = self.open_unleased(&self.step_path(step));
        Ok(match self.judge(step, found, Checkpoint::manifest)? {
            StepState::Complete(checkpoint) => match checkpoint.unknown_tag() {
                Some(error) => StepState::Newer(error),
                None => StepState::Complete(checkpoint),
            },
            state => state,
        })
    }

    /// The state of a step by its manifest alone: for a thousand ranks, one file instead of a
    /// thousand.
    pub fn glance(&self, step: u64) -> Result<StepState<Manifest>> {
        let found =
            read_manifest(&self.step_path(step), self.files()).map(|(manifest, _)| manifest);
        self.judge(step, found, |manifest| manifest)
    }

    /// The newest complete step below another one, or of all, that is not known to be damaged.
    /// Checks the steps in descending order.
    pub fn newest_complete(&self, below: Option<u64>) -> Result<Option<u64>> {
        // Marks are a hint: without them, nothing counts against a step.
        let known = self.known().unwrap_or_default();
        let is_damaged = |step, found: &Checkpoint| known.is_damaged(step, &found.manifest().id);
        let steps = self.steps()?.into_iter().rev();
        for step in steps.filter(|&step| below.is_none_or(|below| step < below)) {
            match self.state(step) {
                Ok(StepState::Complete(found)) if !is_damaged(step, &found) => {
                    return Ok(Some(step));
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Derives the state of a step from the result of reading it.
    fn judge<T>(
        &self,
        step: u64,
        found: Result<T>,
        manifest: impl Fn(&T) -> &Manifest,
    ) -> Result<StepState<T>> {
        let path = self.step_path(step);
        match found {
            Ok(found) => Ok(match manifest(&found).step {
                Some(other) if other != step => {
                    let detail = format!("it belongs to step {other}");
                    StepState::Damaged(Error::corrupt(&path, MANIFEST, detail))
                }
                _ if manifest(&found).partial.is_some() => {
                    StepState::Damaged(Error::Partial { path })
                }
                _ => StepState::Complete(Box::new(found)),
            }),
            // A step is protected only while it has a manifest, and loses its protection first.
            Err(Error::Incomplete { .. }) if self.is_protected(step) => {
                let error = Error::corrupt(&path, MANIFEST, "the file is missing");
                Ok(StepState::Damaged(error))
            }
            Err(Error::Incomplete { .. }) => Ok(StepState::Incomplete),
            Err(error @ Error::NotFound { .. }) => Err(error),
            Err(error @ Error::Storage { .. }) if error.is_of_process() => Err(error),
            Err(error @ (Error::Storage { .. } | Error::Replaced { .. })) => {
                Ok(StepState::Unreadable(error))
            }
            Err(error @ (Error::Version { .. } | Error::Unknown { .. })) => {
                Ok(StepState::Newer(error))
            }
            Err(error) => Ok(StepState::Damaged(error)),
        }
    }

    /// Identity of the checkpoint at a step, if its manifest can be read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the checkpoint belongs to another step.
    pub fn identity(&self, step: u64) -> Result<Option<String>> {
        Ok(self.readable(step)?.map(|manifest| manifest.id))
    }

    /// The id of the checkpoint at a step, and those that its writer knew before it, newest first;
    /// `None` if its manifest cannot be read. Nobody vouches for them without a key.
    ///
    /// # Errors
    /// As [`identity`](Store::identity).
    pub fn lineage(&self, step: u64) -> Result<Option<(String, Vec<String>)>> {
        let manifest = self.readable(step)?;
        Ok(manifest.map(|manifest| (manifest.id, manifest.previous)))
    }

    /// The id of the checkpoint that a step is a sealed copy of; `None` if it is none, or cannot be
    /// read. Nobody vouches for it without a key.
    ///
    /// # Errors
    /// As [`identity`](Store::identity).
    pub fn copy_of(&self, step: u64) -> Result<Option<String>> {
        let manifest = self.readable(step)?;
        let sealed = manifest.filter(|manifest| manifest.sealing.is_some());
        Ok(sealed.and_then(|manifest| manifest.copy_of))
    }

    /// The manifest at a step, if it can be read.
    fn readable(&self, step: u64) -> Result<Option<Manifest>> {
        let path = self.step_path(step);
        match read_manifest(&path, self.files()) {
            Ok((manifest, _)) => {
                check_belongs(&path, &manifest, step)?;
                Ok(Some(manifest))
            }
            Err(_) => Ok(None),
        }
    }

    /// Removes a step, complete or not, and returns the bytes freed. Files that no attempt wrote
    /// stay, and the directory with them.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a step without a directory, [`Error::Protected`], [`Error::Storage`]
    /// with [`io::ErrorKind::ResourceBusy`] during a save in it, with
    /// [`io::ErrorKind::NotADirectory`] for a link, and system errors; another call resumes the
    /// removal. [`Error::Undecided`] if locks are not visible to all hosts and the step has no
    /// readable manifest; there, only the checkpoint's own files are removed.
    pub fn delete(&self, step: u64) -> Result<u64> {
        self.delete_as(step, None, false)
            .map(Option::unwrap_or_default)
    }

    /// Removes a step as [`Store::delete`] does, even if it is protected.
    pub fn delete_protected(&self, step: u64) -> Result<u64> {
        self.delete_as(step, None, true)
            .map(Option::unwrap_or_default)
    }

    /// Removes a step as [`Store::delete`] does, if it still holds the checkpoint with this
    /// identity; returns whether it did.
    pub(crate) fn delete_checkpoint(&self, step: u64, id: &str) -> Result<bool> {
        let removed = self.delete_as(step, Some(id), false)?;
        Ok(removed.is_some())
    }

    /// Removes a step; with `expected`, only if it holds that checkpoint. Returns the bytes freed,
    /// or `None` if it holds another one.
    fn delete_as(&self, step: u64, expected: Option<&str>, is_forced: bool) -> Result<Option<u64>> {
        let (path, lease) = self.take_to_delete(self.step_path(step))?;
        if lease.is_none() {
            return self.delete_unlocked(&path, expected, is_forced);
        }
        self.release(&path, is_forced)?;
        let files = self.files();
        let is_it =
            |id: &str| read_manifest(&path, files).is_ok_and(|(manifest, _)| manifest.id == id);
        if expected.is_some_and(|id| !is_it(id)) {
            return Ok(None);
        }
        self.remove(&path).map(Some)
    }

    /// Takes the exclusive lease of a directory for its deletion, where there are leases.
    pub(crate) fn take_to_delete(&self, path: PathBuf) -> Result<(PathBuf, Option<Lease>)> {
        match self.files().has_directories() {
            true => self.take(path, "delete"),
            false => Ok((path, None)),
        }
    }

    /// Removes the checkpoint in a directory whose lease others cannot see.
    pub(crate) fn delete_unlocked(
        &self,
        path: &Path,
        expected: Option<&str>,
        is_forced: bool,
    ) -> Result<Option<u64>> {
        match self.remove_unlocked(path, expected, is_forced) {
            // Another host has removed it meanwhile.
            Err(error)
                if error.kind() == Some(io::ErrorKind::NotFound) && !self.files().leads(path) =>
            {
                self.sync(&self.root)?;
                let path = path.to_owned();
                Err(Error::NotFound { path })
            }
            result => result,
        }
    }

    /// Prepares a locked directory for deletion: resumes unfinished deletions, and removes its
    /// protection.
    pub(crate) fn release(&self, path: &Path, is_forced: bool) -> Result<()> {
        self.resume_removals(path)?;
        match is_protected_at(path, self.files()) {
            false => Ok(()),
            true if is_forced => self.unprotect_at(path),
            true => {
                let path = path.to_owned();
                Err(Error::Protected { path })
            }
        }
    }

    /// Takes the exclusive lease of a step's directory for its removal. The lease is held to the
    /// end, so that no save begins among files that are being removed.
    pub(crate) fn take(
        &self,
        path: PathBuf,
        operation: &'static str,
    ) -> Result<(PathBuf, Option<Lease>)> {
        let refused = |kind: io::ErrorKind, path: PathBuf| Error::Storage {
            operation,
            path,
            source: kind.into(),
        };
        match self.files().stat(&path) {
            Ok(found) if found.is_directory() => {}
            Ok(_) => return Err(refused(io::ErrorKind::NotADirectory, path)),
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                // An earlier removal may have failed to make this durable.
                if self.is_directory(&self.root) {
                    self.sync(&self.root)?;
                }
                return Err(Error::NotFound { path });
            }
            // Retention skips steps that are gone, and must not skip those on a failing device.
            Err(source) => return Err(Error::storage(operation, path)(source)),
        }
        match Lease::try_exclusive(&path, self.file_system())? {
            Exclusive::Tombstone(lease) => Ok((path, Some(lease))),
            Exclusive::NoLocks => Ok((path, None)),
            Exclusive::Live => Err(refused(io::ErrorKind::ResourceBusy, path)),
            Exclusive::Gone => Err(Error::NotFound { path }),
        }
    }

    /// Removes a checkpoint, and files of other attempts in its directory: none is live, as the
    /// caller holds the lease.
    pub(crate) fn remove(&self, path: &Path) -> Result<u64> {
        let mut freed_bytes = self.remove_manifest(path)?;
        freed_bytes += remove_attempt_files(path, self.file_system(), |_| true)?;
        self.remove_if_empty(path)?;
        Ok(freed_bytes)
    }

    /// Removes the manifest in a directory, durably, so that it holds no complete checkpoint.
    pub(crate) fn remove_manifest(&self, path: &Path) -> Result<u64> {
        // The removal of a protection must be durable before that of the manifest: a protected step
        // without a manifest counts as damaged.
        self.sync(path)?;
        let freed_bytes = remove_file(&path.join(MANIFEST), self.file_system())?;
        // Synced even without a manifest: an earlier removal may have died before it was durable.
        self.sync(path)?;
        Ok(freed_bytes)
    }

    pub(crate) fn remove_if_empty(&self, path: &Path) -> Result<()> {
        let removed = self.file_system.change(Change::RemoveDirectory(path));
        match removed {
            Ok(()) => self.sync(&self.root),
            Err(error) => match error.kind() {
                Some(io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotFound) => Ok(()),
                _ => Err(error.into()),
            },
        }
    }

    /// Whether a step without a manifest holds files of dead saves only; `None` if locks are not
    /// visible to all hosts, so that this is unknown.
    pub fn is_left_behind(&self, step: u64) -> Result<Option<bool>> {
        let path = self.step_path(step);
        let is_certain = match Lease::try_exclusive(&path, self.file_system())? {
            Exclusive::Tombstone(_) => true,
            Exclusive::NoLocks => false,
            Exclusive::Live | Exclusive::Gone => return Ok(Some(false)),
        };
        let is_it = matches!(self.glance(step)?, StepState::Incomplete)
            && !attempt_files(&path, self.files(), |_| true)?.is_empty();
        Ok((is_certain || !is_it).then_some(is_it))
    }
}

/// Checks that the step recorded in a manifest is this one: a directory may have been renamed.
fn check_belongs(path: &Path, manifest: &Manifest, step: u64) -> Result<()> {
    match manifest.step {
        Some(found) if found != step => {
            let detail = format!("it belongs to step {found}");
            Err(Error::corrupt(path, MANIFEST, detail))
        }
        _ => Ok(()),
    }
}
