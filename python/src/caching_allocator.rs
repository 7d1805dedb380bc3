//! Memory for tensors.

use std::num::NonZeroUsize;

use penstock_io::buffer;
use penstock_store::plan::write;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::call;
use crate::errors::transferred as raised;
use crate::owner::{detached, release_dropped};
use crate::tensor::{self, HostBuffer};

/// `(offset in the buffer, address, bytes, owner)` of contiguous host memory to copy.
type PlacedCopy = (usize, usize, usize, Py<PyAny>);

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

/// The order in which a shard has tensors of these sizes, as indices.
#[pyfunction]
pub fn order_of_sizes(sizes: Vec<u64>) -> Vec<usize> {
    write::order_of_sizes(&sizes)
}

/// Copies memory to places in a buffer that come one after the other, with several threads.
#[pyfunction]
pub fn copy_side_by_side(
    py: Python<'_>,
    sources: Vec<PlacedCopy>,
    target: Bound<'_, HostBuffer>,
    threads: usize,
) -> PyResult<()> {
    let len = target.len()?;
    let mut end = 0;
    let mut regions = Vec::with_capacity(sources.len());
    for (place, address, bytes, owner) in sources {
        let room = len.checked_sub(place);
        if place < end || room.is_none_or(|room| room < bytes) {
            let problem = format!("{bytes} bytes at {place} have no place of their own");
            return Err(PyValueError::new_err(problem));
        }
        end = place + bytes;
        regions.push((
            place,
            tensor::contiguous((address, vec![bytes], None, 1, owner))?,
        ));
    }
    let mut target = tensor::buffer(target).into_buf();
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    call::without_gil(py, || {
        buffer::stream_side_by_side(&regions, target.as_mut_slice(), threads);
        drop(regions);
        Ok(())
    })
}
