//! What a kernel is: a function of the host, which runs on its stream's thread, all of the grid in one call,
//! and reaches memory through [`Reach`] alone. Those that there are stand in `kernels.rs`.

use crate::memory::AddressSpace;
use crate::status::{Answer, Status};

/// What can be found in a module.
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// Bytes of each argument, 4 or 8, in order.
    pub(crate) argument_bytes: &'static [usize],
    /// Gets the arguments as unsigned numbers, whatever their type.
    pub(crate) run: fn(&[u64], &Reach<'_>) -> Answer,
}

/// A kernel with the arguments that it was launched with.
pub(crate) struct Launch {
    pub(crate) kernel: &'static Kernel,
    pub(crate) arguments: Vec<u64>,
}

impl Launch {
    pub(crate) fn run(&self, space: &AddressSpace) -> Answer {
        (self.kernel.run)(&self.arguments, &Reach { space })
    }
}

/// Memory as a kernel sees it: that of devices, and mapped pinned memory of the host.
pub(crate) struct Reach<'a> {
    space: &'a AddressSpace,
}

impl Reach<'_> {
    /// Copies within that memory.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64) -> Answer {
        let source = self.find(from, bytes)?;
        let destination = self.find(to, bytes)?;
        // SAFETY: both were found to be mapped over all bytes, and stay so while the kernel runs.
        unsafe { destination.copy_from(source, bytes as usize) };
        Ok(())
    }

    /// The number at an address.
    pub(crate) fn number(&self, address: u64) -> Answer<u64> {
        let source = self.find(address, 8)?;
        // SAFETY: eight bytes were found to be mapped there, and stay so while the kernel runs.
        Ok(unsafe { source.cast::<u64>().read_unaligned() })
    }

    fn find(&self, address: u64, bytes: u64) -> Answer<*mut u8> {
        self.space
            .reach(address, bytes)
            .ok_or(Status::ILLEGAL_ADDRESS)
    }
}
