//! Retention: which checkpoints of a store are kept.
//!
//! Retention deletes only complete checkpoints, only after a newer one was committed, never a
//! protected one, and never the newest one that was read back whole. Steps above the one just saved
//! are kept and not counted: a run that resumed from an earlier step must not lose its next saves.
//! Damaged steps, including those found damaged only by a scrub, are neither counted nor deleted.
//!
//! It checks the files that the decision depends on: all files of the newest checkpoint, of the
//! newest one that was read back, and of those to delete. For the others the manifest suffices:
//! otherwise each save would read a store of many steps of many ranks.
//!
//! The decision comes first ([`Store::plan_retention`]), the deletions after it
//! ([`Store::retire`]), so that a caller can show the decision, or keep some of the steps.

use std::collections::HashSet;
use std::fmt;

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::manifest::Manifest;
use crate::steps::marks::Known;
use crate::steps::store::{StepState, Store};

/// The reason for keeping a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// Nothing is ever deleted.
    Everything,
    /// The step is among the newest.
    Newest,
    /// The step is a multiple of `keep_every`.
    Multiple,
    /// The step is the newest one that was read back whole.
    Verified,
    /// The step is protected.
    Protected,
    /// The step is above the one that was just saved.
    Later,
    /// The step's save is unfinished or in progress.
    Incomplete,
    /// The step is a link to another place, through which nothing is deleted.
    Linked,
    /// The step is damaged; somebody may repair it.
    Damaged,
    /// The step holds only tensors salvaged from a damaged checkpoint.
    Partial,
    /// The step needs a newer Penstock.
    Newer,
    /// The step cannot be read, so its state is unknown.
    Unreadable,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kept::Everything => "everything is kept",
            Kept::Newest => "among the newest",
            Kept::Multiple => "a multiple of keep_every",
            Kept::Verified => "the newest that was read back whole",
            Kept::Protected => "protected",
            Kept::Later => "later than the step just saved",
            Kept::Incomplete => "never finished, or being saved",
            Kept::Linked => "a link to somewhere else",
            Kept::Damaged => "damaged",
            Kept::Partial => "partial",
            Kept::Newer => "written by a newer Penstock",
            Kept::Unreadable => "unreadable",
        })
    }
}

/// The decision about a step.
#[derive(Debug)]
pub struct Verdict {
    /// The step.
    pub step: u64,
    /// The reason for keeping it; `None` if it is to be deleted.
    pub kept: Option<Kept>,
    /// Identity and metadata of a checkpoint to be deleted.
    pub doomed: Option<Doomed>,
}

/// A checkpoint to be deleted.
#[derive(Debug)]
pub struct Doomed {
    /// Identity of the checkpoint: another one at the step is not deleted instead.
    pub id: String,
    /// The caller's metadata.
    pub metadata: Box<RawValue>,
}

