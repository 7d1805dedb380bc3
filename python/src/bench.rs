//! `Bench`, one process of a benchmark, and probes of the system.

use std::path::PathBuf;

use penstock_bench::bench;
use penstock_bench::job::Job;
use penstock_io::buffer::Watch;
use penstock_io::engine::probe;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::abilities;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call;
use crate::owner::detached;

/// A measuring job whose files are open.
#[pyclass(frozen, module = "penstock._native")]
pub struct Bench {
    inner: bench::Bench,
}

#[pymethods]
impl Bench {
    /// Prepares a job, described in JSON.
    #[new]
    fn new(py: Python<'_>, job: &str) -> PyResult<Bench> {
        let invalid = |problem: String| PyValueError::new_err(problem);
        let job: Job = serde_json::from_str(job).map_err(|error| invalid(error.to_string()))?;
        job.check().map_err(invalid)?;
        let inner = call::without_gil(py, || bench::Bench::prepare(job))?;
        Ok(Bench { inner })
    }

    /// Bytes of one pass over the files.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// Makes all requests, beginning at a time of the monotonic clock; returns the results in
    /// JSON.
    fn run(&self, py: Python<'_>, start_at: f64) -> PyResult<String> {
        let run = || self.inner.run(start_at);
        let outcome = call::run_until(py, || self.inner.cancel(), run)?;
        Ok(serde_json::to_string(&outcome).expect("an outcome always serialises"))
    }
}

/// Name of a trial; the system's error number and message if it failed.
type Trial = (&'static str, Option<i32>, Option<String>);

/// Probes the features of `io_uring`.
#[pyfunction]
pub fn probe_io_uring(py: Python<'_>) -> Vec<Trial> {
    let trials = detached(py, probe::try_all);
    let trials = trials.into_iter();
    trials
        .map(|trial| trial_row(trial.name, trial.outcome))
        .collect()
}

/// Probes the operations on names in a directory's file system, with temporary files.
#[pyfunction]
pub fn probe_names(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Trial>> {
    let trials = call::without_gil(py, || Ok(abilities::try_all(&path)?))?;
    let trials = trials.into_iter();
    Ok(trials
        .map(|trial| trial_row(trial.name, trial.outcome))
        .collect())
}

fn trial_row(name: &'static str, outcome: std::io::Result<()>) -> Trial {
    match outcome {
        Ok(()) => (name, None, None),
        Err(error) => (name, error.raw_os_error(), Some(error.to_string())),
    }
}

/// Probes whether memory of lazy saves can be watched; returns the reason if not.
#[pyfunction]
pub fn probe_watch(py: Python<'_>) -> Option<String> {
    let refused = detached(py, Watch::probe).err();
    refused.map(|error| error.to_string())
}

/// Probes direct I/O and `fallocate` with a temporary file in a directory.
#[pyfunction]
pub fn probe_directory<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
    let probe = path.join(format!(".penstock-probe-{}", std::process::id()));
    let (file, allocated) = call::without_gil(py, || {
        let file = File::create(&probe, Direct::Auto)?;
        let allocated = file.allocate(1 << 20);
        // The file is our own; if another process has removed it already, nothing is left to do.
        drop(std::fs::remove_file(&probe));
        Ok((file, allocated.is_ok()))
    })?;
    let alignment = file.alignment();
    let found = PyDict::new(py);
    found.set_item("is_direct", file.is_direct())?;
    found.set_item("alignment", (alignment.memory, alignment.offset))?;
    found.set_item("fallback", file.fallback())?;
    found.set_item("allocates", allocated)?;
    Ok(found)
}
