//! The staging queue: supplies the workers of a save with filled extents.
//!
//! Two kinds of threads copy out of the caller's memory: *stagers*, for a caller who waits to get
//! the memory back, and, in a lazy save, the workers that write. Both take extents from one cursor,
//! so each extent is copied once. Extents copied by stagers wait in a queue, which workers empty
//! first.
//!
//! No thread holds a buffer while it waits for another, and a worker waits only if it has nothing
//! in flight: if the pool is smaller than the state, the two sides take turns and never block each
//! other. All waits end within a [`TURN`] of the save's end, however it ends.
//!
//! Devices copy their own memory: a thread queues the copies of an extent and continues, and the
//! extent can be written when the copies have arrived. The sources are released after the last
//! copy.
//!
//! If the sources are watched, the last copy is followed by a check whether anybody has written to
//! them. Only then does the caller learn that they may be changed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use penstock_io::buffer::{
    DeviceCopies, DeviceRegion, DeviceStreams, DeviceToHost, Edges, HostRegion, IoBuf, Pool,
    Region, Watch,
};
use penstock_io::trace::{self, Role};

use super::Halt;
use crate::error::{Error, Result};
use crate::format::shard::PAGE_BYTES;
use crate::plan::write::{ExtentPart, WritePlan};

/// How often a waiting thread checks whether its work is still needed.
const TURN: Duration = Duration::from_millis(20);

/// How often a thread that waits for a device polls.
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// Amount that a stager claims at once: adjacent extents, so that it reads sequentially for long.
const RUN_BYTES: u64 = 4 << 20;

/// Amount that a stager claims at once if a device copies all but this part of the state: one call
/// queues that much.
const DEVICE_RUN_BYTES: u64 = 16 << 20;
const HOST_PART_MAX: u64 = 8;

/// An extent whose bytes are in a buffer, or arriving there, padded with zeros to a whole page.
pub(crate) struct Filled {
    pub(crate) number: u64,
    pub(crate) buf: DeviceToHost,
}

/// The answer to a worker that asks for an extent.
pub(super) enum Next {
    Filled(Filled),
    /// No extent now, but one will follow.
    Later,
    /// No further extents.
    End,
}

/// The sources of one save and the extents copied from them.
pub(crate) struct StagingQueue {
    plan: Arc<WritePlan>,
    pool: Pool,
    /// Bytes of watched sources outside of whole pages, as they were at first.
    edges: Option<Arc<Edges>>,
    /// Whether workers copy extents that are not staged.
    is_lazy: bool,
    /// Whether some sources are in device memory.
    is_on_device: bool,
    /// Bytes that a stager claims at once.
    run_bytes: u64,
    /// Streams of the devices that copy them in order.
    all_streams: Vec<Arc<DeviceStreams>>,
    state: Mutex<StagingState>,
    /// Signals that there may be an extent for a worker.
    supplied: Condvar,
    /// Signals that the sources are released.
    released: Condvar,
}

struct StagingState {
    /// Dropped after the last copy.
    sources: Option<Arc<Vec<Region>>>,
    /// Detects changes before that; dropped with the sources.
    watch: Option<Watch>,
    /// The tensor that was changed before it was copied, if one was: the save is over then.
    source_modified: Option<usize>,
    /// The cursor: the first extent that is not claimed.
    next: u64,
    /// Claims of stagers and of workers that are still copied from.
    staging: usize,
    filling: usize,
    staged: VecDeque<Filled>,
    /// Whether workers may take staged extents. An eager save keeps workers off the memory bus
    /// until everything is copied or a stager needs their buffers.
    is_open: bool,
    is_released: bool,
    /// Whether threads wait for devices only on request.
    is_deferred: bool,
    /// Whether a thread is currently checking whether the sources were changed.
    is_asking: bool,
    /// Failed or cancelled: nothing more is copied or written.
    is_over: bool,
}

