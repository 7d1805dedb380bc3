//! `RowTensors`: gathers small batches of rows into tensors, by one call.

use std::sync::Arc;

use penstock_gather::Reader;
use penstock_io::{buffer, process};
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::exchange::{Exchange, Kind, window};
use super::{RowBatch, RowReader};
use crate::caching_allocator::CachingHostAllocator;
use crate::files::times::FileTimes;
use crate::owner::detached;

/// Results of fewer bytes are left to PyTorch: a page for each is too much.
const BYTES_MIN: usize = 64 << 10;
/// Larger results take long enough for the usual way, which does not convert ids under the GIL.
const BYTES_MAX: usize = 4 << 20;

/// Gathers rows of a table into new tensors.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowTensors {
    reader: Reader,
    exchange: Exchange,
    kind: Kind,
    row_sizes: Vec<i64>,
    allocator: buffer::CachingHostAllocator,
    files: Py<FileTimes>,
    process: u32,
}

#[pymethods]
impl RowTensors {
    /// `tensor_type` is `torch.Tensor`, `example` a tensor of the elements' type.
    ///
    /// Returns nothing where this PyTorch has no functions for it.
    #[staticmethod]
    fn of(
        reader: &RowReader,
        tensor_type: &Bound<'_, PyType>,
        example: &Bound<'_, PyAny>,
        row_sizes: Vec<i64>,
        allocator: &CachingHostAllocator,
        files: Py<FileTimes>,
    ) -> Option<RowTensors> {
        let exchange = Exchange::of(tensor_type)?;
        let kind = exchange.kind(example)?;
        let reader = reader.shared();
        // Types of less than a byte have sizes of their own in DLPack.
        let bytes = kind.bytes(row_sizes.iter().product())?;
        (bytes == reader.table().value_bytes()).then_some(RowTensors {
            reader,
            exchange,
            kind,
            row_sizes,
            allocator: allocator.shared(),
            files,
            process: process::id(),
        })
    }

    /// Begins to gather the rows of some ids.
    ///
    /// Returns the tensor, and the batch if something is left to do: rows are under way, or a file
    /// may have changed. Returns nothing, and has done nothing, where the usual way has to be
    /// taken: for other ids than contiguous integer tensors of the host, for bad ids, for results
    /// of another size, and in a fork.
    fn gather(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Py<PyAny>, Option<RowBatch>)>> {
        // In a fork, another thread may have held a lock that nobody releases.
        if self.process != process::id() {
            return Ok(None);
        }
        let table = self.reader.table();
        let value_bytes = table.value_bytes() as usize;
        let count_max = BYTES_MAX / value_bytes;
        let Some((rows, mut sizes)) = self.exchange.integers(ids, table.rows(), count_max) else {
            return Ok(None);
        };
        let bytes = rows.len() * value_bytes;
        if bytes < BYTES_MIN {
            return Ok(None);
        }
        sizes.extend_from_slice(&self.row_sizes);
        let files = self.files.get();
        let begin = || {
            let memory = Arc::new(self.allocator.take(rounded(bytes)).ok()?);
            let batch = self.reader.gather(&rows, window(&memory, bytes)).ok()?;
            // After the reads, as a check before them says nothing about the bytes read.
            let is_over = batch.is_good() && files.all_unchanged();
            Some((memory, (!is_over).then_some(batch)))
        };
        let Some((memory, batch)) = detached(py, begin) else {
            return Ok(None);
        };
        let tensor = self.exchange.tensor(py, memory, self.kind, sizes)?;
        Ok(Some((tensor, batch.map(RowBatch::new))))
    }
}

/// Batches of graphs differ in size: rounding up by an eighth lets the next one reuse memory.
fn rounded(bytes: usize) -> usize {
    let step = (1 << bytes.ilog2().saturating_sub(3)).max(4096);
    bytes.next_multiple_of(step)
}
