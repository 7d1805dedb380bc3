//! Moments of streams that are others'.

use std::sync::Arc;

use penstock_cuda::Event;
use penstock_io::buffer::Lane;
use pyo3::prelude::*;

use crate::features::raised;
use crate::owner::detached;
use crate::tensor::device::{NativeDevice, foreign};

/// The moment when all is done that a stream has now.
#[pyclass(frozen, module = "penstock._native")]
pub struct Moment {
    lane: Arc<Lane>,
    event: Event,
}

#[pymethods]
impl Moment {
    #[new]
    fn new(py: Python<'_>, device: NativeDevice) -> PyResult<Moment> {
        let record = || {
            let lane = Lane::of(device.0)?;
            let event = foreign(&lane, device.1)
                .record()
                .map_err(penstock_io::Error::from)?;
            Ok(Moment { lane, event })
        };
        raised(py, detached(py, record))
    }

    /// Whether it has come.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let look = || Ok(self.event.is_done().map_err(penstock_io::Error::from)?);
        raised(py, detached(py, look))
    }

    /// Waits until it has come.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let wait = || Ok(self.event.wait().map_err(penstock_io::Error::from)?);
        raised(py, detached(py, wait))
    }

    /// Has copies to the device that begin from now on come after it.
    fn before_fills(&self, py: Python<'_>) -> PyResult<()> {
        raised(py, detached(py, || Ok(self.lane.fill_at(&self.event)?)))
    }

    /// Has what a stream gets from now on come after it.
    fn before_work(&self, py: Python<'_>, device: NativeDevice) -> PyResult<()> {
        let wait = || {
            let waited = foreign(&self.lane, device.1).wait_for(&self.event);
            Ok(waited.map_err(penstock_io::Error::from)?)
        };
        raised(py, detached(py, wait))
    }
}