impl StagingQueue {
    pub(crate) fn new(
        plan: Arc<WritePlan>,
        sources: Arc<Vec<Region>>,
        watch: Option<Watch>,
        pool: Pool,
        is_lazy: bool,
    ) -> StagingQueue {
        let edges = watch.as_ref().map(Watch::edges);
        let mut all_streams: Vec<Arc<DeviceStreams>> = Vec::new();
        for device_streams in sources.iter().filter_map(streams_of) {
            if !all_streams
                .iter()
                .any(|known| Arc::ptr_eq(known, device_streams))
            {
                all_streams.push(Arc::clone(device_streams));
            }
        }
        let is_on_device = sources.iter().any(|source| source.host().is_none());
        let of_host = sources.iter().filter_map(Region::host);
        let host_bytes: u64 = of_host.map(HostRegion::len).sum();
        // Many threads share the host's part of the copying.
        let run_bytes = match is_on_device && host_bytes <= plan.bytes() / HOST_PART_MAX {
            true => DEVICE_RUN_BYTES,
            false => RUN_BYTES,
        };
        let state = StagingState {
            sources: Some(sources),
            watch,
            source_modified: None,
            next: 0,
            staging: 0,
            filling: 0,
            staged: VecDeque::new(),
            is_open: is_lazy,
            is_released: false,
            is_deferred: false,
            is_asking: false,
            is_over: false,
        };
        let staging_queue = StagingQueue {
            plan,
            pool,
            edges,
            is_lazy,
            is_on_device,
            run_bytes,
            all_streams,
            state: Mutex::new(state),
            supplied: Condvar::new(),
            released: Condvar::new(),
        };
        // Without extents no copy will ever release the sources.
        staging_queue.release_sources(staging_queue.lock());
        staging_queue
    }

    /// Copies all extents that are not copied yet, with at most `threads` threads including this
    /// one; when it returns, the sources are no longer read.
    pub(crate) fn stage(&self, threads: usize) -> Result<()> {
        let rest = self.plan.extents() - self.lock().next;
        let runs = rest.div_ceil(self.run_extents());
        let helpers = (threads as u64).min(runs).saturating_sub(1);
        let copied: Vec<Result<()>> = thread::scope(|scope| {
            let help = |_| {
                thread::Builder::new().spawn_scoped(scope, || {
                    let _row = trace::enter(Role::Stager);
                    let _span = trace::span("work");
                    self.copy_runs()
                })
            };
            // If the system refuses more threads, fewer do the work.
            let helpers: Vec<_> = (0..helpers).map_while(|index| help(index).ok()).collect();
            let own = self.copy_runs();
            let join = |helper: thread::ScopedJoinHandle<'_, _>| {
                let joined = helper.join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            helpers.into_iter().map(join).chain([own]).collect()
        });
        self.wait(None);
        copied.into_iter().collect()
    }

    /// Copies all extents that are not copied yet: when it returns, the host has finished its
    /// copies, and those of devices are queued. The writing threads wait for the devices.
    pub(crate) fn queue(&self) -> Result<()> {
        self.lock().is_deferred = true;
        self.copy_runs()?;
        let mut state = self.lock();
        while !state.is_over && (state.staging + state.filling > 0 || state.is_asking) {
            state = wait_timeout(&self.supplied, state, TURN);
        }
        // The host's part is copied and may be changed from now on, so the check cannot come later.
        let watch = (!state.is_over && self.is_last(&state)).then(|| state.watch.take());
        drop(state);
        if let Some(watch) = watch.flatten() {
            let written = watch.find_written();
            drop(watch);
            let mut state = self.lock();
            state.source_modified = state.source_modified.or(written);
            state.is_over |= written.is_some();
            self.release_sources(state);
        }
        // Threads that wait for the release now wait for devices.
        self.released.notify_all();
        Ok(())
    }

    /// Streams of devices that may not have copied their part of the sources yet.
    pub(crate) fn all_streams(&self) -> &[Arc<DeviceStreams>] {
        // `sources` may already be taken while the thread that drops them waits for the last copy.
        match self.lock().is_released {
            true => &[],
            false => &self.all_streams,
        }
    }

    /// Waits until the sources are no longer read; returns whether that is so.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        // A deadline beyond the clock's range is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        while !state.is_released {
            if state.is_deferred && state.sources.is_some() && self.is_last(&state) {
                // Only device copies are outstanding, and they signal no condition variable.
                if timeout.is_none() || is_idle(&state) {
                    self.drop_sources(state);
                } else {
                    drop(state);
                    if deadline.is_none_or(|deadline| Instant::now() >= deadline) {
                        return false;
                    }
                    thread::sleep(POLL_PAUSE);
                }
                state = self.lock();
                continue;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return false,
                Some(left) => wait_timeout(&self.released, state, left),
                None => self
                    .released
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
        true
    }

