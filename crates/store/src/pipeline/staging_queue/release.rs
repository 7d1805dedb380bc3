//! The release of the sources, after the last copy.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use penstock_io::buffer::{DeviceStreams, Region, Watch};

use super::state::{Sources, StagingState};
use super::{StagingQueue, wait_timeout};

/// How often a thread that waits for a device polls.
const POLL_PAUSE: Duration = Duration::from_micros(200);

impl StagingQueue {
    /// Streams of devices that may not have copied their part of the sources yet.
    pub(crate) fn all_streams(&self) -> &[Arc<DeviceStreams>] {
        // The thread that drops the sources may still be waiting for the last copy.
        match self.lock().sources.is_released() {
            true => &[],
            false => &self.all_streams,
        }
    }

    /// Waits until the sources are no longer read; returns whether that is so.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        // A deadline beyond the clock's range is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        while !state.sources.is_released() {
            if state.is_deferred && state.sources.lent().is_some() && state.is_last() {
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

    /// Drops the sources after the last copy, and wakes all waiting threads.
    pub(super) fn release_sources(&self, state: MutexGuard<'_, StagingState>) {
        if state.is_last() && (state.is_over() || !state.is_deferred) {
            self.drop_sources(state);
        } else {
            drop(state);
        }
        self.supplied.notify_all();
    }

    /// Drops the sources, which waits for devices that copy from them.
    pub(super) fn drop_sources(&self, mut state: MutexGuard<'_, StagingState>) {
        let taken = state.sources.take();
        let is_over = state.is_over();
        // Dropping the owners of sources runs foreign code.
        drop(state);
        let Some((sources, watch)) = taken else {
            return;
        };
        let written = watch.as_ref().filter(|_| !is_over).map(Watch::find_written);
        if watch.is_some() {
            self.lock().sources = Sources::Releasing;
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
        if let Some(tensor) = written.flatten() {
            state.end_modified(tensor);
        }
        state.sources = Sources::Released;
        state.is_open = true;
        let staged = state.is_over().then(|| std::mem::take(&mut state.staged));
        drop(state);
        drop(staged);
        self.released.notify_all();
    }
}

/// Whether no device copies from the sources any more. A failed device does not copy.
fn is_idle(state: &StagingState) -> bool {
    let regions = state.sources.lent().map(|regions| regions.as_slice());
    regions
        .unwrap_or_default()
        .iter()
        .all(|source| match source {
            Region::Host(_) => true,
            Region::Device(region) => region.is_idle().unwrap_or(true),
            Region::Snapshot(snapshot) => snapshot.is_done().unwrap_or(true),
        })
}
