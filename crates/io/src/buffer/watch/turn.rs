//! Allows one watch at a time.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The right of a process's one watch: protecting pages for a second one would erase the kernel's
/// records for the first.
pub(super) struct Turn {
    process: u32,
}

static TURN: AtomicU32 = AtomicU32::new(0);

impl Turn {
    pub(super) fn take() -> Option<Turn> {
        let process = process::id();
        let holder = TURN.load(Ordering::Relaxed);
        // A watch that a fork has inherited belongs to its parent.
        let is_free = holder != process;
        let swapped = is_free
            && TURN
                .compare_exchange(holder, process, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        swapped.then_some(Turn { process })
    }

    pub(super) fn is_ours(&self) -> bool {
        self.process == process::id()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.is_ours() {
            TURN.store(0, Ordering::Release);
        }
    }
}
