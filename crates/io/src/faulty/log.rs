//! The operation log: every change of storage under one directory, in order.
//!
//! An operation is recorded when it begins and again when it ends, since a sync makes durable the
//! operations that ended before it began, and a power cut may fall in between. Files and
//! directories are numbered as they are made: names are reused, numbers are not.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::file_system::Change;

/// The number of the logged directory itself.
pub(super) const ROOT: usize = 0;

/// A recorded operation. Directories and files are given by number, entries by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Logged {
    /// A directory was made.
    CreateDirectory {
        /// The directory that it is in.
        parent: usize,
        /// Its name there.
        name: OsString,
        /// Its own number.
        made: usize,
    },
    /// A file was created.
    Create {
        /// The directory that it is in.
        parent: usize,
        /// Its name there.
        name: OsString,
        /// Its own number.
        made: usize,
    },
    /// A file or a directory got another name in its directory.
    Rename {
        /// The directory.
        parent: usize,
        /// The old name.
        from: OsString,
        /// The new name.
        to: OsString,
        /// The renamed file or directory.
        node: Node,
    },
    /// A file got a further name.
    Link {
        /// The directory of the new name.
        parent: usize,
        /// The new name.
        to: OsString,
        /// The file.
        file: usize,
    },
    /// A name was removed: of a file, or of an empty directory.
    Remove {
        /// The directory that it was in.
        parent: usize,
        /// The name.
        name: OsString,
    },
    /// The entries of a directory were synced.
    SyncDirectory(usize),
    /// Bytes were written to a file.
    Write {
        /// The file.
        file: usize,
        /// Offset of the bytes.
        offset: u64,
        /// The bytes.
        bytes: Arc<[u8]>,
    },
    /// A file's storage was allocated, which extends it to at least this length.
    Allocate {
        /// The file.
        file: usize,
        /// The length.
        len: u64,
    },
    /// A file was cut or extended.
    Truncate {
        /// The file.
        file: usize,
        /// The length.
        len: u64,
    },
    /// The data of a file was synced.
    SyncData(usize),
}

/// An operation and when it ran, on the log's own clock.
#[derive(Clone, Debug)]
pub struct Record {
    /// The operation.
    pub op: Logged,
    /// When it began.
    pub begun: usize,
    /// When it ended; `None` while it runs, and for a write that failed partway.
    pub ended: Option<usize>,
}

/// A file or directory, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// A file.
    File(usize),
    /// A directory.
    Directory(usize),
}

/// The entries of a directory.
pub(super) type Entries = BTreeMap<OsString, Node>;

/// Identifies an operation in flight; functions return `None` for paths outside of the log.
pub(super) type Ticket = usize;

#[derive(Debug, Default)]
struct LogState {
    clock: usize,
    /// Operations that failed without an effect are removed again.
    records: Vec<Option<Record>>,
    /// The present entries, by the directory's number.
    directories: Vec<Entries>,
    files: usize,
}

/// A log of changes under a directory, which is empty and durable at the start.
#[derive(Debug)]
pub struct Log {
    root: PathBuf,
    state: Mutex<LogState>,
}

impl Log {
    /// A log of changes under `root`.
    pub fn new(root: &Path) -> Log {
        let state = LogState {
            directories: vec![Entries::new()],
            ..LogState::default()
        };
        Log {
            root: root.to_owned(),
            state: Mutex::new(state),
        }
    }

    /// The present time: operations recorded so far began before it.
    pub fn position(&self) -> usize {
        self.state().clock
    }

    /// All operations, in the order they began.
    pub fn records(&self) -> Vec<Record> {
        self.state().records.iter().flatten().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().expect("nothing panics with the lock")
    }

    pub(super) fn begin_create(&self, path: &Path) -> Option<Ticket> {
        let mut state = self.state();
        let (parent, name) = state.locate(self.relative(path)?)?;
        let made = state.files;
        state.files += 1;
        Some(state.begin(Logged::Create { parent, name, made }))
    }

    pub(super) fn begin_change(&self, change: Change<'_>) -> Option<Ticket> {
        let mut state = self.state();
        let op = match change {
            Change::CreateDirectory(path) => {
                let (parent, name) = state.locate(self.relative(path)?)?;
                let made = state.directories.len();
                state.directories.push(Entries::new());
                Logged::CreateDirectory { parent, name, made }
            }
            Change::RemoveDirectory(path)
            | Change::RemoveFile(path)
            | Change::RemoveSeen(path, _) => {
                let (parent, name) = state.locate(self.relative(path)?)?;
                Logged::Remove { parent, name }
            }
            Change::SyncDirectory(path) => {
                Logged::SyncDirectory(state.directory(self.relative(path)?)?)
            }
            Change::Rename { from, to }
            | Change::RenameNew { from, to }
            | Change::Replace { from, to, .. } => {
                let (parent, from, to, node) = self.names(&state, from, to)?;
                Logged::Rename {
                    parent,
                    from,
                    to,
                    node,
                }
            }
            Change::Link { from, to } => {
                let file = state.file(self.relative(from)?)?;
                let (parent, to) = state.locate(self.relative(to)?)?;
                Logged::Link { parent, to, file }
            }
            Change::Write(file, bytes) => Logged::Write {
                file: state.file(self.relative(file.path())?)?,
                offset: 0,
                bytes: bytes.into(),
            },
            Change::Allocate(file, len) => Logged::Allocate {
                file: state.file(self.relative(file.path())?)?,
                len,
            },
            Change::Truncate(file, len) => Logged::Truncate {
                file: state.file(self.relative(file.path())?)?,
                len,
            },
            Change::Clone { from, to } => Logged::Write {
                file: state.file(self.relative(to.path())?)?,
                offset: 0,
                bytes: std::fs::read(from.path()).ok()?.into(),
            },
            Change::SyncData(file) => Logged::SyncData(state.file(self.relative(file.path())?)?),
        };
        Some(state.begin(op))
    }

