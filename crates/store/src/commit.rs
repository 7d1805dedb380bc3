//! The commit: how a checkpoint becomes complete in one step, on any POSIX file system.
//!
//! 1. An attempt draws an id, creates the directory, takes the lease, and syncs all directories
//!    above.
//! 2. Data files carry the attempt's id in their names and are synced.
//! 3. The part is written under a temporary name, synced, renamed; the directory is synced.
//! 4. The manifest is written under a temporary name, synced, and published by `link`, which
//!    replaces nothing, or by `rename` if an overwrite was requested.
//! 5. The directory is synced. Only now is the checkpoint acknowledged.
//!
//! On an object store, where no lock shows which attempts are live:
//!
//! - The manifest is put only if none exists, or only over the exact version that was read before;
//!   a saver that loses this race reads the new version and tries again. So each saver knows which
//!   checkpoint it replaced, and removes the files of that checkpoint only.
//! - Before and after the put, a list shows whether all files exist and nobody has begun to remove
//!   them ([`fence`]). Otherwise the manifest is removed, or the replaced one is put back, and the
//!   commit fails: an acknowledged checkpoint has its data, whatever the clocks say.
//! - If the outcome of the put is unknown ([`Error::CommitUndecided`]), the files stay.
//!
//! An attempt that fails removes its files. One that dies leaves unreferenced files;
//! [`crate::steps::store::Store::sweep`] uses the lease to distinguish them from those of a live
//! attempt.

mod directory;
pub(crate) mod fence;
pub(crate) mod files;
pub(crate) mod leftovers;
mod publication;
pub(crate) mod renewal;
mod sidecar;
pub(crate) mod signature;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, Entry, FileSystem, Files};
use penstock_io::trace;

use crate::error::{Error, Result};
use crate::format::directory::{entries, has};
use crate::format::manifest::{Manifest, PREVIOUS_MAX};
use crate::format::name::{self, MANIFEST, PROTECTED};
use crate::format::tombstone::{misplaced, misplaced_among};
use crate::lease::Lease;
use crate::progress::Progress;
use crate::seal::Sealing;
use crate::sign::{Contents, SigningKey};
use directory::{make_directory, sync_ancestors};
use leftovers::remove_attempt_files;
use renewal::Renewal;

/// A save in progress. If dropped before it is published, it removes the files it made. A rank that
/// joined and has cast its vote leaves its files to the rank that counts the votes, unless the
/// attempt is discarded.
#[derive(Debug)]
pub struct Attempt {
    file_system: Arc<dyn FileSystem>,
    path: PathBuf,
    id: String,
    lease: Lease,
    made_directory: bool,
    is_joined: bool,
    /// The saving process: a forked child has a copy of this struct and must remove nothing.
    process: u32,
    made: Vec<PathBuf>,
    /// Files that a cast vote covers.
    voted: Vec<PathBuf>,
    /// Names of the files made by other ranks.
    others: Vec<String>,
    /// The manifest that this attempt's replaced, if known.
    replaced: Option<Vec<u8>>,
    end: End,
    /// The key of a sealed attempt.
    sealing: Option<Sealing>,
    /// The keys that sign it when it is committed.
    signing: Option<Arc<[SigningKey]>>,
    /// Ids of checkpoints that are older, newest first.
    previous: Vec<String>,
    /// Keeps the attempt live where sweeps go by the age of files.
    _renewal: Option<Renewal>,
}

/// The outcome of an attempt.
#[derive(Debug)]
enum End {
    /// None yet.
    Open,
    /// The manifest may exist, or may yet appear: the files stay.
    Undecided,
    /// The manifest with this text is published.
    Published(Vec<u8>),
}

