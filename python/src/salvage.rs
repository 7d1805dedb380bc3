//! `survey` and `salvage`.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::options::NativeOptions;
use crate::report;

/// Finds the intact tensors of a checkpoint; see `penstock.explain`.
#[pyfunction]
#[pyo3(signature = (path, *, options, progress))]
pub fn survey<'py>(
    py: Python<'py>,
    path: PathBuf,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options.at(py, &path)?;
    let survey = call::run(py, &progress, |progress| {
        penstock_store::care::survey::survey(&path, &options, progress)
    })?;
    report::of_survey(py, &survey)
}

/// Saves the intact tensors as a new checkpoint; see `penstock.salvage`.
#[pyfunction]
#[pyo3(signature = (path, out, *, unverified, options, progress))]
pub fn salvage<'py>(
    py: Python<'py>,
    path: PathBuf,
    out: PathBuf,
    unverified: bool,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let into = options.clone().at(py, &out)?;
    let options = options.at(py, &path)?;
    let salvaged = call::run(py, &progress, |progress| {
        penstock_store::care::salvage::salvage(&path, &out, unverified, &options, &into, progress)
    })?;
    report::of_salvage(py, &salvaged)
}
