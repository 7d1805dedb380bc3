//! A result that threads wait for.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

type Watcher = Box<dyn FnOnce() + Send>;

/// A value that is set once, for all who wait for it.
pub struct Outcome<T> {
    value: OnceLock<T>,
    watchers: Mutex<Vec<Watcher>>,
    changed: Condvar,
}

impl<T> Default for Outcome<T> {
    fn default() -> Outcome<T> {
        Outcome {
            value: OnceLock::new(),
            watchers: Mutex::default(),
            changed: Condvar::new(),
        }
    }
}

impl<T> Outcome<T> {
    /// Sets the value; only the first call has an effect.
    pub fn resolve(&self, value: T) {
        let mut watching = self.lock();
        if self.value.set(value).is_err() {
            return;
        }
        let watchers = std::mem::take(&mut *watching);
        drop(watching);
        self.changed.notify_all();
        watchers.into_iter().for_each(|watcher| watcher());
    }

    /// The value, if it is set.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// Waits for the value; returns `None` after the timeout.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<&T> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut watching = self.lock();
        while self.get().is_none() {
            watching = match until {
                None => self
                    .changed
                    .wait(watching)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let waited = self.changed.wait_timeout(watching, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(watching);
        self.get()
    }

    /// Calls `watcher` when the value is set, on the setting thread, or at once if it is set. It
    /// must not wait.
    pub fn on_resolved(&self, watcher: Watcher) {
        let mut watching = self.lock();
        if self.get().is_none() {
            return watching.push(watcher);
        }
        drop(watching);
        watcher();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watcher>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: fmt::Debug> fmt::Debug for Outcome<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}
