//! Events on streams of other libraries.

use std::sync::Arc;

use penstock_cuda::Event;
use penstock_io::buffer::DeviceStreams;
use pyo3::prelude::*;

use crate::errors::gathered as raised;
use crate::owner::detached;
use crate::tensor::device::{NativeDevice, foreign};

/// The completion of the work that a stream has queued so far.
#[pyclass(frozen, module = "penstock._native")]
pub struct Moment {
    device_streams: Arc<DeviceStreams>,
    event: Event,
}

#[pymethods]
impl Moment {
    #[new]
    fn new(py: Python<'_>, device: NativeDevice) -> PyResult<Moment> {
        let record = || {
            let device_streams = DeviceStreams::of(device.0)?;
            let event = foreign(&device_streams, device.1)
                .record()
                .map_err(penstock_io::Error::from)?;
            Ok(Moment {
                device_streams,
                event,
            })
        };
        raised(py, detached(py, record))
    }

    /// Whether it has completed.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let stat = || Ok(self.event.is_done().map_err(penstock_io::Error::from)?);
        raised(py, detached(py, stat))
    }

    /// Waits until it has completed.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let wait = || Ok(self.event.wait().map_err(penstock_io::Error::from)?);
        raised(py, detached(py, wait))
    }

    /// Makes later copies to the device wait for it.
    fn before_fills(&self, py: Python<'_>) -> PyResult<()> {
        raised(
            py,
            detached(py, || Ok(self.device_streams.fill_at(&self.event)?)),
        )
    }

    /// Makes later work on a stream wait for it.
    fn before_work(&self, py: Python<'_>, device: NativeDevice) -> PyResult<()> {
        let wait = || {
            let waited = foreign(&self.device_streams, device.1).wait_for(&self.event);
            Ok(waited.map_err(penstock_io::Error::from)?)
        };
        raised(py, detached(py, wait))
    }
}
