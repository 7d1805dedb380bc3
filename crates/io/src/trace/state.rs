//! Everything that traces share, in one place that a forked child can leave behind.
//!
//! A child has a copy of the memory of its parent and none of its threads: a lock that one of them
//! had at the fork stays locked in it for ever. So a child never touches what was there before.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::meter::Meter;
use super::record::Buffer;
use super::row::Rows;
use super::sink::Running;

/// What traces share; it lives as long as the process.
#[derive(Default)]
pub(super) struct State {
    pub(super) running: Mutex<Option<Running>>,
    /// How many traces have begun: which one a request belongs to.
    pub(super) traces: AtomicU64,
    /// Of every thread, those that have ended included until they are drained.
    pub(super) buffers: Mutex<Vec<Buffer>>,
    /// Records in all buffers.
    pub(super) records: AtomicUsize,
    /// Records for which there was no room.
    pub(super) lost: AtomicU64,
    pub(super) meter: Mutex<Meter>,
    pub(super) rows: Mutex<Rows>,
}

static CURRENT: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());

#[allow(unsafe_code)]
pub(super) fn state() -> &'static State {
    use std::sync::atomic::Ordering::{AcqRel, Acquire};
    let mut current = CURRENT.load(Acquire);
    if current.is_null() {
        let made = Box::into_raw(Box::<State>::default());
        current = match CURRENT.compare_exchange(current, made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(first) => {
                // SAFETY: `made` is from the box above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                first
            }
        };
    }
    // SAFETY: the pointer comes from a box that is never freed once it is in `CURRENT`, and what it
    // points to is only ever shared.
    unsafe { &*current }
}

/// Starts from nothing, in a child that was forked. What was there before is left as it is.
pub(super) fn renew() {
    let made = Box::into_raw(Box::<State>::default());
    CURRENT.store(made, std::sync::atomic::Ordering::Release);
}

/// Whether it is the state of this process and not that of the one it is a fork of.
pub(super) fn is_current(state: &'static State) -> bool {
    ptr::eq(state, CURRENT.load(std::sync::atomic::Ordering::Acquire))
}

/// No panic can leave what is behind these locks half changed, so a poisoned one is as good as any.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
