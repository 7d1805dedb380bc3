//! What a kernel is told by: its own memory of the device.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_cuda::{Device, DeviceMemory, Kernel, Module};

use crate::Result;
use crate::kernels::PTX;

const KERNEL: &CStr = c"penstock_collect";

/// The kernel that collects rows, and memory for what it is told, which is used by one piece after the other, in
/// the order of a lane's stream. It stays as long as the lane does: to free memory of a device waits for all that
/// it has.
#[derive(Debug)]
pub(super) struct Telling {
    pub(super) kernel: Kernel,
    pub(super) memory: DeviceMemory,
    turn: Mutex<()>,
}

impl Telling {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Telling> {
        Ok(Telling {
            kernel: Module::load(device, PTX)?.kernel(KERNEL)?,
            memory: DeviceMemory::allocate(device, bytes)?,
            turn: Mutex::default(),
        })
    }

    /// Held from the copy of what is told until the kernel is queued that reads it.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
