//! Descriptors for event loops.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use penstock_io::executor;
use pyo3::prelude::*;

use crate::errors::transferred as raised;
use crate::owner::release_dropped;

/// A descriptor that becomes readable when transfers end.
#[pyclass(frozen, module = "penstock._native")]
pub struct EventFd {
    inner: executor::EventFd,
}

#[pymethods]
impl EventFd {
    #[new]
    fn new(py: Python<'_>) -> PyResult<EventFd> {
        let inner = raised(py, executor::EventFd::new())?;
        Ok(EventFd { inner })
    }

    /// The descriptor.
    fn fileno(&self) -> RawFd {
        self.inner.as_fd().as_raw_fd()
    }

    /// The keys of the transfers that have ended since the last call.
    fn take(&self, py: Python<'_>) -> Vec<u64> {
        let keys = self.inner.take();
        release_dropped(py);
        keys
    }
}

impl EventFd {
    /// A function that makes the descriptor readable and adds a key.
    pub(crate) fn signal(&self, key: u64) -> Box<dyn FnOnce() + Send> {
        self.inner.signal(key)
    }
}
