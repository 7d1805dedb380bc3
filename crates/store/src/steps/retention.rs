//! Retention: which checkpoints of a store are kept.
//!
//! Only complete checkpoints are ever deleted, only after a newer one was committed, never a
//! protected one, and never the newest that was read back whole. Steps above the one just saved are
//! left alone and do not count: a run that went back to an earlier step must not lose what it saves
//! from there on. Damaged ones, also those that only a scrub found to be so, neither count nor go.
//!
//! What is looked at is what the decision hangs on: all files of the newest checkpoint, of the
//! newest that was read back, and of those that go. Of the others the manifest says enough: a store
//! of many steps of many ranks would else be read through after each save.
//!
//! What goes is decided first ([`Store::plan_retention`]) and carried out after
//! ([`Store::retire`]), so that a caller can show it, or keep some of it.

use std::collections::HashSet;
use std::fmt;

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::manifest::Manifest;
use crate::steps::marks::Known;
use crate::steps::store::{StepState, Store};

/// Why a step is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// Nothing is ever deleted.
    Everything,
    /// It is among the newest.
    Newest,
    /// It is a multiple of `keep_every`.
    Multiple,
    /// It is the newest that was read back whole.
    Verified,
    /// It is protected.
    Protected,
    /// It is above the step that was just saved.
    Later,
    /// Its save never finished, or is under way.
    Incomplete,
    /// It is a link to somewhere else, through which nothing is deleted.
    Linked,
    /// It is damaged; somebody may repair it.
    Damaged,
    /// It holds what was salvaged from a damaged one.
    Partial,
    /// It takes a newer Penstock to read.
    Newer,
    /// It cannot be read, so nobody knows what it is.
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

/// What becomes of a step.
#[derive(Debug)]
pub struct Verdict {
    /// The step.
    pub step: u64,
    /// Why it is kept; `None` for one that goes.
    pub kept: Option<Kept>,
    /// Identity of the checkpoint and the caller's metadata, of one that goes.
    pub doomed: Option<Doomed>,
}

/// A checkpoint that retention does not keep.
#[derive(Debug)]
pub struct Doomed {
    /// Its identity: another one at the step is not deleted in its place.
    pub id: String,
    /// What its caller recorded.
    pub metadata: Box<RawValue>,
}

impl Store {
    /// Deletes complete checkpoints beyond the newest `keep_last`, except protected ones, steps
    /// that are multiples of `keep_every`, and the newest that was read back whole. `None` for
    /// `keep_last` keeps all. `saved` is the step just committed: those above it neither count nor
    /// go; without it, all count. Returns the deleted steps, oldest first.
    ///
    /// # Errors
    /// The system's errors; a step that somebody else removes or saves to is passed over.
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

    /// What [`Store::retain`] would do with each step, ascending. Nothing is changed.
    ///
    /// # Errors
    /// The system's errors; a step that somebody else removes is passed over.
    pub fn plan_retention(
        &self,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> Result<Vec<Verdict>> {
        let known = self.known()?;
        // The newest that was read back whole, of those that count.
        let mut verified = None;
        let newest = saved.unwrap_or(u64::MAX);
        let is_multiple = |step| keep_every.is_some_and(|every| every > 0 && step % every == 0);
        // At least one: the newest complete step is never deleted.
        let mut places = keep_last.map_or(u64::MAX, |count| count.max(1));
        let mut verdicts = Vec::new();
        let mut is_first = keep_last.is_some();
        for step in self.steps()?.into_iter().rev() {
            let may_be_verified = step <= newest && verified.is_none() && known.may_be_good(step);
            // Others go because these are there, so their files have to be.
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
                // Nor does anything go unseen.
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

    /// What is at a step, or why it can neither count nor go; looks at its manifest only, or at all
    /// of its files. `None` where there is nothing.
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
            // Somebody else's retention was faster.
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }))
    }

    /// Deletes these checkpoints, given by step and identity, in their order; returns the steps
    /// deleted. One that was protected, replaced or removed meanwhile, or that somebody saves to or
    /// reads, is passed over; so is the newest that was read back whole, if it has become that since
    /// they were chosen. Nothing is deleted unless another complete checkpoint stays, durably.
    ///
    /// # Errors
    /// The system's errors; one step that cannot be deleted does not keep the others from it.
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
                // Somebody else has removed it under our hands.
                Err(error) if is_gone(&error) && !self.files().leads(&self.step_path(*step)) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(deleted), Err)
    }

    /// Makes what stays durable, since its save may have died before it was, and tells which of the
    /// doomed have to stay as well.
    fn secure_the_others(&self, doomed: &[(u64, String)], newest: u64) -> Result<HashSet<u64>> {
        let all: HashSet<u64> = doomed.iter().map(|(step, _)| *step).collect();
        let known = self.known()?;
        let mut staying = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            // Older ones that were not read back stay for other reasons than to replace these.
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
                // Somebody else's retention does not keep it.
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

/// Whether an error is what a step answers that somebody removes. That of a sync after our own removal
/// is another, though the step is gone then as well.
fn is_gone(error: &Error) -> bool {
    error.kind() == Some(std::io::ErrorKind::NotFound)
}