impl Attempt {
    /// Creates the directory where needed and takes the lease.
    ///
    /// # Errors
    /// [`Error::Exists`] where a complete checkpoint is in the way, [`Error::Interrupted`], and the
    /// system's errors.
    pub fn begin(
        path: &Path,
        overwrite: bool,
        file_system: &Arc<dyn FileSystem>,
        progress: &Progress,
    ) -> Result<Attempt> {
        let _span = trace::span("begin");
        let (lease, made_directory) = take_lease(path, file_system.as_ref(), progress)?;
        let id = name::draw_attempt();
        let (path, made) = (path.to_owned(), Vec::new());
        // Ranks that join are covered by the lease of the rank that began the attempt.
        let renewal = (!file_system.files().has_directories()).then(|| {
            let lease = path.join(name::lease(&id));
            Renewal::begin(lease, file_system, renewal::RENEW)
        });
        let attempt = Attempt {
            file_system: Arc::clone(file_system),
            path,
            id,
            lease,
            made_directory,
            is_joined: false,
            process: std::process::id(),
            made,
            voted: Vec::new(),
            others: Vec::new(),
            replaced: None,
            end: End::Open,
            sealing: None,
            signing: None,
            previous: Vec::new(),
            _renewal: renewal,
        };
        sync_ancestors(&attempt.path, file_system.as_ref())?;
        if !overwrite {
            attempt.check_free()?;
        }
        Ok(attempt)
    }

    /// Refuses a directory that holds a checkpoint, or a protected one that lost its manifest.
    fn check_free(&self) -> Result<()> {
        let (is_taken, is_protected) = match self.is_swept_by_age() {
            // One list answers both.
            true => {
                let entries = entries(&self.path, self.files())?;
                (self.is_taken_by(&entries), has(&entries, PROTECTED))
            }
            false => {
                let protected = self.path.join(PROTECTED);
                (self.is_taken(), self.files().is_there(&protected))
            }
        };
        if is_taken {
            return Err(self.exists());
        }
        if is_protected {
            // Protected without a manifest: the other files may be worth recovering.
            let path = self.path.clone();
            return Err(Error::Protected { path });
        }
        Ok(())
    }

    /// Joins an attempt that another rank began, in an existing directory.
    ///
    /// # Errors
    /// [`Error::NotFound`] where the directory is gone, [`Error::Interrupted`], and the system's
    /// errors.
    pub fn join(
        path: &Path,
        id: &str,
        file_system: &Arc<dyn FileSystem>,
        progress: &Progress,
    ) -> Result<Attempt> {
        assert!(name::is_attempt(id), "an id comes from Attempt::id");
        let path = path.to_owned();
        let Some(lease) = Lease::share(&path, file_system.as_ref(), progress)? else {
            return Err(Error::NotFound { path });
        };
        Ok(Attempt {
            file_system: Arc::clone(file_system),
            path,
            id: id.to_owned(),
            lease,
            made_directory: false,
            is_joined: true,
            process: std::process::id(),
            made: Vec::new(),
            voted: Vec::new(),
            others: Vec::new(),
            replaced: None,
            end: End::Open,
            sealing: None,
            signing: None,
            previous: Vec::new(),
            _renewal: None,
        })
    }

    /// Seals what is written from now on with a key that belongs to this attempt alone.
    ///
    /// # Panics
    /// If it has a key already.
    pub fn seal(&mut self, sealing: Sealing) {
        let before = self.sealing.replace(sealing);
        assert!(before.is_none(), "an attempt has one key");
    }

    /// Signs the checkpoint with each key when this attempt is committed.
    pub fn sign(&mut self, keys: Arc<[SigningKey]>) {
        self.signing = Some(keys);
    }

    /// Records the ids of checkpoints that are older than this attempt, newest first.
    ///
    /// # Panics
    /// If there are more than [`PREVIOUS_MAX`].
    pub fn follow(&mut self, previous: Vec<String>) {
        assert!(previous.len() <= PREVIOUS_MAX, "the caller bounds them");
        self.previous = previous;
    }

    pub(crate) fn previous(&self) -> &[String] {
        &self.previous
    }

    pub(crate) fn signing(&self) -> Option<Arc<[SigningKey]>> {
        self.signing.clone()
    }

