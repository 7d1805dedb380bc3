//! Rows of tables by id.

mod array_type;
mod exchange;
pub(crate) mod neighborhood;
mod numpy_arrays;
pub(crate) mod small_gathers;
mod torch_tensors;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_gather::{
    Batch, Cache, Checks, Counts, DeviceBatch, DeviceReader, Error, Index, Merging, Policy, Reader,
    Segment, Table, replay,
};
use penstock_io::buffer::DeviceStreams;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::blocks::NativeBlockOpener;
use crate::call;
use crate::data_file::DataFile;
use crate::errors::{self, gathered as raised};
use crate::event_fd::EventFd;
use crate::ids::Ids;
use crate::offload::Executor;
use crate::owner::{detached, release_dropped};
use crate::rows::GatherCounts;
use crate::tensor::device::{NativeDevice, foreign};
use crate::tensor::{self, NativeArray, TensorTarget};

/// The counters of a reader.
pub(crate) fn counted(counts: &Counts) -> GatherCounts {
    GatherCounts {
        rows: counts.rows.load(Relaxed),
        hits: counts.hits.load(Relaxed),
        shared: counts.shared.load(Relaxed),
        read_rows: counts.read_rows.load(Relaxed),
        requests: counts.requests.load(Relaxed),
        read_bytes: counts.read_bytes.load(Relaxed),
        read_again: counts.read_again.load(Relaxed),
    }
}

/// CRC-32C of each block of a contiguous array that begins at a block boundary: `uint32` in native
/// byte order.
#[pyfunction]
pub(crate) fn block_checks(py: Python<'_>, array: NativeArray) -> PyResult<Bound<'_, PyBytes>> {
    let region = tensor::contiguous(array)?;
    let sums = call::without_gil(py, || Ok(Checks::of_memory(&region)))?;
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// The eviction policy of a name.
fn policy(name: &str) -> PyResult<Policy> {
    Ok(match name {
        "sieve" => Policy::Sieve,
        "s3fifo" => Policy::S3Fifo,
        "static" => Policy::Static,
        "none" => Policy::None,
        _ => return Err(PyValueError::new_err(format!("policy={name:?}"))),
    })
}

/// Cached rows that tables share.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowCache {
    inner: Arc<Cache>,
}

#[pymethods]
impl RowCache {
    #[new]
    fn new(py: Python<'_>, slots: u32, row_bytes: usize, policy: &str) -> PyResult<RowCache> {
        let policy = self::policy(policy)?;
        let inner = raised(py, detached(py, || Cache::new(slots, row_bytes, policy)))?;
        Ok(RowCache {
            inner: Arc::new(inner),
        })
    }
}

impl RowCache {
    pub(crate) fn shared(&self) -> Arc<Cache> {
        Arc::clone(&self.inner)
    }
}

/// A simulated cache without memory for rows.
#[pyclass(module = "penstock._native")]
pub struct RowIndex {
    inner: Index,
}

#[pymethods]
impl RowIndex {
    #[new]
    fn new(slots: u32, policy: &str) -> PyResult<RowIndex> {
        Ok(RowIndex {
            inner: Index::new(slots, self::policy(policy)?),
        })
    }

    /// Looks up keys, an array of `uint64`, in batches, with `window` batches announced in
    /// advance; returns the number of hits.
    fn replay(
        &mut self,
        py: Python<'_>,
        keys: NativeArray,
        batch_keys: usize,
        window: usize,
    ) -> PyResult<u64> {
        if batch_keys == 0 {
            return Err(PyValueError::new_err("batch_keys=0: must be at least 1"));
        }
        let keys = Ids::of(keys, false)?;
        let hits = detached(py, || {
            let keys = keys.numbers(u64::MAX)?;
            Ok(replay(&mut self.inner, &keys, batch_keys, window))
        });
        raised(py, hits)
    }

    /// Pins rows once they are cached; returns how many are pinned.
    fn pin(&mut self, py: Python<'_>, keys: NativeArray) -> PyResult<usize> {
        let keys = Ids::of(keys, false)?;
        let pinned = detached(py, || {
            let keys = keys.numbers(u64::MAX)?;
            Ok(self.inner.pin(&keys))
        });
        raised(py, pinned)
    }
}

/// Rows of one table, read by an executor.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowReader {
    inner: Reader,
    /// One reader for each device that rows were gathered to.
    devices: Mutex<Vec<Arc<DeviceReader>>>,
}

