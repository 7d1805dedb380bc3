//! Batches whose rows are copied to a device.
//!
//! Rows are gathered into pinned host memory piece by piece, like any batch, and the device copies
//! them from there. A piece is copied only when all of its rows have arrived and passed their
//! checksums.
//!
//! Cached rows are not packed by the host if a kernel can read them: the cache's memory is then
//! pinned too, and the kernel assembles cached and staged rows. A slot that it reads keeps its row
//! until it has finished.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use penstock_cuda::{Event, Foreign};
use penstock_io::buffer::{
    DeviceArrayMut, DeviceFills, DeviceScatter, DeviceStreams, HostToDevice, IoBuf, Lease, Lent,
    Pool, RowGatherKernel,
};
use penstock_io::staging::{CopyJob, Inbound, Outcome, StagingPipeline};
use penstock_io::trace;

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::reader::shared::ReaderShared;
use crate::reader::{HintedBatch, Reader};

/// A batch up to this size is one piece, so that each of its rows is read once. A device copies it
/// in a third of a millisecond.
const PIECE_BYTES: usize = 16 << 20;

/// Rows of fewer bytes, or not of whole 4-byte words, are packed by the host: a link handles small
/// reads slowly.
const COLLECTED_BYTES_MIN: usize = 128;

/// Pinned memory for the pieces of all tables, for each device.
const PINNED_BYTES: usize = 128 << 20;

/// The memory pool of each device, alive while any table uses it.
static POOLS: Mutex<Vec<(u32, Weak<Pool>)>> = Mutex::new(Vec::new());

/// Gathers rows of a table into memory of one device.
#[derive(Debug)]
pub struct DeviceReader {
    shared: Arc<ReaderShared>,
    device_streams: Arc<DeviceStreams>,
    pool: Arc<Pool>,
    pipeline: StagingPipeline<Rows>,
}

impl DeviceReader {
    /// A reader of a table for a device.
    ///
    /// # Errors
    /// [`Error::Io`] if its thread cannot be started.
    pub fn new(reader: &Reader, device_streams: &Arc<DeviceStreams>) -> Result<DeviceReader> {
        let shared = &reader.shared;
        let pool = pool(shared.table.value_bytes() as usize, device_streams);
        Ok(DeviceReader {
            pipeline: StagingPipeline::start((*pool).clone())?,
            shared: Arc::clone(shared),
            device_streams: Arc::clone(device_streams),
            pool,
        })
    }

    /// The streams of the device.
    pub fn device_streams(&self) -> &Arc<DeviceStreams> {
        &self.device_streams
    }

    /// Why some of its memory could not be pinned, if so; copies are then slower.
    pub fn unpinned(&self) -> Option<String> {
        self.pool.unpinned()
    }

    /// Begins to gather rows in the order of `ids`, which may repeat; `hinted` is the batch's
    /// number if it was announced. No copy starts before the work queued on `stream` so far has
    /// completed.
    ///
    /// # Panics
    /// If `out` is not `ids.len()` times the bytes of a row's values, or is on another device.
    pub fn gather(
        &self,
        ids: Vec<u64>,
        out: DeviceArrayMut,
        stream: &Foreign,
        hinted: Option<u64>,
    ) -> Result<DeviceBatch> {
        let _span = trace::span("gather");
        let width = self.shared.table.value_bytes() as usize;
        assert_eq!(out.len(), ids.len() * width, "room for each row");
        assert!(
            Arc::ptr_eq(out.device_streams(), &self.device_streams),
            "another device"
        );
        self.shared.check_process()?;
        self.shared.check(&ids)?;
        let moment = stream.record().map_err(penstock_io::Error::from)?;
        let process = penstock_io::process::id();
        let batch = DeviceBatch {
            outcome: Arc::default(),
            process,
            forked: penstock_io::Error::Forked { process }.into(),
        };
        if ids.is_empty() {
            batch.outcome.resolve(Ok(None));
            return Ok(batch);
        }
        let to = out.into_content();
        let buffer_bytes = self.pool.buffer_bytes();
        let collected_rows = RowGatherKernel::rows(buffer_bytes, width);
        let may_collect = self.shared.cache.is_some()
            && width >= COLLECTED_BYTES_MIN
            && width.is_multiple_of(4)
            && buffer_bytes <= RowGatherKernel::MEMORY_BYTES_MAX
            && collected_rows > 0
            && RowGatherKernel::reaches(&to, width);
        let piece_rows = match may_collect {
            true => collected_rows,
            false => buffer_bytes / width,
        };
        self.pipeline.submit(Rows {
            shared: Arc::clone(&self.shared),
            device_streams: Arc::clone(&self.device_streams),
            may_collect,
            piece_rows: piece_rows.min(ids.len()),
            ids,
            begun: 0,
            hinted,
            moment: Some(moment),
            to: Some(to),
            outcome: Arc::clone(&batch.outcome),
        })?;
        Ok(batch)
    }

