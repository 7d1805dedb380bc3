//! Byte ranges of a file, in batches.

use std::ops::Range;

use penstock_gather::Merging;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::data_file::DataFile;
use crate::errors::gathered as raised;
use crate::features::counted;
use crate::ids::Ids;
use crate::offload::{Executor, Transfer};
use crate::owner::detached;
use crate::rows::GatherCounts;
use crate::tensor::{self, NativeArray, TensorTarget};

/// A file whose ranges an executor reads.
#[pyclass(frozen, module = "penstock._native")]
pub struct RangeReader {
    inner: penstock_gather::RangeReader,
}

#[pymethods]
impl RangeReader {
    #[new]
    #[pyo3(signature = (executor, weight, file, *, gap_bytes, run_bytes_max))]
    fn new(
        py: Python<'_>,
        executor: &Executor,
        weight: u32,
        file: &DataFile,
        gap_bytes: u64,
        run_bytes_max: u64,
    ) -> PyResult<RangeReader> {
        let share = executor.claim_for_rows(py, weight)?;
        let merging = Merging {
            gap_bytes,
            run_bytes_max,
        };
        Ok(RangeReader {
            inner: penstock_gather::RangeReader::new(file.to_read(), share, merging),
        })
    }

    /// Begins to read ranges into consecutive parts of `out`; `ranges` is a contiguous array of
    /// `uint64`, the begin and the end of each range in turn.
    fn read(&self, py: Python<'_>, ranges: NativeArray, out: TensorTarget) -> PyResult<Transfer> {
        let numbers = Ids::of(ranges, false)?;
        let out = tensor::target(out)?.into_buf();
        let numbers = raised(py, detached(py, || numbers.numbers(u64::MAX)))?;
        let ranges: Vec<Range<u64>> = numbers
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&[begin, end]| begin..end)
            .collect();
        let lengths = ranges.iter().map(|one| one.end.checked_sub(one.start));
        let all = lengths.sum::<Option<u64>>();
        if all != Some(out.len() as u64) {
            return Err(PyValueError::new_err(format!(
                "ranges of {all:?} bytes for {} of memory",
                out.len()
            )));
        }
        raised(py, detached(py, || self.inner.read(&ranges, out))).map(Transfer::of_host)
    }

    /// The counters; a row is a range.
    fn counts(&self) -> GatherCounts {
        counted(self.inner.counts())
    }
}