    pub(super) fn begin_write(&self, path: &Path, offset: u64, bytes: &[u8]) -> Option<Ticket> {
        let bytes = bytes.into();
        self.begin_on(path, |file| Logged::Write {
            file,
            offset,
            bytes,
        })
    }

    pub(super) fn begin_on(&self, path: &Path, op: impl FnOnce(usize) -> Logged) -> Option<Ticket> {
        let mut state = self.state();
        let file = state.file(self.relative(path)?)?;
        Some(state.begin(op(file)))
    }

    /// Records the end of a change. A failed change had no effect.
    pub(super) fn end(&self, ticket: Option<Ticket>, is_done: bool) {
        let Some(ticket) = ticket else { return };
        let mut state = self.state();
        if is_done {
            state.end(ticket);
        } else {
            state.records[ticket] = None;
        }
    }

    /// Records the end of a transfer that moved `moved` bytes.
    pub(super) fn end_transfer(&self, ticket: Ticket, moved: usize) {
        let mut state = self.state();
        let record = state.records[ticket].as_mut().expect("it has not ended");
        if let Logged::Write { bytes, .. } = &mut record.op
            && moved < bytes.len()
        {
            *bytes = bytes[..moved].into();
        }
        state.end(ticket);
    }

    /// Records that an operation's outcome is unknown: no sync will cover it.
    pub(super) fn leave_open(&self, _ticket: Ticket) {
        self.state().clock += 1;
    }

    fn relative<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        path.strip_prefix(&self.root).ok()
    }

    /// The directory of both names, the names, and the file or directory with the first one.
    fn names(
        &self,
        state: &LogState,
        from: &Path,
        to: &Path,
    ) -> Option<(usize, OsString, OsString, Node)> {
        let (parent, old) = state.locate(self.relative(from)?)?;
        let (other, new) = state.locate(self.relative(to)?)?;
        assert_eq!(parent, other, "nothing is moved to another directory");
        let node = *state.directories[parent].get(&old)?;
        Some((parent, old, new, node))
    }
}

impl LogState {
    fn begin(&mut self, op: Logged) -> Ticket {
        let record = Record {
            op,
            begun: self.clock,
            ended: None,
        };
        self.clock += 1;
        self.records.push(Some(record));
        self.records.len() - 1
    }

    fn end(&mut self, ticket: Ticket) {
        let record = self.records[ticket].as_mut().expect("it has not ended");
        record.ended = Some(self.clock);
        self.clock += 1;
        if let Some(parent) = record.op.parent() {
            record.op.apply(&mut self.directories[parent]);
        }
    }

    fn directory(&self, path: &Path) -> Option<usize> {
        path.iter()
            .try_fold(ROOT, |at, name| match self.directories[at].get(name)? {
                Node::Directory(number) => Some(*number),
                Node::File(_) => None,
            })
    }

    fn locate(&self, path: &Path) -> Option<(usize, OsString)> {
        let parent = self.directory(path.parent()?)?;
        Some((parent, path.file_name()?.to_owned()))
    }

    fn file(&self, path: &Path) -> Option<usize> {
        let (parent, name) = self.locate(path)?;
        match self.directories[parent].get(&name)? {
            Node::File(number) => Some(*number),
            Node::Directory(_) => None,
        }
    }
}

impl Logged {
    /// The directory whose entries it changes, if any.
    pub(super) fn parent(&self) -> Option<usize> {
        match self {
            Logged::CreateDirectory { parent, .. }
            | Logged::Create { parent, .. }
            | Logged::Rename { parent, .. }
            | Logged::Link { parent, .. }
            | Logged::Remove { parent, .. } => Some(*parent),
            _ => None,
        }
    }

    /// The file whose bytes or length it changes, if any.
    pub(super) fn file(&self) -> Option<usize> {
        match self {
            Logged::Write { file, .. }
            | Logged::Allocate { file, .. }
            | Logged::Truncate { file, .. } => Some(*file),
            _ => None,
        }
    }

    /// Applies the operation to the entries of its directory.
    pub(super) fn apply(&self, entries: &mut Entries) {
        match self {
            Logged::CreateDirectory { name, made, .. } => {
                entries.insert(name.clone(), Node::Directory(*made));
            }
            Logged::Create { name, made, .. } => {
                entries.insert(name.clone(), Node::File(*made));
            }
            Logged::Rename { from, to, node, .. } => {
                entries.remove(from);
                entries.insert(to.clone(), *node);
            }
            Logged::Link { to, file, .. } => {
                entries.insert(to.clone(), Node::File(*file));
            }
            Logged::Remove { name, .. } => {
                entries.remove(name);
            }
            _ => {}
        }
    }
}