    /// Ends the save early: copying and waiting threads stop, and staged extents are dropped.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        let staged = std::mem::take(&mut state.staged);
        self.release_sources(state);
        drop(staged);
    }

    /// Whether some sources are in device memory.
    pub(super) fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    /// The tensor that was changed before it was copied, if any.
    pub(crate) fn source_modified(&self) -> Option<usize> {
        self.lock().source_modified
    }

    /// Returns [`Error::Interrupted`] once the save has ended early.
    pub(crate) fn check(&self) -> Result<()> {
        match self.lock().is_over {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }

    /// The next extent for a worker to write. With `may_wait`, which only a worker without
    /// operations in flight sets, it is never [`Next::Later`].
    pub(super) fn next(&self, may_wait: bool, halt: &Halt<'_>) -> Result<Next> {
        let patience = if may_wait { TURN } else { Duration::ZERO };
        while halt.check_running()? {
            let mut state = self.lock();
            if state.is_over {
                return Err(Error::Interrupted);
            }
            let is_exhausted = state.next == self.plan.extents();
            if state.is_open {
                if let Some(filled) = state.staged.pop_front() {
                    return Ok(Next::Filled(filled));
                }
                if is_exhausted && state.staging == 0 {
                    if state.is_deferred && self.is_last(&state) {
                        self.drop_sources(state);
                    }
                    return Ok(Next::End);
                }
            }
            if self.is_lazy && !is_exhausted {
                let is_staged_beside = state.staging > 0;
                drop(state);
                let patience = match is_staged_beside {
                    true => Duration::ZERO,
                    false => patience,
                };
                let span = trace::span("wait for memory");
                let taken = self.pool.take_timeout(patience)?;
                drop(span);
                if let Some(buf) = taken {
                    if let Some(filled) = self.fill(buf)? {
                        return Ok(Next::Filled(filled));
                    }
                } else if may_wait && is_staged_beside {
                    // The stager takes the returned memory, and signals when it is filled.
                    let state = self.lock();
                    if state.staged.is_empty() && state.staging > 0 && !state.is_over {
                        drop(wait_timeout(&self.supplied, state, TURN));
                    }
                }
            } else if may_wait {
                let _span = trace::span("wait for stage");
                drop(wait_timeout(&self.supplied, state, TURN));
            }
            if !may_wait {
                return Ok(Next::Later);
            }
        }
        Ok(Next::End)
    }

    /// Copies the next extent for a worker, if one is left.
    fn fill(&self, buf: IoBuf) -> Result<Option<Filled>> {
        let Some(mut claim) = self.claim(1, false) else {
            return Ok(None);
        };
        claim.copy(buf).map(Some)
    }

    /// The loop of one stager: copies claims until none is left or the save is over.
    pub(crate) fn copy_runs(&self) -> Result<()> {
        while let Some(mut claim) = self.claim(self.run_extents(), true) {
            while !claim.numbers.is_empty() {
                let Some(buf) = self.take_buffer()? else {
                    return Ok(());
                };
                let mut bufs = vec![buf];
                // Several copies are queued on a device at once, but no thread waits for a buffer
                // while it holds others.
                while self.is_on_device
                    && (bufs.len() as u64) < claim.numbers.end - claim.numbers.start
                    && let Some(buf) = self.pool.take_unless_spent()?
                {
                    bufs.push(buf);
                }
                for filled in claim.copy_all(bufs)? {
                    self.push(filled);
                }
            }
        }
        Ok(())
    }

    fn run_extents(&self) -> u64 {
        (self.run_bytes / self.plan.extent_bytes).max(1)
    }

    /// Takes a buffer for a stager, waiting until workers return one; `None` once the save is over.
    fn take_buffer(&self) -> Result<Option<IoBuf>> {
        let _span = trace::span("wait for memory");
        if let Some(buf) = self.pool.take_unless_spent()? {
            return Ok(Some(buf));
        }
        self.lock().is_open = true;
        self.supplied.notify_all();
        while self.check().is_ok() {
            if let Some(buf) = self.pool.take_timeout(TURN)? {
                return Ok(Some(buf));
            }
        }
        Ok(None)
    }

    fn claim(&self, extents: u64, is_stager: bool) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if state.is_over || state.next == self.plan.extents() {
            return None;
        }
        let start = state.next;
        state.next = start.saturating_add(extents).min(self.plan.extents());
        match is_stager {
            true => state.staging += 1,
            false => state.filling += 1,
        }
        Some(Claim {
            staging_queue: self,
            sources: state.sources.clone(),
            numbers: start..state.next,
            is_stager,
        })
    }

    /// Hands a staged extent to the workers.
    fn push(&self, filled: Filled) {
        let mut state = self.lock();
        if state.is_over {
            drop(state);
            drop(filled);
            return;
        }
        state.staged.push_back(filled);
        if state.is_open {
            self.supplied.notify_one();
        }
    }

    /// Whether everything is copied, or will not be, and only device copies are outstanding.
    fn is_last(&self, state: &StagingState) -> bool {
        let is_last = state.is_over || state.next == self.plan.extents();
        is_last && state.staging + state.filling == 0
    }

    /// Drops the sources after the last copy, and wakes all waiting threads.
    fn release_sources(&self, state: MutexGuard<'_, StagingState>) {
        if self.is_last(&state) && (state.is_over || !state.is_deferred) {
            self.drop_sources(state);
        } else {
            drop(state);
        }
        self.supplied.notify_all();
    }

    /// Drops the sources, which waits for devices that copy from them.
    fn drop_sources(&self, mut state: MutexGuard<'_, StagingState>) {
        let (sources, watch) = (state.sources.take(), state.watch.take());
        let is_over = state.is_over;
        state.is_asking |= watch.is_some();
        // Dropping the owners of sources runs foreign code.
        drop(state);
        let Some(sources) = sources else { return };
        let written = watch.as_ref().filter(|_| !is_over).map(Watch::find_written);
        if watch.is_some() {
            self.lock().is_asking = false;
            self.supplied.notify_all();
        }
        for source in sources.iter() {
            if let Region::Snapshot(snapshot) = source {
                // Threads that need the copy see the failure themselves.
                let _ = snapshot.wait();
            }
        }
        drop((watch, sources));
        let mut state = self.lock();
        state.source_modified = state.source_modified.or(written.flatten());
        state.is_over |= state.source_modified.is_some();
        state.is_released = true;
        state.is_open = true;
        let staged = state.is_over.then(|| std::mem::take(&mut state.staged));
        drop(state);
        drop(staged);
        self.released.notify_all();
    }

    /// A panic cannot leave the state inconsistent, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, StagingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn streams_of(source: &Region) -> Option<&Arc<DeviceStreams>> {
    source.device().map(DeviceRegion::device_streams)
}

