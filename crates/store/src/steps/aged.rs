//! Sweeping by age, on an object store.
//!
//! No lock shows there which attempts are live. The files of one attempt, its unfinished uploads
//! and its lease ([`crate::commit::renewal`]) are judged together: the attempt is dead if the
//! youngest of them is older than the limit. Ages come from the storage's clock alone, as the
//! difference between the time of a newly written file and those of the others, so a wrong clock is
//! wrong for both. A clock that jumps may make a live attempt look dead: its files are then removed
//! behind a fence ([`crate::commit::fence`]), and its commit fails.
//!
//! A sweep removes from a step:
//!
//! - Files and uploads of dead attempts that no manifest names, and fences of sweeps that died;
//!   next to a manifest only once that is older than the limit too, since a commit may be revoked.
//! - The remains of a deletion that took the manifest and died ([`crate::steps::removal`]).
//! - The lease of the checkpoint itself, if its save died right after the commit, and uploads that
//!   the save began without receiving the response.
//!
//! A step that cannot be read (damaged, or of a newer version) stays unchanged, as on other
//! storage, except for a manifest without any of its other files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use penstock_io::file_system::{Change, Entry, OpenUpload};

use crate::commit::fence::{clear, is_gone};
use crate::commit::files::remove_file;
use crate::commit::renewal::AGE_MIN;
use crate::error::{Error, Result};
use crate::format::description::MANIFEST_BYTES_MAX;
use crate::format::directory::{entries, has};
use crate::format::manifest::{Manifest, PartEntry};
use crate::format::name::{
    MANIFEST, PROTECTED, attempt_of, clock, is_clock, is_fence, is_lease, is_tombstone, parse_step,
};
use crate::format::tombstone::has_unknown;
use crate::steps::store::{StepState, Store};

/// The files and uploads of one attempt.
#[derive(Default)]
struct AttemptFiles {
    files: Vec<Entry>,
    uploads: Vec<OpenUpload>,
}

impl AttemptFiles {
    fn is_older_than(&self, limit: SystemTime) -> bool {
        self.uploads.iter().all(|upload| upload.begun < limit) && are_older(&self.files, limit)
    }

    fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| file.bytes).sum()
    }

    fn fences(&self) -> Vec<String> {
        let names = self.files.iter().filter_map(|file| file.name.to_str());
        names
            .filter(|name| is_fence(name))
            .map(str::to_owned)
            .collect()
    }
}

/// Whether all files are older than the limit.
fn are_older(files: &[Entry], limit: SystemTime) -> bool {
    files.iter().all(|file| is_older(file, limit))
}

/// Whether a file is older than the limit; false if its age is unknown.
fn is_older(file: &Entry, limit: SystemTime) -> bool {
    file.modified.is_some_and(|modified| modified < limit)
}

/// The parameters of one sweep.
struct Aged {
    /// Attempts older than this time, by the clock of the storage, are dead.
    limit: SystemTime,
    /// Whether dead attempts are removed, or only listed.
    removes: bool,
}

