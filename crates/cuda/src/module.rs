//! Kernels.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::raw;
use crate::stream::Foreign;

/// Code of a device, unloaded when the last of its kernels is gone.
pub struct Module {
    device: Arc<Device>,
    handle: raw::ModuleHandle,
}

// SAFETY: modules are made for use by all threads of a process.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles the text of kernels for a device, which takes long the first time on a machine.
    ///
    /// # Errors
    /// What the driver says, notably where it is older than the text.
    pub fn load(device: &Arc<Device>, ptx: &CStr) -> Result<Arc<Module>> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer, and reads a text up to its zero; the drop unloads what it is to.
        unsafe { entered.module_load(&raw mut handle, ptx.as_ptr().cast()) }?;
        Ok(Arc::new(Module {
            device: Arc::clone(device),
            handle,
        }))
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// What the driver says, notably where there is none of that name.
    pub fn kernel(self: &Arc<Module>, name: &CStr) -> Result<Kernel> {
        let entered = self.device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer, and reads a text up to its zero; the module is there.
        unsafe { entered.module_function(&raw mut handle, self.handle, name.as_ptr()) }?;
        Ok(Kernel {
            module: Arc::clone(self),
            handle,
        })
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A fork cannot.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was loaded by this value, and whoever launched its kernels has waited for them.
            let _ = unsafe { entered.module_unload(self.handle) };
        }
    }
}

/// A kernel whose arguments have 64 bits each.
#[derive(Debug)]
pub struct Kernel {
    module: Arc<Module>,
    handle: raw::FunctionHandle,
}

// SAFETY: functions are made for use by all threads of a process.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Queues so many blocks of so many threads.
    ///
    /// # Errors
    /// [`Error::Capturing`](crate::Error::Capturing), and what the driver says.
    ///
    /// # Safety
    /// The kernel has so many arguments, of 64 bits each. With them it reads and writes memory that is there
    /// until it has ended, and that nobody uses meanwhile but as the kernel's text says.
    pub unsafe fn launch<const N: usize>(
        &self,
        stream: &Foreign,
        blocks: u32,
        threads: u32,
        arguments: [u64; N],
    ) -> Result<()> {
        stream.check()?;
        let mut pointers = arguments
            .each_ref()
            .map(|argument| ptr::from_ref(argument).cast_mut().cast::<c_void>());
        let entered = self.module.device.enter()?;
        // SAFETY: the kernel is there, the arguments are read before this returns; the stream is there by
        // the promise that was made of it, and the rest is the caller's promise.
        unsafe {
            entered.launch(
                self.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}
