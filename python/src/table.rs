//! Tables whose rows can be updated.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_gather::{Error, Form, Frozen, Merging, MutableTable, NewTable, Opening, Storage};
use penstock_io::file::Direct;
use penstock_io::file_system::Native;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::call;
use crate::errors;
use crate::errors::gathered as raised;
use crate::features::{RowBatch, RowCache, counted};
use crate::ids::Ids;
use crate::offload::Executor;
use crate::owner::detached;
use crate::rows::{GatherCounts, RowTableForm};
use crate::tensor::{self, NativeArray, TensorTarget};

fn storage(py: Python<'_>, executor: &Executor, weight: u32, direct: &str) -> PyResult<Storage> {
    let direct: Direct = direct
        .parse()
        .map_err(|error| errors::raise_transfer(py, &error))?;
    Ok(Storage {
        file_system: Arc::new(Native),
        direct,
        share: Arc::new(executor.claim(py, weight)?),
    })
}

fn closed() -> PyErr {
    PyValueError::new_err("the table is closed: open it again")
}

/// A table that is being created.
#[pyclass(frozen, module = "penstock._native")]
pub struct NewRowTable {
    inner: Mutex<Option<NewTable>>,
    form: Form,
}

#[pymethods]
impl NewRowTable {
    /// Begins a table in a directory; `note` is metadata in JSON.
    #[new]
    fn new(
        py: Python<'_>,
        executor: &Executor,
        weight: u32,
        home: PathBuf,
        form: Py<RowTableForm>,
        note: &str,
        direct: &str,
    ) -> PyResult<NewRowTable> {
        let storage = storage(py, executor, weight, direct)?;
        let form = form.get().form();
        let note = serde_json::from_str(note)
            .map_err(|error| PyValueError::new_err(format!("note: {error}")))?;
        let begun = detached(py, || NewTable::begin(&home, form, note, storage));
        Ok(NewRowTable {
            inner: Mutex::new(Some(raised(py, begun)?)),
            form,
        })
    }

    /// Appends whole rows, given as a contiguous array.
    fn append(&self, py: Python<'_>, rows: NativeArray) -> PyResult<()> {
        let rows = tensor::contiguous(rows)?;
        if !rows.len().is_multiple_of(self.form.value_bytes) {
            return Err(PyValueError::new_err("rows: not whole ones"));
        }
        self.with(py, |table| table.append(&rows))
    }

    /// Commits the table.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let done = detached(py, || match self.take() {
            None => Ok(()),
            Some(table) => table.finish(),
        });
        raised(py, done)
    }

    /// Drops the table; without `finish` its files are removed.
    fn close(&self, py: Python<'_>) {
        detached(py, || drop(self.take()));
    }
}

impl NewRowTable {
    fn take(&self) -> Option<NewTable> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    fn with(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut NewTable) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        let done = detached(py, || {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.as_mut().map(work)
        });
        match done {
            None => Err(closed()),
            Some(done) => raised(py, done),
        }
    }
}

/// The form of a table, and its creator's metadata in JSON.
#[pyfunction]
pub(crate) fn row_table_form(py: Python<'_>, home: PathBuf) -> PyResult<(RowTableForm, String)> {
    let (form, note) = raised(py, detached(py, || MutableTable::describe(&home)))?;
    Ok((RowTableForm::of(form), note.to_string()))
}

/// A table whose rows can be updated.
#[pyclass(frozen, module = "penstock._native")]
pub struct RowTable {
    inner: Mutex<Option<Arc<MutableTable>>>,
}

