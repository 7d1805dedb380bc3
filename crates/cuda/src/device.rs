//! A device and its primary context.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::raw;
use crate::table::Table;

/// A device, used through the same context as PyTorch's.
pub struct Device {
    table: Arc<Table>,
    process: u32,
    ordinal: u32,
    handle: raw::Ordinal,
    context: raw::Context,
    pitch_max: usize,
    /// Whether repeated calls have failed: queued work is no longer done.
    has_failed: AtomicBool,
}

// SAFETY: all threads of a process may use a context.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn open(table: &Arc<Table>, process: u32, ordinal: u32) -> Result<Device> {
        check_process(process)?;
        let mut handle: raw::Ordinal = 0;
        // SAFETY: it writes one number.
        unsafe { table.device_get(&raw mut handle, ordinal.cast_signed()) }?;
        let attribute = |which: c_int| {
            let mut value: c_int = 0;
            // SAFETY: it writes one number.
            unsafe { table.device_attribute(&raw mut value, which, handle) }.map(|()| value)
        };
        if attribute(raw::ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            let reason = "it does not share addresses with the host".to_owned();
            return Err(Error::Unusable { ordinal, reason });
        }
        let pitch_max = attribute(raw::ATTRIBUTE_MAX_PITCH)?.unsigned_abs() as usize;
        let mut context = ptr::null_mut();
        // SAFETY: it writes one pointer; the drop releases the retained context.
        unsafe { table.primary_context_retain(&raw mut context, handle) }?;
        Ok(Device {
            table: Arc::clone(table),
            process,
            ordinal,
            handle,
            context,
            pitch_max,
            has_failed: AtomicBool::new(false),
        })
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its product name.
    pub fn name(&self) -> Result<String> {
        self.text(|table, to, len| {
            // SAFETY: it writes at most `len` bytes, with a zero at the end.
            unsafe { table.device_name(to, len, self.handle) }
        })
    }

    /// Its address on the PCI bus, as in `0000:3b:00.0`.
    pub fn pci_bus_id(&self) -> Result<String> {
        self.text(|table, to, len| {
            // SAFETY: as above.
            unsafe { table.device_pci_bus_id(to, len, self.handle) }
        })
    }

    /// Bytes of its memory: the free ones, and all.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        let entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two numbers.
        unsafe { entered.memory_info(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    /// Waits for all work that this process has queued, on all streams.
    ///
    /// # Errors
    /// An error of the work on the device, or the driver's error.
    pub fn synchronize(&self) -> Result<()> {
        let entered = self.enter()?;
        // SAFETY: the context is the current one.
        unsafe { entered.context_synchronize() }
    }

    /// The largest pitch that the driver accepts for a copy of rows.
    pub(crate) fn pitch_max(&self) -> usize {
        self.pitch_max
    }

    /// Makes its context the current one of this thread until the result is dropped, and prevents
    /// the thread's calls from invalidating another thread's capture meanwhile.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        check_process(self.process)?;
        // SAFETY: the context is retained, and the drop pops it.
        unsafe { self.table.context_push(self.context) }?;
        let mut mode = raw::CAPTURE_MODE_RELAXED;
        // SAFETY: it reads and writes one number.
        let exchanged = unsafe { self.table.capture_mode_exchange(&raw mut mode) };
        let entered = Entered {
            table: &self.table,
            mode,
            _stays: PhantomData,
        };
        exchanged?;
        Ok(entered)
    }

    /// See [`Event::drain`](crate::Event::drain).
    pub(crate) fn drain(&self, wait: impl Fn() -> Result<()>) {
        for _ in 0..DRAIN_TRIES {
            match wait() {
                Ok(()) | Err(Error::Forked { .. }) => return,
                // After one such failure, later waits need no further tries.
                Err(_) if self.has_failed.load(Ordering::Relaxed) => return,
                Err(_) => thread::sleep(DRAIN_PAUSE),
            }
        }
        self.has_failed.store(true, Ordering::Relaxed);
    }

    fn text(&self, ask: impl Fn(&Table, *mut c_char, c_int) -> Result<()>) -> Result<String> {
        let mut text: [c_char; 256] = [0; 256];
        ask(&self.table, text.as_mut_ptr(), text.len() as c_int - 1)?;
        // SAFETY: the last byte is still zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_string_lossy().into_owned())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if check_process(self.process).is_ok() {
            // SAFETY: this value has retained it once; streams, events and memory of the context
            // hold the device. No caller could react to an error.
            let _ = unsafe { self.table.primary_context_release(self.handle) };
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.ordinal)
            .finish_non_exhaustive()
    }
}

/// Consecutive failures after which a device counts as failed.
const DRAIN_TRIES: usize = 20;
const DRAIN_PAUSE: Duration = Duration::from_millis(1);

fn check_process(process: u32) -> Result<()> {
    match process == std::process::id() {
        true => Ok(()),
        false => Err(Error::Forked { process }),
    }
}

/// The functions, on a thread whose current context is the device's.
pub(crate) struct Entered<'a> {
    table: &'a Table,
    /// The thread's capture mode before.
    mode: c_int,
    /// Not `Send`, as the current context is a thread's own.
    _stays: PhantomData<*const ()>,
}

impl std::ops::Deref for Entered<'_> {
    type Target = Table;

    fn deref(&self) -> &Table {
        self.table
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Both calls fail only in a process that is about to end.
        // SAFETY: it reads and writes one number.
        let _ = unsafe { self.table.capture_mode_exchange(&raw mut self.mode) };
        let mut context = ptr::null_mut();
        // SAFETY: it writes one pointer; the context on top is the one that was pushed.
        let _ = unsafe { self.table.context_pop(&raw mut context) };
    }
}
