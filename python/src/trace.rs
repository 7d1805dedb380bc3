//! Traces: their files, and the spans that Python adds.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;

use penstock_io::trace::{self, Process, Role};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::owner::detached;

/// Begins a trace of this process; `order` is its position among the processes, `about` a JSON
/// object. With `is_shared`, other processes have the same path.
#[pyfunction]
#[pyo3(signature = (path, *, order, name, about, is_shared))]
pub fn trace_start(
    py: Python<'_>,
    path: PathBuf,
    order: u32,
    name: String,
    about: &str,
    is_shared: bool,
) -> PyResult<()> {
    let about = serde_json::from_str(about);
    let about = about.map_err(|error| PyValueError::new_err(format!("about: {error}")))?;
    let process = Process {
        id: std::process::id(),
        order,
        name,
        about,
    };
    let started = detached(py, || trace::start(&path, process, is_shared));
    started.map_err(|error| errors::raise(py, &error.into()))
}

/// Ends the trace, if there is one, and completes its file.
#[pyfunction]
pub fn trace_stop(py: Python<'_>) -> PyResult<()> {
    let stopped = detached(py, trace::stop);
    stopped.map_err(|error| errors::raise(py, &error.into()))
}

/// Leaves the trace to the parent, in a forked child.
#[pyfunction]
pub fn trace_forget() {
    trace::forget();
}

/// Whether a trace is running.
#[pyfunction]
pub fn trace_is_on() -> bool {
    trace::is_on()
}

/// Nanoseconds of the clock that spans use.
#[pyfunction]
pub fn trace_now() -> u64 {
    trace::now_ns()
}

/// The time at which a span of the calling thread begins, of the clock that spans use.
#[pyfunction]
pub fn trace_begin() -> u64 {
    trace::begin_ns()
}

/// Records what this thread has done from `start_ns` to `end_ns`, by default until now.
#[pyfunction]
#[pyo3(signature = (name, start_ns, detail=None, end_ns=None))]
pub fn trace_span(name: String, start_ns: u64, detail: Option<OsString>, end_ns: Option<u64>) {
    trace::span_during(name, until(start_ns, end_ns), detail.map(printable));
}

/// Records an interval in the row of a "stall" or of the "background", by default until now.
#[pyfunction]
#[pyo3(signature = (role, name, start_ns, detail=None, end_ns=None))]
pub fn trace_overlapping(
    role: &str,
    name: String,
    start_ns: u64,
    detail: Option<OsString>,
    end_ns: Option<u64>,
) -> PyResult<()> {
    let unknown = || PyValueError::new_err(format!("there is no row for {role:?}"));
    let role = Role::of(role).ok_or_else(unknown)?;
    trace::span_overlapping(role, name, until(start_ns, end_ns), detail.map(printable));
    Ok(())
}

fn until(start_ns: u64, end_ns: Option<u64>) -> Range<u64> {
    start_ns..end_ns.unwrap_or_else(trace::now_ns).max(start_ns)
}

/// A path as text; bytes that are not UTF-8 are replaced.
fn printable(detail: OsString) -> String {
    detail.to_string_lossy().into_owned()
}