    /// Writes the signatures of the checkpoint that this attempt is about to become.
    pub(crate) fn write_signatures(
        &mut self,
        contents: &Contents,
        keys: &[SigningKey],
    ) -> Result<()> {
        let put = signature::put(&self.path, self.file_system.as_ref(), contents, None, keys);
        let files = keys
            .iter()
            .flat_map(|key| signature::files_of(&self.id, key.form()));
        let paths: Vec<_> = files.map(|name| self.path.join(name)).collect();
        self.made.extend(paths);
        put
    }

    pub(crate) fn sealing(&self) -> Option<&Sealing> {
        self.sealing.as_ref()
    }

    /// Whether the directory holds a checkpoint, or may have held one.
    pub(crate) fn is_taken(&self) -> bool {
        let files = self.files();
        if self.is_swept_by_age() {
            return entries(&self.path, files).is_ok_and(|entries| self.is_taken_by(&entries));
        }
        files.is_there(&self.path.join(MANIFEST)) || misplaced(&self.path, files).is_some()
    }

    /// Answers [`is_taken`](Self::is_taken) from a list.
    fn is_taken_by(&self, entries: &[Entry]) -> bool {
        has(entries, MANIFEST) || misplaced_among(&self.path, self.files(), entries).is_some()
    }

    /// Reads the existing files, of this attempt and of others.
    pub(crate) fn files(&self) -> &dyn Files {
        self.file_system.files()
    }

    /// Returns an error for an existing checkpoint, after syncing the directory: the save that made
    /// the checkpoint may have died before its sync, and the caller relies on this answer.
    fn exists(&self) -> Error {
        let path = self.path.clone();
        self.sync_directory()
            .err()
            .unwrap_or(Error::Exists { path })
    }

    /// The checkpoint directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the future checkpoint: 32 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Creates a data file of this attempt.
    pub(crate) fn create(&mut self, name: &str, direct: Direct) -> Result<Arc<File>> {
        let path = self.path.join(name);
        let file = self.make(&path, |file_system| file_system.create(&path, direct))?;
        Ok(Arc::new(file))
    }

    /// Hard-links an existing, durable file under `name` as a data file of this attempt; returns
    /// the new path. The name becomes durable with the part's.
    pub(crate) fn link(&mut self, from: &Path, name: &str) -> Result<PathBuf> {
        let to = self.path.join(name);
        self.make(&to, |file_system| {
            let to = to.as_path();
            file_system.change(Change::Link { from, to })
        })?;
        Ok(to)
    }

    /// Makes a file. If the lease is not visible to everybody, a deletion may have removed the
    /// still empty directory; then the directory is made again.
    fn make<T>(
        &mut self,
        path: &Path,
        make: impl Fn(&dyn FileSystem) -> penstock_io::Result<T>,
    ) -> Result<T> {
        let file_system = self.file_system.as_ref();
        let made = match make(file_system) {
            Err(error)
                if error.kind() == Some(io::ErrorKind::NotFound)
                    && self.made.is_empty()
                    && !self.is_guarded() =>
            {
                make_directory(&self.path, file_system)?;
                sync_ancestors(&self.path, file_system)?;
                make(file_system)
            }
            made => made,
        }?;
        self.made.push(path.to_owned());
        Ok(made)
    }

    /// Writes the part, and makes it and all data files reachable after a crash.
    pub(crate) fn write_part(&mut self, rank: u32, text: &[u8]) -> Result<()> {
        let temporary = self.write_temporary(&name::temporary_part(rank, &self.id), text)?;
        let part = self.path.join(name::part_file(rank, &self.id));
        let (from, to) = (&temporary, &part);
        self.file_system.change(Change::Rename { from, to })?;
        self.made.retain(|path| *path != temporary);
        self.made.push(part);
        self.sync_directory()?;
        if self.is_joined {
            // The vote is about to be cast: removing files now could break a checkpoint that
            // another rank commits.
            self.voted.append(&mut self.made);
            // The lease of the rank that counts the votes protects these files; after the commit no
            // shared lease may hinder the removal of the replaced files.
            self.lease.give_back();
        }
        Ok(())
    }

