//! `FileTimes`: asks the kernel whether files are as they were.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use pyo3::prelude::*;

use crate::owner::detached;

/// Size, time of modification, time of change, device and number of a file; times in nanoseconds
/// since 1970.
type Mark = (u64, i128, i128, u64, u64);

/// Files, and the marks that they had.
#[pyclass(frozen, module = "penstock._native")]
pub struct FileTimes {
    files: RwLock<Vec<(PathBuf, Mark)>>,
}

#[pymethods]
impl FileTimes {
    #[new]
    fn new(files: Vec<(PathBuf, Mark)>) -> FileTimes {
        FileTimes {
            files: RwLock::new(files),
        }
    }

    /// Whether all files have their marks.
    fn are_unchanged(&self, py: Python<'_>) -> bool {
        detached(py, || self.all_unchanged())
    }

    /// Replaces the mark of a file.
    fn accept(&self, index: usize, mark: Mark) {
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        files[index].1 = mark;
    }
}

impl FileTimes {
    /// As `are_unchanged`, on a thread without the GIL.
    pub(crate) fn all_unchanged(&self) -> bool {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files
            .iter()
            .all(|(path, mark)| fs::metadata(path).is_ok_and(|found| mark_of(&found) == *mark))
    }
}

fn mark_of(file: &fs::Metadata) -> Mark {
    let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
    (
        file.size(),
        ns(file.mtime(), file.mtime_nsec()),
        ns(file.ctime(), file.ctime_nsec()),
        file.dev(),
        file.ino(),
    )
}
