//! A file system that breaks the protocol: it skips one step and reports success.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use penstock_io::Result;
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files};

/// A kind of change in the protocol, and its occurrence, counted from 1.
pub(crate) type Step = (&'static str, usize);

#[derive(Default)]
struct MutantState {
    skipped: Option<Step>,
    seen: Vec<&'static str>,
    is_done: bool,
}

/// A file system that skips a step.
pub(crate) struct Mutant {
    inner: Arc<dyn FileSystem>,
    home: PathBuf,
    state: Mutex<MutantState>,
}

impl Mutant {
    pub(crate) fn new(inner: Arc<dyn FileSystem>, home: &Path) -> Mutant {
        Mutant {
            inner,
            home: home.to_owned(),
            state: Mutex::default(),
        }
    }

    /// Skips this step from now on, or none.
    pub(crate) fn arm(&self, skipped: Option<Step>) {
        *self.state.lock().unwrap() = MutantState {
            skipped,
            ..MutantState::default()
        };
    }

    /// Whether the step has occurred.
    pub(crate) fn is_done(&self) -> bool {
        self.state.lock().unwrap().is_done
    }

    fn kind(&self, change: &Change<'_>) -> &'static str {
        let name = change.path().file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        let of = |kinds: [&'static str; 3]| match name.split(['-', '.']).next() {
            Some("rows") => kinds[0],
            Some("log") => kinds[1],
            _ => kinds[2],
        };
        match change {
            Change::SyncDirectory(path) if *path == self.home => "sync home",
            Change::SyncDirectory(_) => "sync above",
            Change::SyncData(_) => of(["sync piece", "sync log", "sync manifest"]),
            Change::Rename { .. } => "publish",
            Change::RemoveFile(_) => of(["remove piece", "remove log", "remove manifest"]),
            _ => "other",
        }
    }
}

impl fmt::Debug for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutant")
    }
}

impl FileSystem for Mutant {
    fn files(&self) -> &dyn Files {
        self.inner.files()
    }

    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        self.inner.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        let kind = self.kind(&change);
        let mut state = self.state.lock().unwrap();
        state.seen.push(kind);
        let nth = state.seen.iter().filter(|seen| **seen == kind).count();
        if state.skipped == Some((kind, nth)) {
            state.is_done = true;
            return Ok(());
        }
        drop(state);
        self.inner.change(change)
    }
}
