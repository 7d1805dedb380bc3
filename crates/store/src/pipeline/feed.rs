//! Where a save's workers get filled extents from.
//!
//! Two kinds of threads copy out of the caller's memory: *stagers*, on behalf of a caller who wants
//! it back, and, in a lazy feed, the workers that write. Both take extents from one cursor, so each
//! is copied once. What stagers have copied waits in a queue, which workers look at first.
//!
//! Nobody holds a buffer while waiting for one, and a worker waits only while nothing of its own is
//! under way: where the pool is smaller than the state, the two sides take turns and never block each
//! other. All waits end within a [`TURN`] of the save's end, however it ends.
//!
//! What a device has is copied by the device: a thread queues the copies of an extent and goes on, and
//! the extent can be written when it has arrived. The sources are let go of when the last copy is done.
//!
//! Where the sources are watched, the last copy is followed by the question whether anybody has
//! written to them, and only then is the caller told that they may be changed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use penstock_io::buffer::{
    Arriving, DeviceCopies, DeviceRegion, Edges, HostRegion, IoBuf, Lane, Pool, Region, Watch,
};
use penstock_io::trace::{self, Role};

use super::Halt;
use crate::error::{Error, Result};
use crate::format::shard::PAGE_BYTES;
use crate::plan::write::{Piece, WritePlan};

/// How often a thread that waits looks whether its work is still wanted.
const TURN: Duration = Duration::from_millis(20);

/// How often a thread that waits for a device looks.
const LOOK: Duration = Duration::from_micros(200);

/// What a stager takes on at once: neighbours, so that it reads in one direction for long.
const RUN_BYTES: u64 = 4 << 20;

/// The same where a device copies, but for this part of the state at the most: it is told of as much by one call.
const DEVICE_RUN_BYTES: u64 = 16 << 20;
const HOST_PART_MAX: u64 = 8;

/// An extent whose bytes are in a buffer, or on their way to it, padded with zeros to a whole page.
pub(crate) struct Filled {
    pub(crate) number: u64,
    pub(crate) buf: Arriving,
}

/// What a worker that asks for an extent gets.
pub(super) enum Next {
    Filled(Filled),
    /// Nothing now, but there will be.
    Later,
    /// Nothing any more.
    End,
}

/// The sources of one save and the extents copied from them.
pub(crate) struct Feed {
    plan: Arc<WritePlan>,
    pool: Pool,
    /// What sources that are watched had beside their pages at first.
    edges: Option<Arc<Edges>>,
    /// Whether workers copy what nobody has staged.
    is_lazy: bool,
    /// Whether a device has some of the sources.
    is_on_device: bool,
    /// Bytes that a stager takes on at once.
    run_bytes: u64,
    /// Devices that copy them when it is their turn.
    lanes: Vec<Arc<Lane>>,
    state: Mutex<State>,
    /// There may be something for a worker.
    supplied: Condvar,
    /// The sources are gone.
    released: Condvar,
}

struct State {
    /// Dropped with the last copy.
    sources: Option<Arc<Vec<Region>>>,
    /// Tells whether they changed before that; ends with them.
    watch: Option<Watch>,
    /// The tensor that did, where one did: the save is over then.
    torn: Option<usize>,
    /// The cursor: the first extent that nobody has taken on.
    next: u64,
    /// Claims of stagers and of workers that are still copied from.
    staging: usize,
    filling: usize,
    staged: VecDeque<Filled>,
    /// Whether workers may begin with what is staged. An eager feed keeps them out of the memory bus
    /// until everything is copied or a stager needs their buffers.
    is_open: bool,
    is_released: bool,
    /// Whether nobody is kept waiting for devices who does not ask to.
    is_deferred: bool,
    /// Whether somebody is asking at the moment who has changed the sources.
    is_asking: bool,
    /// Failed or cancelled: nothing is copied or written any more.
    is_over: bool,
}

