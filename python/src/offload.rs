//! Bytes of files from and to the memory of tensors, many at a time.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use penstock_io::Error;
use penstock_io::buffer;
use penstock_io::device::{Device, Requests};
use penstock_io::executor::{
    self, ExecutorConfig, Kind, Landing, Moved, Request, Source, Target, page_bytes,
};
use penstock_io::file::{Direct, File};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::call;
use crate::errors;
use crate::owner::{detached, let_go};
use crate::tensor::{HostBuffer, NativeArray, landing, supply};

fn raised<T>(py: Python<'_>, result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| errors::raise_transfer(py, &error))
}

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
    fn prepare(&self, end: u64, has_edges: bool, is_durable: bool) -> Result<Target, Error> {
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

/// A file, where in it, and an array.
type NativeRequest = (Py<DataFile>, u64, NativeArray);

/// Workers that many callers share.
#[pyclass(frozen, module = "penstock._native")]
pub struct Executor {
    /// Until it is closed.
    inner: Mutex<Option<executor::Executor>>,
    /// The claims of tables, by weight.
    rows: Mutex<HashMap<u32, Weak<executor::Share>>>,
    engine: &'static str,
    fallback: Option<String>,
}

#[pymethods]
impl Executor {
    #[new]
    #[pyo3(signature = (*, engine, workers, queue_depth, in_flight_bytes, block_bytes, staging_bytes))]
    fn new(
        py: Python<'_>,
        engine: &str,
        workers: usize,
        queue_depth: usize,
        in_flight_bytes: usize,
        block_bytes: usize,
        staging_bytes: usize,
    ) -> PyResult<Executor> {
        let config = ExecutorConfig {
            engine: raised(py, engine.parse())?,
            workers,
            queue_depth,
            in_flight_bytes,
            block_bytes,
            staging_bytes,
            ..ExecutorConfig::default()
        };
        let inner = raised(py, detached(py, || executor::Executor::open(&config)))?;
        Ok(Executor {
            engine: inner.engine(),
            fallback: inner.fallback().map(str::to_owned),
            inner: Mutex::new(Some(inner)),
            rows: Mutex::default(),
        })
    }

    /// The engine in use.
    #[getter]
    fn engine(&self) -> &'static str {
        self.engine
    }

    /// Why it is not io_uring, where that was left open.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// A claim on the device.
    fn share(&self, py: Python<'_>, weight: u32) -> PyResult<Share> {
        let inner = self.claim(py, weight)?;
        Ok(Share { inner })
    }

    /// Finishes what was handed over, and lets the workers go.
    fn close(&self, py: Python<'_>) {
        let inner = self.inner().take();
        detached(py, || drop(inner));
    }
}

impl Executor {
    pub(crate) fn claim(&self, py: Python<'_>, weight: u32) -> PyResult<executor::Share> {
        match &*self.inner() {
            Some(inner) => raised(py, inner.share(weight)),
            None => Err(PyRuntimeError::new_err("the program ends")),
        }
    }

    /// That of all tables: what is asked for first is read first, whichever of them has it. Batches
    /// that are waited for together have rows of several.
    pub(crate) fn claim_for_rows(
        &self,
        py: Python<'_>,
        weight: u32,
    ) -> PyResult<Arc<executor::Share>> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = rows.get(&weight).and_then(Weak::upgrade) {
            return Ok(share);
        }
        let share = Arc::new(self.claim(py, weight)?);
        rows.insert(weight, Arc::downgrade(&share));
        Ok(share)
    }

    fn inner(&self) -> MutexGuard<'_, Option<executor::Executor>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One caller's claim on an executor.
#[pyclass(frozen, module = "penstock._native")]
pub struct Share {
    inner: executor::Share,
}

#[pymethods]
impl Share {
    /// Reads arrays.
    fn read(&self, py: Python<'_>, requests: Vec<NativeRequest>) -> PyResult<Transfer> {
        let request = |(file, offset, array): NativeRequest| {
            let landing: Landing = landing(array)?;
            Ok(Request {
                target: file.get().to_read(),
                offset,
                kind: Kind::Read(landing),
            })
        };
        let requests: PyResult<Vec<Request>> = requests.into_iter().map(request).collect();
        self.submit(py, requests?, Vec::new())
    }

