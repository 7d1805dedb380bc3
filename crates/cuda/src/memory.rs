//! Memory of a device.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// Memory of a device, freed when dropped, once all that the device has queued is done.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: raw::Address,
    len: usize,
}

impl DeviceMemory {
    /// So many bytes; what they hold is not said.
    ///
    /// # Errors
    /// One that [is out of memory](crate::Error::is_out_of_memory), and what else the driver says.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<DeviceMemory> {
        assert!(len > 0, "an allocation of nothing");
        let entered = device.enter()?;
        let mut address = 0;
        // SAFETY: it writes one number; the drop frees what it is of.
        unsafe { entered.memory_alloc(&raw mut address, len) }?;
        Ok(DeviceMemory {
            device: Arc::clone(device),
            address,
            len,
        })
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where it begins, for the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: see [`DeviceMemory::allocate`].
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A fork cannot.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was allocated by this value. There is nobody to tell what goes wrong.
            let _ = unsafe { entered.memory_free(self.address) };
        }
    }
}
