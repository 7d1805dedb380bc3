//! Pages of new memory, populated by workers that have nothing else to do.

use std::sync::Mutex;

use penstock_io::buffer::MemoryHandle;
use penstock_io::trace;

/// Approximate amount of memory populated at a time: two huge pages, a fraction of a millisecond.
const POPULATED_BYTES: usize = 4 << 20;

/// New memory whose pages are populated while the device is busy: a page fault during submission
/// would leave the device idle.
pub(super) struct Pages<'a> {
    handles: &'a [MemoryHandle],
    /// Segment and offset of the first byte that no worker has claimed.
    next: Mutex<(usize, usize)>,
}

impl<'a> Pages<'a> {
    pub(super) fn of(handles: &'a [MemoryHandle]) -> Pages<'a> {
        Pages {
            handles,
            next: Mutex::new((0, 0)),
        }
    }

    /// Populates some pages; returns false if none are left.
    pub(super) fn populate_next(&self) -> bool {
        let mut next = self.next.lock().expect("no worker panics with the lock");
        let (segment, start) = *next;
        let Some(handle) = self.handles.get(segment) else {
            return false;
        };
        // Cut at huge page boundaries, so that no two workers make the kernel clear the same one.
        let address = handle.address() + start;
        let step = (address + 1).next_multiple_of(POPULATED_BYTES) - address;
        let end = (start + step).min(handle.len());
        *next = if end == handle.len() {
            (segment + 1, 0)
        } else {
            (segment, end)
        };
        drop(next);
        let _span = trace::span("populate");
        handle.populate(start..end);
        true
    }
}
