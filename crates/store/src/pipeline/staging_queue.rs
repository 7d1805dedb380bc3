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
//!
//! `supply` is the side of the workers and `stagers` the other side; `claim` copies, `lending` lends
//! instead, and `release` drops the sources.

mod claim;
pub(super) mod lending;
mod release;
mod stagers;
mod state;
pub(super) mod supply;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_io::buffer::{DeviceRegion, DeviceStreams, Edges, HostRegion, Pool, Region, Watch};

use self::state::StagingState;
use crate::error::{Error, Result};
use crate::plan::write::WritePlan;

pub(super) use self::state::Filled;

/// How often a waiting thread checks whether its work is still needed.
const TURN: Duration = Duration::from_millis(20);

/// Amount that a stager claims at once: adjacent extents, so that it reads sequentially for long.
const RUN_BYTES: u64 = 4 << 20;

/// Amount that a stager claims at once if a device copies all but this part of the state: one call
/// queues that much.
const DEVICE_RUN_BYTES: u64 = 16 << 20;
const HOST_PART_MAX: u64 = 8;

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
        let state = StagingState::new(plan.extents(), sources, watch, is_lazy);
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

    /// Ends the save early: copying and waiting threads stop, and staged extents are dropped.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.end();
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
        self.lock().source_modified()
    }

    /// Returns [`Error::Interrupted`] once the save has ended early.
    pub(crate) fn check(&self) -> Result<()> {
        match self.lock().is_over() {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }

    /// Hands a staged extent to the workers.
    fn push(&self, filled: Filled) {
        let mut state = self.lock();
        if state.is_over() {
            drop(state);
            drop(filled);
            return;
        }
        state.staged.push_back(filled);
        if state.is_open {
            self.supplied.notify_one();
        }
    }

    /// A panic cannot leave the state inconsistent, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, StagingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn streams_of(source: &Region) -> Option<&Arc<DeviceStreams>> {
    source.device().map(DeviceRegion::device_streams)
}

fn wait_timeout<'a>(
    condvar: &Condvar,
    state: MutexGuard<'a, StagingState>,
    timeout: Duration,
) -> MutexGuard<'a, StagingState> {
    let waited = condvar.wait_timeout(state, timeout);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use std::thread;

    use penstock_io::faulty::Lent;

    use super::supply::Next;
    use super::*;
    use crate::pipeline::Halt;
    use crate::plan::write::{TensorSpec, plan};

    const EXTENT_BYTES: usize = 1 << 20;

    /// The staging queue of a lazy save of one tensor that takes a little more than three extents.
    fn staging_queue(lent: &Lent) -> StagingQueue {
        watched_queue(lent, None)
    }

    fn watched_queue(lent: &Lent, watch: Option<Watch>) -> StagingQueue {
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
        StagingQueue::new(Arc::new(plan), sources, watch, pool, true)
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
            claim.copy(buf, &[]).unwrap();
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
        assert!(matches!(
            staging_queue.next(false, &halt, &[], None),
            Ok(Next::Later)
        ));
        for number in 0..4 {
            let filled = claim.copy(staging_queue.pool.take().unwrap(), &[]).unwrap();
            assert_eq!(filled.number, number);
            staging_queue.push(filled);
        }
        drop(claim);
        assert!(lent.is_returned());
        for number in 0..4 {
            let next = staging_queue.next(true, &halt, &[], None).unwrap();
            assert!(matches!(next, Next::Filled(filled) if filled.number == number));
        }
        assert!(matches!(
            staging_queue.next(true, &halt, &[], None),
            Ok(Next::End)
        ));
    }

    /// Otherwise the save could be committed before the check finds that a tensor was changed, and
    /// a second caller could change the sources during the check of the first.
    #[test]
    fn nothing_is_written_to_its_end_during_a_check() {
        let lent = lent();
        let region = Region::from(lent.region());
        let watch = match Watch::begin(Arc::new(vec![region]), &[]) {
            Ok(watch) => watch,
            Err(error) => return eprintln!("skipped: the kernel does not watch memory: {error}"),
        };
        let staging_queue = watched_queue(&lent, Some(watch));
        let progress = crate::Progress::default();
        let halt = Halt::new(&progress);
        staging_queue.lock().is_deferred = true;
        staging_queue.copy_runs().unwrap();
        for _ in 0..4 {
            assert!(matches!(
                staging_queue.next(true, &halt, &[], None),
                Ok(Next::Filled(_))
            ));
        }
        let watch = staging_queue.lock().begin_check().unwrap();
        assert!(matches!(
            staging_queue.next(false, &halt, &[], None),
            Ok(Next::Later)
        ));
        assert!(!staging_queue.wait(Some(Duration::from_millis(10))));
        thread::scope(|scope| {
            let second = scope.spawn(|| staging_queue.queue());
            thread::sleep(Duration::from_millis(10));
            assert!(!second.is_finished());
            drop(watch);
            let mut state = staging_queue.lock();
            state.end_check(Some(0));
            staging_queue.release_sources(state);
            second.join().unwrap().unwrap();
        });
        assert!(matches!(
            staging_queue.next(true, &halt, &[], None),
            Err(Error::Interrupted)
        ));
        assert_eq!(staging_queue.source_modified(), Some(0));
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
