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

use penstock_io::file::{Direct, File};

use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::name::{self, MANIFEST};

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
    pub(crate) fn begin(path: &Path, overwrite: bool) -> Result<Attempt> {
        let (lease, made_directory) = take_lease(path)?;
        if !made_directory {
            // An earlier attempt may have made the directory and died before it was synced.
            sync_directory(parent_of(path))?;
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
        self.made.push(path.clone());
        Ok(Arc::new(File::create(&path, direct)?))
    }

    /// Writes the part and makes it and all data files reachable after a crash.
    pub(crate) fn write_part(&mut self, rank: u32, text: &[u8]) -> Result<()> {
        let temporary = self.write_synced(&name::temporary_part(rank, &self.id), text)?;
        let part = self.path.join(name::part(rank, &self.id));
        self.made.push(part.clone());
        fs::rename(&temporary, &part).map_err(Error::storage("rename to", &part))?;
        self.sync_directory()
    }

    /// Publishes the manifest: from here on the checkpoint is complete, whatever happens.
    pub(crate) fn publish(&mut self, text: &[u8], overwrite: bool) -> Result<()> {
        let temporary = self.write_synced(&name::temporary_manifest(&self.id), text)?;
        let manifest = self.path.join(MANIFEST);
        if overwrite {
            fs::rename(&temporary, &manifest).map_err(Error::storage("rename to", &manifest))?;
        } else {
            self.link(&temporary, &manifest)?;
        }
        self.published = Some(text.to_owned());
        self.sync_directory()?;
        // The second name of a linked manifest; the checkpoint is complete with it or without.
        let _ = fs::remove_file(&temporary);
        Ok(())
    }

    fn link(&self, temporary: &Path, manifest: &Path) -> Result<()> {
        let Err(source) = fs::hard_link(temporary, manifest) else {
            return Ok(());
        };
        // A network file system may report failure for a link that it made: the count tells.
        if link_count(temporary) == Some(2) {
            return Ok(());
        }
        if source.kind() == io::ErrorKind::AlreadyExists {
            return Err(Error::Exists {
                path: self.path.clone(),
            });
        }
        Err(Error::Storage {
            operation: "link to",
            path: manifest.to_owned(),
            source,
        })
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
        self.made.push(path.clone());
        let mut file = fs::File::create_new(&path).map_err(Error::storage("create", &path))?;
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

fn link_count(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|metadata| metadata.nlink())
}

/// Creates the directory where needed and takes the lease; tells whether the directory is new.
///
/// A sweep may find the new directory before the lease is on it, and remove it: then it is made
/// again.
fn take_lease(path: &Path) -> Result<(Lease, bool)> {
    loop {
        let is_new = make_directory(path)?;
        if let Some(lease) = Lease::share(path)? {
            return Ok((lease, is_new));
        }
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

fn open_directory(path: &Path) -> Result<fs::File> {
    fs::File::open(path).map_err(Error::storage("open", path))
}

pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    open_directory(path)?
        .sync_all()
        .map_err(Error::storage("sync", path))
}

/// Removes the attempt files of a directory that `select` picks and returns their bytes.
pub(crate) fn remove_attempt_files(path: &Path, select: impl Fn(&str) -> bool) -> Result<u64> {
    let mut removed_bytes = 0;
    for entry in fs::read_dir(path).map_err(Error::storage("list", path))? {
        let entry = entry.map_err(Error::storage("list", path))?;
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str() else {
            continue;
        };
        if !name::is_attempt_file(name) || !select(name) {
            continue;
        }
        let file = entry.path();
        removed_bytes += entry
            .metadata()
            .map_err(Error::storage("stat", &file))?
            .len();
        fs::remove_file(&file).map_err(Error::storage("remove", &file))?;
    }
    Ok(removed_bytes)
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
        let mut attempt = Attempt::begin(&path, false).unwrap();
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
        let mut first = Attempt::begin(&path, false).unwrap();
        let mut second = Attempt::begin(&path, false).unwrap();
        first.publish(b"first", false).unwrap();
        assert!(matches!(
            second.publish(b"second", false),
            Err(Error::Exists { .. })
        ));
        drop(second);
        assert_eq!(fs::read(path.join(MANIFEST)).unwrap(), b"first");
        assert_eq!(names(&path), [MANIFEST]);
        assert!(matches!(
            Attempt::begin(&path, false),
            Err(Error::Exists { .. })
        ));
    }

    #[test]
    fn replaced_files_go_only_when_nobody_else_is_at_work() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let mut old = Attempt::begin(&path, false).unwrap();
        old.write_part(0, b"{}").unwrap();
        old.publish(b"old", false).unwrap();
        drop(old);
        fs::write(path.join("notes.txt"), b"mine").unwrap();

        let live = Attempt::begin(&path, true).unwrap();
        let mut new = Attempt::begin(&path, true).unwrap();
        new.publish(b"new", true).unwrap();
        assert_eq!(new.remove_replaced(&HashSet::new()).unwrap(), 0);
        assert!(matches!(
            Lease::try_exclusive(&path).unwrap(),
            Exclusive::Live
        ));
        drop(live);
        let mut newer = Attempt::begin(&path, true).unwrap();
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
            let error = Attempt::begin(&path, false).unwrap_err();
            let Error::Storage { source, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(source.kind(), io::ErrorKind::NotADirectory);
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
}
