//! A device for the tests: its context is current, and the next test's reset frees everything they
//! make.

use penstock_cuda_fake::Control;

use crate::raw::CUDA;

pub(crate) const NON_BLOCKING: u32 = 1;
pub(crate) const NOT_READY: i32 = 600;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT: u32 = 3;

/// The value that a successful call writes.
pub(crate) fn made<T: Default>(call: impl FnOnce(&mut T) -> i32) -> T {
    let mut value = T::default();
    assert_eq!(call(&mut value), 0);
    value
}

/// Exclusive control of the driver, with one device, whose context is current in this thread.
pub(crate) struct Device {
    pub(crate) control: Control,
    pub(crate) context: u64,
}

impl Device {
    pub(crate) fn new() -> Device {
        let control = Control::new();
        assert_eq!((CUDA.cuInit)(0), 0);
        let context = made(|context| (CUDA.cuDevicePrimaryCtxRetain)(context, 0));
        assert_eq!((CUDA.cuCtxPushCurrent_v2)(context), 0);
        Device { control, context }
    }

    pub(crate) fn stream(&self) -> u64 {
        made(|stream| (CUDA.cuStreamCreate)(stream, NON_BLOCKING))
    }

    pub(crate) fn blocking_stream(&self) -> u64 {
        made(|stream| (CUDA.cuStreamCreate)(stream, 0))
    }

    pub(crate) fn event(&self) -> u64 {
        made(|event| (CUDA.cuEventCreate)(event, EVENT))
    }

    /// Creates an event and records it in a stream.
    pub(crate) fn record(&self, stream: u64) -> u64 {
        let event = self.event();
        assert_eq!((CUDA.cuEventRecord)(event, stream), 0);
        event
    }

    /// Allocates device memory, filled with a byte.
    pub(crate) fn memory(&self, bytes: usize, byte: u8) -> u64 {
        let address = made(|address| (CUDA.cuMemAlloc_v2)(address, bytes));
        self.control.poke(address, &vec![byte; bytes]);
        address
    }

    pub(crate) fn peek(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        self.control.peek(address, &mut found);
        found
    }

    /// Allocates pinned host memory, filled with a byte.
    pub(crate) fn pinned(&self, bytes: usize, byte: u8) -> Pinned {
        let mut pointer = std::ptr::null_mut();
        assert_eq!((CUDA.cuMemHostAlloc)(&mut pointer, bytes, 0), 0);
        self.control.poke(pointer as u64, &vec![byte; bytes]);
        Pinned { pointer, bytes }
    }
}

/// Pinned host memory, which streams write to while a test reads it.
#[derive(Clone, Copy)]
pub(crate) struct Pinned {
    pub(crate) pointer: *mut u8,
    pub(crate) bytes: usize,
}

impl Pinned {
    pub(crate) fn address(&self) -> u64 {
        self.pointer as u64
    }

    /// The present content.
    pub(crate) fn read(&self, device: &Device) -> Vec<u8> {
        device.peek(self.address(), self.bytes)
    }
}
