//! Rows that kernels ask for.

use std::sync::{Arc, Mutex, PoisonError};

use penstock_gather::{Proxy, Serving};
use penstock_io::buffer::Lane;
use penstock_io::fifo::{Fifo, HEADER};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::features::{RowReader, raised};
use crate::owner::detached;
use crate::tensor::device::{NativeDevice, gather_by, wait_for};

/// What kernels post to a FIFO with: CUDA C++.
#[pyfunction]
pub(crate) fn fifo_header() -> &'static str {
    HEADER
}

/// Serves kernels of one device with rows of one table.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowProxy {
    /// None when it is closed.
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
            let lane = Lane::of(ordinal)?;
            let row_bytes = reader.table().value_bytes() as usize;
            let fifo = Fifo::new(lane.device(), row_bytes, staging_bytes)?;
            Proxy::new(reader, Arc::new(fifo))
        });
        Ok(RowProxy {
            inner: Mutex::new(Some(Arc::new(raised(py, made)?))),
        })
    }

    /// Queues a kernel that gathers the rows of ids at an address, of 4 or 8 bytes each, to another one.
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
        // The last one to have it waits for the device.
        let launched = detached(py, move || {
            proxy.check_runs()?;
            Ok(gather_by(proxy.fifo(), device, ids, id_bytes, count, out)?)
        });
        raised(py, launched)
    }

    /// Raises the first thing that went wrong since this was called last.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let proxy = self.open()?;
        raised(py, detached(py, move || proxy.check()))
    }

    /// Has kernels of others be served until `end` of what comes back is called.
    fn serve(&self) -> PyResult<RowServing> {
        Ok(RowServing {
            inner: Mutex::new(Some(self.open()?.serve())),
        })
    }

    /// Address of the FIFO on the device, ids of a post at most, posts that can be under way.
    fn fifo(&self) -> PyResult<(u64, usize, usize)> {
        let proxy = self.open()?;
        let fifo = proxy.fifo();
        Ok((fifo.address(), fifo.post_rows(), fifo.slots()))
    }

    /// Waits until all is done that was queued, and raises what went wrong with it. Other kernels that run get
    /// no more rows.
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

/// Kernels of others are served as long as this is there.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowServing {
    inner: Mutex<Option<Serving>>,
}

#[pymethods]
impl RowServing {
    /// Waits until a stream has done what it has now.
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
