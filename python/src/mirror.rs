//! `mirror` and `MirrorJob`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use penstock_store::mirror::{MirrorReport, Mirroring, mirror as copy_as_it_is, mirror_sealed};
use penstock_store::options::Options;
use penstock_store::seal::Sealing;
use penstock_store::{Progress, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::{self, Callback};
use crate::keys::AttemptKey;
use crate::options::NativeOptions;

/// Copies a checkpoint as it is, or sealed.
fn copy(
    path: &Path,
    url: &Path,
    sealing: Option<Sealing>,
    mirroring: &Mirroring,
    options: &Options,
    progress: &Progress,
) -> Result<MirrorReport> {
    match sealing {
        None => copy_as_it_is(path, url, mirroring, options, progress),
        Some(sealing) => mirror_sealed(path, url, sealing, mirroring, options, progress),
    }
}

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
#[pyo3(signature = (path, url, *, sealing, bytes_per_second, connections, options, progress))]
#[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
pub fn mirror<'py>(
    py: Python<'py>,
    path: PathBuf,
    url: PathBuf,
    sealing: Option<PyRef<'_, AttemptKey>>,
    bytes_per_second: Option<u64>,
    connections: Option<usize>,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let mirroring = Mirroring {
        bytes_per_second,
        connections,
    };
    let sealing = sealing.map(|key| key.sealing());
    let report = call::run(py, &progress, |progress| {
        copy(&path, &url, sealing, &mirroring, &options.0, progress)
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
    #[pyo3(signature = (path, url, *, sealing, bytes_per_second, connections, nice, options))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        url: PathBuf,
        sealing: Option<PyRef<'_, AttemptKey>>,
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
        let sealing = sealing.map(|key| key.sealing());
        let report = call::without_gil(py, || {
            let progress = &self.progress;
            let report = copy(&path, &url, sealing, &mirroring, &options, progress);
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
