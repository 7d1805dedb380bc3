//! Memory and files registered with a ring.

use std::ops::Range;
use std::sync::Arc;

use rustix::fd::RawFd;

use crate::buffer::Owner;
use crate::file::File;

/// The most bytes of one registered buffer, and the most such buffers (`io_uring_register(2)`).
pub(super) const REGISTERED_BYTES_MAX: usize = 1 << 30;
pub(super) const REGISTERED_BUFFERS_MAX: usize = 1 << 14;

/// Memory and files that the kernel has prepared for all operations.
#[derive(Default)]
pub(super) struct Registered {
    /// Address ranges, ascending; the kernel uses the same indices.
    pub(super) buffers: Vec<Range<usize>>,
    /// Descriptors, with the kernel's indices.
    pub(super) files: Vec<RawFd>,
    /// Kept alive, as a freed descriptor or address could be reused for another file or buffer.
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
