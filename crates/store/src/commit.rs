//! The commit: how a checkpoint becomes complete in one step, on any POSIX file system.
//!
//! 1. An attempt draws an id, creates the directory, takes the lease, and syncs the parent.
//! 2. Data files carry the attempt's id in their names and are synced.
//! 3. The part is written under a temporary name, synced, renamed; the directory is synced.
//! 4. The manifest is written under a temporary name, synced, and published by `link`, which
//!    replaces nothing, or by `rename` where replacing was asked for.
//! 5. The directory is synced. Only now is the checkpoint acknowledged.
//!
//! An attempt that fails removes what it made. One that dies leaves files that nothing refers to;
//! [`crate::store::Store::sweep`] tells them from those of a live attempt by the lease.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_io::file::{Direct, File, rename_no_replace};

use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::name::{self, MANIFEST};
use crate::progress::Progress;

/// A save under way. Dropped before it is published, it removes the files it made.
#[derive(Debug)]
pub(crate) struct Attempt {
    path: PathBuf,
    id: String,
    lease: Lease,
    made_directory: bool,
    made: Vec<PathBuf>,
    /// The manifest's text, once it is published.
    published: Option<Vec<u8>>,
}

impl Attempt {
    /// Creates the directory where needed and takes the lease.
    pub(crate) fn begin(path: &Path, overwrite: bool, progress: &Progress) -> Result<Attempt> {
        let (lease, made_directory) = take_lease(path, progress)?;
        if !made_directory {
            sync_parent(path)?;
        }
        let id = name::draw_attempt();
        let (path, made) = (path.to_owned(), Vec::new());
        let attempt = Attempt {
            path,
            id,
            lease,
            made_directory,
            made,
            published: None,
        };
        if !overwrite && attempt.path.join(MANIFEST).exists() {
            return Err(Error::Exists {
                path: attempt.path.clone(),
            });
        }
        Ok(attempt)
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Creates a data file of this attempt.
    pub(crate) fn create(&mut self, name: &str, direct: Direct) -> Result<Arc<File>> {
        let path = self.path.join(name);
        let file = File::create(&path, direct)?;
        self.made.push(path);
        Ok(Arc::new(file))
    }

    /// Writes the part and makes it and all data files reachable after a crash.
    pub(crate) fn write_part(&mut self, rank: u32, text: &[u8]) -> Result<()> {
        let temporary = self.write_synced(&name::temporary_part(rank, &self.id), text)?;
        let part = self.path.join(name::part(rank, &self.id));
        fs::rename(&temporary, &part).map_err(Error::storage("rename to", &part))?;
        self.made.retain(|path| *path != temporary);
        self.made.push(part);
        self.sync_directory()
    }

    /// Publishes the manifest: from here on the checkpoint is complete, whatever happens.
    pub(crate) fn publish(&mut self, text: &[u8], overwrite: bool) -> Result<()> {
        let temporary = self.write_synced(&name::temporary_manifest(&self.id), text)?;
        self.check_made()?;
        let manifest = self.path.join(MANIFEST);
        let moved = if overwrite {
            fs::rename(&temporary, &manifest)
        } else {
            link(&temporary, &manifest)
        };
        if let Err(source) = moved {
            self.settle(&manifest, text, source)?;
        }
        self.published = Some(text.to_owned());
        self.sync_directory()?;
        // The second name of a linked manifest; the checkpoint is complete with it or without.
        let _ = fs::remove_file(&temporary);
        Ok(())
    }

    /// Somebody who does not see our lease may have removed a file: what is incomplete is not
    /// published.
    fn check_made(&self) -> Result<()> {
        let mut made = self.made.iter();
        made.try_for_each(|path| match fs::metadata(path) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::storage("publish", path)(source)),
        })
    }

    /// Decides what a failed publication was. A network file system may report failure for one that
    /// it carried out: what the manifest says now tells. Where even that is open, the files stay,
    /// since a manifest may refer to them; a sweep decides later.
    fn settle(&mut self, manifest: &Path, text: &[u8], source: io::Error) -> Result<()> {
        match fs::read(manifest) {
            Ok(found) if found == text => return Ok(()),
            Ok(_) if source.kind() == io::ErrorKind::AlreadyExists => {
                let path = self.path.clone();
                return Err(Error::Exists { path });
            }
            Ok(_) => {}
            Err(_) if is_definite(&source) => {}
            Err(_) => self.made.clear(),
        }
        Err(Error::storage("publish", manifest)(source))
    }

    /// Removes files of other attempts that the published manifest does not refer to, unless one
    /// of them is live, or has replaced this one in turn: then ours are those nobody refers to, and
    /// left to a sweep.
    pub(crate) fn remove_replaced(self, referenced: &HashSet<String>) -> Result<u64> {
        if !self.lease.try_upgrade() || !self.is_current() {
            return Ok(0);
        }
        remove_attempt_files(&self.path, |name| !referenced.contains(name))
    }

    /// Whether the manifest in the directory is the one that this attempt published.
    fn is_current(&self) -> bool {
        let found = fs::read(self.path.join(MANIFEST)).ok();
        found.is_some() && found == self.published
    }

    fn write_synced(&mut self, name: &str, text: &[u8]) -> Result<PathBuf> {
        let path = self.path.join(name);
        let mut file = fs::File::create_new(&path).map_err(Error::storage("create", &path))?;
        self.made.push(path.clone());
        file.write_all(text)
            .map_err(Error::storage("write", &path))?;
        file.sync_all().map_err(Error::storage("sync", &path))?;
        Ok(path)
    }

    fn sync_directory(&self) -> Result<()> {
        self.lease
            .sync_directory()
            .map_err(Error::storage("sync", &self.path))
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.published.is_some() {
            return;
        }
        // Best effort: what stays behind is an orphan that a sweep finds.
        for path in &self.made {
            let _ = fs::remove_file(path);
        }
        // Not under another attempt that is about to write its first file there.
        if self.made_directory && self.lease.try_upgrade() {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Gives the manifest its name unless it is taken: by a link, which every POSIX file system with
/// hard links makes in one step, or by a rename that does not replace.
fn link(temporary: &Path, manifest: &Path) -> io::Result<()> {
    match fs::hard_link(temporary, manifest) {
        Err(error) if has_no_links(&error) => rename_no_replace(temporary, manifest),
        result => result,
    }
}

/// What file systems without hard links answer (FAT, some in user space): EPERM, ENOSYS,
/// EOPNOTSUPP.
fn has_no_links(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
    )
}

/// Whether the system refused, as opposed to lost track of what it did.
fn is_definite(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::AlreadyExists
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::TooManyLinks
            | io::ErrorKind::Unsupported
            | io::ErrorKind::InvalidInput
    )
}

