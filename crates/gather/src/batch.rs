//! A batch of rows under way.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::buffer::IoBuf;
use penstock_io::executor::Transfer;

use crate::error::{Error, Result};
use crate::reader::Shared;

/// For so long a transfer looks out for its end.
const LOOKOUT: Duration = Duration::from_micros(100);

/// A place in a result that a row goes to.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) row: u64,
    pub(crate) memory: IoBuf,
}

/// A block that is not the one that was written.
#[derive(Clone, Debug)]
pub(crate) struct Damage {
    pub(crate) row: u64,
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl From<Damage> for Error {
    fn from(damage: Damage) -> Error {
        let Damage {
            row,
            path,
            offset,
            bytes,
        } = damage;
        Error::Damaged {
            row,
            path,
            offset,
            bytes,
        }
    }
}

/// What of a batch is not there yet.
#[derive(Debug, Default)]
pub(crate) struct State {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Transfers of its own, and rows that others read.
    left: usize,
    /// Places whose rows did not come with what was to bring them.
    lost: Vec<Place>,
    /// Blocks that were not what was written.
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

impl State {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expect(&self, more: usize) {
        self.lock().left += more;
    }

    /// One of those that were expected is there, or will not be.
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

    /// These are to be read again.
    pub(crate) fn lose(&self, places: impl IntoIterator<Item = Place>) {
        self.lock().lost.extend(places);
    }

    pub(crate) fn damage(&self, damage: Damage) {
        self.lock().damaged.get_or_insert(damage);
    }
}

/// A place that waits for a row which another batch reads.
#[derive(Debug)]
pub(crate) struct Waiting {
    place: Option<Place>,
    state: Arc<State>,
}

impl Waiting {
    /// One that its batch expects.
    pub(crate) fn new(place: Place, state: &Arc<State>) -> Waiting {
        state.expect(1);
        Waiting {
            place: Some(place),
            state: Arc::clone(state),
        }
    }

    /// The row that it waits for.
    pub(crate) fn row(&self) -> u64 {
        self.place.as_ref().expect("it has its place").row
    }

    /// The row is there.
    pub(crate) fn have(mut self, bytes: &[u8]) {
        if let Some(mut place) = self.place.take() {
            let values = place.memory.as_mut_slice();
            values.copy_from_slice(&bytes[..values.len()]);
        }
    }

    /// The place, which does not wait any more.
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

/// Rows that are being gathered. It goes on when this is dropped; the memory is let go of at the
/// end.
#[must_use = "rows are there once they were waited for"]
pub struct Batch {
    shared: Arc<Shared>,
    state: Arc<State>,
    transfers: Mutex<Vec<Transfer>>,
    process: u32,
}

impl Batch {
    pub(crate) fn new(shared: &Arc<Shared>, state: Arc<State>, transfers: Vec<Transfer>) -> Batch {
        Batch {
            shared: Arc::clone(shared),
            state,
            transfers: Mutex::new(transfers),
            process: std::process::id(),
        }
    }

    /// Whether nothing of it is under way. What is then left to do, where reads were lost or what
    /// came was damaged, [`wait`](Batch::wait) does.
    pub fn is_done(&self) -> bool {
        self.process == std::process::id() && self.state.lock().left == 0
    }

    /// Waits until all rows are there; `false` where the time is over before.
    ///
    /// # Errors
    /// [`Error::Io`] where rows cannot be read, [`Error::Damaged`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        if self.process != std::process::id() {
            let process = self.process;
            return Err(penstock_io::Error::Forked { process }.into());
        }
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if until.is_none_or(|until| until > Instant::now() + LOOKOUT) {
                self.look_out();
            }
            let mut progress = self.state.lock();
            while progress.left > 0 {
                let changed = &self.state.changed;
                progress = match until {
                    None => changed
                        .wait(progress)
                        .unwrap_or_else(PoisonError::into_inner),
                    Some(until) => {
                        let left = until.saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            return Ok(false);
                        }
                        let waited = changed.wait_timeout(progress, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
            }
            let lost = std::mem::take(&mut progress.lost);
            let damaged = progress.damaged.clone();
            drop(progress);
            // Their first failure is told as often as it is asked for.
            let ended = self.transfers().clone();
            for transfer in ended {
                transfer.wait(None)?;
            }
            if let Some(damage) = damaged {
                return Err(damage.into());
            }
            if lost.is_empty() {
                return Ok(true);
            }
            // Once more: of what is damaged, whether it comes so from storage.
            let again = Shared::read_again(&self.shared, &self.state, lost)?;
            self.transfers().extend(again);
        }
    }

    /// Has a function called when nothing of it is under way, on a thread of the executor or right
    /// now. It must not wait.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) {
        let mut progress = self.state.lock();
        if progress.left > 0 {
            return progress.watchers.push(watcher);
        }
        drop(progress);
        watcher();
    }

    /// Waits for transfers where one is all there is: they know how to be fast.
    fn look_out(&self) {
        let first = self.transfers().first().cloned();
        if let Some(transfer) = first {
            // What becomes of it is asked for later.
            drop(transfer.wait(Some(LOOKOUT)));
        }
    }

    fn transfers(&self) -> MutexGuard<'_, Vec<Transfer>> {
        self.transfers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
