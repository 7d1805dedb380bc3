//! Rows of tables by id.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_gather::{
    Batch, Cache, Checks, Counts, DeviceBatch, DeviceReader, Error, Index, Merging, Policy, Reader,
    Segment, Table, replay,
};
use penstock_io::buffer::Lane;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bell::Bell;
use crate::call;
use crate::data_file::DataFile;
use crate::errors;
use crate::ids::Ids;
use crate::offload::Executor;
use crate::owner::{detached, let_go};
use crate::tensor::device::{NativeDevice, foreign};
use crate::tensor::{self, NativeArray, TensorTarget};

pub(crate) fn raised<T>(py: Python<'_>, result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| errors::raise_gather(py, &error))
}

/// Rows, hits, shared, read rows, requests, read bytes, read again.
pub(crate) type NativeCounts = (u64, u64, u64, u64, u64, u64, u64);

/// What was done so far.
pub(crate) fn counted(counts: &Counts) -> NativeCounts {
    (
        counts.rows.load(Relaxed),
        counts.hits.load(Relaxed),
        counts.shared.load(Relaxed),
        counts.read_rows.load(Relaxed),
        counts.requests.load(Relaxed),
        counts.read_bytes.load(Relaxed),
        counts.read_again.load(Relaxed),
    )
}

