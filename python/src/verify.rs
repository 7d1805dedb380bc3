//! `verify`.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::options::NativeOptions;
use crate::report;

/// Checks every byte of a checkpoint; see `penstock.verify`.
#[pyfunction]
#[pyo3(signature = (path, *, options, progress))]
pub fn verify<'py>(
    py: Python<'py>,
    path: PathBuf,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options.at(py, &path)?;
    let verified = call::run(py, &progress, |progress| {
        penstock_store::care::verify::verify(&path, &options, progress)
    })?;
    let dict = report::of_verify(py, &verified)?;
    dict.set_item("path", path.as_os_str())?;
    Ok(dict)
}
