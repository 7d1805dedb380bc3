//! Numbers that identify the driver's objects. None is ever reused, so a handle that was destroyed,
//! or is from before a reset, is recognised as invalid; none is a valid pointer.

use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(0x1000);

/// A new number, above those with a meaning in `cuda.h` (the streams 0, 1 and 2).
pub(crate) fn next() -> u64 {
    NEXT.fetch_add(16, Ordering::Relaxed)
}
