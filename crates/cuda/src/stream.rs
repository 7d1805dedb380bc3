//! Streams: those of this crate, and those of other libraries that they wait for.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::raw;

/// A stream of this crate: a device does its work in the order in which it was queued. It does not
/// wait for stream 0.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: raw::StreamHandle,
}

// SAFETY: all threads of a process may use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream of a device.
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        let entered = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one pointer; the drop destroys the stream.
        unsafe { entered.stream_create(&raw mut handle, raw::STREAM_NON_BLOCKING) }?;
        Ok(Stream {
            device: Arc::clone(device),
            handle,
        })
    }

    /// The device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Records an event behind all work now queued.
    pub fn record(&self) -> Result<Event> {
        Event::record(&self.device, self.handle)
    }

    /// Makes work queued later wait for an event of another stream. This thread does not wait.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: both are alive.
        unsafe { entered.stream_wait_event(self.handle, event.handle(), 0) }
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// An error of the work on the device, or the driver's error.
    pub fn synchronize(&self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: the stream is alive.
        unsafe { entered.stream_synchronize(self.handle) }
    }

    /// As [`Event::drain`], for all queued work.
    pub fn drain(&self) {
        self.device.drain(|| self.synchronize());
    }

    /// `CUstream`, for other users of the driver; valid as long as this value lives.
    pub fn raw(&self) -> usize {
        self.handle.expose_provenance()
    }

    pub(crate) fn handle(&self) -> raw::StreamHandle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A fork cannot call the driver, and its copy of the handle costs nothing.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: this value has created it. Queued work is still done.
            let _ = unsafe { entered.stream_destroy(self.handle) };
        }
    }
}

/// A stream of another library, PyTorch for instance.
#[derive(Clone, Debug)]
pub struct Foreign {
    device: Arc<Device>,
    handle: usize,
}

impl Foreign {
    /// A stream of a device by its handle, which is 0 for the default stream.
    ///
    /// # Safety
    /// It is a stream of the device's primary context as long as this is used. With a destroyed
    /// stream, a driver may crash.
    pub unsafe fn new(device: &Arc<Device>, handle: usize) -> Foreign {
        Foreign {
            device: Arc::clone(device),
            handle,
        }
    }

    /// The device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// `CUstream`.
    pub fn raw(&self) -> usize {
        self.handle
    }

    /// Records an event behind all work now queued.
    ///
    /// # Errors
    /// [`Error::Capturing`], and the driver's error.
    pub fn record(&self) -> Result<Event> {
        self.check()?;
        Event::record(&self.device, self.handle())
    }

    /// Makes work queued later wait for an event of another stream. This thread does not wait.
    ///
    /// # Errors
    /// [`Error::Capturing`], and the driver's error.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.check()?;
        let entered = self.device.enter()?;
        // SAFETY: the event is alive, and the stream by the promise of [`Foreign::new`].
        unsafe { entered.stream_wait_event(self.handle(), event.handle(), 0) }
    }

    /// Returns an error for a stream that is being captured: its "queued" work goes into a graph
    /// and is never done, and an event of it belongs to the graph.
    ///
    /// # Errors
    /// [`Error::Capturing`], and the driver's error.
    pub fn check(&self) -> Result<()> {
        let entered = self.device.enter()?;
        let mut status: c_int = 0;
        // SAFETY: it writes one number; the stream is alive by the promise of [`Foreign::new`].
        let asked = unsafe { entered.stream_is_capturing(self.handle(), &raw mut status) };
        match asked {
            // The error of the default stream, while a stream that waits for it is captured.
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
