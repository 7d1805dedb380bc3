//! Pinned host memory, which devices access directly.
#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// A claim that keeps host memory pinned: devices copy to it and from it while the host does other
/// work. Dropping it unpins the memory.
#[derive(Debug)]
pub struct Registration {
    device: Arc<Device>,
    address: usize,
}

/// Bytes pinned so far.
static TOTAL_BYTES: AtomicU64 = AtomicU64::new(0);

impl Registration {
    /// Bytes that this process has pinned since it started, including those unpinned again.
    pub fn total_bytes() -> u64 {
        TOTAL_BYTES.load(Ordering::Relaxed)
    }

    /// Pins memory for all devices. The cost grows with the size, and other threads that pin wait
    /// meanwhile, so it is meant for long-lived memory.
    ///
    /// # Errors
    /// An error that [is out of memory](crate::Error::is_out_of_memory) where the system refuses to
    /// pin more, one that [is not permitted](crate::Error::is_not_permitted), or another one of the
    /// driver.
    ///
    /// # Safety
    /// The pages from `address` on are the caller's and stay mapped, in this process, until this is
    /// dropped.
    pub unsafe fn new(device: &Arc<Device>, address: usize, bytes: usize) -> Result<Registration> {
        // SAFETY: the caller's promise is passed on.
        unsafe { Registration::with(device, address, bytes, raw::REGISTER_PORTABLE) }
    }

    /// As [`Registration::new`], for memory that kernels of the device read and write as well. It
    /// uses some memory of the device.
    ///
    /// # Safety
    /// As [`Registration::new`].
    pub unsafe fn mapped(
        device: &Arc<Device>,
        address: usize,
        bytes: usize,
    ) -> Result<Registration> {
        let flags = raw::REGISTER_PORTABLE | raw::REGISTER_DEVICEMAP;
        // SAFETY: the caller's promise is passed on.
        unsafe { Registration::with(device, address, bytes, flags) }
    }

    /// # Safety
    /// As [`Registration::new`].
    unsafe fn with(
        device: &Arc<Device>,
        address: usize,
        bytes: usize,
        flags: c_uint,
    ) -> Result<Registration> {
        let entered = device.enter()?;
        let start: *mut c_void = ptr::with_exposed_provenance_mut(address);
        // SAFETY: the pages are mapped, and stay mapped.
        unsafe { entered.host_register(start, bytes, flags) }?;
        TOTAL_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Registration {
            device: Arc::clone(device),
            address,
        })
    }

    /// The address of the memory for kernels, if they can access it.
    ///
    /// # Errors
    /// The driver's error, notably for memory that is not mapped.
    pub fn device_address(&self) -> Result<u64> {
        let entered = self.device.enter()?;
        let host: *mut c_void = ptr::with_exposed_provenance_mut(self.address);
        let mut address = 0;
        // SAFETY: it writes one number; the memory is registered.
        unsafe { entered.host_device_pointer(&raw mut address, host, 0) }?;
        Ok(address)
    }

    /// Whether it was made by this device; all other devices can use it as well.
    pub fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A fork cannot call the driver, and does not have the pages either.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has registered it, and it is still mapped. No caller could react
            // to an error.
            let _ =
                unsafe { entered.host_unregister(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}
