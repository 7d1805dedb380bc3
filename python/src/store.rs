//! `Store`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_store::load::checkpoint;
use penstock_store::steps::marks::Mark;
use penstock_store::steps::quarantine::QuarantinedStep;
use penstock_store::steps::retention::Verdict;
use penstock_store::steps::scrub::Scrub;
use penstock_store::steps::store::{self, StepState};
use penstock_store::steps::sweep::Sweep;
use penstock_store::steps::whole::{self, Removal};
use penstock_store::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::checkpoint::Checkpoint;
use crate::errors;
use crate::options::NativeOptions;
use crate::report;

/// A directory of checkpoints; see `penstock.CheckpointStore`.
#[pyclass(frozen, module = "penstock._native")]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store with the bucket's current settings.
    fn now(&self) -> Result<store::Store> {
        store::Store::at(&self.root)
    }

    /// The steps up to `last`, newest first: all, or down to the first that can be loaded.
    fn rows(
        &self,
        last: Option<u64>,
        to_first: bool,
    ) -> Result<(Vec<StateRow>, Option<checkpoint::Checkpoint>)> {
        let (store, mut rows) = (self.now()?, Vec::new());
        let steps = store.steps()?.into_iter().rev();
        for step in steps.filter(|&step| last.is_none_or(|last| step <= last)) {
            let state = match store.state(step) {
                Ok(state) => state,
                // Removed since the directory was listed.
                Err(Error::NotFound { .. }) => continue,
                Err(error) => return Err(error),
            };
            rows.push(state_row(step, &state));
            match state {
                StepState::Incomplete | StepState::Damaged(_) => {}
                _ if !to_first => {}
                StepState::Complete(found) => return Ok((rows, found.into_opened())),
                _ => break,
            }
        }
        Ok((rows, None))
    }
}

/// A step, why it is kept, and if it is to be deleted its id and metadata.
type Row = (u64, Option<String>, Option<String>, Option<String>);

fn row(verdict: Verdict) -> Row {
    let reason = verdict.kept.map(|kept| kept.to_string());
    let (id, metadata) = match verdict.doomed {
        Some(doomed) => (Some(doomed.id), Some(doomed.metadata.get().to_owned())),
        None => (None, None),
    };
    (verdict.step, reason, id, metadata)
}

/// A step, its state, and the reason for the state.
type StateRow = (u64, &'static str, Option<String>);

fn state_row(step: u64, state: &StepState) -> StateRow {
    match state {
        StepState::Complete(_) => (step, "complete", None),
        StepState::Incomplete => (step, "incomplete", None),
        StepState::Damaged(error @ Error::Partial { .. }) => {
            (step, "partial", Some(error.to_string()))
        }
        StepState::Damaged(error) => (step, "damaged", Some(error.to_string())),
        StepState::Newer(error) => (step, "newer", Some(error.to_string())),
        StepState::Unreadable(error) => (step, "unreadable", Some(error.full_message())),
    }
}

/// Removes a checkpoint's directory with everything in it; see
/// `penstock.plugin.remove_checkpoint`.
#[pyfunction]
#[pyo3(signature = (path, *, force, foreign))]
pub fn remove_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    force: bool,
    foreign: bool,
) -> PyResult<u64> {
    let allowed = Removal {
        is_forced: force,
        is_foreign: foreign,
    };
    call::without_gil(py, || whole::remove_checkpoint(&path, allowed))
}

