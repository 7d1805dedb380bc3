//! Parameters of the row-gather kernel, in their own device memory.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_cuda::{Device, DeviceMemory, Kernel, Module};

use crate::Result;
use crate::kernels::PTX;

const KERNEL: &CStr = c"penstock_collect";

/// The row-gather kernel, and device memory for its parameters, which pieces use one after the
/// other in the order of the stream for copies to the device. It lives as long as that stream, as
/// freeing device memory waits for all work of the device.
#[derive(Debug)]
pub(super) struct KernelParams {
    pub(super) kernel: Kernel,
    pub(super) memory: DeviceMemory,
    turn: Mutex<()>,
}

impl KernelParams {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<KernelParams> {
        Ok(KernelParams {
            kernel: Module::load(device, PTX)?.kernel(KERNEL)?,
            memory: DeviceMemory::allocate(device, bytes)?,
            turn: Mutex::default(),
        })
    }

    /// Held from the copy of the parameters until the kernel that reads them is queued.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
