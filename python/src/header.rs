//! Headers of safetensors files, whoever wrote them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_store::format::dtype;
use penstock_store::format::header::{self, Header};
use pyo3::prelude::*;

use crate::errors;

/// A tensor: its name; its safetensors type; our dtype and the shape in its elements, if there is
/// one; the shape in the header; and its byte range in the data.
type TensorRow = (
    String,
    String,
    Option<(&'static str, Vec<u64>)>,
    Vec<u64>,
    (u64, u64),
);

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
) -> PyResult<(u64, BTreeMap<String, String>, Vec<TensorRow>)> {
    let parsed = header::parse_header(start, nbytes);
    let Header {
        data_start,
        metadata,
        tensors,
    } = parsed.map_err(|error| errors::raise_header(py, &path, &error))?;
    let rows = tensors.into_iter().map(|(name, tensor)| {
        let ours = dtype::of_stored(&tensor.dtype, &tensor.shape);
        (name, tensor.dtype, ours, tensor.shape, tensor.data_offsets)
    });
    Ok((data_start, metadata, rows.collect()))
}

/// Every dtype that safetensors has a name for: our name, its name, and how many of its elements
/// make one of ours along the last dimension.
#[pyfunction]
pub(crate) fn header_types() -> Vec<(&'static str, &'static str, u64)> {
    dtype::named().collect()
}
