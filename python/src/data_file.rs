//! Files that tensors are read from and written to, at any offset.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use penstock_io::Error;
use penstock_io::device::{Device, Requests};
use penstock_io::executor::{Target, page_bytes};
use penstock_io::file::{Direct, File};
use pyo3::prelude::*;

use crate::errors::transferred as raised;
use crate::owner::detached;

/// An open file to read tensors from or to write them to.
#[pyclass(frozen, module = "penstock._native")]
pub struct DataFile {
    file: Arc<File>,
    /// The same file through the page cache; opened when a write needs it.
    edges: OnceLock<Arc<File>>,
    is_writable: bool,
    /// Whether its entry in its directory may not be durable, whoever made it.
    is_entry_unsynced: AtomicBool,
}

#[pymethods]
impl DataFile {
    /// Opens a file by its path, to write, and made where it is not there, or to read; links are
    /// followed.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, to_write: bool, direct: &str) -> PyResult<DataFile> {
        let direct: Direct = raised(py, direct.parse())?;
        if !to_write {
            let file = raised(py, detached(py, || File::reach(&path, direct)))?;
            return Ok(DataFile::of(file, false, false));
        }
        // Who found it may have made it a moment ago, in a write that was not to be durable.
        let file = raised(py, detached(py, || reach_or_create(&path, direct)))?;
        Ok(DataFile::of(file, true, true))
    }

    /// Opens the file of a descriptor again, which its owner keeps.
    #[staticmethod]
    fn of_descriptor(py: Python<'_>, fd: RawFd, direct: &str) -> PyResult<DataFile> {
        let direct: Direct = raised(py, direct.parse())?;
        let file = raised(py, detached(py, || File::reopen(fd, direct)))?;
        let is_writable = raised(py, file.is_writable())?;
        Ok(DataFile::of(file, is_writable, false))
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// Bytes that it has now.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        raised(py, self.file.len())
    }

    #[getter]
    fn direct(&self) -> bool {
        self.file.is_direct()
    }

    #[getter]
    fn writable(&self) -> bool {
        self.is_writable
    }

    /// What suits its device: the bytes of a request, requests of so many in flight of a worker,
    /// workers.
    #[getter]
    fn suited(&self) -> (usize, usize, usize) {
        let device = Device::of(&*self.file);
        let suited = Requests::suited(device.as_ref());
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let bytes = suited.whole_stripes(device.as_ref(), page_bytes() as usize);
        // Twice as many in flight as a save has, which stages them: these need no memory of ours.
        (
            bytes.unwrap_or(suited.bytes),
            2 * suited.queue_depth,
            cores.min(suited.workers_max),
        )
    }

    /// Why it is not direct, where that was left open.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.file.fallback()
    }
}

impl DataFile {
    fn of(file: File, is_writable: bool, is_entry_unsynced: bool) -> DataFile {
        DataFile {
            file: Arc::new(file),
            edges: OnceLock::new(),
            is_writable,
            is_entry_unsynced: AtomicBool::new(is_entry_unsynced),
        }
    }

    pub(crate) fn to_read(&self) -> Target {
        Target {
            file: Arc::clone(&self.file),
            edges: None,
        }
    }

    /// Makes it ready for a write that ends there.
    pub(crate) fn prepare(
        &self,
        end: u64,
        has_edges: bool,
        is_durable: bool,
    ) -> Result<Target, Error> {
        self.file.extend_to(end)?;
        if is_durable && self.is_entry_unsynced.load(Ordering::Acquire) {
            self.file.sync_entry()?;
            self.is_entry_unsynced.store(false, Ordering::Release);
        }
        self.to_write(has_edges)
    }

    /// As it is needed to write whole pages only, or others as well.
    fn to_write(&self, has_edges: bool) -> Result<Target, Error> {
        let edges = match self.edges.get() {
            _ if !has_edges || !self.file.is_direct() => None,
            Some(edges) => Some(Arc::clone(edges)),
            None => {
                let edges = Arc::new(self.file.again(Direct::Off)?);
                Some(Arc::clone(self.edges.get_or_init(|| edges)))
            }
        };
        let file = Arc::clone(&self.file);
        Ok(Target { file, edges })
    }
}

/// The file, made where it is not there.
fn reach_or_create(path: &Path, direct: Direct) -> Result<File, Error> {
    use std::io::ErrorKind;
    match File::reach_to_write(path, direct) {
        Err(error) if error.kind() == Some(ErrorKind::NotFound) => {}
        file => return file,
    }
    match File::create(path, direct) {
        // Somebody else was faster.
        Err(error) if error.kind() == Some(ErrorKind::AlreadyExists) => {
            File::reach_to_write(path, direct)
        }
        file => file,
    }
}
