//! Moments of streams.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::Device;
use crate::error::Result;
use crate::raw;

/// A moment of a stream: it has come when all that was queued before it is done. What a copy to the host
/// has brought can be read from then on.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: raw::EventHandle,
    /// Whether it is known to have come: many may ask, and the driver takes a while to answer.
    has_come: AtomicBool,
}

// SAFETY: events are made for use by all threads of a process.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Takes down the moment after all that a stream has now.
    pub(crate) fn record(device: &Arc<Device>, stream: raw::StreamHandle) -> Result<Event> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // Whoever waits sleeps, and nobody asks when it came.
        let flags = raw::EVENT_BLOCKING_SYNC | raw::EVENT_DISABLE_TIMING;
        // SAFETY: it writes one pointer; the drop destroys what it is to.
        unsafe { entered.event_create(&raw mut handle, flags) }?;
        let event = Event {
            device: Arc::clone(device),
            handle,
            has_come: AtomicBool::new(false),
        };
        // SAFETY: the event is there; the stream is the caller's, who says that it is.
        unsafe { entered.event_record(handle, stream) }?;
        Ok(event)
    }

    /// Whether it has come.
    ///
    /// # Errors
    /// What went wrong on the device before it, and what the driver says.
    pub fn is_done(&self) -> Result<bool> {
        if self.has_come.load(Ordering::Acquire) {
            return Ok(true);
        }
        let entered = self.device.enter()?;
        // SAFETY: the event is there.
        match unsafe { entered.event_query(self.handle) } {
            Ok(()) => {
                self.has_come.store(true, Ordering::Release);
                Ok(true)
            }
            Err(error) if error.code() == Some(raw::NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until it has come.
    ///
    /// # Errors
    /// As [`Event::is_done`].
    pub fn wait(&self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: the event is there.
        unsafe { entered.event_synchronize(self.handle) }
    }

    /// Waits until it has come, or never will: for whoever is about to give memory up. A call that fails once
    /// says nothing of the work, so it is made again; a device that has failed fails them all, and copies
    /// nothing any more.
    pub fn settle(&self) {
        self.device.settle(|| self.wait());
    }

    pub(crate) fn handle(&self) -> raw::EventHandle {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A fork cannot, and its copy costs nothing.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was created by this value. Streams that wait for it do so still.
            let _ = unsafe { entered.event_destroy(self.handle) };
        }
    }
}