/// Creates the directory where needed and takes the lease; tells whether the directory is new.
///
/// A sweep may find the new directory before the lease is on it, and remove it: then it is made
/// again.
fn take_lease(path: &Path, progress: &Progress) -> Result<(Lease, bool)> {
    loop {
        let is_new = make_directory(path)?;
        if let Some(lease) = Lease::share(path, progress)? {
            return Ok((lease, is_new));
        }
        progress.check()?;
    }
}

/// Creates a directory and its parents, each synced into the one above it; tells whether the last
/// one is new.
fn make_directory(path: &Path) -> Result<bool> {
    let parent = parent_of(path);
    let created = match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && parent != path => {
            make_directory(parent)?;
            fs::create_dir(path)
        }
        result => result,
    };
    match created {
        Ok(()) => {
            sync_directory(parent)?;
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if path.is_dir() {
                return Ok(false);
            }
            // Removed since by a sweep.
            if fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
                return make_directory(path);
            }
            let source = io::Error::from(io::ErrorKind::NotADirectory);
            Err(Error::Storage {
                operation: "save to",
                path: path.to_owned(),
                source,
            })
        }
        Err(source) => Err(Error::Storage {
            operation: "create",
            path: path.to_owned(),
            source,
        }),
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Syncs a directory that was there into its parent: an earlier attempt may have made it and died
/// before it did. A parent that may be searched but not read is somebody else's, as is the entry.
fn sync_parent(path: &Path) -> Result<()> {
    match sync_directory(parent_of(path)) {
        Err(Error::Storage { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Ok(())
        }
        result => result,
    }
}

fn open_directory(path: &Path) -> Result<fs::File> {
    fs::File::open(path).map_err(Error::storage("open", path))
}

pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    open_directory(path)?
        .sync_all()
        .map_err(Error::storage("sync", path))
}

