//! Events: positions in the work of streams.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// A position in the work of a stream: it is complete when all work queued before it is done. After
/// that, the results of copies to the host can be read.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: raw::EventHandle,
    /// Whether it is known to be complete, which saves further calls of the slow driver.
    has_come: AtomicBool,
}

// SAFETY: all threads of a process may use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event behind all work now queued on a stream.
    pub(crate) fn record(device: &Arc<Device>, stream: raw::StreamHandle) -> Result<Event> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // Waiting threads sleep, and the event has no time stamp.
        let flags = raw::EVENT_BLOCKING_SYNC | raw::EVENT_DISABLE_TIMING;
        // SAFETY: it writes one pointer; the drop destroys the event.
        unsafe { entered.event_create(&raw mut handle, flags) }?;
        let event = Event {
            device: Arc::clone(device),
            handle,
            has_come: AtomicBool::new(false),
        };
        // SAFETY: the event is alive; so is the stream, by the caller's promise.
        unsafe { entered.event_record(handle, stream) }?;
        Ok(event)
    }

    /// Whether it is complete.
    ///
    /// # Errors
    /// An error of the work before it, or the driver's error.
    pub fn is_done(&self) -> Result<bool> {
        if self.has_come.load(Ordering::Acquire) {
            return Ok(true);
        }
        let entered = self.device.enter()?;
        // SAFETY: the event is alive.
        match unsafe { entered.event_query(self.handle) } {
            Ok(()) => {
                self.has_come.store(true, Ordering::Release);
                Ok(true)
            }
            Err(error) if error.code() == Some(raw::NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until it is complete.
    pub fn wait(&self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: the event is alive.
        unsafe { entered.event_synchronize(self.handle) }
    }

    /// Waits until it is complete, or never will be: for callers that are about to free memory. A
    /// single failed call proves nothing about the work, so it is repeated; a device that has
    /// failed fails every call, and copies nothing any more.
    pub fn drain(&self) {
        self.device.drain(|| self.wait());
    }

    pub(crate) fn handle(&self) -> raw::EventHandle {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A fork cannot call the driver, and its copy of the handle costs nothing.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has created it. Streams that wait for it continue to do so.
            let _ = unsafe { entered.event_destroy(self.handle) };
        }
    }
}
