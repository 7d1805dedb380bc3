//! State shared by the threads of a process, which a forked child replaces.
//!
//! A child has a copy of its parent's memory and none of its threads: a lock that was held at the
//! fork stays locked forever. So a child never touches the parent's state.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value that lives as long as the process, made on first use.
pub(super) struct Cell<T: 'static> {
    current: AtomicPtr<T>,
}

impl<T: Default + Send + Sync> Cell<T> {
    pub(super) const fn new() -> Cell<T> {
        Cell {
            current: AtomicPtr::new(ptr::null_mut()),
        }
    }

    #[allow(unsafe_code)]
    pub(super) fn get(&self) -> &'static T {
        use Ordering::{AcqRel, Acquire};
        let mut current = self.current.load(Acquire);
        if current.is_null() {
            let made = Box::into_raw(Box::<T>::default());
            current = match self
                .current
                .compare_exchange(current, made, AcqRel, Acquire)
            {
                Ok(_) => made,
                Err(first) => {
                    // SAFETY: `made` is from the box above, and nothing else has seen it.
                    drop(unsafe { Box::from_raw(made) });
                    first
                }
            };
        }
        // SAFETY: the pointer comes from a box that is never freed once it is in `current`. The
        // value is only ever shared, between threads as well, since it is `Send + Sync`.
        unsafe { &*current }
    }

    /// Starts with a new value, in a forked child. The old value is left as it is.
    pub(super) fn renew(&self) {
        let made = Box::into_raw(Box::<T>::default());
        self.current.store(made, Ordering::Release);
    }

    /// Whether it is the value of this process, and not that of the parent.
    pub(super) fn is_current(&self, value: &'static T) -> bool {
        ptr::eq(value, self.current.load(Ordering::Acquire))
    }
}

/// No panic leaves a value behind these locks half changed, so a poisoned lock is used as it is.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
