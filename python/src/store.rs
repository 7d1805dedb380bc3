//! `Store`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use penstock_store::Error;
use penstock_store::store::{self, StepState};
use pyo3::prelude::*;

use crate::errors;

/// A directory of checkpoints; see `penstock.CheckpointStore`.
#[pyclass(frozen, module = "penstock._native")]
pub struct Store {
    inner: store::Store,
}

/// A path as Python spells it: what is not UTF-8 becomes surrogates.
fn text(path: &Path) -> OsString {
    path.as_os_str().to_owned()
}

/// Does file system work without the GIL.
fn without_gil<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| errors::raise(py, &error))
}

#[pymethods]
impl Store {
    #[new]
    fn new(root: PathBuf) -> Store {
        Store {
            inner: store::Store::new(root),
        }
    }

    /// Where a step's checkpoint is or would be.
    fn step_path(&self, step: u64) -> OsString {
        text(&self.inner.step_path(step))
    }

    /// Every step by number with its state and the reason for it.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<(u64, &'static str, Option<String>)>> {
        without_gil(py, || {
            let mut rows = Vec::new();
            for step in self.inner.steps()? {
                rows.push(match self.inner.state(step) {
                    Ok(StepState::Complete(_)) => (step, "complete", None),
                    Ok(StepState::Incomplete) => (step, "incomplete", None),
                    Ok(StepState::Damaged(error)) => (step, "damaged", Some(error.to_string())),
                    Ok(StepState::Newer(error)) => (step, "newer", Some(error.to_string())),
                    // Removed since the directory was listed.
                    Err(Error::NotFound { .. }) => continue,
                    Err(error) => return Err(error),
                });
            }
            Ok(rows)
        })
    }

    /// Removes a step; returns the bytes freed.
    fn delete(&self, py: Python<'_>, step: u64) -> PyResult<u64> {
        without_gil(py, || self.inner.delete(step))
    }

    /// Removes what dead saves left; returns paths and bytes.
    fn sweep(&self, py: Python<'_>) -> PyResult<Vec<(OsString, u64)>> {
        let swept = without_gil(py, || self.inner.sweep())?;
        Ok(swept
            .into_iter()
            .map(|(path, bytes)| (text(&path), bytes))
            .collect())
    }

    /// Deletes what retention does not keep; returns the steps.
    #[pyo3(signature = (keep_last, keep_every, saved))]
    fn retain(
        &self,
        py: Python<'_>,
        keep_last: Option<u64>,
        keep_every: Option<u64>,
        saved: Option<u64>,
    ) -> PyResult<Vec<u64>> {
        without_gil(py, || self.inner.retain(keep_last, keep_every, saved))
    }

    /// Remembers that a checkpoint was read back whole and found right.
    fn mark_verified(&self, py: Python<'_>, step: u64, checkpoint_id: &str) -> PyResult<()> {
        without_gil(py, || self.inner.mark_verified(step, checkpoint_id))
    }
}