impl Store {
    /// Sweeps all steps by the age of their files, or lists what a sweep would remove.
    pub(super) fn sweep_aged(&self, age: Duration, removes: bool) -> Result<Vec<(PathBuf, u64)>> {
        let now = self.file_system().time_at(&self.root().join(clock()))?;
        let Some((now, limit)) = now.and_then(|now| Some((now, now.checked_sub(age)?))) else {
            return Ok(Vec::new());
        };
        let sweep = Aged { limit, removes };
        let mut uploads: BTreeMap<u64, Vec<OpenUpload>> = BTreeMap::new();
        for upload in self.file_system().open_uploads(self.root())? {
            if let Some(step) = self.step_of_upload(&upload) {
                uploads.entry(step).or_default().push(upload);
            }
        }
        let mut steps: BTreeSet<u64> = self.steps()?.into_iter().collect();
        steps.extend(uploads.keys());
        let (mut swept, mut failed) = (Vec::new(), None);
        for step in steps {
            let uploads = uploads.remove(&step).unwrap_or_default();
            match self.sweep_aged_step(step, uploads, &sweep) {
                Ok(Some(bytes)) => swept.push((self.step_path(step), bytes)),
                Ok(None) => {}
                // The other steps are still swept.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if removes {
            // A caller who excludes saves in progress does not exclude sweeps.
            self.sweep_clocks(limit.min(now - AGE_MIN))?;
        }
        failed.map_or(Ok(swept), Err)
    }

    /// The step that an upload belongs to, if it is one of our attempts.
    fn step_of_upload(&self, upload: &OpenUpload) -> Option<u64> {
        let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
        let directory = upload.path.parent()?;
        let step = parse_step(&name(directory)?)?;
        attempt_of(&name(&upload.path)?)?;
        (self.step_path(step) == directory).then_some(step)
    }

    fn sweep_aged_step(
        &self,
        step: u64,
        uploads: Vec<OpenUpload>,
        sweep: &Aged,
    ) -> Result<Option<u64>> {
        let path = self.step_path(step);
        let mut freed_bytes = 0;
        let listed = entries(&path, self.files())?;
        if sweep.removes {
            freed_bytes += self.resume_listed(&path, &listed)?;
        }
        let is_taken = |entry: &Entry| entry.name.to_str().is_some_and(is_tombstone);
        if listed.iter().any(is_taken) && has_unknown(&path, self.files()) {
            return Ok(None);
        }
        let committed = match self.state(step) {
            Ok(StepState::Complete(checkpoint)) => Some(checkpoint.manifest().id.clone()),
            Ok(StepState::Incomplete) | Err(Error::NotFound { .. }) => None,
            Ok(StepState::Damaged(_)) => return self.sweep_empty(&path, sweep),
            // Others may be able to read or repair it, unless its files are gone.
            Ok(StepState::Newer(_) | StepState::Unreadable(_)) | Err(_) => {
                return Ok(None);
            }
        };
        let mut is_any = freed_bytes > 0;
        // Listed again now that the manifest was read: the earlier list may show the age of another
        // manifest, and the checkpoint that this one replaced may yet be put back.
        let listed = entries(&path, self.files())?;
        let is_decided = committed.is_none() || is_old_manifest(&listed, sweep);
        for (id, found) in attempts(listed, uploads) {
            let freed = match committed.as_ref() == Some(&id) {
                true => self.sweep_committed(&path, &found, sweep)?,
                false if !is_decided || !found.is_older_than(sweep.limit) => None,
                false => self.sweep_dead(&path, &id, &found, sweep)?,
            };
            is_any |= freed.is_some();
            freed_bytes += freed.unwrap_or_default();
        }
        Ok(is_any.then_some(freed_bytes))
    }

    /// Removes a manifest without any of its other files: nothing of that checkpoint could be read
    /// or repaired. A request whose response was lost may have put it again after the step was
    /// deleted.
    fn sweep_empty(&self, path: &Path, sweep: &Aged) -> Result<Option<u64>> {
        let manifest = path.join(MANIFEST);
        let Ok((_, seen)) = self.files().stat_and_read(&manifest, MANIFEST_BYTES_MAX) else {
            return Ok(None);
        };
        let Ok(Manifest { id, parts, .. }) = Manifest::parse(&seen.bytes, path) else {
            return Ok(None);
        };
        // Listed after the manifest was read, whose files existed before it did.
        let listed = entries(path, self.files())?;
        let is_its = |entry: &Entry| entry.name.to_str().and_then(attempt_of) == Some(&id);
        // A list may be outdated, so the named files are looked up as well.
        let is_there = |part: &PartEntry| self.files().is_there(&path.join(&part.file));
        let stays =
            listed.iter().any(is_its) || has(&listed, PROTECTED) || parts.iter().any(is_there);
        if stays || !is_old_manifest(&listed, sweep) {
            return Ok(None);
        }
        let bytes = seen.bytes.len() as u64;
        if !sweep.removes {
            return Ok(Some(bytes));
        }
        match self
            .file_system()
            .change(Change::RemoveSeen(&manifest, &seen))
        {
            Err(error) if error.kind().is_some_and(is_gone) => Ok(None),
            removed => Ok(removed.map(|()| Some(bytes))?),
        }
    }

    /// Removes the remains of a dead attempt.
    fn sweep_dead(
        &self,
        path: &Path,
        id: &str,
        found: &AttemptFiles,
        sweep: &Aged,
    ) -> Result<Option<u64>> {
        if !sweep.removes {
            return Ok(Some(found.bytes()));
        }
        let mut freed_bytes = 0;
        if !found.files.is_empty() {
            let is_dead = |files: &[Entry]| are_older(files, sweep.limit);
            let cleared = clear(path, self.file_system(), id, is_dead, &found.fences())?;
            let Some(cleared_bytes) = cleared else {
                return Ok(None);
            };
            freed_bytes += cleared_bytes;
        }
        for upload in &found.uploads {
            self.file_system().abandon(upload)?;
        }
        Ok(Some(freed_bytes))
    }

    /// Removes the files that a committed save should have removed, and copies of the manifest left
    /// by unfinished deletions. Its fences stay, since their creators may be about to continue. Its
    /// open uploads were begun twice, because a response was lost.
    fn sweep_committed(
        &self,
        path: &Path,
        found: &AttemptFiles,
        sweep: &Aged,
    ) -> Result<Option<u64>> {
        let is_left = |file: &&Entry| {
            let name = file.name.to_str().unwrap_or_default();
            let is_old = file.modified.is_some_and(|modified| modified < sweep.limit);
            is_old && (is_lease(name) || is_tombstone(name))
        };
        let left: Vec<&Entry> = found.files.iter().filter(is_left).collect();
        let bytes = left.iter().filter_map(|file| file.bytes).sum();
        let uploads = found.uploads.iter();
        let uploads: Vec<_> = uploads
            .filter(|upload| upload.begun < sweep.limit)
            .collect();
        if sweep.removes {
            for file in &left {
                remove_file(&path.join(&file.name), self.file_system())?;
            }
            for upload in &uploads {
                self.file_system().abandon(upload)?;
            }
        }
        let is_any = !left.is_empty() || !uploads.is_empty();
        Ok(is_any.then_some(bytes))
    }

    /// Removes the clock files of sweeps that died.
    fn sweep_clocks(&self, limit: SystemTime) -> Result<()> {
        for entry in self.list_root()? {
            let is_dead = entry.modified.is_some_and(|modified| modified < limit);
            if is_dead && entry.name.to_str().is_some_and(is_clock) {
                remove_file(&self.root().join(&entry.name), self.file_system())?;
            }
        }
        Ok(())
    }
}

/// Whether the manifest of a step is too old to be revoked ([`crate::commit::fence`]).
fn is_old_manifest(listed: &[Entry], sweep: &Aged) -> bool {
    let mut manifest = listed.iter().filter(|entry| entry.name == MANIFEST);
    manifest.all(|manifest| is_older(manifest, sweep.limit))
}

/// Groups files and uploads by attempt id.
fn attempts(listed: Vec<Entry>, uploads: Vec<OpenUpload>) -> BTreeMap<String, AttemptFiles> {
    let mut attempts: BTreeMap<String, AttemptFiles> = BTreeMap::new();
    let id = |name: Option<&str>| name.and_then(attempt_of).map(str::to_owned);
    for entry in listed {
        if let Some(id) = id(entry.name.to_str()) {
            attempts.entry(id).or_default().files.push(entry);
        }
    }
    for upload in uploads {
        if let Some(id) = id(upload.path.file_name().and_then(|name| name.to_str())) {
            attempts.entry(id).or_default().uploads.push(upload);
        }
    }
    attempts
}
