//! Memory and files that the kernel has prepared for a ring.

use std::ops::Range;
use std::sync::Arc;

use rustix::fd::RawFd;

use crate::buffer::Owner;
use crate::file::File;

/// The most bytes of one registered buffer, and the most such buffers (`io_uring_register(2)`).
pub(super) const REGISTERED_BYTES_MAX: usize = 1 << 30;
pub(super) const REGISTERED_BUFFERS_MAX: usize = 1 << 14;

/// What the kernel has prepared once and for all.
#[derive(Default)]
pub(super) struct Registered {
    /// Addresses, ascending; the index is the kernel's.
    pub(super) buffers: Vec<Range<usize>>,
    /// Descriptors, likewise.
    pub(super) files: Vec<RawFd>,
    /// A descriptor or an address that was freed could be another's.
    pub(super) _kept: (Vec<Owner>, Vec<Arc<File>>),
}

impl Registered {
    pub(super) fn buffer(&self, address: usize, len: usize) -> Option<u16> {
        let after = self.buffers.partition_point(|range| range.start <= address);
        let index = after.checked_sub(1)?;
        let is_inside = address + len <= self.buffers[index].end;
        is_inside.then(|| u16::try_from(index).expect("bounded by REGISTERED_BUFFERS_MAX"))
    }

    pub(super) fn file(&self, fd: RawFd) -> Option<i32> {
        let found = self.files.binary_search(&fd).ok()?;
        Some(i32::try_from(found).expect("there are fewer files than descriptors"))
    }
}
