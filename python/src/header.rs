//! Headers of safetensors files, whoever wrote them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_store::format::dtype;
use penstock_store::format::header::{self, Header};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::rows::HeaderTensor;

/// Bytes of the start of a file that `parse_header` needs; `start` must have the first eight.
#[pyfunction]
pub(crate) fn header_end(
    py: Python<'_>,
    path: PathBuf,
    start: &[u8],
    nbytes: u64,
) -> PyResult<u64> {
    let found = header::header_end_of(start, nbytes);
    found.map_err(|error| errors::raise_header(py, &path, &error))
}

/// The offset of the data in a safetensors file, its metadata, and its tensors.
#[pyfunction]
pub(crate) fn parse_header(
    py: Python<'_>,
    path: PathBuf,
    start: &[u8],
    nbytes: u64,
) -> PyResult<(u64, BTreeMap<String, String>, Vec<HeaderTensor>)> {
    let parsed = header::parse_header(start, nbytes);
    let Header {
        data_start,
        metadata,
        tensors,
    } = parsed.map_err(|error| errors::raise_header(py, &path, &error))?;
    let rows = tensors.into_iter().map(|(name, tensor)| {
        let (dtype, shape) = match dtype::of_stored(&tensor.dtype, &tensor.shape) {
            Some((dtype, shape)) => (Some(dtype), shape),
            None => (None, tensor.shape),
        };
        let (begin, end) = tensor.data_offsets;
        Ok(HeaderTensor {
            name,
            kind: tensor.dtype,
            dtype,
            shape: PyTuple::new(py, shape)?.unbind(),
            begin,
            end,
        })
    });
    let rows: PyResult<Vec<_>> = rows.collect();
    Ok((data_start, metadata, rows?))
}

/// Every dtype that safetensors has a name for: our name, its name, and how many of its elements
/// make one of ours along the last dimension.
#[pyfunction]
pub(crate) fn header_types() -> Vec<(&'static str, &'static str, u64)> {
    dtype::named().collect()
}
