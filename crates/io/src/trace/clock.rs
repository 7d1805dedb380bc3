//! The switch of the trace, and its clock.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a trace runs.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether a trace runs: for callers to whom even preparing a record is work.
pub fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Switches recording on or off for all threads.
pub(super) fn turn(on: bool) {
    IS_ON.store(on, Ordering::Relaxed);
}

/// Nanoseconds of the monotonic clock, for the times of spans.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