    /// Waits until all batches have ended; it accepts no more.
    pub fn finish(&self) {
        self.pipeline.finish();
    }
}

/// Memory for pieces of a table with rows of so many bytes.
fn pool(width: usize, device_streams: &DeviceStreams) -> Arc<Pool> {
    let device = device_streams.device();
    if width > PIECE_BYTES {
        let budget_bytes = PINNED_BYTES.max(2 * width);
        return Arc::new(Pool::pinned_and_kept(width, budget_bytes, device));
    }
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools.retain(|(_, pool)| pool.strong_count() > 0);
    let of_device = pools
        .iter()
        .filter(|(ordinal, _)| *ordinal == device.ordinal());
    let mut found = of_device.filter_map(|(_, pool)| pool.upgrade());
    if let Some(pool) = found.find(|pool| pool.is_ours()) {
        return pool;
    }
    let pool = Arc::new(Pool::pinned_and_kept(PIECE_BYTES, PINNED_BYTES, device));
    pools.push((device.ordinal(), Arc::downgrade(&pool)));
    pool
}

/// The part of a batch that has not begun.
struct Rows {
    shared: Arc<ReaderShared>,
    device_streams: Arc<DeviceStreams>,
    /// Whether a kernel may gather cached rows.
    may_collect: bool,
    piece_rows: usize,
    ids: Vec<u64>,
    /// How many ids have begun.
    begun: usize,
    hinted: Option<u64>,
    /// Completion of the work that the caller's stream had queued at the call, until copies wait
    /// for it.
    moment: Option<Event>,
    /// Destination of the rows that have not been copied.
    to: Option<DeviceScatter>,
    outcome: Arc<Outcome<Result<Option<Event>>>>,
}

/// Rows on their way to host memory.
struct StagedRows {
    /// `None` if the cache has all of them.
    batch: Option<Batch>,
    memory: Lease,
    /// Cached rows that a kernel reads too, and memory for its parameters.
    lent: Option<(Lent, IoBuf)>,
    /// Range of bytes in the result.
    bytes: Range<u64>,
}

impl Inbound for StagedRows {
    fn has_arrived(&self) -> bool {
        self.batch.as_ref().is_none_or(Batch::is_done)
    }
}

impl Rows {
    fn width(&self) -> usize {
        self.shared.table.value_bytes() as usize
    }

    /// The kernel that gathers the rows, if one can.
    fn gather_kernel(&self) -> Option<RowGatherKernel<'_>> {
        let cache = self.shared.cache.as_ref().filter(|_| self.may_collect)?;
        let gather_kernel = RowGatherKernel::of(&self.device_streams)?;
        // The slots may be pinned for another device.
        cache.slots().map(self.device_streams.device(), 0).ok()?;
        Some(gather_kernel)
    }

    fn next_rows(&self) -> Range<usize> {
        self.begun..self.ids.len().min(self.begun + self.piece_rows)
    }
}

impl CopyJob for Rows {
    type Error = Error;
    type Inbound = StagedRows;
    type Outbound = HostToDevice;

    fn next_bytes(&self) -> Option<usize> {
        let rows = self.next_rows().len();
        let bytes = match self.may_collect {
            true => RowGatherKernel::memory_bytes(rows, self.width()),
            false => rows * self.width(),
        };
        (rows > 0).then_some(bytes)
    }

    fn begin(&mut self, mut memory: IoBuf) -> Result<StagedRows> {
        let rows = self.next_rows();
        let hinted = self.hinted.map(|number| HintedBatch {
            number,
            is_over: rows.end == self.ids.len(),
        });
        let width = self.width();
        let bytes = (rows.start * width) as u64..(rows.end * width) as u64;
        let mut lent = None;
        let mut left = Cow::Borrowed(&self.ids[rows.clone()]);
        if self.gather_kernel().is_some() {
            self.shared.map(self.device_streams.device());
            let (found, rest) = self.shared.lend(&left, hinted);
            left = rest.iter().map(|&position| left[position]).collect();
            let kernel_params = memory.split_off((left.len() * width).next_multiple_of(8));
            lent = Some((found, kernel_params));
        }
        drop(memory.split_off(left.len() * width));
        let (memory, window) = Lease::of(memory);
        let batch = match left.is_empty() {
            false => Some(self.shared.gather_part(&left, window, hinted)?),
            true => {
                self.shared.passed(hinted);
                None
            }
        };
        self.begun = rows.end;
        Ok(StagedRows {
            batch,
            memory,
            lent,
            bytes,
        })
    }

