//! `survey` and `salvage`.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_store::care::salvage::{Seals, salvage_with};
use penstock_store::care::survey::survey_with;
use penstock_store::seal::Unsealing;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::keys::{AttemptKey, Identities};
use crate::options::NativeOptions;
use crate::report;

/// Finds the intact tensors of a checkpoint; see `penstock.explain`.
#[pyfunction]
#[pyo3(signature = (path, identities=None, *, demanded=false, options, progress))]
pub fn survey<'py>(
    py: Python<'py>,
    path: PathBuf,
    identities: Option<PyRef<'_, Identities>>,
    demanded: bool,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options.at(py, &path)?;
    let unsealing = unsealing_of(identities, demanded);
    let survey = call::run(py, &progress, |progress| {
        survey_with(&path, &options, &unsealing, progress)
    })?;
    report::of_survey(py, &survey)
}

/// Saves the intact tensors as a new checkpoint; see `penstock.salvage`.
#[pyfunction]
#[pyo3(signature = (
    path, out, identities=None, *, demanded=false, sealing=None, unverified, options, progress
))]
#[expect(clippy::too_many_arguments, reason = "all but the first are keywords")]
pub fn salvage<'py>(
    py: Python<'py>,
    path: PathBuf,
    out: PathBuf,
    identities: Option<PyRef<'_, Identities>>,
    demanded: bool,
    sealing: Option<PyRef<'_, AttemptKey>>,
    unverified: bool,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let into = options.clone().at(py, &out)?;
    let options = options.at(py, &path)?;
    let unsealing = unsealing_of(identities, demanded);
    let sealing = sealing.map(|key| key.sealing());
    let salvaged = call::run(py, &progress, |progress| {
        let seals = Seals {
            unsealing: unsealing.clone(),
            sealing: sealing.clone(),
        };
        salvage_with(&path, &out, unverified, seals, &options, &into, progress)
    })?;
    report::of_salvage(py, &salvaged)
}

fn unsealing_of(identities: Option<PyRef<'_, Identities>>, is_demanded: bool) -> Unsealing {
    Unsealing {
        identities: identities.map(|identities| Arc::clone(&identities.unwrap)),
        is_demanded,
        ..Unsealing::default()
    }
}
