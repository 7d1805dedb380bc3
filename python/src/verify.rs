//! `verify`.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_store::care;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::options::NativeOptions;
use crate::report;
use crate::signing::Signers;

/// Checks every byte of a checkpoint; see `penstock.verify`.
#[pyfunction]
#[pyo3(signature = (path, *, options, progress, signers=None))]
pub fn verify<'py>(
    py: Python<'py>,
    path: PathBuf,
    options: NativeOptions,
    progress: Callback,
    signers: Option<PyRef<'_, Signers>>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options.at(py, &path)?;
    let signers = signers.map(|signers| Arc::clone(&signers.signers));
    let verified = call::run(py, &progress, |progress| match &signers {
        None => care::verify::verify(&path, &options, progress),
        Some(signers) => care::verify::verify_signed(&path, signers, &options, progress),
    })?;
    let dict = report::of_verify(py, &verified)?;
    dict.set_item("path", path.as_os_str())?;
    Ok(dict)
}
