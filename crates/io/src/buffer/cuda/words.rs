//! Counters that the host and kernels of a device share.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_cuda::Device;

use super::Mapped;
use crate::Result;

/// 64-bit numbers in host memory that kernels read and write, all zero at first.
pub struct Words {
    memory: Mapped,
    count: usize,
}

impl Words {
    /// Allocates `count` numbers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), and [`Error::Cuda`](crate::Error::Cuda)
    /// where they cannot be pinned.
    pub fn allocate(device: &Arc<Device>, count: usize) -> Result<Words> {
        Ok(Words {
            memory: Mapped::allocate(device, count * size_of::<AtomicU64>())?,
            count,
        })
    }

    /// The first number's address for kernels.
    pub fn device_address(&self) -> u64 {
        self.memory.device_address()
    }

    /// All numbers; empty in a fork, which does not inherit the memory.
    pub fn as_slice(&self) -> &[AtomicU64] {
        if !self.memory.is_ours() {
            return &[];
        }
        let start = self.memory.as_non_null().cast::<AtomicU64>();
        // SAFETY: the memory has room for `count`, is initialised, page aligned, lives as long as
        // `self`, and is given out in no other way; kernels only use atomic loads and stores on it.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.count) }
    }
}

// SAFETY: the numbers are only accessed atomically.
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