/// Removes the attempt files of a directory that `select` picks and returns their bytes. Files
/// that somebody else removes at the same time are as good as removed.
pub(crate) fn remove_attempt_files(path: &Path, select: impl Fn(&str) -> bool) -> Result<u64> {
    let mut removed_bytes = 0;
    for entry in fs::read_dir(path).map_err(Error::storage("list", path))? {
        let entry = entry.map_err(Error::storage("list", path))?;
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str() else {
            continue;
        };
        if name::is_attempt_file(name) && select(name) {
            removed_bytes += remove_file(&entry.path())?;
        }
    }
    Ok(removed_bytes)
}

/// Removes a file, if it is there, and returns its bytes.
pub(crate) fn remove_file(path: &Path) -> Result<u64> {
    let removed = fs::symlink_metadata(path)
        .and_then(|metadata| fs::remove_file(path).map(|()| metadata.len()));
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        result => result.map_err(Error::storage("remove", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Exclusive;

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
        let mut attempt = Attempt::begin(&path, false, &Progress::default()).unwrap();
        attempt
            .create(&name::shard(0, 0, attempt.id()), Direct::Auto)
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
        let mut first = Attempt::begin(&path, false, &Progress::default()).unwrap();
        let mut second = Attempt::begin(&path, false, &Progress::default()).unwrap();
        first.publish(b"first", false).unwrap();
        assert!(matches!(
            second.publish(b"second", false),
            Err(Error::Exists { .. })
        ));
        drop(second);
        assert_eq!(fs::read(path.join(MANIFEST)).unwrap(), b"first");
        assert_eq!(names(&path), [MANIFEST]);
        assert!(matches!(
            Attempt::begin(&path, false, &Progress::default()),
            Err(Error::Exists { .. })
        ));
    }

    #[test]
    fn replaced_files_go_only_when_nobody_else_is_at_work() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let mut old = Attempt::begin(&path, false, &Progress::default()).unwrap();
        old.write_part(0, b"{}").unwrap();
        old.publish(b"old", false).unwrap();
        drop(old);
        fs::write(path.join("notes.txt"), b"mine").unwrap();

        let live = Attempt::begin(&path, true, &Progress::default()).unwrap();
        let mut new = Attempt::begin(&path, true, &Progress::default()).unwrap();
        new.publish(b"new", true).unwrap();
        assert_eq!(new.remove_replaced(&HashSet::new()).unwrap(), 0);
        assert!(matches!(
            Lease::try_exclusive(&path).unwrap(),
            Exclusive::Live
        ));
        drop(live);
        let mut newer = Attempt::begin(&path, true, &Progress::default()).unwrap();
        newer.publish(b"newer", true).unwrap();
        assert_eq!(newer.remove_replaced(&HashSet::new()).unwrap(), 2);
        assert_eq!(names(&path), [MANIFEST, "notes.txt"]);
        assert_eq!(fs::read(path.join(MANIFEST)).unwrap(), b"newer");
    }

    #[test]
    fn a_path_through_a_file_is_an_error_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, b"precious").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Attempt::begin(&path, false, &Progress::default()).unwrap_err();
            let Error::Storage { source, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(source.kind(), io::ErrorKind::NotADirectory);
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
}