impl Store {
    /// Deletes complete checkpoints beyond the newest `keep_last`, except protected ones, steps
    /// that are multiples of `keep_every`, and the newest one that was read back whole. With `None`
    /// for `keep_last` it keeps all. `saved` is the step just committed: those above it are neither
    /// counted nor deleted; without it, all count. Returns the deleted steps, oldest first.
    ///
    /// # Errors
    /// System errors. Skips a step that somebody else removes or saves to.
    pub fn retain(
        &self,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> Result<Vec<u64>> {
        if keep_last.is_none() {
            return Ok(Vec::new());
        }
        let verdicts = self.plan_retention(keep_last, keep_every, saved)?;
        let doomed = |verdict: Verdict| verdict.doomed.map(|doomed| (verdict.step, doomed.id));
        let doomed: Vec<_> = verdicts.into_iter().filter_map(doomed).collect();
        self.retire(&doomed)
    }

    /// The decision of [`Store::retain`] about each step, ascending. Nothing is changed.
    ///
    /// # Errors
    /// System errors. Skips a step that somebody else removes.
    pub fn plan_retention(
        &self,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> Result<Vec<Verdict>> {
        let known = self.known()?;
        // The newest counted step that was read back whole.
        let mut verified = None;
        let newest = saved.unwrap_or(u64::MAX);
        let is_multiple = |step| keep_every.is_some_and(|every| every > 0 && step % every == 0);
        // At least one: the newest complete step is never deleted.
        let mut places = keep_last.map_or(u64::MAX, |count| count.max(1));
        let mut verdicts = Vec::new();
        let mut is_first = keep_last.is_some();
        for step in self.steps()?.into_iter().rev() {
            let may_be_verified = step <= newest && verified.is_none() && known.may_be_good(step);
            // Others are deleted because these exist, so their files must be checked.
            let is_whole = may_be_verified || (is_first && step <= newest);
            let Some(mut found) = self.standing(step, is_whole, &known)? else {
                continue;
            };
            if let Ok(manifest) = &found
                && may_be_verified
                && known.is_good(step, &manifest.id)
            {
                verified = Some(step);
            }
            is_first &= found.is_err() || step > newest;
            let mut kept = match &found {
                Err(kept) => Some(*kept),
                Ok(_) if keep_last.is_none() => Some(Kept::Everything),
                Ok(_) if step > newest => Some(Kept::Later),
                Ok(_) if self.step_path(step).is_symlink() => Some(Kept::Linked),
                Ok(_) if places > 0 => {
                    places -= 1;
                    Some(Kept::Newest)
                }
                Ok(_) if self.is_protected(step) => Some(Kept::Protected),
                Ok(_) if is_multiple(step) => Some(Kept::Multiple),
                Ok(_) if Some(step) == verified => Some(Kept::Verified),
                Ok(_) => None,
            };
            if kept.is_none() && !is_whole {
                // A step is deleted only after all of its files were checked.
                let Some(whole) = self.standing(step, true, &known)? else {
                    continue;
                };
                kept = whole.as_ref().err().copied();
                found = whole;
            }
            let doomed = found.ok().filter(|_| kept.is_none());
            let doomed = doomed.map(|manifest| Doomed {
                id: manifest.id,
                metadata: manifest.metadata,
            });
            verdicts.push(Verdict { step, kept, doomed });
        }
        verdicts.reverse();
        Ok(verdicts)
    }

    /// The checkpoint at a step, or the reason why it is neither counted nor deleted; checks its
    /// manifest only, or all of its files. `None` if the step does not exist.
    fn standing(
        &self,
        step: u64,
        is_whole: bool,
        known: &Known,
    ) -> Result<Option<std::result::Result<Manifest, Kept>>> {
        let found = match is_whole {
            true => self.state(step).map(StepState::into_manifest),
            false => self.glance(step),
        };
        Ok(Some(match found {
            Ok(StepState::Complete(manifest)) if !known.is_damaged(step, &manifest.id) => {
                Ok(*manifest)
            }
            Ok(StepState::Damaged(Error::Partial { .. })) => Err(Kept::Partial),
            Ok(StepState::Complete(_) | StepState::Damaged(_)) => Err(Kept::Damaged),
            Ok(StepState::Incomplete) => Err(Kept::Incomplete),
            Ok(StepState::Newer(_)) => Err(Kept::Newer),
            Ok(StepState::Unreadable(_)) => Err(Kept::Unreadable),
            // Another process's retention removed it first.
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }))
    }

    /// Deletes these checkpoints, given by step and identity, in order; returns the deleted steps.
    /// Skips those that were protected, replaced or removed meanwhile, that somebody saves to or
    /// reads, and the newest one that was read back whole, if a read since the decision made it
    /// that. Nothing is deleted unless another complete checkpoint stays, durably.
    ///
    /// # Errors
    /// System errors; one step that cannot be deleted does not stop the deletion of others.
    pub fn retire(&self, doomed: &[(u64, String)]) -> Result<Vec<u64>> {
        let Some(newest_doomed) = doomed.iter().map(|(step, _)| *step).max() else {
            return Ok(Vec::new());
        };
        let spared = self.secure_the_others(doomed, newest_doomed)?;
        let (mut deleted, mut failed) = (Vec::new(), None);
        for (step, id) in doomed.iter().filter(|(step, _)| !spared.contains(step)) {
            match self.delete_checkpoint(*step, id) {
                Ok(true) => deleted.push(*step),
                Ok(false) | Err(Error::NotFound { .. } | Error::Protected { .. }) => {}
                Err(error) if error.kind() == Some(std::io::ErrorKind::ResourceBusy) => {}
                // Somebody else has removed it meanwhile.
                Err(error) if is_gone(&error) && !self.files().leads(&self.step_path(*step)) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(deleted), Err)
    }

    /// Makes the steps that stay durable, since their saves may have died before their syncs;
    /// returns the steps chosen for deletion that must stay as well.
    fn secure_the_others(&self, doomed: &[(u64, String)], newest: u64) -> Result<HashSet<u64>> {
        let all: HashSet<u64> = doomed.iter().map(|(step, _)| *step).collect();
        let known = self.known()?;
        let mut staying = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            // Older steps that were not read back do not replace the deleted ones.
            let may_stay = !all.contains(&step) && (step > newest || known.may_be_good(step));
            if !may_stay {
                continue;
            }
            let Ok(StepState::Complete(manifest)) = self.glance(step) else {
                continue;
            };
            let is_good = known.is_good(step, &manifest.id);
            if known.is_damaged(step, &manifest.id) || !(step > newest || is_good) {
                continue;
            }
            let path = self.step_path(step);
            match self.sync(&path) {
                Ok(()) => staying.push((step, is_good)),
                // Another process's retention removed it.
                Err(error) if is_gone(&error) && !self.files().leads(&path) => {}
                Err(error) => return Err(error),
            }
        }
        let is_whole = |step: u64| matches!(self.state(step), Ok(StepState::Complete(_)));
        if !staying.iter().any(|&(step, _)| is_whole(step)) {
            return Ok(all);
        }
        let mut known_good = staying.iter().filter(|(_, is_good)| *is_good);
        if known_good.any(|&(step, _)| is_whole(step)) {
            return Ok(HashSet::new());
        }
        let good = doomed.iter().filter(|(step, id)| known.is_good(*step, id));
        Ok(good.map(|(step, _)| *step).max().into_iter().collect())
    }
}

/// Whether an error means that somebody removed the step. A sync after our own removal returns
/// another error, though the step is gone then as well.
fn is_gone(error: &Error) -> bool {
    error.kind() == Some(std::io::ErrorKind::NotFound)
}
