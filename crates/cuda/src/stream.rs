//! Streams: ours, and those of others that ours wait for.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::raw;

/// A stream of our own: work that a device does in the order in which it is queued. It does not wait for
/// the stream 0.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: raw::StreamHandle,
}

// SAFETY: streams are made for use by all threads of a process.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of a device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer; the drop destroys what it is to.
        unsafe { entered.stream_create(&raw mut handle, raw::STREAM_NON_BLOCKING) }?;
        Ok(Stream {
            device: Arc::clone(device),
            handle,
        })
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The moment when all is done that it has now.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self) -> Result<Event> {
        Event::record(&self.device, self.handle)
    }

    /// Has what is queued from now on wait for a moment of another stream. This thread does not wait.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: both are there.
        unsafe { entered.stream_wait_event(self.handle, event.handle(), 0) }
    }

    /// Waits until all is done that it has.
    ///
    /// # Errors
    /// What went wrong on the device, and what the driver says.
    pub fn synchronize(&self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: the stream is there.
        unsafe { entered.stream_synchronize(self.handle) }
    }

    /// As [`Event::settle`], for all that it has.
    pub fn settle(&self) {
        self.device.settle(|| self.synchronize());
    }

    /// `CUstream`, for others who use the driver; as long as this is there.
    pub fn raw(&self) -> usize {
        self.handle.expose_provenance()
    }

    pub(crate) fn handle(&self) -> raw::StreamHandle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A fork cannot, and its copy costs nothing.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: it was created by this value. What it has queued is done all the same.
            let _ = unsafe { entered.stream_destroy(self.handle) };
        }
    }
}

/// A stream of somebody else's, PyTorch's for instance.
#[derive(Clone, Debug)]
pub struct Foreign {
    device: Arc<Device>,
    handle: usize,
}

impl Foreign {
    /// A stream of a device by its handle, which is 0 for the default one.
    ///
    /// # Safety
    /// It is a stream of the device's primary context as long as this is used. A driver may crash with
    /// one that was destroyed.
    pub unsafe fn new(device: &Arc<Device>, handle: usize) -> Foreign {
        Foreign {
            device: Arc::clone(device),
            handle,
        }
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// `CUstream`.
    pub fn raw(&self) -> usize {
        self.handle
    }

    /// The moment when all is done that it has now.
    ///
    /// # Errors
    /// [`Error::Capturing`], and what the driver says.
    pub fn record(&self) -> Result<Event> {
        self.check()?;
        Event::record(&self.device, self.handle())
    }

    /// Has what is queued from now on wait for a moment of another stream. This thread does not wait.
    ///
    /// # Errors
    /// [`Error::Capturing`], and what the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.check()?;
        let entered = self.device.enter()?;
        // SAFETY: the event is there, and the stream by the promise that was made.
        unsafe { entered.stream_wait_event(self.handle(), event.handle(), 0) }
    }

    /// Refuses one whose work goes into a graph: what it has "queued" is not done when it is, and an event
    /// of it belongs to the graph.
    ///
    /// # Errors
    /// [`Error::Capturing`], and what the driver says.
    pub fn check(&self) -> Result<()> {
        let entered = self.device.enter()?;
        let mut status: c_int = 0;
        // SAFETY: it writes one number; the stream is there by the promise that was made.
        let asked = unsafe { entered.stream_is_capturing(self.handle(), &raw mut status) };
        match asked {
            // Of the default stream, where one that waits for it is captured.
            Err(error) if error.code() == Some(raw::CAPTURE_IMPLICIT) => {
                return Err(Error::Capturing);
            }
            asked => asked?,
        }
        match status {
            raw::CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(Error::Capturing),
        }
    }

    pub(crate) fn handle(&self) -> raw::StreamHandle {
        ptr::with_exposed_provenance_mut(self.handle)
    }
}
