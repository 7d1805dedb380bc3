//! Memory for tensors.

use penstock_io::buffer;
use pyo3::prelude::*;

use crate::errors::transferred as raised;
use crate::owner::{detached, release_dropped};
use crate::tensor::HostBuffer;

/// A cache of buffers for tensors.
#[pyclass(frozen, module = "penstock._native")]
pub struct CachingHostAllocator {
    inner: buffer::CachingHostAllocator,
}

#[pymethods]
impl CachingHostAllocator {
    #[new]
    fn new(budget_bytes: usize, locked: bool) -> CachingHostAllocator {
        let inner = buffer::CachingHostAllocator::new(budget_bytes, locked);
        CachingHostAllocator { inner }
    }

    /// A page-aligned buffer of `nbytes` bytes.
    fn take(&self, py: Python<'_>, nbytes: usize) -> PyResult<HostBuffer> {
        raised(py, detached(py, || self.inner.take(nbytes))).map(HostBuffer::from)
    }

    /// Returns unused buffers to the system.
    fn release(&self, py: Python<'_>) {
        detached(py, || self.inner.release());
    }

    /// Bytes that tensors use.
    #[getter]
    fn taken_bytes(&self, py: Python<'_>) -> usize {
        release_dropped(py);
        self.inner.taken_bytes()
    }

    /// Bytes that are kept unused.
    #[getter]
    fn free_bytes(&self, py: Python<'_>) -> usize {
        release_dropped(py);
        self.inner.free_bytes()
    }
}

impl CachingHostAllocator {
    pub(crate) fn shared(&self) -> buffer::CachingHostAllocator {
        self.inner.clone()
    }
}

/// A page-aligned buffer of `nbytes` bytes; a thread touches its first `early_bytes` in advance.
#[pyfunction]
pub fn reserve(py: Python<'_>, nbytes: usize, early_bytes: usize) -> PyResult<HostBuffer> {
    raised(py, buffer::reserve(nbytes, early_bytes)).map(HostBuffer::from)
}
