//! Pinned host memory that kernels access.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use penstock_cuda::{Device, Registration};

use crate::buffer::Memory;
use crate::{Error, Result};

/// Zeroed, page-aligned host memory that kernels of a device read and write. Forks do not inherit
/// it.
pub(in crate::buffer) struct Mapped {
    device_address: u64,
    /// Dropped before the memory is.
    _registration: Registration,
    memory: Memory,
}

impl Mapped {
    pub(in crate::buffer) fn allocate(device: &Arc<Device>, bytes: usize) -> Result<Mapped> {
        let memory = Memory::allocate(bytes.max(1))?;
        let kept = memory.keep_from_forks();
        kept.map_err(|source| Error::OutOfMemory { bytes, source })?;
        memory.populate(0..memory.len());
        // SAFETY: the pages are this value's, which drops the registration first.
        let registration = unsafe { Registration::mapped(device, memory.address(), memory.len()) }?;
        Ok(Mapped {
            device_address: registration.device_address()?,
            _registration: registration,
            memory,
        })
    }

    /// The first byte's address for kernels.
    pub(in crate::buffer) fn device_address(&self) -> u64 {
        self.device_address
    }

    pub(in crate::buffer) fn as_non_null(&self) -> NonNull<u8> {
        self.memory.as_non_null()
    }

    pub(in crate::buffer) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether this process has the memory; a fork of it does not.
    pub(in crate::buffer) fn is_ours(&self) -> bool {
        self.memory.is_ours()
    }
}
