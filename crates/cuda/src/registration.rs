//! Memory of the host that devices reach by themselves.
#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// A claim on memory of the host that is pinned: devices copy to it and from it while the host does
/// something else. Dropped, it is plain memory again.
#[derive(Debug)]
pub struct Registration {
    device: Arc<Device>,
    address: usize,
}

/// All that was ever pinned.
static TOTAL_BYTES: AtomicU64 = AtomicU64::new(0);

impl Registration {
    /// Bytes that this process has pinned since it began, those among them that it has given back.
    pub fn total_bytes() -> u64 {
        TOTAL_BYTES.load(Ordering::Relaxed)
    }

    /// Pins memory for all devices. It costs the more the more memory there is, and others that pin wait
    /// meanwhile: it is for memory that is kept.
    ///
    /// # Errors
    /// One that [is out of memory](crate::Error::is_out_of_memory) where the system lets no more be
    /// pinned, one that [is not permitted](crate::Error::is_not_permitted), and what else the driver says.
    ///
    /// # Safety
    /// The pages from `address` on are the caller's and stay mapped, in this process, until this is
    /// dropped.
    pub unsafe fn new(device: &Arc<Device>, address: usize, bytes: usize) -> Result<Registration> {
        // SAFETY: the caller's promise is handed on.
        unsafe { Registration::with(device, address, bytes, raw::REGISTER_PORTABLE) }
    }

    /// As [`Registration::new`], of memory that kernels of the device read and write as well. It takes some
    /// memory of the device.
    ///
    /// # Errors
    /// As [`Registration::new`].
    ///
    /// # Safety
    /// As [`Registration::new`].
    pub unsafe fn mapped(
        device: &Arc<Device>,
        address: usize,
        bytes: usize,
    ) -> Result<Registration> {
        let flags = raw::REGISTER_PORTABLE | raw::REGISTER_DEVICEMAP;
        // SAFETY: the caller's promise is handed on.
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
        // SAFETY: the pages are mapped, and stay so.
        unsafe { entered.host_register(start, bytes, flags) }?;
        TOTAL_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Registration {
            device: Arc::clone(device),
            address,
        })
    }

    /// Where kernels find the memory, if they reach it at all.
    ///
    /// # Errors
    /// What the driver says, notably of memory that is not mapped.
    pub fn device_address(&self) -> Result<u64> {
        let entered = self.device.enter()?;
        let host: *mut c_void = ptr::with_exposed_provenance_mut(self.address);
        let mut address = 0;
        // SAFETY: it writes one number; the memory is registered.
        unsafe { entered.host_device_pointer(&raw mut address, host, 0) }?;
        Ok(address)
    }

    /// Whether it was made by this device; it serves all others as well.
    pub fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A fork cannot, and has not the pages either.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was registered by this value, and is mapped still. There is nobody to tell what
            // goes wrong.
            let _ =
                unsafe { entered.host_unregister(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}