    /// Writes arrays; each file is made long enough first, and made durable at the end if asked for.
    fn write(
        &self,
        py: Python<'_>,
        requests: Vec<NativeRequest>,
        durable: bool,
    ) -> PyResult<Transfer> {
        let mut supplies = Vec::with_capacity(requests.len());
        let mut files: Vec<(Py<DataFile>, u64, bool)> = Vec::new();
        let mut known = HashMap::new();
        for (file, offset, array) in requests {
            let supply: Source = supply(array)?;
            let (len, page) = (supply.len(), page_bytes());
            let end = offset.saturating_add(len);
            let has_edges = !offset.is_multiple_of(page) || !len.is_multiple_of(page);
            let index = *known.entry(file.as_ptr()).or_insert_with(|| {
                files.push((file, 0, false));
                files.len() - 1
            });
            let (_, last, any_edges) = &mut files[index];
            (*last, *any_edges) = (end.max(*last), has_edges || *any_edges);
            supplies.push((index, offset, supply));
        }
        let prepare = || -> Result<Vec<Target>, Error> {
            let target = |(file, end, has_edges): &(Py<DataFile>, u64, bool)| {
                file.get().prepare(*end, *has_edges, durable)
            };
            files.iter().map(target).collect()
        };
        let targets = raised(py, detached(py, prepare))?;
        let request = |(index, offset, supply): (usize, u64, Source)| Request {
            target: targets[index].clone(),
            offset,
            kind: Kind::Write(supply),
        };
        let made = supplies.into_iter().map(request).collect();
        let syncs = match durable {
            true => targets.iter().map(|one| Arc::clone(&one.file)).collect(),
            false => Vec::new(),
        };
        self.submit(py, made, syncs)
    }
}

impl Share {
    fn submit(
        &self,
        py: Python<'_>,
        requests: Vec<Request>,
        syncs: Vec<Arc<File>>,
    ) -> PyResult<Transfer> {
        // Who hands over more than may wait waits here.
        let inner = raised(
            py,
            detached(py, || self.inner.submit_synced(requests, syncs)),
        )?;
        Ok(Transfer { inner })
    }
}

/// Bytes moved, of those through staging, of those through the page cache, and for how long in
/// seconds.
type NativeMoved = (u64, u64, u64, f64);

/// Requests that were handed over together.
#[pyclass(frozen, module = "penstock._native")]
pub struct Transfer {
    inner: executor::Transfer,
}

#[pymethods]
impl Transfer {
    /// Whether it has ended, well or not.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = self.inner.is_done();
        let_go(py);
        is_done
    }

    /// Waits for the end; None where the time is over before. Signals have their turn meanwhile.
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<Option<NativeMoved>> {
        let wait = |turn| raised(py, detached(py, || self.inner.wait(Some(turn))));
        let moved = call::wait(py, timeout_seconds, wait)?;
        let of = |moved: Moved| {
            let seconds = self.inner.took().as_secs_f64();
            (moved.bytes, moved.staged_bytes, moved.cached_bytes, seconds)
        };
        Ok(moved.map(of))
    }

    /// Gives up what has not begun.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        raised(py, self.inner.cancel())
    }

    /// Has a bell rung when it ends.
    fn ring(&self, py: Python<'_>, bell: &Bell, key: u64) -> PyResult<()> {
        raised(py, bell.inner.hang(&self.inner, key))
    }
}

/// A descriptor that becomes readable when transfers end.
#[pyclass(frozen, module = "penstock._native")]
pub struct Bell {
    inner: executor::Bell,
}

#[pymethods]
impl Bell {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Bell> {
        let inner = raised(py, executor::Bell::new())?;
        Ok(Bell { inner })
    }

    /// The descriptor.
    fn fileno(&self) -> RawFd {
        self.inner.as_fd().as_raw_fd()
    }

    /// The keys of those that have ended since.
    fn take(&self, py: Python<'_>) -> Vec<u64> {
        let keys = self.inner.take();
        let_go(py);
        keys
    }
}

impl Bell {
    /// What rings it with a key.
    pub(crate) fn ringing(&self, key: u64) -> Box<dyn FnOnce() + Send> {
        self.inner.ringing(key)
    }
}

/// Memory that is kept for the next tensor.
#[pyclass(frozen, module = "penstock._native")]
pub struct Stock {
    inner: buffer::Stock,
}

#[pymethods]
impl Stock {
    #[new]
    fn new(budget_bytes: usize, locked: bool) -> Stock {
        let inner = buffer::Stock::new(budget_bytes, locked);
        Stock { inner }
    }

    /// Memory of so many bytes, at a page.
    fn take(&self, py: Python<'_>, nbytes: usize) -> PyResult<HostBuffer> {
        raised(py, detached(py, || self.inner.take(nbytes))).map(HostBuffer::from)
    }

    /// Gives what nobody has back to the system.
    fn release(&self, py: Python<'_>) {
        detached(py, || self.inner.release());
    }

    /// Bytes that tensors have.
    #[getter]
    fn taken_bytes(&self, py: Python<'_>) -> usize {
        let_go(py);
        self.inner.taken_bytes()
    }

    /// Bytes that are kept.
    #[getter]
    fn free_bytes(&self, py: Python<'_>) -> usize {
        let_go(py);
        self.inner.free_bytes()
    }
}

/// Memory of so many bytes, at a page; a thread puts the first of its pages in place.
#[pyfunction]
pub fn reserve(py: Python<'_>, nbytes: usize, early_bytes: usize) -> PyResult<HostBuffer> {
    raised(py, buffer::reserve(nbytes, early_bytes)).map(HostBuffer::from)
}