/// A path as Python spells it: bytes that are not UTF-8 become surrogates.
fn text(path: &Path) -> OsString {
    path.as_os_str().to_owned()
}

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, root: PathBuf) -> PyResult<Store> {
        let store = Store { root };
        // Fails at once if the path cannot be reached.
        store.now().map_err(|error| errors::raise(py, &error))?;
        Ok(store)
    }

    /// The path of a step's checkpoint, whether it exists or not.
    fn step_path(&self, step: u64) -> OsString {
        text(&store::Store::new(&self.root).step_path(step))
    }

    /// Every step by number with its state and the reason, newest first.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<StateRow>> {
        let rows = call::without_gil(py, || self.rows(None, false))?;
        Ok(rows.0)
    }

    /// The steps up to `last`, down to the first that can be loaded, as `steps` returns them; and
    /// that checkpoint, opened, unless readers must be announced first.
    #[pyo3(signature = (*, last=None))]
    fn newest(
        &self,
        py: Python<'_>,
        last: Option<u64>,
    ) -> PyResult<(Vec<StateRow>, Option<Checkpoint>)> {
        let (rows, opened) = call::without_gil(py, || self.rows(last, true))?;
        Ok((rows, opened.map(Checkpoint::of)))
    }

    /// The state of a step; `None` if there is none.
    fn state(&self, py: Python<'_>, step: u64) -> PyResult<Option<&'static str>> {
        call::without_gil(py, || match self.now()?.state(step) {
            Ok(state) => Ok(Some(state_row(step, &state).1)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        })
    }

    /// The steps whose manifest says that they are complete, ascending.
    fn committed(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        call::without_gil(py, || {
            let store = self.now()?;
            let mut steps = store.steps()?;
            let mut failed = None;
            steps.retain(|&step| match store.glance(step) {
                Ok(state) => matches!(state, StepState::Complete(_)),
                Err(Error::NotFound { .. }) => false,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            });
            failed.map_or(Ok(steps), Err)
        })
    }

    /// The newest complete step that is not known to be damaged, of all or of those before
    /// `below`.
    #[pyo3(signature = (*, below=None))]
    fn newest_complete(&self, py: Python<'_>, below: Option<u64>) -> PyResult<Option<u64>> {
        call::without_gil(py, || self.now()?.newest_complete(below))
    }

    /// Removes a step, even a protected one with `force`; returns the bytes freed.
    #[pyo3(signature = (step, *, force))]
    fn delete(&self, py: Python<'_>, step: u64, force: bool) -> PyResult<u64> {
        call::without_gil(py, || match force {
            true => self.now()?.delete_protected(step),
            false => self.now()?.delete(step),
        })
    }

    /// Protects a step from deletion.
    fn protect(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        call::without_gil(py, || self.now()?.protect(step))
    }

    /// Removes the protection of a step.
    fn unprotect(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        call::without_gil(py, || self.now()?.unprotect(step))
    }

    /// The protected steps.
    fn protected(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        call::without_gil(py, || self.now()?.protected())
    }

    /// Whether a step without a manifest has files that no save is writing; `None` if that cannot
    /// be determined.
    fn is_left_behind(&self, py: Python<'_>, step: u64) -> PyResult<Option<bool>> {
        call::without_gil(py, || self.now()?.is_left_behind(step))
    }

    /// Removes the files of dead saves, or only lists them with `dry_run`; returns paths and
    /// bytes.
    #[pyo3(signature = (*, dry_run, min_age_seconds))]
    fn sweep(
        &self,
        py: Python<'_>,
        dry_run: bool,
        min_age_seconds: Option<u64>,
    ) -> PyResult<Vec<(OsString, u64)>> {
        let mut sweep = Sweep::default();
        if let Some(seconds) = min_age_seconds {
            sweep.age = Duration::from_secs(seconds);
        }
        let swept = call::without_gil(py, || match dry_run {
            true => self.now()?.orphans_as(&sweep),
            false => self.now()?.sweep_as(&sweep),
        })?;
        Ok(swept
            .into_iter()
            .map(|(path, bytes)| (text(&path), bytes))
            .collect())
    }

    /// The steps that retention would keep and delete.
    #[pyo3(signature = (keep_last, keep_every, saved))]
    fn plan_retention(
        &self,
        py: Python<'_>,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> PyResult<Vec<Row>> {
        let plan = || self.now()?.plan_retention(keep_last, keep_every, saved);
        Ok(call::without_gil(py, plan)?.into_iter().map(row).collect())
    }

    /// Deletes checkpoints given by step and id; returns the steps.
    fn retire(&self, py: Python<'_>, doomed: Vec<(u64, String)>) -> PyResult<Vec<u64>> {
        call::without_gil(py, || self.now()?.retire(&doomed))
    }

    /// The id of a step's checkpoint, if its manifest can be read.
    fn identity(&self, py: Python<'_>, step: u64) -> PyResult<Option<String>> {
        call::without_gil(py, || self.now()?.identity(step))
    }

    /// The id of a step's checkpoint and those that its writer knew before it, newest first, if its
    /// manifest can be read.
    fn lineage(&self, py: Python<'_>, step: u64) -> PyResult<Option<(String, Vec<String>)>> {
        call::without_gil(py, || self.now()?.lineage(step))
    }

    /// The id of the checkpoint that a step is a sealed copy of.
    fn copy_of(&self, py: Python<'_>, step: u64) -> PyResult<Option<String>> {
        call::without_gil(py, || self.now()?.copy_of(step))
    }

    /// Records that a checkpoint was read back completely and is intact.
    fn mark_verified(&self, py: Python<'_>, step: u64, checkpoint_id: &str) -> PyResult<()> {
        call::without_gil(py, || self.now()?.mark_verified(step, checkpoint_id))
    }

    /// Records that a checkpoint is damaged.
    fn mark_damaged(&self, py: Python<'_>, step: u64, checkpoint_id: &str) -> PyResult<()> {
        call::without_gil(py, || self.now()?.mark_damaged(step, checkpoint_id))
    }

    /// Reads back the steps whose last check is long ago; see `penstock.CheckpointStore.scrub`.
    #[pyo3(signature = (*, bytes_per_second, max_age_seconds, options, progress))]
    fn scrub<'py>(
        &self,
        py: Python<'py>,
        bytes_per_second: Option<u64>,
        max_age_seconds: Option<f64>,
        options: NativeOptions,
        progress: Callback,
    ) -> PyResult<Bound<'py, PyDict>> {
        let age = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let scrub = Scrub {
            bytes_per_second,
            max_age: max_age_seconds.map(age),
        };
        let options = options.at(py, &self.root)?;
        let scrubbed = call::run(py, &progress, |progress| {
            self.now()?.scrub(&scrub, &options, progress)
        })?;
        report::of_scrub(py, &scrubbed)
    }

    /// Moves a step to quarantine if it is known to be damaged; returns its new path.
    fn quarantine(&self, py: Python<'_>, step: u64) -> PyResult<Option<OsString>> {
        let path = call::without_gil(py, || self.now()?.quarantine(step))?;
        Ok(path.as_deref().map(text))
    }

    /// As `quarantine`, before a save of the step: moves a step that cannot be read as well, and
    /// waits for its readers. `None` also if there is no such step.
    fn make_way(&self, py: Python<'_>, step: u64) -> PyResult<Option<OsString>> {
        let path = call::run(py, &None, |progress| self.now()?.make_way(step, progress))?;
        Ok(path.as_deref().map(text))
    }

    /// The steps in quarantine, with their paths, ascending.
    fn quarantined(&self, py: Python<'_>) -> PyResult<Vec<(u64, OsString)>> {
        let found = call::without_gil(py, || self.now()?.quarantined())?;
        let row = |quarantined: QuarantinedStep| (quarantined.step, text(&quarantined.path));
        Ok(found.into_iter().map(row).collect())
    }

    /// Removes all but the last of the steps in quarantine; returns the paths.
    fn retire_quarantined(&self, py: Python<'_>) -> PyResult<Vec<OsString>> {
        let removed = call::without_gil(py, || self.now()?.retire_quarantined())?;
        Ok(removed.iter().map(|path| text(path)).collect())
    }

    /// The step that a directory of this name holds or held.
    #[staticmethod]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "what is no UTF-8 cannot be borrowed"
    )]
    fn step_of(name: OsString) -> Option<u64> {
        name.to_str().and_then(penstock_store::step_of)
    }

    /// The results of reading back: step, id, seconds since 1970, whether it was damaged.
    fn marks(&self, py: Python<'_>) -> PyResult<Vec<(u64, String, u64, bool)>> {
        let row = |mark: Mark| (mark.step, mark.id, mark.at_seconds, mark.is_damaged);
        let marks = call::without_gil(py, || self.now()?.marks())?;
        Ok(marks.into_iter().map(row).collect())
    }
}
