//! Memory of the host that the driver allocates.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// Memory of the host that the driver has allocated and pinned for all devices, as `cudaHostAlloc` does. What
/// is kept is better pinned by a [`Registration`](crate::Registration): this is what that is measured against.
#[derive(Debug)]
pub struct HostMemory {
    device: Arc<Device>,
    address: usize,
    len: usize,
}

impl HostMemory {
    /// So many bytes; what they hold is not said.
    ///
    /// # Errors
    /// As [`Registration::new`](crate::Registration::new).
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<HostMemory> {
        assert!(len > 0, "an allocation of nothing");
        let entered = device.enter()?;
        let mut start = ptr::null_mut();
        // SAFETY: it writes one pointer; the drop frees what it is to.
        unsafe { entered.host_alloc(&raw mut start, len, raw::HOST_ALLOC_PORTABLE) }?;
        Ok(HostMemory {
            device: Arc::clone(device),
            address: start.expose_provenance(),
            len,
        })
    }

    /// Where it begins, for the host and for devices.
    pub fn address(&self) -> usize {
        self.address
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: see [`HostMemory::allocate`].
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // A fork cannot.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was allocated by this value. There is nobody to tell what goes wrong.
            let _ = unsafe { entered.host_free(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}