    fn forward(&mut self, piece: StagedRows) -> Result<HostToDevice> {
        let StagedRows {
            batch,
            memory,
            lent,
            bytes,
        } = piece;
        if let Some(batch) = batch {
            batch.wait(None)?;
        }
        let memory = memory.reclaim().expect("every row of it is there");
        if let Some(moment) = self.moment.take() {
            self.device_streams.fill_at(&moment)?;
        }
        let mut to = self.to.take().expect("there is more to copy");
        if bytes.end < to.range().end {
            self.to = Some(to.split_off(bytes.end));
        }
        let host_to_device = match lent {
            Some((lent, kernel_params)) => {
                let gather_kernel =
                    RowGatherKernel::of(&self.device_streams).expect("it was there before");
                gather_kernel.begin(to, self.width(), memory, kernel_params, lent)?
            }
            None => {
                let mut fills = DeviceFills::default();
                fills.add(to, bytes.start, 0, 0..memory.len());
                fills.keep([memory]);
                fills.begin()?
            }
        };
        let copied = &self.shared.counts.device_bytes;
        copied.fetch_add(host_to_device.bytes(), Relaxed);
        Ok(host_to_device)
    }

    fn all_forwarded(&mut self) -> Result<()> {
        self.outcome
            .resolve(Ok(Some(self.device_streams.filled()?)));
        Ok(())
    }

    fn leave(&mut self, host_to_device: HostToDevice) -> Result<()> {
        Ok(host_to_device.wait()?)
    }

    fn end(mut self, result: Result<()>) {
        // The destination is released first.
        self.to = None;
        if let Err(error) = result {
            self.outcome.resolve(Err(error));
        }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if let (Some(number), Some(cache)) = (self.hinted, &self.shared.cache)
            && self.begun < self.ids.len()
        {
            cache.lock().index.cancel(number);
        }
        // A batch that no staging pipeline finished would be waited for forever.
        let source = std::io::Error::other("a batch was dropped unfinished");
        let operation = "the staging pipeline";
        let error = penstock_io::Error::Engine { operation, source };
        self.outcome.resolve(Err(error.into()));
    }
}

/// Rows that are being gathered into device memory. Dropping the batch does not cancel it.
#[must_use = "rows are there once they were waited for"]
pub struct DeviceBatch {
    /// The event after all copies, set once they have been queued.
    outcome: Arc<Outcome<Result<Option<Event>>>>,
    process: u32,
    forked: Error,
}

impl DeviceBatch {
    /// Whether all copies have been queued, or the batch has failed.
    pub fn is_done(&self) -> bool {
        self.is_ours() && self.outcome.get().is_some()
    }

    /// Waits until all copies have been queued; `false` on timeout.
    pub fn wait(&self, timeout: Option<Duration>) -> std::result::Result<bool, &Error> {
        if !self.is_ours() {
            return Err(&self.forked);
        }
        let _span = trace::span("wait for rows");
        match self.outcome.wait(timeout) {
            None => Ok(false),
            Some(Ok(_)) => Ok(true),
            Some(Err(error)) => Err(error),
        }
    }

    /// Makes later work on `stream` wait for the copies, which have been queued.
    ///
    /// # Errors
    /// [`Error::Io`] if the stream is being captured or the driver fails.
    pub fn hold(&self, stream: &Foreign) -> Result<()> {
        if let Some(Ok(Some(moment))) = self.outcome.get() {
            stream.wait_for(moment).map_err(penstock_io::Error::from)?;
        }
        Ok(())
    }

    /// Calls a function once all copies have been queued or the batch has failed, on the staging
    /// pipeline's thread or at once. The function must not block.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) {
        self.outcome.on_resolved(watcher);
    }

    fn is_ours(&self) -> bool {
        self.process == penstock_io::process::id()
    }
}

impl fmt::Debug for DeviceBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch")
            .field("is_done", &self.is_done())
            .finish_non_exhaustive()
    }
}
