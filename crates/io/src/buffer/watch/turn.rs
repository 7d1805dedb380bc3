//! Whose turn it is to watch.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The right of one watch of a process: the protection by a second one would wipe out what the
/// kernel knows for the first.
pub(super) struct Turn {
    process: u32,
}

static TURN: AtomicU32 = AtomicU32::new(0);

impl Turn {
    pub(super) fn take() -> Option<Turn> {
        let process = process::id();
        let holder = TURN.load(Ordering::Relaxed);
        // Whatever watch a fork has a copy of is its parent's.
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