#[pymethods]
impl RowTable {
    /// Opens the table of a directory.
    #[new]
    #[pyo3(signature = (executor, weight, home, *, direct, cache, gap_bytes, run_bytes_max, log_bytes, record_bytes))]
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the keywords of a constructor"
    )]
    fn new(
        py: Python<'_>,
        executor: &Executor,
        weight: u32,
        home: PathBuf,
        direct: &str,
        cache: Option<Py<RowCache>>,
        gap_bytes: u64,
        run_bytes_max: u64,
        log_bytes: u64,
        record_bytes: u64,
    ) -> PyResult<RowTable> {
        let storage = storage(py, executor, weight, direct)?;
        let opening = Opening {
            cache: cache.map(|cache| cache.get().shared()),
            merging: Merging {
                gap_bytes,
                run_bytes_max,
            },
            log_bytes,
            record_bytes,
        };
        let opened = raised(
            py,
            detached(py, || MutableTable::open(&home, storage, opening)),
        )?;
        Ok(RowTable {
            inner: Mutex::new(Some(Arc::new(opened))),
        })
    }

    /// Begins to gather the rows of these ids, a contiguous array of integers, into bytes.
    fn look_up(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        out: TensorTarget,
    ) -> PyResult<RowBatch> {
        let table = self.table()?;
        let ids = Ids::of(ids, is_signed)?;
        let out = tensor::target(out)?.into_buf();
        let begin = || {
            let ids = ids.numbers(table.form().rows)?;
            table.look_up(&ids, out)
        };
        raised(py, detached(py, begin)).map(RowBatch::new)
    }

    /// Updates rows, given as a contiguous array of their values.
    fn update(
        &self,
        py: Python<'_>,
        ids: NativeArray,
        is_signed: bool,
        rows: NativeArray,
    ) -> PyResult<()> {
        let table = self.table()?;
        let ids = Ids::of(ids, is_signed)?;
        let rows = tensor::contiguous(rows)?;
        if rows.len() != ids.count() * table.form().value_bytes {
            return Err(PyValueError::new_err("rows: not one for each id"));
        }
        let work = || {
            let ids = ids.numbers(table.form().rows)?;
            table.update(&ids, &rows)
        };
        raised(py, detached(py, work))
    }

    /// Makes all updates durable.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let table = self.table()?;
        raised(py, detached(py, || table.flush()))
    }

    /// Takes a snapshot of all rows, waiting for other snapshots to end; handles signals
    /// meanwhile.
    fn freeze(&self, py: Python<'_>) -> PyResult<FrozenTable> {
        let table = self.table()?;
        let frozen = call::wait(py, None, |turn| {
            raised(py, detached(py, || table.try_freeze(turn)))
        })?;
        Ok(FrozenTable {
            inner: Mutex::new(frozen),
        })
    }

    /// Number of updated rows outside of pieces, and bytes of the logs that hold them.
    fn logged(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let table = self.table()?;
        raised(py, detached(py, || table.logged()))
    }

    /// The counters.
    fn counts(&self) -> PyResult<GatherCounts> {
        Ok(counted(self.table()?.counts()))
    }

    /// Closes the table once no compaction or snapshot is active; unflushed updates are lost.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let table = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.take()
        };
        let Some(table) = table else {
            return Ok(());
        };
        // The table is closed however the wait ends; its lock is released with the last reference.
        let waited = call::wait(py, None, |turn| {
            Ok(detached(py, || table.is_still(turn)).then_some(()))
        });
        detached(py, || drop(table));
        waited.map(drop)
    }
}

impl RowTable {
    fn table(&self) -> PyResult<Arc<MutableTable>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(closed)
    }
}

/// A snapshot of all rows.
#[pyclass(frozen, module = "penstock._native")]
pub struct FrozenTable {
    inner: Mutex<Option<Frozen>>,
}

#[pymethods]
impl FrozenTable {
    /// Reads the rows of a piece into bytes, in the layout of its file.
    fn read(&self, py: Python<'_>, piece: u64, out: TensorTarget) -> PyResult<()> {
        let mut out = tensor::target(out)?.into_buf();
        let read = detached(py, || {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            let frozen = inner.as_ref()?;
            let copy = |memory: penstock_io::buffer::Memory| {
                let bytes = out.len();
                out.as_mut_slice()
                    .copy_from_slice(&memory.as_slice()[..bytes]);
            };
            Some(frozen.rows_of(piece).map(copy))
        });
        match read {
            None => Err(closed()),
            Some(read) => raised(py, read),
        }
    }

    /// Compacts: moves updated rows into pieces; returns the number of rows, of pieces written,
    /// and of their bytes.
    fn compact(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let Some(mut frozen) = self.take() else {
            return Err(closed());
        };
        loop {
            // Each piece is committed by itself, so a signal may interrupt between two.
            let more = detached(py, || frozen.compact_more());
            if let Some(compacted) = raised(py, more)? {
                detached(py, || drop(frozen));
                return Ok((compacted.rows, compacted.pieces, compacted.bytes));
            }
            py.check_signals()?;
        }
    }

    /// Releases the snapshot.
    fn close(&self, py: Python<'_>) {
        detached(py, || drop(self.take()));
    }
}

impl FrozenTable {
    fn take(&self) -> Option<Frozen> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}
