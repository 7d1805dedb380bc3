//! `NumpyArrays`: NumPy's arrays with elements of one type.

use std::sync::Arc;

use penstock_io::buffer::{CachedMemory, HostRegionMut};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::array_type::ArrayType;
use crate::ids::Ids;
use crate::tensor::{self, HostBuffer};

/// Reads arrays of the type `numpy.ndarray`, and makes those of one element type.
pub(crate) struct NumpyArrays {
    array_type: Py<PyType>,
    dtype: Py<PyAny>,
}

impl NumpyArrays {
    /// Arrays with elements of a `numpy.dtype`.
    pub(crate) fn new(array_type: Py<PyType>, dtype: Py<PyAny>) -> NumpyArrays {
        NumpyArrays { array_type, dtype }
    }

    /// The elements of a contiguous array that has some; `None` if the object is of a subclass, or
    /// its elements are of a type that buffers do not have.
    fn elements(&self, object: &Bound<'_, PyAny>) -> Option<PyUntypedBuffer> {
        if !object.get_type().is(self.array_type.bind(object.py())) {
            return None;
        }
        let buffer = PyUntypedBuffer::get(object).ok()?;
        (buffer.len_bytes() > 0 && buffer.is_c_contiguous()).then_some(buffer)
    }
}

impl ArrayType for NumpyArrays {
    fn integers(
        &self,
        object: &Bound<'_, PyAny>,
        end: u64,
        count_max: usize,
    ) -> Option<(Vec<u64>, Vec<i64>)> {
        let buffer = self.elements(object)?;
        // NumPy writes an order of bytes only before the code of elements that are not native.
        let &[code] = buffer.format().to_bytes() else {
            return None;
        };
        let is_integer = b"bhilq".contains(&code.to_ascii_lowercase());
        if !is_integer || buffer.item_count() > count_max {
            return None;
        }
        let sizes = buffer.shape().iter().map(|&size| size as i64).collect();
        let (address, owner) = (
            buffer.buf_ptr().expose_provenance(),
            object.clone().unbind(),
        );
        let array = (
            address,
            vec![buffer.item_count()],
            None,
            buffer.item_size(),
            owner,
        );
        let ids = Ids::of(array, code.is_ascii_lowercase()).ok()?;
        let numbers = ids.numbers(end).ok()?;
        buffer.release(object.py());
        Some((numbers, sizes))
    }

    fn target(&self, object: &Bound<'_, PyAny>, sizes: &[i64]) -> Option<HostRegionMut> {
        let (py, buffer) = (object.py(), self.elements(object)?);
        // NumPy has one object for each type of numbers. Others are left to the usual way.
        let dtype = object.getattr(intern!(py, "dtype")).ok()?;
        let has_sizes = buffer
            .shape()
            .iter()
            .map(|&size| size as i64)
            .eq(sizes.iter().copied());
        if buffer.readonly() || !has_sizes || !dtype.is(&self.dtype) {
            return None;
        }
        let target = (
            buffer.buf_ptr().expose_provenance(),
            buffer.len_bytes(),
            object.clone().unbind(),
        );
        buffer.release(py);
        tensor::target(target).ok()
    }

    fn empty<'py>(&self, py: Python<'py>, sizes: &[i64]) -> PyResult<Bound<'py, PyAny>> {
        let sizes = PyTuple::new(py, sizes)?;
        self.array_type.bind(py).call1((sizes, &self.dtype))
    }

    fn of_memory(
        &self,
        py: Python<'_>,
        memory: Arc<CachedMemory>,
        sizes: Vec<i64>,
    ) -> PyResult<Py<PyAny>> {
        let (sizes, buffer) = (PyTuple::new(py, sizes)?, HostBuffer::from(memory));
        let array = self
            .array_type
            .bind(py)
            .call1((sizes, &self.dtype, buffer))?;
        Ok(array.unbind())
    }
}
