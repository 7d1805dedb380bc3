//! `TorchTensors`: PyTorch's tensors with elements of one type.

use std::sync::Arc;

use penstock_io::buffer::{CachedMemory, HostRegionMut};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::array_type::ArrayType;
use super::exchange::{Exchange, Kind};

/// Reads tensors of the type `torch.Tensor`, and makes those of one element type.
pub(crate) struct TorchTensors {
    exchange: Exchange,
    kind: Kind,
    example: Py<PyAny>,
}

impl TorchTensors {
    /// Tensors with elements as an example has them, and the bytes of a row of these sizes. `None`
    /// where this PyTorch has no functions for it.
    pub(crate) fn of(
        tensor_type: &Bound<'_, PyType>,
        example: &Bound<'_, PyAny>,
        row_sizes: &[i64],
    ) -> Option<(TorchTensors, u64)> {
        let exchange = Exchange::of(tensor_type)?;
        let kind = exchange.kind(example)?;
        // Types of less than a byte have sizes of their own in DLPack.
        let bytes = kind.bytes(row_sizes.iter().product())?;
        let tensors = TorchTensors {
            exchange,
            kind,
            example: example.clone().unbind(),
        };
        Some((tensors, bytes))
    }
}

impl ArrayType for TorchTensors {
    fn integers(
        &self,
        object: &Bound<'_, PyAny>,
        end: u64,
        count_max: usize,
    ) -> Option<(Vec<u64>, Vec<i64>)> {
        self.exchange.integers(object, end, count_max)
    }

    fn target(&self, object: &Bound<'_, PyAny>, sizes: &[i64]) -> Option<HostRegionMut> {
        self.exchange.target(object, self.kind, sizes)
    }

    fn empty<'py>(&self, py: Python<'py>, sizes: &[i64]) -> PyResult<Bound<'py, PyAny>> {
        let sizes = PyTuple::new(py, sizes)?;
        // Faster than `torch.empty`, which has to be told the type and the device.
        self.example
            .bind(py)
            .call_method1(intern!(py, "new_empty"), (sizes,))
    }

    fn of_memory(
        &self,
        py: Python<'_>,
        memory: Arc<CachedMemory>,
        sizes: Vec<i64>,
    ) -> PyResult<Py<PyAny>> {
        self.exchange.tensor(py, memory, self.kind, sizes)
    }
}
