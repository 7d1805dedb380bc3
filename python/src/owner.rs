//! Python objects that the engine keeps alive, and their release.
//!
//! An engine thread drops the owner of the memory that it transferred, without the GIL. PyO3 puts
//! such references on a list behind a lock, and a fork at that moment creates a child in which the
//! lock is never released: its first thread that drops a reference waits forever. So this module
//! has a lock-free list, emptied by threads that hold the GIL.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::prelude::*;

/// A reference that any thread may drop at any time.
pub(crate) struct Owner(Option<Py<PyAny>>);

/// A dropped reference, linked to the one dropped before it.
struct Left {
    _object: Py<PyAny>,
    before: *mut Left,
}

/// The reference dropped last.
static LAST: AtomicPtr<Left> = AtomicPtr::new(ptr::null_mut());

impl Owner {
    /// The owner of a memory region, boxed because the engine holds owners of any type.
    pub(crate) fn of(object: Py<PyAny>) -> Box<Owner> {
        Box::new(Owner(Some(object)))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        let left = Box::into_raw(Box::new(Left {
            _object: object,
            before: ptr::null_mut(),
        }));
        let mut last = LAST.load(Ordering::Relaxed);
        loop {
            // SAFETY: `left` is from the box above, and no other thread has seen it yet.
            unsafe { (*left).before = last };
            match LAST.compare_exchange_weak(last, left, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => last = now,
            }
        }
    }
}

/// Releases the references dropped so far.
pub(crate) fn release_dropped(_: Python<'_>) {
    if LAST.load(Ordering::Relaxed).is_null() {
        return;
    }
    let mut last = LAST.swap(ptr::null_mut(), Ordering::Acquire);
    while !last.is_null() {
        // SAFETY: `last` is from a box, and the thread that swapped the list out is its only
        // owner.
        last = unsafe { Box::from_raw(last) }.before;
    }
}

/// Runs `work` without the GIL, then releases the references dropped meanwhile.
#[expect(clippy::disallowed_methods, reason = "all others do it by this one")]
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let value = py.detach(work);
    release_dropped(py);
    value
}
