//! `mirror` and `MirrorJob`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use penstock_store::Progress;
use penstock_store::mirror::{MirrorReport, Mirroring, mirror as copy};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::options::NativeOptions;

fn of_mirror<'py>(
    py: Python<'py>,
    from: &Path,
    to: &Path,
    report: &MirrorReport,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", from.as_os_str())?;
    dict.set_item("url", to.as_os_str())?;
    dict.set_item("checkpoint_id", &report.id)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("sent_bytes", report.sent_bytes)?;
    dict.set_item("files", report.files)?;
    dict.set_item("seconds", report.seconds)?;
    Ok(dict)
}

/// Copies to a bucket the files of a complete checkpoint that are not there yet.
#[pyfunction]
#[pyo3(signature = (path, url, *, bytes_per_second, connections, options, progress))]
pub fn mirror<'py>(
    py: Python<'py>,
    path: PathBuf,
    url: PathBuf,
    bytes_per_second: Option<u64>,
    connections: Option<usize>,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let mirroring = Mirroring {
        bytes_per_second,
        connections,
    };
    let report = call::run(py, &progress, |progress| {
        copy(&path, &url, &mirroring, &options.0, progress)
    })?;
    of_mirror(py, &path, &url, &report)
}

/// A copy in the background, which other threads observe and stop.
#[pyclass(frozen, module = "penstock._native")]
pub struct MirrorJob {
    progress: Progress,
    is_left: AtomicBool,
}

#[pymethods]
impl MirrorJob {
    #[new]
    fn new() -> MirrorJob {
        MirrorJob {
            progress: Progress::default(),
            is_left: AtomicBool::new(false),
        }
    }

    /// Copies without the GIL and without signal handling.
    #[pyo3(signature = (path, url, *, bytes_per_second, connections, nice, options))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        url: PathBuf,
        bytes_per_second: Option<u64>,
        connections: Option<usize>,
        nice: Option<u8>,
        options: NativeOptions,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mirroring = Mirroring {
            bytes_per_second,
            connections,
        };
        let mut options = options.0;
        options.nice = nice;
        let report = call::without_gil(py, || {
            let report = copy(&path, &url, &mirroring, &options, &self.progress);
            while self.is_left.load(Ordering::Relaxed) {
                thread::park();
            }
            report
        })?;
        of_mirror(py, &path, &url, &report)
    }

    /// Stops it: `run` soon raises, without having published anything.
    fn cancel(&self) {
        self.progress.cancel();
    }

    /// Stops it at the end of the process: `run` never returns. A thread that requested the GIL
    /// then would be ended in the middle of native code, and the process with it.
    fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.cancel();
    }

    /// Bytes copied or already there, and bytes in all.
    fn bytes(&self) -> (u64, u64) {
        self.progress.bytes()
    }
}
