//! Device memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// Device memory; its drop frees it once all queued work of the device is done.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: raw::Address,
    len: usize,
}

impl DeviceMemory {
    /// Allocates `len` bytes with undefined content.
    ///
    /// # Errors
    /// An error that [is out of memory](crate::Error::is_out_of_memory), or another one of the
    /// driver.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<DeviceMemory> {
        assert!(len > 0, "an allocation of nothing");
        let entered = device.enter()?;
        let mut address = 0;
        // SAFETY: it writes one number; the drop frees the memory.
        unsafe { entered.memory_alloc(&raw mut address, len) }?;
        Ok(DeviceMemory {
            device: Arc::clone(device),
            address,
            len,
        })
    }

    /// The device that has the memory.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: see [`DeviceMemory::allocate`].
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A fork cannot call the driver.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has allocated it. No caller could react to an error.
            let _ = unsafe { entered.memory_free(self.address) };
        }
    }
}
