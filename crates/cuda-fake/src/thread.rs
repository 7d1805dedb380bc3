//! The driver's state for each thread of the caller: its stack of contexts, its capture mode, and
//! whether it is inside a host function.
//!
//! A reset clears all of it: threads notice by a counter.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`, in which a thread starts.
pub(crate) const MODE_GLOBAL: i32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const MODE_RELAXED: i32 = 2;

static RESETS: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicU64 = AtomicU64::new(1);

struct Thread {
    id: u64,
    resets: Cell<u64>,
    contexts: RefCell<Vec<u64>>,
    capture_mode: Cell<i32>,
    in_host_function: Cell<bool>,
}

thread_local! {
    static THREAD: Thread = Thread {
        id: THREADS.fetch_add(1, Ordering::Relaxed),
        resets: Cell::new(RESETS.load(Ordering::Acquire)),
        contexts: RefCell::new(Vec::new()),
        capture_mode: Cell::new(MODE_GLOBAL),
        in_host_function: Cell::new(false),
    };
}

fn with<T>(body: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(|thread| {
        let resets = RESETS.load(Ordering::Acquire);
        if thread.resets.replace(resets) != resets {
            thread.contexts.borrow_mut().clear();
            thread.capture_mode.set(MODE_GLOBAL);
        }
        body(thread)
    })
}

/// Clears the state of all threads.
pub(crate) fn reset() {
    RESETS.fetch_add(1, Ordering::AcqRel);
}

pub(crate) fn id() -> u64 {
    with(|thread| thread.id)
}

pub(crate) fn current_context() -> Option<u64> {
    with(|thread| thread.contexts.borrow().last().copied())
}

pub(crate) fn push_context(context: u64) {
    with(|thread| thread.contexts.borrow_mut().push(context));
}

pub(crate) fn pop_context() -> Option<u64> {
    with(|thread| thread.contexts.borrow_mut().pop())
}

pub(crate) fn capture_mode() -> i32 {
    with(|thread| thread.capture_mode.get())
}

/// Sets this thread's capture mode, and returns the one before.
pub(crate) fn exchange_capture_mode(mode: i32) -> i32 {
    with(|thread| thread.capture_mode.replace(mode))
}

pub(crate) fn in_host_function() -> bool {
    with(|thread| thread.in_host_function.get())
}

/// Runs a host function, which may not call the driver.
pub(crate) fn host_function(body: impl FnOnce()) {
    with(|thread| thread.in_host_function.set(true));
    body();
    with(|thread| thread.in_host_function.set(false));
}
