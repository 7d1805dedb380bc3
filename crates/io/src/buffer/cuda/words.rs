//! Words that the host and kernels of a device share.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_cuda::Device;

use super::Mapped;
use crate::Result;

/// Numbers in memory of the host that kernels read and write, all 0 at first.
pub struct Words {
    memory: Mapped,
    count: usize,
}

impl Words {
    /// So many.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), and [`Error::Cuda`](crate::Error::Cuda) where
    /// they cannot be pinned.
    pub fn allocate(device: &Arc<Device>, count: usize) -> Result<Words> {
        Ok(Words {
            memory: Mapped::allocate(device, count * size_of::<AtomicU64>())?,
            count,
        })
    }

    /// Where kernels find the first one.
    pub fn device_address(&self) -> u64 {
        self.memory.device_address()
    }

    /// All of them; none in a fork of the process that made them, which does not have the memory.
    pub fn as_slice(&self) -> &[AtomicU64] {
        if !self.memory.is_ours() {
            return &[];
        }
        let start = self.memory.as_non_null().cast::<AtomicU64>();
        // SAFETY: the memory has room for `count`, is initialised, aligned to pages, lives as long as `self`,
        // and is given out in no other way; kernels use it with atomic loads and stores alone.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.count) }
    }
}

// SAFETY: words are reached atomically alone.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}
