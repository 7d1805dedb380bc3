//! `Bench`, one process of a benchmark, and what can be found out before one.

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

    /// Bytes that going over the files once moves.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// Makes all requests, from a moment of the monotonic clock on; what came of it, in JSON.
    fn run(&self, py: Python<'_>, start_at: f64) -> PyResult<String> {
        let run = || self.inner.run(start_at);
        let outcome = call::run_until(py, || self.inner.cancel(), run)?;
        Ok(serde_json::to_string(&outcome).expect("an outcome always serialises"))
    }
}

/// What was tried, the number of the kernel's error where it failed, and that in words.
type Trial = (&'static str, Option<i32>, Option<String>);

/// Tries what `io_uring` can do here.
#[pyfunction]
pub fn probe_io_uring(py: Python<'_>) -> Vec<Trial> {
    let trials = detached(py, probe::try_all);
    let trials = trials.into_iter();
    trials
        .map(|trial| told(trial.name, trial.outcome))
        .collect()
}

/// Tries what the file system of a directory can do with names: it makes files there and removes them.
#[pyfunction]
pub fn probe_names(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Trial>> {
    let trials = call::without_gil(py, || Ok(abilities::try_all(&path)?))?;
    let trials = trials.into_iter();
    Ok(trials
        .map(|trial| told(trial.name, trial.outcome))
        .collect())
}

fn told(name: &'static str, outcome: std::io::Result<()>) -> Trial {
    match outcome {
        Ok(()) => (name, None, None),
        Err(error) => (name, error.raw_os_error(), Some(error.to_string())),
    }
}

/// Tries whether lazy saves can be watched here; in words why not, else `None`.
#[pyfunction]
pub fn probe_watch(py: Python<'_>) -> Option<String> {
    let refused = detached(py, Watch::probe).err();
    refused.map(|error| error.to_string())
}

/// Tries direct I/O and `fallocate` on a file that is made in a directory and removed again.
#[pyfunction]
pub fn probe_directory<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
    let probe = path.join(format!(".penstock-probe-{}", std::process::id()));
    let (file, allocated) = call::without_gil(py, || {
        let file = File::create(&probe, Direct::Auto)?;
        let allocated = file.allocate(1 << 20);
        // It was made just now; whoever removes it first does what we would.
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
