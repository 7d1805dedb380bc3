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

/// Code on a device, unloaded when the last of its kernels is dropped.
pub struct Module {
    device: Arc<Device>,
    handle: raw::ModuleHandle,
}

// SAFETY: all threads of a process may use a module.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles kernels in PTX for a device, which takes long the first time on a machine.
    ///
    /// # Errors
    /// The driver's error, notably where the driver is older than the PTX version.
    pub fn load(device: &Arc<Device>, ptx: &CStr) -> Result<Arc<Module>> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer, and reads a text up to its zero; the drop unloads the
        // module.
        unsafe { entered.module_load(&raw mut handle, ptx.as_ptr().cast()) }?;
        Ok(Arc::new(Module {
            device: Arc::clone(device),
            handle,
        }))
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// The driver's error, notably where no kernel has that name.
    pub fn kernel(self: &Arc<Module>, name: &CStr) -> Result<Kernel> {
        let entered = self.device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer, and reads a text up to its zero; the module is loaded.
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
        // A fork cannot call the driver.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has loaded it, and callers that launched its kernels have waited
            // for them.
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

// SAFETY: all threads of a process may use a function.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Queues a launch of `blocks` blocks of `threads` threads.
    ///
    /// # Errors
    /// [`Error::Capturing`](crate::Error::Capturing), and the driver's error.
    ///
    /// # Safety
    /// The kernel has `N` arguments, of 64 bits each. The memory that it reads and writes through
    /// them stays until it has ended, and is used meanwhile only as the kernel's source allows.
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
        // SAFETY: the kernel is loaded, the arguments are read before this returns; the stream is
        // alive by the promise of [`Foreign::new`], and the rest is the caller's promise.
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
