//! Rows that kernels request.

use std::sync::{Arc, Mutex, PoisonError};

use penstock_gather::{Proxy, Serving};
use penstock_io::buffer::DeviceStreams;
use penstock_io::fifo::{Fifo, HEADER};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::gathered as raised;
use crate::features::RowReader;
use crate::owner::detached;
use crate::tensor::device::{NativeDevice, gather_by, wait_for};

/// The CUDA C++ header with which kernels use the host queue.
#[pyfunction]
pub(crate) fn fifo_header() -> &'static str {
    HEADER
}

/// Serves kernels of one device with rows of one table.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowProxy {
    /// `None` once it is closed.
    inner: Mutex<Option<Arc<Proxy>>>,
}

impl RowProxy {
    fn open(&self) -> PyResult<Arc<Proxy>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let open = inner.as_ref().map(Arc::clone);
        open.ok_or_else(|| PyValueError::new_err("it is closed"))
    }
}

#[pymethods]
impl RowProxy {
    #[new]
    fn new(
        py: Python<'_>,
        reader: &RowReader,
        ordinal: u32,
        staging_bytes: usize,
    ) -> PyResult<RowProxy> {
        let reader = reader.shared();
        let made = detached(py, || {
            let device_streams = DeviceStreams::of(ordinal)?;
            let row_bytes = reader.table().value_bytes() as usize;
            let fifo = Fifo::new(device_streams.device(), row_bytes, staging_bytes)?;
            Proxy::new(reader, Arc::new(fifo))
        });
        Ok(RowProxy {
            inner: Mutex::new(Some(Arc::new(raised(py, made)?))),
        })
    }

    /// Queues a kernel that gathers the rows of `count` ids of 4 or 8 bytes at an address to
    /// another address.
    fn gather(
        &self,
        py: Python<'_>,
        device: NativeDevice,
        ids: u64,
        id_bytes: usize,
        count: usize,
        out: u64,
    ) -> PyResult<()> {
        let proxy = self.open()?;
        // The last reference to the proxy waits for the device when it is dropped.
        let launched = detached(py, move || {
            proxy.check_runs()?;
            Ok(gather_by(proxy.fifo(), device, ids, id_bytes, count, out)?)
        });
        raised(py, launched)
    }

    /// Raises the first failure since the last call.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let proxy = self.open()?;
        raised(py, detached(py, move || proxy.check()))
    }

    /// Serves kernels launched elsewhere until `end` of the returned object is called.
    fn serve(&self) -> PyResult<RowServing> {
        Ok(RowServing {
            inner: Mutex::new(Some(self.open()?.serve())),
        })
    }

    /// Device address of the host queue, most ids of a request, most requests in flight.
    fn fifo(&self) -> PyResult<(u64, usize, usize)> {
        let proxy = self.open()?;
        let fifo = proxy.fifo();
        Ok((fifo.address(), fifo.post_rows(), fifo.slots()))
    }

    /// Waits until all queued kernels have completed, and raises their failures. Other running
    /// kernels receive no more rows.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let proxy = inner.take();
        drop(inner);
        let Some(proxy) = proxy else { return Ok(()) };
        let closed = detached(py, move || {
            proxy.stop();
            proxy.check()
        });
        raised(py, closed)
    }
}

/// Keeps kernels launched elsewhere served for as long as it exists.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowServing {
    inner: Mutex<Option<Serving>>,
}

#[pymethods]
impl RowServing {
    /// Stops serving once the work queued on a stream so far has completed.
    fn end(&self, py: Python<'_>, device: NativeDevice) -> PyResult<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let serving = inner.take();
        drop(inner);
        let ended = detached(py, move || {
            let waited = wait_for(device);
            drop(serving);
            Ok(waited?)
        });
        raised(py, ended)
    }
}
