//! A batch of rows under way.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::executor::Transfer;
use penstock_io::trace;

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
    /// What was asked of one table each.
    parts: Vec<Part>,
    process: u32,
}

struct Part {
    state: Arc<State>,
    again: Again,
    transfers: Mutex<Vec<Transfer>>,
}

impl Batch {
    pub(crate) fn new(state: Arc<State>, again: Again, transfers: Vec<Transfer>) -> Batch {
        let part = Part {
            state,
            again,
            transfers: Mutex::new(transfers),
        };
        Batch {
            parts: vec![part],
            process: std::process::id(),
        }
    }

    /// Those of several tables, which are waited for together.
    pub(crate) fn of_all(batches: Vec<Batch>) -> Batch {
        Batch {
            parts: batches.into_iter().flat_map(|one| one.parts).collect(),
            process: std::process::id(),
        }
    }

    /// Whether nothing of it is under way. What is then left to do, where reads were lost or what
    /// came was damaged, [`wait`](Batch::wait) does.
    pub fn is_done(&self) -> bool {
        self.process == std::process::id() && self.parts.iter().all(|one| one.state.is_ended())
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
        let _span = trace::span("wait for rows");
        let until = timeout.map(|timeout| Instant::now() + timeout);
        for part in &self.parts {
            if !part.wait(until)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all rows are there, so that [`wait`](Batch::wait) has nothing left to do.
    pub(crate) fn is_good(&self) -> bool {
        self.parts.iter().all(Part::is_good)
    }

    /// Gives it to a function when nothing of it is under way, on a thread of the executor or right now.
    /// That must not wait.
    pub(crate) fn hand_over(self, to: Box<dyn FnOnce(Batch) + Send>) {
        let states: Vec<Arc<State>> = self
            .parts
            .iter()
            .map(|one| Arc::clone(&one.state))
            .collect();
        let last = Arc::new(Last(Mutex::new(Some(Box::new(move || to(self))))));
        for state in states {
            let last = Arc::clone(&last);
            state.on_ended(Box::new(move || drop(last)));
        }
    }

    /// Has a function called when nothing of it is under way, on a thread of the executor or right
    /// now. It must not wait.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) {
        // Called by whichever of the parts ends last, when its own watcher goes.
        let last = Arc::new(Last(Mutex::new(Some(watcher))));
        for part in &self.parts {
            let last = Arc::clone(&last);
            part.state.on_ended(Box::new(move || drop(last)));
        }
    }
}

/// Calls a function when nobody has it any more.
struct Last(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for Last {
    fn drop(&mut self) {
        let watcher = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = watcher.take() {
            watcher();
        }
    }
}

impl Part {
    fn is_good(&self) -> bool {
        let has_come =
            |transfer: &Transfer| matches!(transfer.wait(Some(Duration::ZERO)), Ok(Some(_)));
        self.state.is_whole() && self.transfers().iter().all(has_come)
    }

    fn wait(&self, until: Option<Instant>) -> Result<bool> {
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
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}
