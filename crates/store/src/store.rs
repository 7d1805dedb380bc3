//! A store: one directory of checkpoints, a step each.
//!
//! Steps are ordered by number, never by time. Retention deletes only complete checkpoints, only
//! after a newer one was committed, and never the newest that was read back whole. Removal takes
//! the manifest first, so that what is left of it is an incomplete checkpoint and never a broken
//! one.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, read_manifest};
use crate::commit::{remove_attempt_files, sync_directory};
use crate::error::{Error, Result};
use crate::lease::{Exclusive, Lease};
use crate::name::{self, MANIFEST, parse_step, step_directory};

/// Remembers the newest checkpoint that was read back whole. A hint for retention: losing it
/// loses no data.
const VERIFIED: &str = "verified.json";

/// A directory of checkpoints. It need not exist before the first save.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

/// What is at a step.
#[derive(Debug)]
pub enum StepState {
    /// A checkpoint whose manifest and part are right and whose files have their sizes.
    Complete(Box<Checkpoint>),
    /// No manifest: a save that is under way or died.
    Incomplete,
    /// A manifest, but not a checkpoint that can be opened.
    Damaged(Error),
}

#[derive(Serialize, Deserialize)]
struct Verified {
    step: u64,
    id: String,
}

impl Store {
    /// The store in this directory.
    pub fn new(root: impl Into<PathBuf>) -> Store {
        Store { root: root.into() }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a step's checkpoint is or would be.
    pub fn step_path(&self, step: u64) -> PathBuf {
        self.root.join(step_directory(step))
    }

    /// Every step that has a directory, ascending. A root that does not exist has none.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => {
                return Err(Error::Storage {
                    operation: "list",
                    path: self.root.clone(),
                    source,
                });
            }
        };
        let mut steps = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::storage("list", &self.root))?;
            let step = entry.file_name().to_str().and_then(parse_step);
            steps.extend(step.filter(|_| entry.path().is_dir()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// What is at a step.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a step without a directory, and the system's errors.
    pub fn state(&self, step: u64) -> Result<StepState> {
        let path = self.step_path(step);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => Ok(match checkpoint.manifest().step {
                Some(found) if found != step => {
                    let detail = format!("it belongs to step {found}");
                    StepState::Damaged(Error::corrupt(&path, MANIFEST, detail))
                }
                _ => StepState::Complete(Box::new(checkpoint)),
            }),
            Err(Error::Incomplete { .. }) => Ok(StepState::Incomplete),
            Err(error @ (Error::NotFound { .. } | Error::Storage { .. })) => Err(error),
            Err(error) => Ok(StepState::Damaged(error)),
        }
    }

    /// Removes a step, complete or not, and returns the bytes freed. Files that no attempt wrote
    /// stay, and their directory with them.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a step without a directory, [`Error::Storage`] with
    /// [`io::ErrorKind::ResourceBusy`] while a save is under way in it, and the system's errors;
    /// called again, it goes on where it stopped.
    pub fn delete(&self, step: u64) -> Result<u64> {
        let path = self.step_path(step);
        if !path.is_dir() {
            return Err(Error::NotFound { path });
        }
        // Held to the end, so that no save begins among files that are being removed.
        let lease = Lease::try_exclusive(&path)?;
        if let Exclusive::Live = lease {
            let source = io::Error::from(io::ErrorKind::ResourceBusy);
            return Err(Error::Storage {
                operation: "delete",
                path,
                source,
            });
        }
        let manifest = path.join(MANIFEST);
        let mut freed_bytes = 0;
        match fs::metadata(&manifest) {
            Ok(metadata) => {
                fs::remove_file(&manifest).map_err(Error::storage("remove", &manifest))?;
                sync_directory(&path)?;
                freed_bytes += metadata.len();
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                return Err(Error::Storage {
                    operation: "stat",
                    path: manifest,
                    source,
                });
            }
        }
        freed_bytes += remove_attempt_files(&path, |_| true)?;
        self.remove_if_empty(&path)?;
        Ok(freed_bytes)
    }

    fn remove_if_empty(&self, path: &Path) -> Result<()> {
        match fs::remove_dir(path) {
            Ok(()) => sync_directory(&self.root),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(Error::Storage {
                operation: "remove",
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Removes what dead saves left behind and returns what was removed, with its bytes. A
    /// directory that a live save holds the lease of is passed over, and so is one on a file
    /// system without locks.
    pub fn sweep(&self) -> Result<Vec<(PathBuf, u64)>> {
        let mut swept = Vec::new();
        for step in self.steps()? {
            let path = self.step_path(step);
            let Exclusive::Taken(_lease) = Lease::try_exclusive(&path)? else {
                continue;
            };
            let referenced: HashSet<String> = match self.state(step)? {
                StepState::Complete(checkpoint) => checkpoint
                    .files()
                    .into_iter()
                    .map(|(name, _)| name.to_owned())
                    .collect(),
                StepState::Incomplete => HashSet::new(),
                // Perhaps it can be repaired; certainly not after its files are gone.
                StepState::Damaged(_) => continue,
            };
            let freed_bytes = remove_attempt_files(&path, |name| !referenced.contains(name))?;
            if referenced.is_empty() {
                self.remove_if_empty(&path)?;
            }
            if freed_bytes > 0 || !path.exists() {
                swept.push((path, freed_bytes));
            }
        }
        Ok(swept)
    }

    /// Deletes complete checkpoints beyond the newest `keep_last`, except steps that are multiples
    /// of `keep_every` and the newest that was read back whole. `None` for `keep_last` keeps all.
    /// Returns the deleted steps, oldest first.
    pub fn retain(&self, keep_last: Option<u64>, keep_every: Option<u64>) -> Result<Vec<u64>> {
        let Some(keep_last) = keep_last else {
            return Ok(Vec::new());
        };
        let mut complete = Vec::new();
        for step in self.steps()? {
            match self.state(step) {
                Ok(StepState::Complete(checkpoint)) => {
                    complete.push((step, checkpoint.manifest().id.clone()));
                }
                Ok(StepState::Incomplete | StepState::Damaged(_)) => {}
                // Somebody else's retention was faster.
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let verified = self.verified();
        let is_verified = |step: u64, id: &str| {
            verified
                .as_ref()
                .is_some_and(|verified| verified.step == step && verified.id == id)
        };
        let newest_kept = complete.len().saturating_sub(keep_last.max(1) as usize);
        let mut deleted = Vec::new();
        for (step, id) in &complete[..newest_kept] {
            let is_kept = keep_every.is_some_and(|every| every > 0 && step % every == 0);
            if is_kept || is_verified(*step, id) {
                continue;
            }
            match self.delete(*step) {
                Ok(_) => deleted.push(*step),
                Err(Error::NotFound { .. }) => {}
                Err(Error::Storage { source, .. })
                    if source.kind() == io::ErrorKind::ResourceBusy => {}
                Err(error) => return Err(error),
            }
        }
        Ok(deleted)
    }

    /// Remembers that the checkpoint was read back whole and found right.
    pub fn mark_verified(&self, step: u64, id: &str) -> Result<()> {
        if self.verified().is_some_and(|verified| verified.step > step) {
            return Ok(());
        }
        let verified = Verified {
            step,
            id: id.to_owned(),
        };
        let text = serde_json::to_vec(&verified).expect("a hint always serialises");
        let temporary = self
            .root
            .join(format!("verified.{}.tmp", name::draw_attempt()));
        fs::write(&temporary, text).map_err(Error::storage("write", &temporary))?;
        let path = self.root.join(VERIFIED);
        fs::rename(&temporary, &path).map_err(Error::storage("rename to", &path))
    }

    /// The hint, where it is there, readable, and about a checkpoint that still is.
    fn verified(&self) -> Option<Verified> {
        let text = fs::read(self.root.join(VERIFIED)).ok()?;
        let verified: Verified = serde_json::from_slice(&text).ok()?;
        let (manifest, _) = read_manifest(&self.step_path(verified.step)).ok()?;
        (manifest.id == verified.id).then_some(verified)
    }
}
