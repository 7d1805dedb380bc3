//! A batch of rows under way.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::executor::Transfer;

use crate::error::Result;
use crate::state::{Place, State};

/// For so long a transfer looks out for its end.
const LOOKOUT: Duration = Duration::from_micros(100);

/// Reads places once more.
pub(crate) type Again = Box<dyn Fn(Vec<Place>) -> Result<Option<Transfer>> + Send + Sync>;

/// Rows that are being gathered. It goes on when this is dropped; the memory is let go of at the
/// end.
#[must_use = "rows are there once they were waited for"]
pub struct Batch {
    state: Arc<State>,
    again: Again,
    transfers: Mutex<Vec<Transfer>>,
    process: u32,
}

impl Batch {
    pub(crate) fn new(state: Arc<State>, again: Again, transfers: Vec<Transfer>) -> Batch {
        Batch {
            state,
            again,
            transfers: Mutex::new(transfers),
            process: std::process::id(),
        }
    }

    /// Whether nothing of it is under way. What is then left to do, where reads were lost or what
    /// came was damaged, [`wait`](Batch::wait) does.
    pub fn is_done(&self) -> bool {
        self.process == std::process::id() && self.state.is_ended()
    }

    /// Waits until all rows are there; `false` where the time is over before.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) where rows cannot be read,
    /// [`Error::Damaged`](crate::Error::Damaged).
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
            let Some((lost, damaged)) = self.state.wait(until) else {
                return Ok(false);
            };
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
            let again = (self.again)(lost)?;
            self.transfers().extend(again);
        }
    }

    /// Has a function called when nothing of it is under way, on a thread of the executor or right
    /// now. It must not wait.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) {
        self.state.on_ended(watcher);
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
