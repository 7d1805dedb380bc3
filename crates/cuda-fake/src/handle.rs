//! Numbers that stand for what the driver made. None is ever given twice, so a handle that was destroyed, or
//! is from before a reset, is known to be wrong; none can be read through.

use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(0x1000);

/// A new number, above those that `cuda.h` gives a meaning of their own (the streams 0, 1 and 2).
pub(crate) fn next() -> u64 {
    NEXT.fetch_add(16, Ordering::Relaxed)
}
