//! `digests`, `chunk_digests` and `dtypes`: functions about tensors that need no checkpoint.

use penstock_store::format::digest::Digest;
use penstock_store::format::dtype;
use pyo3::prelude::*;

use crate::call;
use crate::tensor::{self, TensorSource};

/// CRC-64/NVME of the elements of each tensor, in row-major order.
#[pyfunction]
pub(crate) fn digests(py: Python<'_>, tensors: Vec<TensorSource>) -> PyResult<Vec<u64>> {
    let sources = tensors.into_iter();
    let regions: Vec<_> = sources
        .map(|source| tensor::on_host(py, source))
        .collect::<PyResult<_>>()?;
    call::without_gil(py, || {
        let found = regions.iter().map(|region| Digest::of_memory(region).0);
        Ok(found.collect())
    })
}

/// CRC-64/NVME of each chunk of the elements of a tensor, in row-major order.
#[pyfunction]
pub(crate) fn chunk_digests(py: Python<'_>, tensor: TensorSource) -> PyResult<Vec<u64>> {
    let region = tensor::on_host(py, tensor)?;
    call::without_gil(py, || {
        let found = Digest::chunks_of_memory(&region);
        Ok(found.iter().map(|digest| digest.0).collect())
    })
}

/// Every named dtype of the format, with the bytes of an element.
#[pyfunction]
pub(crate) fn dtypes() -> Vec<(&'static str, usize)> {
    dtype::all().collect()
}

/// CRC-64/NVME of some bytes followed by `second_bytes` more, from the digests of both.
#[pyfunction]
pub(crate) fn combine_digests(first: u64, second: u64, second_bytes: u64) -> u64 {
    Digest(first).then(Digest(second), second_bytes).0
}
