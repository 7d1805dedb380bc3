//! A batch of rows that is being gathered.

pub(crate) mod state;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::buffer::Slots;
use penstock_io::executor::Transfer;
use penstock_io::trace;

use self::state::{BatchState, Place};
use crate::error::Result;

/// How long a waiting thread spins for a transfer before it sleeps.
const SPIN_MAX: Duration = Duration::from_micros(100);

/// Reads the rows of these places a second time.
pub(crate) type Again = Box<dyn Fn(Vec<Place>) -> Result<Option<Transfer>> + Send + Sync>;

/// Rows that are being gathered. Dropping the batch does not cancel it; its memory is released
/// when it ends.
#[must_use = "rows are there once they were waited for"]
pub struct Batch {
    /// One part for each table.
    parts: Vec<Part>,
    process: u32,
}

struct Part {
    state: Arc<BatchState>,
    again: Again,
    /// Those of the cache that rows are read into.
    slots: Option<Arc<Slots>>,
    transfers: Mutex<Vec<Transfer>>,
}

impl Batch {
    pub(crate) fn new(
        state: Arc<BatchState>,
        again: Again,
        slots: Option<Arc<Slots>>,
        transfers: Vec<Transfer>,
    ) -> Batch {
        let part = Part {
            state,
            again,
            slots,
            transfers: Mutex::new(transfers),
        };
        Batch {
            parts: vec![part],
            process: penstock_io::process::id(),
        }
    }

    /// Combines batches of several tables, to wait for them together.
    pub(crate) fn of_all(batches: Vec<Batch>) -> Batch {
        Batch {
            parts: batches.into_iter().flat_map(|one| one.parts).collect(),
            process: penstock_io::process::id(),
        }
    }

    /// Whether no read of the batch is in flight. [`wait`](Batch::wait) still has to repeat lost
    /// and damaged reads.
    pub fn is_done(&self) -> bool {
        self.process == penstock_io::process::id()
            && self.parts.iter().all(|one| one.state.is_ended())
    }

    /// Waits until all rows have arrived; `false` on timeout.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if rows cannot be read,
    /// [`Error::Damaged`](crate::Error::Damaged).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        if self.process != penstock_io::process::id() {
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

    /// Whether all rows have arrived, so that [`wait`](Batch::wait) has nothing left to do.
    pub fn is_good(&self) -> bool {
        self.parts.iter().all(Part::is_good)
    }

    /// Passes the batch to a function once no read is in flight, on a thread of the executor or at
    /// once. The function must not block.
    pub(crate) fn hand_over(self, to: Box<dyn FnOnce(Batch) + Send>) {
        let states: Vec<Arc<BatchState>> = self
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

    /// Calls a function once no read of the batch is in flight, on a thread of the executor or at
    /// once. The function must not block.
    pub fn on_done(&self, watcher: Box<dyn FnOnce() + Send>) {
        // The part that ends last drops the last reference, which calls the function.
        let last = Arc::new(Last(Mutex::new(Some(watcher))));
        for part in &self.parts {
            let last = Arc::clone(&last);
            part.state.on_ended(Box::new(move || drop(last)));
        }
    }
}

/// Calls a function when its last reference is dropped.
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
        if let Some(slots) = &self.slots {
            let is_waited_for = || until.is_none_or(|until| until > Instant::now());
            while !self.state.is_ended() && is_waited_for() && slots.populate_next() {}
        }
        loop {
            if until.is_none_or(|until| until > Instant::now() + SPIN_MAX) {
                self.spin_wait();
            }
            let Some((lost, damaged)) = self.state.wait(until) else {
                return Ok(false);
            };
            // A failed transfer returns its error on every call.
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
            // One retry; it shows whether the bytes in storage are damaged too.
            let again = (self.again)(lost)?;
            self.transfers().extend(again);
        }
    }

    /// Spins for a single transfer, whose own wait is fast.
    fn spin_wait(&self) {
        let first = self.transfers().first().cloned();
        if let Some(transfer) = first {
            // Its result is read later.
            drop(transfer.wait(Some(SPIN_MAX)));
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const MIB: usize = 1 << 20;

    fn batch(state: &Arc<BatchState>, slots: &Arc<Slots>) -> Batch {
        let again = Box::new(|_| Ok(None));
        Batch::new(
            Arc::clone(state),
            again,
            Some(Arc::clone(slots)),
            Vec::new(),
        )
    }

    #[test]
    fn a_thread_that_waits_populates_slots() {
        let slots = Slots::allocate(8, MIB).unwrap();
        drop(slots.claim(3));
        let state = Arc::new(BatchState::default());
        assert!(batch(&state, &slots).wait(None).unwrap());
        assert_eq!(slots.populated_bytes(), 0, "nothing is waited for");
        state.expect(1);
        let waited_for = batch(&state, &slots);
        assert!(!waited_for.wait(Some(Duration::ZERO)).unwrap());
        assert_eq!(slots.populated_bytes(), 0, "there is no time");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| waited_for.wait(None).unwrap());
            while slots.populated_bytes() < 8 * MIB {
                thread::yield_now();
            }
            state.end();
            assert!(waiting.join().unwrap());
        });
    }
}