/// Whether no device copies from the sources any more. A failed device does not copy.
fn is_idle(state: &StagingState) -> bool {
    let mut sources = state.sources.iter().flat_map(|sources| sources.iter());
    sources.all(|source| match source {
        Region::Host(_) => true,
        Region::Device(region) => region.is_idle().unwrap_or(true),
        Region::Snapshot(snapshot) => snapshot.is_done().unwrap_or(true),
    })
}

fn wait_timeout<'a>(
    condvar: &Condvar,
    state: MutexGuard<'a, StagingState>,
    timeout: Duration,
) -> MutexGuard<'a, StagingState> {
    let waited = condvar.wait_timeout(state, timeout);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Extents that one thread has claimed, in order.
struct Claim<'a> {
    staging_queue: &'a StagingQueue,
    /// `None` only while dropping.
    sources: Option<Arc<Vec<Region>>>,
    /// Not copied yet.
    numbers: Range<u64>,
    is_stager: bool,
}

impl Claim<'_> {
    /// Copies the next extent into the buffer, or queues its device copies, and pads it to a whole
    /// page.
    fn copy(&mut self, buf: IoBuf) -> Result<Filled> {
        let mut copied = self.copy_all(vec![buf])?;
        Ok(copied.pop().expect("one for each buffer"))
    }

    /// Copies as many extents as there are buffers.
    fn copy_all(&mut self, bufs: Vec<IoBuf>) -> Result<Vec<Filled>> {
        let numbers = self.numbers.start..self.numbers.start + bufs.len() as u64;
        let sources = self.sources.clone().expect("the claim is not dropped");
        let place = |(number, buf)| self.place(&sources, number, buf);
        let placed = numbers.clone().zip(bufs).map(place).collect();
        let device_to_host = DeviceCopies::begin_all(placed)?;
        self.numbers.start = numbers.end;
        let filled = |(number, buf)| Filled { number, buf };
        Ok(numbers.zip(device_to_host).map(filled).collect())
    }

    /// Copies the host's part of an extent, and lists the device's part.
    fn place<'a>(
        &self,
        sources: &'a [Region],
        number: u64,
        mut buf: IoBuf,
    ) -> (DeviceCopies<'a>, IoBuf) {
        let _span = trace::span("copy");
        let plan = &self.staging_queue.plan;
        let extent = plan.extent(number);
        let bytes = extent.bytes();
        buf.set_len(bytes.next_multiple_of(PAGE_BYTES as usize));
        let (mut rest, padding) = buf.as_mut_slice().split_at_mut(bytes);
        let mut copies = DeviceCopies::default();
        plan.pieces(&extent, |piece| match piece {
            ExtentPart::Header(header) => take(&mut rest, header.len()).copy_from_slice(header),
            ExtentPart::Tensor {
                tensor,
                start,
                bytes: piece_bytes,
            } => {
                let at = bytes - rest.len();
                let place = take(&mut rest, piece_bytes as usize);
                match &sources[tensor] {
                    Region::Snapshot(source) => {
                        copies.add_snapshot(source, start, at..at + place.len());
                    }
                    Region::Device(source) => copies.add(source, start, at..at + place.len()),
                    Region::Host(source) => {
                        // A worker digests and writes the extent at once; a staged one waits, so it
                        // bypasses the caches.
                        match self.is_stager {
                            true => source.stream_to(start, place),
                            false => source.copy_to(start, place),
                        }
                        if let Some(edges) = &self.staging_queue.edges {
                            edges.put_over(tensor, source, start, place);
                        }
                    }
                }
            }
        });
        padding.fill(0);
        (copies, buf)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Dropped before the count changes: dropping the last reference waits for devices.
        self.sources = None;
        let mut state = self.staging_queue.lock();
        match self.is_stager {
            true => state.staging -= 1,
            false => state.filling -= 1,
        }
        // No other thread copies the extents that this claim gives up.
        state.is_over |= !self.numbers.is_empty();
        self.staging_queue.release_sources(state);
    }
}

