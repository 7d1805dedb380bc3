//! Memory that a thread backs with pages while its owner does something else.

use std::sync::{Arc, Weak};
use std::thread;

use super::Memory;
use crate::Result;

/// Bytes backed by one call; in between, the thread notices whether the memory was dropped.
const STEP_BYTES: usize = 16 << 20;

/// Maps `len` bytes, and starts a thread that backs the first `early_bytes` of them with pages, in
/// order. The others get their pages on first use; so do all where no thread can be started.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) when the kernel refuses the mapping.
pub fn reserve(len: usize, early_bytes: usize) -> Result<Arc<Memory>> {
    let memory = Arc::new(Memory::allocate(len)?);
    let early_bytes = early_bytes.min(memory.len());
    if early_bytes > 0 {
        let held = Arc::downgrade(&memory);
        let thread = thread::Builder::new().name("penstock-pages".to_owned());
        let _ = thread.spawn(move || populate(&held, early_bytes));
    }
    Ok(memory)
}

/// Ends when all pages are in place, or when the memory was dropped.
fn populate(held: &Weak<Memory>, early_bytes: usize) {
    for start in (0..early_bytes).step_by(STEP_BYTES) {
        let Some(memory) = held.upgrade() else {
            return;
        };
        memory.populate(start..early_bytes.min(start + STEP_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn what_is_written_before_the_pages_come_stays() {
        let len = 2 * STEP_BYTES + 1;
        let memory = reserve(len, usize::MAX).unwrap();
        assert_eq!(memory.len(), len);
        assert!(memory.as_slice().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn nobody_keeps_it_for_its_pages() {
        let memory = reserve(64 * STEP_BYTES, usize::MAX).unwrap();
        let held = Arc::downgrade(&memory);
        drop(memory);
        let begun = Instant::now();
        while held.strong_count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            thread::yield_now();
        }
    }

    #[test]
    fn nothing_is_memory_too() {
        assert!(reserve(0, 1).unwrap().is_empty());
    }
}
