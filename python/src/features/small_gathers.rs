//! `SmallGathers`: gathers small batches of rows by one call.

use std::sync::{Arc, OnceLock};

use penstock_gather::{Batch, Reader};
use penstock_io::buffer::IoBuf;
use penstock_io::{buffer, process};
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::array_type::ArrayType;
use super::exchange::window;
use super::numpy_arrays::NumpyArrays;
use super::torch_tensors::TorchTensors;
use super::{RowBatch, RowReader};
use crate::caching_allocator::CachingHostAllocator;
use crate::files::times::FileTimes;
use crate::owner::detached;

/// Results of fewer bytes get memory of PyTorch or NumPy: a page for each is too much.
const KEPT_FROM_BYTES: usize = 64 << 10;
/// Larger results, and more ids, take long enough for the usual way, which does not convert ids
/// under the GIL.
const BYTES_MAX: usize = 4 << 20;
const IDS_MAX: usize = 64 << 10;

/// A result, and the batch if something of it is left to do.
type Gathered = (Py<PyAny>, Option<RowBatch>);

/// Gathers rows of a table into tensors and arrays.
#[pyclass(frozen, module = "penstock._native")]
pub struct SmallGathers {
    reader: Reader,
    arrays: Option<NumpyArrays>,
    tensors: OnceLock<TorchTensors>,
    row_sizes: Vec<i64>,
    allocator: buffer::CachingHostAllocator,
    files: Py<FileTimes>,
    process: u32,
}

#[pymethods]
impl SmallGathers {
    /// `array_type` is `numpy.ndarray`, `dtype` the elements' type, if NumPy has it.
    #[new]
    fn new(
        reader: &RowReader,
        array_type: Py<PyType>,
        dtype: Option<Py<PyAny>>,
        row_sizes: Vec<i64>,
        allocator: &CachingHostAllocator,
        files: Py<FileTimes>,
    ) -> SmallGathers {
        SmallGathers {
            reader: reader.shared(),
            arrays: dtype.map(|dtype| NumpyArrays::new(array_type, dtype)),
            tensors: OnceLock::new(),
            row_sizes,
            allocator: allocator.shared(),
            files,
            process: process::id(),
        }
    }

    /// Serves tensors from now on, if this PyTorch has functions for that. `tensor_type` is
    /// `torch.Tensor`, `example` a tensor of the elements' type.
    fn add_tensors(&self, tensor_type: &Bound<'_, PyType>, example: &Bound<'_, PyAny>) {
        if let Some((tensors, bytes)) = TorchTensors::of(tensor_type, example, &self.row_sizes)
            && bytes == self.reader.table().value_bytes()
        {
            // Another thread may have been faster, with the same.
            let _ = self.tensors.set(tensors);
        }
    }

    /// Begins to gather the rows of some ids, into `out` if that is given.
    ///
    /// Returns the result, and the batch if something is left to do: rows are under way, or a file
    /// may have changed. Returns nothing, and has done nothing, where the usual way has to be
    /// taken: for other ids than contiguous integers of the host, for bad ids, for memory that does
    /// not suit, for large results, and in a fork.
    #[pyo3(signature = (ids, out=None))]
    fn gather(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        out: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Option<Gathered>> {
        // In a fork, another thread may have held a lock that nobody releases.
        if self.process != process::id() {
            return Ok(None);
        }
        let table = self.reader.table();
        let value_bytes = table.value_bytes() as usize;
        let (end, count_max) = (table.rows(), IDS_MAX.min(BYTES_MAX / value_bytes));
        let found = self.types().find_map(|one| {
            let (rows, sizes) = one.integers(ids, end, count_max)?;
            Some((one, rows, sizes))
        });
        let Some((array_type, rows, mut sizes)) = found else {
            return Ok(None);
        };
        sizes.extend_from_slice(&self.row_sizes);
        let bytes = rows.len() * value_bytes;
        if out.is_none() && bytes >= KEPT_FROM_BYTES {
            return self.gather_new(py, &rows, bytes, array_type, sizes);
        }
        let out = out.or_else(|| array_type.empty(py, &sizes).ok());
        Ok(out.and_then(|out| self.gather_into(out, &rows, &sizes)))
    }
}

impl SmallGathers {
    /// The types of arrays that are served.
    fn types(&self) -> impl Iterator<Item = &dyn ArrayType> {
        let tensors = self.tensors.get().map(|one| one as &dyn ArrayType);
        let arrays = self.arrays.as_ref().map(|one| one as &dyn ArrayType);
        tensors.into_iter().chain(arrays)
    }

    /// Gathers into memory that is kept for later results.
    fn gather_new(
        &self,
        py: Python<'_>,
        rows: &[u64],
        bytes: usize,
        array_type: &dyn ArrayType,
        sizes: Vec<i64>,
    ) -> PyResult<Option<Gathered>> {
        let begin = || {
            let memory = Arc::new(self.allocator.take(rounded(bytes)).ok()?);
            let (batch, is_over) = self.begin(rows, window(&memory, bytes))?;
            Some((memory, (!is_over).then_some(batch)))
        };
        let Some((memory, batch)) = detached(py, begin) else {
            return Ok(None);
        };
        let result = array_type.of_memory(py, memory, sizes)?;
        Ok(Some((result, batch.map(RowBatch::new))))
    }

    /// Gathers into a tensor or an array.
    fn gather_into(&self, out: Bound<'_, PyAny>, rows: &[u64], sizes: &[i64]) -> Option<Gathered> {
        let target = self.types().find_map(|one| one.target(&out, sizes))?;
        let begin = || self.begin(rows, target.into_buf());
        let (batch, is_over) = detached(out.py(), begin)?;
        let batch = (!is_over).then(|| RowBatch::new(batch));
        Some((out.unbind(), batch))
    }

    /// Begins a batch; also returns whether all rows are there and no file has changed.
    fn begin(&self, rows: &[u64], out: IoBuf) -> Option<(Batch, bool)> {
        let batch = self.reader.gather(rows, out).ok()?;
        // After the reads, as a check before them says nothing about the bytes read.
        let is_over = batch.is_good() && self.files.get().all_unchanged();
        Some((batch, is_over))
    }
}

/// Batches of graphs differ in size: rounding up by an eighth lets the next one reuse memory.
fn rounded(bytes: usize) -> usize {
    let step = (1 << bytes.ilog2().saturating_sub(3)).max(4096);
    bytes.next_multiple_of(step)
}
