//! Objects of Python that the engine holds on to, and who lets go of them.
//!
//! A thread of the engine drops what it moved bytes for, and has no GIL. PyO3 puts such references on a
//! list behind a lock, and a fork at that moment is a child in which the lock is never released: the first
//! of its threads that drops one waits for ever. So the list is one of our own, without a lock, and a thread
//! that has the GIL takes from it.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::prelude::*;

/// A reference that any thread may drop at any time.
pub(crate) struct Owner(Option<Py<PyAny>>);

/// One of those that were dropped, and the one before it.
struct Left {
    _object: Py<PyAny>,
    before: *mut Left,
}

/// The last of them.
static LAST: AtomicPtr<Left> = AtomicPtr::new(ptr::null_mut());

impl Owner {
    /// That of memory, which the engine holds in a box whatever it is.
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
            // SAFETY: it is from the box above, and nobody else has seen it yet.
            unsafe { (*left).before = last };
            match LAST.compare_exchange_weak(last, left, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => last = now,
            }
        }
    }
}

/// Lets go of what was dropped until now.
pub(crate) fn let_go(_: Python<'_>) {
    if LAST.load(Ordering::Relaxed).is_null() {
        return;
    }
    let mut last = LAST.swap(ptr::null_mut(), Ordering::Acquire);
    while !last.is_null() {
        // SAFETY: it is from a box, and whoever has taken the list has it alone.
        last = unsafe { Box::from_raw(last) }.before;
    }
}

/// Runs `work` without the GIL, and lets go of what was dropped meanwhile.
#[expect(clippy::disallowed_methods, reason = "all others do it by this one")]
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let value = py.detach(work);
    let_go(py);
    value
}
