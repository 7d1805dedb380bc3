//! Traces: where they go, and what Python has to add to them.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;

use penstock_io::trace::{self, Process, Role};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::owner::detached;

/// Begins a trace of this process; `order` is where it comes among others, `about` a JSON object.
/// With `is_shared` others were given the path as well.
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

/// Leaves the trace to the parent, in a child that was forked.
#[pyfunction]
pub fn trace_forget() {
    trace::forget();
}

/// Whether a trace runs.
#[pyfunction]
pub fn trace_is_on() -> bool {
    trace::is_on()
}

/// Nanoseconds of the clock that spans are made of.
#[pyfunction]
pub fn trace_now() -> u64 {
    trace::now_ns()
}

/// Records what this thread has done since `start_ns`, until now if nothing else is said.
#[pyfunction]
#[pyo3(signature = (name, start_ns, detail=None, end_ns=None))]
pub fn trace_span(name: String, start_ns: u64, detail: Option<OsString>, end_ns: Option<u64>) {
    trace::span_during(name, until(start_ns, end_ns), detail.map(printable));
}

/// Records what went on since `start_ns` in a row for a "stall" or for the "background".
#[pyfunction]
#[pyo3(signature = (role, name, start_ns, detail=None, end_ns=None))]
pub fn trace_beside(
    role: &str,
    name: String,
    start_ns: u64,
    detail: Option<OsString>,
    end_ns: Option<u64>,
) -> PyResult<()> {
    let unknown = || PyValueError::new_err(format!("there is no row for {role:?}"));
    let role = Role::of(role).ok_or_else(unknown)?;
    trace::span_beside(role, name, until(start_ns, end_ns), detail.map(printable));
    Ok(())
}

fn until(start_ns: u64, end_ns: Option<u64>) -> Range<u64> {
    start_ns..end_ns.unwrap_or_else(trace::now_ns).max(start_ns)
}

/// Of a path, whatever bytes it is made of.
fn printable(detail: OsString) -> String {
    detail.to_string_lossy().into_owned()
}
