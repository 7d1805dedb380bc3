//! Retention: which checkpoints of a store are kept.
//!
//! Only complete checkpoints are ever deleted, only after a newer one was committed, and never the
//! newest that was read back whole. Steps above the one just saved are left alone and do not count:
//! a run that went back to an earlier step must not lose what it saves from there on.

use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use crate::checkpoint::read_manifest;
use crate::error::{Error, Result};
use crate::store::{StepState, Store};

/// Remembers which checkpoints were read back whole. A hint: losing it loses no data.
const VERIFIED: &str = "verified.json";
const VERIFIED_TEMPORARY: &str = "verified.tmp";

/// How many of them are remembered: more than any retention keeps.
const VERIFIED_MAX: usize = 64;

/// A checkpoint that was read back whole, by step and identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Verified {
    step: u64,
    id: String,
}

impl Store {
    /// Deletes complete checkpoints beyond the newest `keep_last`, except steps that are multiples
    /// of `keep_every` and the newest that was read back whole. `None` for `keep_last` keeps all.
    /// `saved` is the step just committed: those above it neither count nor go; without it, all
    /// count. Returns the deleted steps, oldest first.
    ///
    /// # Errors
    /// The system's errors; a step that somebody else removes or saves to is passed over.
    pub fn retain(
        &self,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> Result<Vec<u64>> {
        let Some(keep_last) = keep_last else {
            return Ok(Vec::new());
        };
        let newest = saved.unwrap_or(u64::MAX);
        let mut complete = Vec::new();
        for step in self.steps()?.into_iter().filter(|&step| step <= newest) {
            match self.state(step) {
                Ok(StepState::Complete(_)) => complete.push(step),
                // Somebody else's retention was faster, or it is nothing that may be deleted.
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let verified = self.verified().last().map(|verified| verified.step);
        let kept = usize::try_from(keep_last.max(1)).unwrap_or(usize::MAX);
        let beyond = complete.len().saturating_sub(kept);
        let mut deleted = Vec::new();
        for &step in &complete[..beyond] {
            let is_milestone = keep_every.is_some_and(|every| every > 0 && step % every == 0);
            if is_milestone || Some(step) == verified {
                continue;
            }
            match self.delete(step) {
                Ok(_) => deleted.push(step),
                Err(Error::NotFound { .. }) => {}
                Err(Error::Storage { source, .. })
                    if source.kind() == io::ErrorKind::ResourceBusy => {}
                Err(error) => return Err(error),
            }
        }
        Ok(deleted)
    }

    /// Remembers that the checkpoint was read back whole and found right.
    ///
    /// # Errors
    /// The system's errors.
    pub fn mark_verified(&self, step: u64, id: &str) -> Result<()> {
        let mark = Verified {
            step,
            id: id.to_owned(),
        };
        let mut verified = self.verified();
        if verified.contains(&mark) || !self.holds(&mark) {
            return Ok(());
        }
        verified.push(mark);
        verified.sort_by_key(|verified| verified.step);
        let surplus = verified.len().saturating_sub(VERIFIED_MAX);
        verified.drain(..surplus);
        let text = serde_json::to_vec(&verified).expect("a hint always serialises");
        let temporary = self.root().join(VERIFIED_TEMPORARY);
        fs::write(&temporary, text).map_err(Error::storage("write", &temporary))?;
        let path = self.root().join(VERIFIED);
        fs::rename(&temporary, &path).map_err(Error::storage("rename to", &path))
    }

    /// The marks of checkpoints that are still what was verified, by step.
    fn verified(&self) -> Vec<Verified> {
        let text = fs::read(self.root().join(VERIFIED)).unwrap_or_default();
        let mut verified: Vec<Verified> = serde_json::from_slice(&text).unwrap_or_default();
        verified.retain(|mark| self.holds(mark));
        verified.sort_by_key(|mark| mark.step);
        verified
    }

    /// Whether the step still holds the checkpoint with this identity.
    fn holds(&self, mark: &Verified) -> bool {
        let manifest = read_manifest(&self.step_path(mark.step));
        manifest.is_ok_and(|(manifest, _)| manifest.id == mark.id)
    }
}