/// CRC-32C of each block of an array, contiguous in memory, that begins where a block does: `uint32`
/// in the order of this machine's bytes.
#[pyfunction]
pub(crate) fn block_checks(py: Python<'_>, array: NativeArray) -> PyResult<Bound<'_, PyBytes>> {
    let region = tensor::contiguous(array)?;
    let sums = call::without_gil(py, || Ok(Checks::of_memory(&region)))?;
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Who goes when others come.
fn policy(name: &str) -> PyResult<Policy> {
    Ok(match name {
        "sieve" => Policy::Sieve,
        "s3fifo" => Policy::S3Fifo,
        "static" => Policy::Static,
        "none" => Policy::None,
        _ => return Err(PyValueError::new_err(format!("policy={name:?}"))),
    })
}

/// Rows in memory that tables share.
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

/// What a cache would keep, without its memory.
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

    /// Asks for keys, an array of `uint64`, in batches of which so many are known ahead, and says
    /// how many were there.
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

    /// Has rows stay once they are there, and says how many do.
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
    /// One for each device that rows have gone to.
    devices: Mutex<Vec<Arc<DeviceReader>>>,
}

#[pymethods]
impl RowReader {
    /// Segments are files, where in them rows begin, and how many; checks are an array of `uint32`, of
    /// the blocks of each segment in turn.
    #[new]
    #[pyo3(signature = (executor, weight, segments, *, row_bytes, value_bytes, checks, cache, gap_bytes, run_bytes_max))]
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
        cache: Option<Py<RowCache>>,
        gap_bytes: u64,
        run_bytes_max: u64,
    ) -> PyResult<RowReader> {
        let share = executor.claim_for_rows(py, weight)?;
        let mut sums = checks.map(tensor::words).transpose()?.map(Vec::into_iter);
        let segment = |(file, offset, rows): (Py<DataFile>, u64, u64)| {
            let blocks = Checks::blocks(rows * row_bytes) as usize;
            let sums = sums.as_mut().map(|sums| sums.by_ref().take(blocks));
            Segment {
                target: file.get().to_read(),
                offset,
                rows,
                checks: sums.map(Checks::new).map(Arc::new),
            }
        };
        let segments = segments.into_iter().map(segment).collect();
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

    /// Begins to gather the rows of integers, contiguous in memory, into bytes; of a batch that was
    /// foreseen, or of none.
    fn gather(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        out: TensorTarget,
        foreseen: Option<u64>,
    ) -> PyResult<RowBatch> {
        let ids = Ids::of(ids, is_signed)?;
        let out = tensor::target(out)?.into_buf();
        let begin = || {
            let ids = ids.numbers(self.inner.table().rows())?;
            self.inner.gather_foreseen(&ids, out, foreseen)
        };
        raised(py, detached(py, begin)).map(RowBatch::new)
    }

    /// Begins to gather the rows of integers into the bytes of an array of a device, without gaps, once its
    /// stream has done what it has queued until now; as `gather` otherwise.
    fn gather_to_device(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        out: NativeArray,
        device: NativeDevice,
        foreseen: Option<u64>,
    ) -> PyResult<DeviceRowBatch> {
        let ids = Ids::of(ids, is_signed)?;
        let begin = || {
            let numbers = ids.numbers(self.inner.table().rows())?;
            let lane = Lane::of(device.0)?;
            Ok((numbers, self.device(&lane)?))
        };
        let (numbers, reader) = raised(py, detached(py, begin))?;
        let lane = Arc::clone(reader.lane());
        let out = tensor::device_landing(&lane, out)?;
        let stream = foreign(&lane, device.1);
        let begin = || reader.gather(numbers, out, &stream, foreseen);
        let inner = raised(py, detached(py, begin))?;
        Ok(DeviceRowBatch { inner, lane })
    }

    /// Waits until all that was asked for of devices has come to its end.
    fn finish_devices(&self, py: Python<'_>) {
        let devices = std::mem::take(&mut *self.devices());
        detached(py, || devices.iter().for_each(|reader| reader.finish()));
    }

    /// Bytes that devices have copied from pinned memory; why some of that is not pinned.
    fn device_copies(&self) -> (u64, Option<String>) {
        let bytes = self.inner.counts().device_bytes.load(Relaxed);
        let devices = self.devices();
        let unpinned = devices.iter().find_map(|reader| reader.unpinned());
        (bytes, unpinned)
    }

    /// Tells the cache of a batch to come, and says its number.
    fn foresee(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<Option<u64>> {
        self.tell(py, ids, is_signed, |ids| self.inner.foresee(ids))
    }

    /// A batch that was foreseen will not be gathered.
    fn forget(&self, py: Python<'_>, foreseen: u64) {
        detached(py, || self.inner.forget(foreseen));
    }

    /// Has rows stay in the cache, and says how many do.
    fn pin(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<Option<usize>> {
        self.tell(py, ids, is_signed, |ids| self.inner.pin(ids))
    }

    /// Has rows that were pinned go like others.
    fn unpin(&self, py: Python<'_>, ids: NativeArray, is_signed: bool) -> PyResult<()> {
        self.tell(py, ids, is_signed, |ids| self.inner.unpin(ids))
    }

    /// What was done so far: rows, hits, shared, read rows, requests, read bytes, read again.
    fn counts(&self) -> NativeCounts {
        counted(self.inner.counts())
    }
}

impl RowReader {
    pub(crate) fn shared(&self) -> Reader {
        self.inner.clone()
    }

    /// What gathers into memory of a device.
    fn device(&self, lane: &Arc<Lane>) -> Result<Arc<DeviceReader>, Error> {
        let mut devices = self.devices();
        let found = devices.iter().find(|one| Arc::ptr_eq(one.lane(), lane));
        if let Some(reader) = found {
            return Ok(Arc::clone(reader));
        }
        let reader = Arc::new(DeviceReader::new(&self.inner, lane)?);
        devices.push(Arc::clone(&reader));
        Ok(reader)
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Arc<DeviceReader>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell<T: Send>(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        tell: impl FnOnce(&[u64]) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let ids = Ids::of(ids, is_signed)?;
        let work = || tell(&ids.numbers(self.inner.table().rows())?);
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
    /// Whether nothing of it is under way.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = self.inner.is_done();
        let_go(py);
        is_done
    }

    /// Waits until all rows are there, and says whether they are; signals have their turn meanwhile.
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<bool> {
        let wait = |turn| {
            let is_there = raised(py, detached(py, || self.inner.wait(Some(turn))))?;
            Ok(is_there.then_some(()))
        };
        Ok(call::wait(py, timeout_seconds, wait)?.is_some())
    }

    /// Has a bell rung when nothing of it is under way.
    fn ring(&self, bell: &Bell, key: u64) {
        self.inner.on_done(bell.ringing(key));
    }
}

/// Rows that are being gathered into memory of a device.
#[pyclass(frozen, module = "penstock._native")]
pub struct DeviceRowBatch {
    inner: DeviceBatch,
    lane: Arc<Lane>,
}

#[pymethods]
impl DeviceRowBatch {
    /// Whether all of it is on its way to the device.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = self.inner.is_done();
        let_go(py);
        is_done
    }

    /// Waits until all of it is on its way to the device, and says whether it is; signals have their turn
    /// meanwhile.
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<bool> {
        let wait = |turn| {
            let is_there = detached(py, || self.inner.wait(Some(turn)));
            let is_there = is_there.map_err(|error| errors::raise_gather(py, error))?;
            Ok(is_there.then_some(()))
        };
        Ok(call::wait(py, timeout_seconds, wait)?.is_some())
    }

    /// Has a stream of the device wait until all of it is there.
    fn hold(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let stream = foreign(&self.lane, stream);
        raised(py, detached(py, || self.inner.hold(&stream)))
    }

    /// Has a bell rung when all of it is on its way.
    fn ring(&self, bell: &Bell, key: u64) {
        self.inner.on_done(bell.ringing(key));
    }
}

/// That a stream of a device is not being captured, where what is queued on it is waited for.
#[pyfunction]
pub fn check_stream(py: Python<'_>, device: NativeDevice) -> PyResult<()> {
    let check = || {
        let lane = Lane::of(device.0)?;
        foreign(&lane, device.1)
            .check()
            .map_err(penstock_io::Error::from)?;
        Ok(())
    };
    raised(py, detached(py, check))
}
