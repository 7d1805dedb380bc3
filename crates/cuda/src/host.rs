//! Host memory that the driver allocates.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// Host memory that the driver allocates and pins for all devices, as `cudaHostAlloc` does.
/// Long-lived memory is better pinned by a [`Registration`](crate::Registration), which is measured
/// against this.
#[derive(Debug)]
pub struct HostMemory {
    device: Arc<Device>,
    address: usize,
    len: usize,
}

impl HostMemory {
    /// Allocates `len` bytes with undefined content.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<HostMemory> {
        assert!(len > 0, "an allocation of nothing");
        let entered = device.enter()?;
        let mut start = ptr::null_mut();
        // SAFETY: it writes one pointer; the drop frees the memory.
        unsafe { entered.host_alloc(&raw mut start, len, raw::HOST_ALLOC_PORTABLE) }?;
        Ok(HostMemory {
            device: Arc::clone(device),
            address: start.expose_provenance(),
            len,
        })
    }

    /// The address of the first byte, for the host and for devices.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: see [`HostMemory::allocate`].
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // A fork cannot call the driver.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has allocated it. No caller could react to an error.
            let _ = unsafe { entered.host_free(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}