/// Splits the first `bytes` off `rest`.
fn take<'a>(rest: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    rest.split_off_mut(..bytes)
        .expect("the pieces of an extent add up to its length")
}

#[cfg(test)]
mod tests {
    use penstock_io::faulty::Lent;

    use super::*;
    use crate::plan::write::{TensorSpec, plan};

    const EXTENT_BYTES: usize = 1 << 20;

    /// The staging queue of a lazy save of one tensor that takes a little more than three extents.
    fn staging_queue(lent: &Lent) -> StagingQueue {
        let source = lent.region();
        let spec = TensorSpec {
            name: "t".to_owned(),
            dtype: "uint8".to_owned(),
            shape: vec![source.len()],
            item_bytes: 1,
            region: None,
            group: None,
        };
        let plan = plan(&[spec], u64::MAX, EXTENT_BYTES as u64).unwrap();
        assert_eq!(plan.extents(), 4);
        let pool = Pool::new(EXTENT_BYTES, 8 * EXTENT_BYTES);
        let sources = Arc::new(vec![Region::from(source)]);
        StagingQueue::new(Arc::new(plan), sources, None, pool, true)
    }

    fn lent() -> Lent {
        Lent::new(1, 3 * EXTENT_BYTES / 8)
    }

    #[test]
    fn staging_waits_for_the_copy_of_a_worker() {
        let lent = lent();
        let staging_queue = staging_queue(&lent);
        let buf = staging_queue.pool.take().unwrap();
        let mut claim = staging_queue.claim(1, false).unwrap();
        thread::scope(|scope| {
            let staging = scope.spawn(|| staging_queue.stage(2));
            while staging_queue.lock().staged.len() < 3 || staging_queue.lock().staging > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!staging_queue.wait(Some(Duration::from_millis(10))));
            assert!(!staging.is_finished() && !lent.is_returned());
            claim.copy(buf).unwrap();
            drop(claim);
            staging.join().unwrap().unwrap();
            assert!(lent.is_returned());
        });
        staging_queue.check().unwrap();
    }

    #[test]
    fn a_worker_has_no_end_before_the_last_stager() {
        let lent = lent();
        let staging_queue = staging_queue(&lent);
        let progress = crate::Progress::default();
        let halt = Halt::new(&progress);
        let mut claim = staging_queue.claim(4, true).unwrap();
        assert!(matches!(staging_queue.next(false, &halt), Ok(Next::Later)));
        for number in 0..4 {
            let filled = claim.copy(staging_queue.pool.take().unwrap()).unwrap();
            assert_eq!(filled.number, number);
            staging_queue.push(filled);
        }
        drop(claim);
        assert!(lent.is_returned());
        for number in 0..4 {
            let next = staging_queue.next(true, &halt).unwrap();
            assert!(matches!(next, Next::Filled(filled) if filled.number == number));
        }
        assert!(matches!(staging_queue.next(true, &halt), Ok(Next::End)));
    }

    /// A claimed extent that was not copied would be missing from the file.
    #[test]
    fn a_claim_that_is_given_up_ends_the_save() {
        let lent = lent();
        let staging_queue = staging_queue(&lent);
        drop(staging_queue.claim(1, true));
        assert!(matches!(staging_queue.check(), Err(Error::Interrupted)));
        assert!(staging_queue.wait(None) && lent.is_returned());
        staging_queue.stage(2).unwrap();
    }
}