    /// Abandons the attempt and removes its files, including those covered by its vote. Call it
    /// only when nobody counts the votes any more: it would remove the data of a checkpoint that is
    /// committed, or may yet be.
    pub fn discard(mut self) {
        let voted = std::mem::take(&mut self.voted);
        self.made.extend(voted);
        // The rank that made the directory may be gone, so the last one to leave removes it.
        self.made_directory = true;
    }

    /// Writes sidecars of this attempt; see [`sidecars`].
    pub(crate) fn write_sidecars(&mut self, files: &[(&str, Cow<'_, [u8]>)]) -> Result<()> {
        for (name, text) in files {
            let path = self.path.join(name::sidecar_file(&self.id, name));
            let create = |file_system: &dyn FileSystem| file_system.create(&path, Direct::Off);
            let file = self.make(&path, create)?;
            self.write_synced(&file, text)?;
        }
        if files.is_empty() {
            return Ok(());
        }
        // Sync before a manifest names the files, and before copies exist that could not be
        // attributed.
        self.sync_directory()
    }

    /// Puts copies of sidecars under their own names, durably.
    pub(crate) fn place<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<()> {
        sidecar::place(&self.path, self.file_system.as_ref(), &self.id, names)?;
        self.sync_directory()
    }

    /// Sets the names of other ranks' files that must exist when the manifest is published.
    pub(crate) fn expect(&mut self, names: Vec<String>) {
        self.others = names;
    }

    /// Removes files of other attempts, unless one of them is live or has already replaced this
    /// one; a sweep removes the unreferenced files then.
    pub(crate) fn remove_replaced(self) -> Result<u64> {
        if self.is_swept_by_age() {
            let replaced = self.replaced.as_ref();
            let replaced = replaced.and_then(|text| Manifest::parse(text, &self.path).ok());
            // A replaced manifest that cannot be parsed is left to a sweep.
            let Some(Manifest { id, .. }) = replaced else {
                return Ok(0);
            };
            let cleared = fence::clear(&self.path, self.file_system.as_ref(), &id, |_| true, &[]);
            return cleared.map(Option::unwrap_or_default);
        }
        if !self.lease.try_upgrade(&self.path, self.files()) || !self.is_current() {
            return Ok(0);
        }
        let is_replaced = |name: &str| name::attempt_of(name) != Some(&self.id);
        remove_attempt_files(&self.path, self.file_system.as_ref(), is_replaced)
    }

    /// Whether the manifest in the directory is the one that this attempt published.
    fn is_current(&self) -> bool {
        let found = self.files().read(&self.path.join(MANIFEST));
        matches!((&self.end, found), (End::Published(text), Ok(found)) if found == *text)
    }

    /// Writes a file that is renamed or linked afterwards.
    fn write_temporary(&mut self, name: &str, text: &[u8]) -> Result<PathBuf> {
        let path = self.path.join(name);
        let file = self.make(&path, |file_system| file_system.create_temporary(&path))?;
        self.write_synced(&file, text)?;
        Ok(path)
    }

    fn write_synced(&self, file: &File, text: &[u8]) -> Result<()> {
        self.file_system.change(Change::Write(file, text))?;
        Ok(self.file_system.change(Change::SyncData(file))?)
    }

    fn sync_directory(&self) -> Result<()> {
        Ok(self.file_system.change(Change::SyncDirectory(&self.path))?)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !matches!(self.end, End::Open) || self.process != std::process::id() {
            return;
        }
        // Best effort: a sweep removes what stays behind.
        let is_made = |name: &str| self.made.contains(&self.path.join(name));
        if let Ok(listed) = entries(&self.path, self.files()) {
            let _ = sidecar::reconcile(&self.path, self.file_system.as_ref(), &listed, is_made);
        }
        for path in &self.made {
            let _ = self.file_system.change(Change::RemoveFile(path));
        }
        // Without its vote an attempt cannot be committed, and the rank that made the directory may
        // be gone. The exclusive lease protects another attempt that is about to write its first
        // file there.
        let is_last = self.made_directory || self.is_joined && self.voted.is_empty();
        if is_last && self.lease.try_upgrade(&self.path, self.files()) {
            let _ = self.file_system.change(Change::RemoveDirectory(&self.path));
        }
    }
}

/// Creates the directory if needed and takes the lease; returns whether the directory is new.
///
/// A sweep may find and remove the new directory before the lease is taken; then it is made again.
fn take_lease(
    path: &Path,
    file_system: &dyn FileSystem,
    progress: &Progress,
) -> Result<(Lease, bool)> {
    loop {
        let is_new = make_directory(path, file_system)?;
        if let Some(lease) = Lease::share(path, file_system, progress)? {
            return Ok((lease, is_new));
        }
        progress.check()?;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use penstock_io::file_system::Native;

    use super::*;
    use crate::lease::Exclusive;

    fn begin(path: &Path, overwrite: bool) -> Result<Attempt> {
        let file_system: Arc<dyn FileSystem> = Arc::new(Native);
        Attempt::begin(path, overwrite, &file_system, &Progress::default())
    }

    fn join(path: &Path, id: &str) -> Attempt {
        let file_system: Arc<dyn FileSystem> = Arc::new(Native);
        Attempt::join(path, id, &file_system, &Progress::default()).unwrap()
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_attempt_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/ckpt");
        let mut attempt = begin(&path, false).unwrap();
        attempt
            .create(&name::shard_file(0, 0, attempt.id()), Direct::Auto)
            .unwrap();
        attempt.write_part(0, b"{}").unwrap();
        assert_eq!(names(&path).len(), 2);
        drop(attempt);
        assert!(!path.exists());
    }

    #[test]
    fn the_first_of_two_attempts_wins() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let mut first = begin(&path, false).unwrap();
        let mut second = begin(&path, false).unwrap();
        first.publish(b"first", false).unwrap();
        assert!(matches!(
            second.publish(b"second", false),
            Err(Error::Exists { .. })
        ));
        drop(second);
        assert_eq!(fs::read(path.join(MANIFEST)).unwrap(), b"first");
        assert_eq!(names(&path), [MANIFEST]);
        assert!(matches!(begin(&path, false), Err(Error::Exists { .. })));
    }

    #[test]
    fn whoever_leaves_a_failed_attempt_last_takes_its_directory_away() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let first = begin(&path, false).unwrap();
        let mut member = join(&path, first.id());
        let name = name::shard_file(1, 0, member.id());
        member.create(&name, Direct::Auto).unwrap();
        drop(first);
        assert_eq!(names(&path), [name]);
        drop(member);
        assert!(!path.exists());
    }

    #[test]
    fn a_member_that_has_voted_leaves_its_files() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let first = begin(&path, false).unwrap();
        let mut member = join(&path, first.id());
        member.write_part(1, b"{}").unwrap();
        drop((member, first));
        assert_eq!(names(&path).len(), 1);
    }

    #[test]
    fn replaced_files_go_only_when_nobody_else_is_at_work() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let mut old = begin(&path, false).unwrap();
        old.write_part(0, b"{}").unwrap();
        old.publish(b"old", false).unwrap();
        drop(old);
        fs::write(path.join("notes.txt"), b"mine").unwrap();

        let live = begin(&path, true).unwrap();
        let mut new = begin(&path, true).unwrap();
        new.publish(b"new", true).unwrap();
        assert_eq!(new.remove_replaced().unwrap(), 0);
        assert!(matches!(
            Lease::try_exclusive(&path, &Native).unwrap(),
            Exclusive::Live
        ));
        drop(live);
        let mut newer = begin(&path, true).unwrap();
        newer.publish(b"newer", true).unwrap();
        assert_eq!(newer.remove_replaced().unwrap(), 2);
        assert_eq!(names(&path), [MANIFEST, "notes.txt"]);
        assert_eq!(fs::read(path.join(MANIFEST)).unwrap(), b"newer");
    }

    #[test]
    fn a_path_through_a_file_is_an_error_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, b"precious").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = begin(&path, false).unwrap_err();
            let Error::Storage { source, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(source.kind(), io::ErrorKind::NotADirectory);
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
}
