//! Files and directories of checkpoints, for callers that do not open one.

pub(crate) mod times;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{FileStat, Files, Kind};
use penstock_store::{Error, tier};
use pyo3::prelude::*;

use crate::errors;
use crate::owner::detached;

/// Kind and length in bytes.
type Row = (&'static str, u64);

fn row(found: FileStat) -> Row {
    let kind = match found.kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Link => "link",
        Kind::Other => "other",
    };
    (kind, found.bytes)
}

/// Runs `ask` with the file system of a path.
fn on<T: Send>(
    py: Python<'_>,
    path: &Path,
    ask: impl FnOnce(&dyn Files) -> io::Result<T> + Send,
) -> PyResult<io::Result<T>> {
    let file_system = tier::file_system(path).map_err(|error| errors::raise(py, &error))?;
    Ok(detached(py, || ask(file_system.files())))
}

/// The target of a path; `None` if it does not exist.
#[pyfunction]
pub(crate) fn stat(py: Python<'_>, path: PathBuf) -> PyResult<Option<Row>> {
    let found = on(py, &path, |files| files.follow(&path))?;
    match found {
        Ok(found) => Ok(Some(row(found))),
        Err(error) => nothing(&error).then_some(None).ok_or(error),
    }
    .map_err(|source| failed(py, "look at", path, source))
}

/// Whether a path leads to a file, or to anything on a file system with directories.
#[pyfunction]
pub(crate) fn has_file(py: Python<'_>, path: PathBuf) -> PyResult<bool> {
    let found = on(py, &path, |files| match files.has_directories() {
        true => files.follow(&path),
        false => files.stat_file(&path),
    })?;
    match found {
        Ok(_) => Ok(true),
        Err(error) => nothing(&error).then_some(false).ok_or(error),
    }
    .map_err(|source| failed(py, "look at", path, source))
}

/// The names in a directory.
#[pyfunction]
pub(crate) fn list_names(py: Python<'_>, path: PathBuf) -> PyResult<Vec<OsString>> {
    let listed = on(py, &path, |files| files.list(&path))?;
    let listed = listed.map_err(|source| failed(py, "list", path, source))?;
    Ok(listed.into_iter().map(|entry| entry.name).collect())
}

/// The first bytes of a file, or the whole file if it is shorter.
#[pyfunction]
pub(crate) fn read_start(py: Python<'_>, path: PathBuf, bytes: u64) -> PyResult<Vec<u8>> {
    let read = on(py, &path, |files| files.read_range(&path, 0..bytes))?;
    read.map_err(|source| failed(py, "read", path, source))
}

fn nothing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn failed(py: Python<'_>, operation: &'static str, path: PathBuf, source: io::Error) -> PyErr {
    let error = Error::Storage {
        operation,
        path,
        source,
    };
    errors::raise(py, &error)
}