impl Feed {
    pub(crate) fn new(
        plan: Arc<WritePlan>,
        sources: Arc<Vec<Region>>,
        watch: Option<Watch>,
        pool: Pool,
        is_lazy: bool,
    ) -> Feed {
        let edges = watch.as_ref().map(Watch::edges);
        let mut lanes: Vec<Arc<Lane>> = Vec::new();
        for lane in sources.iter().filter_map(lane_of) {
            if !lanes.iter().any(|known| Arc::ptr_eq(known, lane)) {
                lanes.push(Arc::clone(lane));
            }
        }
        let is_on_device = sources.iter().any(|source| source.host().is_none());
        let of_host = sources.iter().filter_map(Region::host);
        let host_bytes: u64 = of_host.map(HostRegion::len).sum();
        // Many threads share what the host has to copy.
        let run_bytes = match is_on_device && host_bytes <= plan.bytes() / HOST_PART_MAX {
            true => DEVICE_RUN_BYTES,
            false => RUN_BYTES,
        };
        let state = State {
            sources: Some(sources),
            watch,
            torn: None,
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
        let feed = Feed {
            plan,
            pool,
            edges,
            is_lazy,
            is_on_device,
            run_bytes,
            lanes,
            state: Mutex::new(state),
            supplied: Condvar::new(),
            released: Condvar::new(),
        };
        // Without a single extent nothing is ever copied.
        feed.release_sources(feed.lock());
        feed
    }

    /// Copies whatever is not yet copied, with at most `threads` threads, this one among them; when
    /// it returns, nobody reads the sources any more.
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
            // Where the system has no more threads to give, fewer do the work.
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

    /// Has everything copied that is not yet: when it returns, the host has copied what it has to copy, and
    /// has queued the copies of devices. Those who write wait for them.
    pub(crate) fn queue(&self) -> Result<()> {
        self.lock().is_deferred = true;
        self.copy_runs()?;
        let mut state = self.lock();
        while !state.is_over && (state.staging + state.filling > 0 || state.is_asking) {
            state = wait_timeout(&self.supplied, state, TURN);
        }
        // The host's part is copied, and may be changed from now on: what is asked later is asked too late.
        let watch = (!state.is_over && self.is_last(&state)).then(|| state.watch.take());
        drop(state);
        if let Some(watch) = watch.flatten() {
            let written = watch.find_written();
            drop(watch);
            let mut state = self.lock();
            state.torn = state.torn.or(written);
            state.is_over |= written.is_some();
            self.release_sources(state);
        }
        // Who waits for the end waits for devices now.
        self.released.notify_all();
        Ok(())
    }

    /// Devices that have some of the sources and may not have copied them yet.
    pub(crate) fn lanes(&self) -> &[Arc<Lane>] {
        // Sources may be gone, and what drops them still waiting for the last copy.
        match self.lock().is_released {
            true => &[],
            false => &self.lanes,
        }
    }

    /// Waits until nobody reads the sources any more; tells whether that is so.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        // A time too far off to be written down is no bound.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        while !state.is_released {
            if state.is_deferred && state.sources.is_some() && self.is_last(&state) {
                // Only devices are waited for, who wake nobody.
                if timeout.is_none() || is_idle(&state) {
                    self.let_go(state);
                } else {
                    drop(state);
                    if deadline.is_none_or(|deadline| Instant::now() >= deadline) {
                        return false;
                    }
                    thread::sleep(LOOK);
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

    /// Ends the save early: whoever copies or waits stops, and what is staged is dropped.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        let staged = std::mem::take(&mut state.staged);
        self.release_sources(state);
        drop(staged);
    }

    /// Whether a device has some of the sources.
    pub(super) fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    /// The tensor that was changed before it was copied, if one was.
    pub(crate) fn torn(&self) -> Option<usize> {
        self.lock().torn
    }

    /// [`Error::Interrupted`] once the save has ended early.
    pub(crate) fn check(&self) -> Result<()> {
        match self.lock().is_over {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }

    /// An extent for a worker to write. With `may_wait`, which only a worker sets that has nothing
    /// under way, it is never [`Next::Later`].
    pub(super) fn next(&self, may_wait: bool, halt: &Halt<'_>) -> Result<Next> {
        let patience = if may_wait { TURN } else { Duration::ZERO };
        while halt.go_on()? {
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
                        self.let_go(state);
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
                    // Who stages has the memory that comes back, and tells what is in it.
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

    /// Copies the next extent on behalf of a worker, if there is one left.
    fn fill(&self, buf: IoBuf) -> Result<Option<Filled>> {
        let Some(mut claim) = self.claim(1, false) else {
            return Ok(None);
        };
        claim.copy(buf).map(Some)
    }

    /// What one stager does: run after run, until none is left or the save is over.
    pub(crate) fn copy_runs(&self) -> Result<()> {
        while let Some(mut claim) = self.claim(self.run_extents(), true) {
            while !claim.numbers.is_empty() {
                let Some(buf) = self.take_buffer()? else {
                    return Ok(());
                };
                let mut bufs = vec![buf];
                // A device is told of several at once, but nobody waits for one to return while holding others.
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

    /// A buffer for a stager, waiting for the workers to return one; `None` once the save is over.
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
            feed: self,
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

    /// Whether all is copied, or will not be, and nobody copies any more but a device.
    fn is_last(&self, state: &State) -> bool {
        let is_last = state.is_over || state.next == self.plan.extents();
        is_last && state.staging + state.filling == 0
    }

    /// Drops the sources after the last copy, and lets everybody look again.
    fn release_sources(&self, state: MutexGuard<'_, State>) {
        if self.is_last(&state) && (state.is_over || !state.is_deferred) {
            self.let_go(state);
        } else {
            drop(state);
        }
        self.supplied.notify_all();
    }

    /// Drops the sources, which waits for devices that copy from them.
    fn let_go(&self, mut state: MutexGuard<'_, State>) {
        let (sources, watch) = (state.sources.take(), state.watch.take());
        let is_over = state.is_over;
        state.is_asking |= watch.is_some();
        // Owners are somebody else's code.
        drop(state);
        let Some(sources) = sources else { return };
        let written = watch.as_ref().filter(|_| !is_over).map(Watch::find_written);
        if watch.is_some() {
            self.lock().is_asking = false;
            self.supplied.notify_all();
        }
        for source in sources.iter() {
            if let Region::Snapshot(snapshot) = source {
                // Whoever needs it is told of a failure.
                let _ = snapshot.wait();
            }
        }
        drop((watch, sources));
        let mut state = self.lock();
        state.torn = state.torn.or(written.flatten());
        state.is_over |= state.torn.is_some();
        state.is_released = true;
        state.is_open = true;
        let staged = state.is_over.then(|| std::mem::take(&mut state.staged));
        drop(state);
        drop(staged);
        self.released.notify_all();
    }

    /// No panic can leave the state half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lane_of(source: &Region) -> Option<&Arc<Lane>> {
    source.device().map(DeviceRegion::lane)
}

/// Whether no device copies from the sources any more. One that has failed does not.
fn is_idle(state: &State) -> bool {
    let mut sources = state.sources.iter().flat_map(|sources| sources.iter());
    sources.all(|source| match source {
        Region::Host(_) => true,
        Region::Device(region) => region.is_idle().unwrap_or(true),
        Region::Snapshot(snapshot) => snapshot.is_here().unwrap_or(true),
    })
}

fn wait_timeout<'a>(
    condvar: &Condvar,
    state: MutexGuard<'a, State>,
    timeout: Duration,
) -> MutexGuard<'a, State> {
    let waited = condvar.wait_timeout(state, timeout);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Extents that one thread has taken on, in order.
struct Claim<'a> {
    feed: &'a Feed,
    /// `None` only while dropping.
    sources: Option<Arc<Vec<Region>>>,
    /// Not yet copied.
    numbers: Range<u64>,
    is_stager: bool,
}

impl Claim<'_> {
    /// Copies the next extent into the buffer, or has devices do it, and pads it to a whole page.
    fn copy(&mut self, buf: IoBuf) -> Result<Filled> {
        let mut copied = self.copy_all(vec![buf])?;
        Ok(copied.pop().expect("one for each buffer"))
    }

    /// The same for as many extents as there are buffers.
    fn copy_all(&mut self, bufs: Vec<IoBuf>) -> Result<Vec<Filled>> {
        let numbers = self.numbers.start..self.numbers.start + bufs.len() as u64;
        let sources = self.sources.clone().expect("the claim is not dropped");
        let place = |(number, buf)| self.place(&sources, number, buf);
        let placed = numbers.clone().zip(bufs).map(place).collect();
        let arriving = DeviceCopies::begin_all(placed)?;
        self.numbers.start = numbers.end;
        let filled = |(number, buf)| Filled { number, buf };
        Ok(numbers.zip(arriving).map(filled).collect())
    }

    /// Copies what the host has of an extent, and says what devices have to copy.
    fn place<'a>(
        &self,
        sources: &'a [Region],
        number: u64,
        mut buf: IoBuf,
    ) -> (DeviceCopies<'a>, IoBuf) {
        let _span = trace::span("copy");
        let plan = &self.feed.plan;
        let extent = plan.extent(number);
        let bytes = extent.bytes();
        buf.set_len(bytes.next_multiple_of(PAGE_BYTES as usize));
        let (mut rest, padding) = buf.as_mut_slice().split_at_mut(bytes);
        let mut copies = DeviceCopies::default();
        plan.pieces(&extent, |piece| match piece {
            Piece::Header(header) => take(&mut rest, header.len()).copy_from_slice(header),
            Piece::Tensor {
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
                        // A worker digests and writes it at once; what is staged waits for that.
                        match self.is_stager {
                            true => source.stream_to(start, place),
                            false => source.copy_to(start, place),
                        }
                        if let Some(edges) = &self.feed.edges {
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
        // Before the count says so. Who holds them last waits for devices.
        self.sources = None;
        let mut state = self.feed.lock();
        match self.is_stager {
            true => state.staging -= 1,
            false => state.filling -= 1,
        }
        // Nobody else copies what this thread gave up on.
        state.is_over |= !self.numbers.is_empty();
        self.feed.release_sources(state);
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

    /// A lazy feed of one tensor that takes a little more than three extents.
    fn feed(lent: &Lent) -> Feed {
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
        Feed::new(Arc::new(plan), sources, None, pool, true)
    }

    fn lent() -> Lent {
        Lent::new(1, 3 * EXTENT_BYTES / 8)
    }

    #[test]
    fn staging_waits_for_the_copy_of_a_worker() {
        let lent = lent();
        let feed = feed(&lent);
        let buf = feed.pool.take().unwrap();
        let mut claim = feed.claim(1, false).unwrap();
        thread::scope(|scope| {
            let staging = scope.spawn(|| feed.stage(2));
            while feed.lock().staged.len() < 3 || feed.lock().staging > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!feed.wait(Some(Duration::from_millis(10))));
            assert!(!staging.is_finished() && !lent.is_returned());
            claim.copy(buf).unwrap();
            drop(claim);
            staging.join().unwrap().unwrap();
            assert!(lent.is_returned());
        });
        feed.check().unwrap();
    }

    #[test]
    fn a_worker_has_no_end_before_the_last_stager() {
        let lent = lent();
        let feed = feed(&lent);
        let progress = crate::Progress::default();
        let halt = Halt::new(&progress);
        let mut claim = feed.claim(4, true).unwrap();
        assert!(matches!(feed.next(false, &halt), Ok(Next::Later)));
        for number in 0..4 {
            let filled = claim.copy(feed.pool.take().unwrap()).unwrap();
            assert_eq!(filled.number, number);
            feed.push(filled);
        }
        drop(claim);
        assert!(lent.is_returned());
        for number in 0..4 {
            let next = feed.next(true, &halt).unwrap();
            assert!(matches!(next, Next::Filled(filled) if filled.number == number));
        }
        assert!(matches!(feed.next(true, &halt), Ok(Next::End)));
    }

    /// An extent that was taken on and not copied would be missing from the file.
    #[test]
    fn a_claim_that_is_given_up_ends_the_save() {
        let lent = lent();
        let feed = feed(&lent);
        drop(feed.claim(1, true));
        assert!(matches!(feed.check(), Err(Error::Interrupted)));
        assert!(feed.wait(None) && lent.is_returned());
        feed.stage(2).unwrap();
    }
}