#[pymethods]
impl RowReader {
    /// Segments are files, each with the offset of its rows and their number; checks are an array
    /// of `uint32` for the blocks of all segments in order; openers open those of each segment, if
    /// they are sealed.
    #[new]
    #[pyo3(signature = (
        executor, weight, segments, *, row_bytes, value_bytes, checks, openers=None, cache,
        gap_bytes, run_bytes_max
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the keywords of a constructor"
    )]
    fn new(
        py: Python<'_>,
        executor: &Executor,
        weight: u32,
        segments: Vec<(Py<DataFile>, u64, u64)>,
        row_bytes: u64,
        value_bytes: u64,
        checks: Option<NativeArray>,
        openers: Option<Vec<Py<NativeBlockOpener>>>,
        cache: Option<Py<RowCache>>,
        gap_bytes: u64,
        run_bytes_max: u64,
    ) -> PyResult<RowReader> {
        let share = executor.claim_for_rows(py, weight)?;
        let mut sums = checks.map(tensor::words).transpose()?.map(Vec::into_iter);
        let mut openers = openers.map(Vec::into_iter);
        let segment = |(file, offset, rows): (Py<DataFile>, u64, u64)| {
            let opener = match &mut openers {
                None => None,
                Some(openers) => {
                    let opener = openers.next();
                    let opener = opener.ok_or_else(|| PyValueError::new_err("too few openers"))?;
                    Some(opener.get().of_rows(offset)?)
                }
            };
            let blocks = Checks::blocks(rows * row_bytes) as usize;
            let sums = sums.as_mut().map(|sums| sums.by_ref().take(blocks));
            Ok(Segment {
                target: file.get().to_read(),
                offset,
                rows,
                checks: sums.map(Checks::new).map(Arc::new),
                opener,
            })
        };
        let segments = segments.into_iter().map(segment);
        let segments = segments.collect::<PyResult<_>>()?;
        let table = Table::new(segments, row_bytes, value_bytes);
        let cache = cache.map(|cache| cache.get().shared());
        let merging = Merging {
            gap_bytes,
            run_bytes_max,
        };
        Ok(RowReader {
            inner: Reader::new(table, share, cache, merging),
            devices: Mutex::default(),
        })
    }

    /// Begins to gather the rows of these ids, a contiguous array of integers, into bytes;
    /// `hinted` is the batch's number if it was announced.
    fn gather(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        out: TensorTarget,
        hinted: Option<u64>,
    ) -> PyResult<RowBatch> {
        let ids = Ids::of(ids, is_signed)?;
        let out = tensor::target(out)?.into_buf();
        let begin = || {
            let ids = ids.numbers(self.inner.table().rows())?;
            self.inner.gather_hinted(&ids, out, hinted)
        };
        raised(py, detached(py, begin)).map(RowBatch::new)
    }

    /// As `gather`, into a contiguous array on a device, once the work queued on its stream so far
    /// has completed.
    fn gather_to_device(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        out: NativeArray,
        device: NativeDevice,
        hinted: Option<u64>,
    ) -> PyResult<DeviceRowBatch> {
        let ids = Ids::of(ids, is_signed)?;
        let begin = || {
            let numbers = ids.numbers(self.inner.table().rows())?;
            let device_streams = DeviceStreams::of(device.0)?;
            Ok((numbers, self.device(&device_streams)?))
        };
        let (numbers, reader) = raised(py, detached(py, begin))?;
        let device_streams = Arc::clone(reader.device_streams());
        let out = tensor::device_landing(&device_streams, out)?;
        let stream = foreign(&device_streams, device.1);
        let begin = || reader.gather(numbers, out, &stream, hinted);
        let inner = raised(py, detached(py, begin))?;
        Ok(DeviceRowBatch {
            inner,
            device_streams,
        })
    }

    /// Waits until all batches for devices have ended.
    fn finish_devices(&self, py: Python<'_>) {
        let devices = std::mem::take(&mut *self.devices());
        detached(py, || devices.iter().for_each(|reader| reader.finish()));
    }

    /// Bytes that devices have copied from pinned memory, and why some of that memory is not
    /// pinned.
    fn device_copies(&self) -> (u64, Option<String>) {
        let bytes = self.inner.counts().device_bytes.load(Relaxed);
        let devices = self.devices();
        let unpinned = devices.iter().find_map(|reader| reader.unpinned());
        (bytes, unpinned)
    }

    /// Announces a batch to the cache; returns its number.
    fn hint(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<Option<u64>> {
        self.apply(py, ids, is_signed, |ids| self.inner.hint(ids))
    }

    /// Withdraws an announced batch that will not be gathered.
    fn forget(&self, py: Python<'_>, hinted: u64) {
        detached(py, || self.inner.forget(hinted));
    }

    /// Pins rows in the cache; returns how many are pinned.
    fn pin(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<Option<usize>> {
        self.apply(py, ids, is_signed, |ids| self.inner.pin(ids))
    }

    /// Unpins rows.
    fn unpin(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<()> {
        self.apply(py, ids, is_signed, |ids| self.inner.unpin(ids))
    }

    /// The counters: rows, hits, shared, read rows, requests, read bytes, read again.
    fn counts(&self) -> GatherCounts {
        counted(self.inner.counts())
    }
}

impl RowReader {
    pub(crate) fn shared(&self) -> Reader {
        self.inner.clone()
    }

    /// The reader for a device.
    fn device(&self, device_streams: &Arc<DeviceStreams>) -> Result<Arc<DeviceReader>, Error> {
        let mut devices = self.devices();
        let found = devices
            .iter()
            .find(|one| Arc::ptr_eq(one.device_streams(), device_streams));
        if let Some(reader) = found {
            return Ok(Arc::clone(reader));
        }
        let reader = Arc::new(DeviceReader::new(&self.inner, device_streams)?);
        devices.push(Arc::clone(&reader));
        Ok(reader)
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Arc<DeviceReader>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply<T: Send>(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        apply: impl FnOnce(&[u64]) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let ids = Ids::of(ids, is_signed)?;
        let work = || apply(&ids.numbers(self.inner.table().rows())?);
        raised(py, detached(py, work))
    }
}

/// Rows that are being gathered.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowBatch {
    inner: Batch,
}

impl RowBatch {
    pub(crate) fn new(inner: Batch) -> RowBatch {
        RowBatch { inner }
    }
}

#[pymethods]
impl RowBatch {
    /// Whether no read of the batch is in flight.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = self.inner.is_done();
        release_dropped(py);
        is_done
    }

    /// Waits until all rows have arrived; returns whether they have. Handles signals meanwhile.
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<bool> {
        let wait = |turn| {
            let is_there = raised(py, detached(py, || self.inner.wait(Some(turn))))?;
            Ok(is_there.then_some(()))
        };
        Ok(call::wait(py, timeout_seconds, wait)?.is_some())
    }

    /// Signals `event_fd` with `key` once no read of the batch is in flight.
    fn ring(&self, event_fd: &EventFd, key: u64) {
        self.inner.on_done(event_fd.signal(key));
    }
}

/// Rows that are being gathered into device memory.
#[pyclass(frozen, module = "penstock._native")]
pub struct DeviceRowBatch {
    inner: DeviceBatch,
    device_streams: Arc<DeviceStreams>,
}

#[pymethods]
impl DeviceRowBatch {
    /// Whether all copies to the device have been queued.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = self.inner.is_done();
        release_dropped(py);
        is_done
    }

    /// Waits until all copies to the device have been queued; returns whether they have. Handles
    /// signals meanwhile.
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<bool> {
        let wait = |turn| {
            let is_there = detached(py, || self.inner.wait(Some(turn)));
            let is_there = is_there.map_err(|error| errors::raise_gather(py, error))?;
            Ok(is_there.then_some(()))
        };
        Ok(call::wait(py, timeout_seconds, wait)?.is_some())
    }

    /// Makes a stream of the device wait for the copies.
    fn hold(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let stream = foreign(&self.device_streams, stream);
        raised(py, detached(py, || self.inner.hold(&stream)))
    }

    /// Signals `event_fd` with `key` once all copies have been queued.
    fn ring(&self, event_fd: &EventFd, key: u64) {
        self.inner.on_done(event_fd.signal(key));
    }
}

/// Checks that a stream is not being captured, because work queued on it is waited for.
#[pyfunction]
pub fn check_stream(py: Python<'_>, device: NativeDevice) -> PyResult<()> {
    let check = || {
        let device_streams = DeviceStreams::of(device.0)?;
        foreign(&device_streams, device.1)
            .check()
            .map_err(penstock_io::Error::from)?;
        Ok(())
    };
    raised(py, detached(py, check))
}
