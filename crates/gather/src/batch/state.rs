//! Progress of a batch: outstanding rows, and the threads that wait for them.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use penstock_io::buffer::IoBuf;

use crate::error::Error;

/// The destination of a row in a result.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) row: u64,
    /// The row's key in the cache.
    pub(crate) key: u64,
    pub(crate) memory: IoBuf,
}

/// A block whose bytes are not those that were written.
#[derive(Clone, Debug)]
pub(crate) struct Damage {
    pub(crate) row: u64,
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Whether the block is whole, and somebody has changed it.
    pub(crate) is_tampered: bool,
}

impl From<Damage> for Error {
    fn from(damage: Damage) -> Error {
        let Damage {
            row,
            path,
            offset,
            bytes,
            is_tampered,
        } = damage;
        match is_tampered {
            true => Error::Tampered {
                row,
                path,
                offset,
                bytes,
            },
            false => Error::Damaged {
                row,
                path,
                offset,
                bytes,
            },
        }
    }
}

/// Progress of a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchState {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Outstanding transfers, and rows that other batches read.
    left: usize,
    /// Places whose rows were lost with the operation that read them.
    lost: Vec<Place>,
    /// The first damaged block.
    damaged: Option<Damage>,
    watchers: Vec<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl BatchState {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing is outstanding.
    pub(crate) fn is_ended(&self) -> bool {
        self.lock().left == 0
    }

    /// Whether nothing is outstanding, lost or damaged.
    pub(crate) fn is_whole(&self) -> bool {
        let progress = self.lock();
        progress.left == 0 && progress.lost.is_empty() && progress.damaged.is_none()
    }

    /// Waits until nothing is outstanding.
    ///
    /// # Returns
    /// Places to read again, and the damage; `None` on timeout.
    pub(crate) fn wait(&self, until: Option<Instant>) -> Option<(Vec<Place>, Option<Damage>)> {
        let mut progress = self.lock();
        while progress.left > 0 {
            let changed = &self.changed;
            progress = match until {
                None => changed
                    .wait(progress)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let waited = changed.wait_timeout(progress, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let lost = std::mem::take(&mut progress.lost);
        Some((lost, progress.damaged.clone()))
    }

    /// Calls a function once nothing is outstanding, or at once.
    pub(crate) fn on_ended(&self, watcher: Box<dyn FnOnce() + Send>) {
        let mut progress = self.lock();
        if progress.left > 0 {
            return progress.watchers.push(watcher);
        }
        drop(progress);
        watcher();
    }

    pub(crate) fn expect(&self, more: usize) {
        self.lock().left += more;
    }

    /// Ends one of the outstanding reads, successful or not.
    pub(crate) fn end(&self) {
        let mut progress = self.lock();
        progress.left -= 1;
        if progress.left > 0 {
            return;
        }
        let watchers = std::mem::take(&mut progress.watchers);
        drop(progress);
        self.changed.notify_all();
        watchers.into_iter().for_each(|watcher| watcher());
    }

    /// Marks places to be read again.
    pub(crate) fn lose(&self, places: impl IntoIterator<Item = Place>) {
        self.lock().lost.extend(places);
    }

    pub(crate) fn damage(&self, damage: Damage) {
        self.lock().damaged.get_or_insert(damage);
    }
}

/// A place whose row another batch reads.
#[derive(Debug)]
pub(crate) struct Waiting {
    place: Option<Place>,
    state: Arc<BatchState>,
}

impl Waiting {
    /// A place whose batch counts it as outstanding.
    pub(crate) fn new(place: Place, state: &Arc<BatchState>) -> Waiting {
        state.expect(1);
        Waiting {
            place: Some(place),
            state: Arc::clone(state),
        }
    }

    /// Delivers the row.
    pub(crate) fn have(mut self, bytes: &[u8]) {
        if let Some(mut place) = self.place.take() {
            let values = place.memory.as_mut_slice();
            values.copy_from_slice(&bytes[..values.len()]);
        }
    }

    /// The place, which stops waiting.
    pub(crate) fn into_place(mut self) -> Option<Place> {
        self.place.take()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.state.lose(self.place.take());
        self.state.end();
    }
}
