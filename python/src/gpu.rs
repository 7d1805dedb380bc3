//! Finds, tests and measures the path between the host and a GPU, without PyTorch.

use std::sync::Arc;

use penstock_bench::gpu::{self, DriverProbe, LinkJob};
use penstock_cuda::{Driver, Registration};
use penstock_io::buffer::DeviceStreams;
use penstock_io::fifo;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::call;
use crate::owner::detached;

/// Finds the driver and examines one of its devices, or all; returns the result in JSON.
#[pyfunction]
pub fn probe_gpus(py: Python<'_>, only: Option<u32>) -> String {
    let found = detached(py, || DriverProbe::run(only));
    serde_json::to_string(&found).expect("what is found always serialises")
}

/// Copies bytes to a device and back; returns the result in JSON.
#[pyfunction]
pub fn probe_copies(py: Python<'_>, device: u32) -> PyResult<String> {
    let tried = call::without_gil(py, || {
        // Not the streams that saves use, which are not created if this test fails.
        let device = Driver::shared().and_then(|driver| driver.device(device));
        let device_streams = DeviceStreams::new(&device.map_err(penstock_io::Error::from)?)?;
        Ok(gpu::self_test(&Arc::new(device_streams))?)
    })?;
    Ok(serde_json::to_string(&tried).expect("what was tried always serialises"))
}

/// Measures the link of a device by a job in JSON; returns the rates in JSON.
#[pyfunction]
pub fn measure_link(py: Python<'_>, device: u32, job: &str) -> PyResult<String> {
    let invalid = |problem: String| PyValueError::new_err(problem);
    let job: LinkJob = serde_json::from_str(job).map_err(|error| invalid(error.to_string()))?;
    job.check().map_err(invalid)?;
    let measured = call::without_gil(py, || Ok(gpu::link(&DeviceStreams::of(device)?, &job)?))?;
    Ok(serde_json::to_string(&measured).expect("what was measured always serialises"))
}

/// Measures the cost of pinning memory; returns the times in JSON.
#[pyfunction]
pub fn measure_pinning(py: Python<'_>, device: u32, nbytes: usize) -> PyResult<String> {
    if nbytes == 0 {
        return Err(PyValueError::new_err("nbytes must be positive"));
    }
    let measure = || Ok(gpu::pinning(DeviceStreams::of(device)?.device(), nbytes)?);
    let measured = call::without_gil(py, measure)?;
    Ok(serde_json::to_string(&measured).expect("what was measured always serialises"))
}

/// Seconds for `warps` warps to post `posts` requests in all to the host queue, each answered at
/// once.
#[pyfunction]
pub fn measure_posts(py: Python<'_>, device: u32, warps: usize, posts: usize) -> PyResult<f64> {
    if warps == 0 || posts == 0 {
        return Err(PyValueError::new_err("warps and posts must be positive"));
    }
    let measure = || {
        Ok(fifo::measure_posts(
            DeviceStreams::of(device)?.device(),
            warps,
            posts,
        )?)
    };
    let took = call::without_gil(py, measure)?;
    Ok(took.as_secs_f64())
}

/// Seconds for a kernel to gather `count` rows of a table in pinned memory.
#[pyfunction]
pub fn measure_packing(
    py: Python<'_>,
    device: u32,
    rows: u32,
    row_bytes: usize,
    count: usize,
) -> PyResult<f64> {
    if rows == 0 || row_bytes == 0 || count == 0 {
        return Err(PyValueError::new_err(
            "rows, row_bytes and count must be positive",
        ));
    }
    let measure = || {
        Ok(fifo::measure_packing(
            DeviceStreams::of(device)?.device(),
            rows,
            row_bytes,
            count,
        )?)
    };
    let took = call::without_gil(py, measure)?;
    Ok(took.as_secs_f64())
}

/// Bytes that this process has ever pinned, including those released.
#[pyfunction]
pub fn pinned_bytes() -> u64 {
    Registration::total_bytes()
}
