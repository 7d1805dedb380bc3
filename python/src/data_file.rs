//! Files from which tensors are read and to which they are written, at any offset.

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

/// An open file for tensors.
#[pyclass(frozen, module = "penstock._native")]
pub struct DataFile {
    file: Arc<File>,
    /// The same file through the page cache; opened when a write needs it.
    edges: OnceLock<Arc<File>>,
    is_writable: bool,
    /// Whether its directory entry may not be durable, whichever process created it.
    is_entry_unsynced: AtomicBool,
}

#[pymethods]
impl DataFile {
    /// Opens a file by its path for reading, or for writing, which creates it if necessary.
    /// Follows links.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, to_write: bool, direct: &str) -> PyResult<DataFile> {
        let direct: Direct = raised(py, direct.parse())?;
        if !to_write {
            let file = raised(py, detached(py, || File::reach(&path, direct)))?;
            return Ok(DataFile::of(file, false, false));
        }
        // Another process may have just created it, without making it durable.
        let file = raised(py, detached(py, || reach_or_create(&path, direct)))?;
        Ok(DataFile::of(file, true, true))
    }

    /// Opens again the file of a descriptor, which its owner keeps.
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

    /// Its current size in bytes.
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

    /// Parameters that suit its device: bytes of a request, requests in flight of each worker,
    /// number of workers.
    #[getter]
    fn suited(&self) -> (usize, usize, usize) {
        let device = Device::of(&*self.file);
        let suited = Requests::suited(device.as_ref());
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let bytes = suited.whole_stripes(device.as_ref(), page_bytes() as usize);
        // Twice the queue depth of a save: a save stages its requests, and these need no staging
        // memory.
        (
            bytes.unwrap_or(suited.bytes),
            2 * suited.queue_depth,
            cores.min(suited.workers_max),
        )
    }

    /// Why it is not direct, if direct I/O was optional.
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

    /// Prepares the file for a write that ends at `end`.
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

    /// The target of a write of whole pages, or also of parts of pages (`has_edges`).
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

/// Opens the file for writing, and creates it if necessary.
fn reach_or_create(path: &Path, direct: Direct) -> Result<File, Error> {
    use std::io::ErrorKind;
    match File::reach_to_write(path, direct) {
        Err(error) if error.kind() == Some(ErrorKind::NotFound) => {}
        file => return file,
    }
    match File::create(path, direct) {
        // Another process has created it meanwhile.
        Err(error) if error.kind() == Some(ErrorKind::AlreadyExists) => {
            File::reach_to_write(path, direct)
        }
        file => file,
    }
}
