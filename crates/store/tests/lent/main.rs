//! Saves that read the memory of the caller while it may change.

#[path = "../common/mod.rs"]
mod common;
mod watched;
mod zero_copy;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A process watches for one save at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
