//! `ArrayType`: a type of Python objects with elements in memory of the host.

use std::sync::Arc;

use penstock_io::buffer::{CachedMemory, HostRegionMut};
use pyo3::prelude::*;

/// A type of Python objects with elements: PyTorch's tensors, NumPy's arrays. Results have elements
/// of one type.
pub(crate) trait ArrayType {
    /// The integers of a contiguous object, all below `end`, and its sizes. `None` if the object is
    /// of another type, or has no items or more than `count_max`.
    fn integers(
        &self,
        object: &Bound<'_, PyAny>,
        end: u64,
        count_max: usize,
    ) -> Option<(Vec<u64>, Vec<i64>)>;

    /// The memory of a contiguous object that may be filled, with elements of the results' type.
    /// `None` if the object is of another type or other sizes.
    fn target(&self, object: &Bound<'_, PyAny>, sizes: &[i64]) -> Option<HostRegionMut>;

    /// An object with memory of its own and undefined content.
    fn empty<'py>(&self, py: Python<'py>, sizes: &[i64]) -> PyResult<Bound<'py, PyAny>>;

    /// An object that uses memory, which comes back when the object is released.
    fn of_memory(
        &self,
        py: Python<'_>,
        memory: Arc<CachedMemory>,
        sizes: Vec<i64>,
    ) -> PyResult<Py<PyAny>>;
}
