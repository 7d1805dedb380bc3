//! Descriptors for event loops.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use penstock_io::executor;
use pyo3::prelude::*;

use crate::errors::transferred as raised;
use crate::owner::let_go;

/// A descriptor that becomes readable when transfers end.
#[pyclass(frozen, module = "penstock._native")]
pub struct Bell {
    inner: executor::Bell,
}

#[pymethods]
impl Bell {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Bell> {
        let inner = raised(py, executor::Bell::new())?;
        Ok(Bell { inner })
    }

    /// The descriptor.
    fn fileno(&self) -> RawFd {
        self.inner.as_fd().as_raw_fd()
    }

    /// The keys of the transfers that have ended since the last call.
    fn take(&self, py: Python<'_>) -> Vec<u64> {
        let keys = self.inner.take();
        let_go(py);
        keys
    }
}

impl Bell {
    /// A function that makes the descriptor readable and adds a key.
    pub(crate) fn ringing(&self, key: u64) -> Box<dyn FnOnce() + Send> {
        self.inner.ringing(key)
    }
}
