//! Mutations of the protocol: a step left out, carried out too late, or failed.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files};
use penstock_io::{Error, Result};

const EIO: i32 = 5;

/// A change, named by its role in the protocol and its number among those of the role, counted from
/// 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) kind: &'static str,
    pub(crate) nth: usize,
}

pub(crate) const fn step(kind: &'static str, nth: usize) -> Step {
    Step { kind, nth }
}

/// A way to break the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// The step reports success, and does nothing.
    Skip(Step),
    /// The step reports success, and is carried out right after another one, or never if that one
    /// does not occur.
    Late { held: Step, after: Step },
    /// This change and all later ones fail: the process or the disk is dead.
    Die(usize),
    /// A verdict is given without reading the bytes.
    Unread,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` #{}", self.kind, self.nth)
    }
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mutation::Skip(step) => write!(f, "without {step}"),
            Mutation::Late { held, after } => write!(f, "{held} after {after}"),
            Mutation::Die(nth) => write!(f, "dead from change {nth} on"),
            Mutation::Unread => f.write_str("a verdict without a look"),
        }
    }
}

/// A change that is delayed.
#[derive(Debug)]
enum Held {
    SyncData(PathBuf),
    SyncDirectory(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Remove(PathBuf),
}

/// An action of somebody else.
type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct MutantState {
    mutation: Option<Mutation>,
    /// A step that fails with this error, in a scenario or in addition to the mutation.
    failing: Option<(Step, i32)>,
    /// An action right before a step.
    meanwhile: Option<(Step, Call)>,
    seen: Vec<&'static str>,
    held: Option<Held>,
    is_done: bool,
}

/// Breaks the protocol once it is armed.
#[derive(Default)]
pub(crate) struct Mutant {
    state: Mutex<MutantState>,
    /// Whether locks are not visible to everybody, as on a network file system.
    is_unlocked: AtomicBool,
}

impl fmt::Debug for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutant")
    }
}

impl Mutant {
    /// Applies a mutation to the changes from now on.
    pub(crate) fn arm(&self, mutation: Mutation) {
        *self.state.lock().unwrap() = MutantState {
            mutation: Some(mutation),
            ..MutantState::default()
        };
    }

    /// Makes one of the changes from now on fail.
    pub(crate) fn fail(&self, (kind, nth): (&'static str, usize)) {
        self.fail_with((kind, nth), EIO);
    }

    pub(crate) fn fail_with(&self, (kind, nth): (&'static str, usize), errno: i32) {
        let mut state = self.state.lock().unwrap();
        state.failing = Some((step(kind, nth), errno));
        state.seen.clear();
    }

    /// Makes the nth change from now on and all later ones fail.
    pub(crate) fn die(&self, nth: usize) {
        self.arm(Mutation::Die(nth));
    }

    /// Performs an action of somebody else right before a step.
    pub(crate) fn meanwhile(
        &self,
        (kind, nth): (&'static str, usize),
        call: impl FnOnce() + Send + 'static,
    ) {
        let mut state = self.state.lock().unwrap();
        state.meanwhile = Some((step(kind, nth), Box::new(call)));
    }

    /// From now on locks are not visible to everybody.
    pub(crate) fn unlock(&self) {
        self.is_unlocked.store(true, Ordering::Relaxed);
    }

    /// Whether a verdict must be given without reading.
    pub(crate) fn is_unread(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        let is_unread = state.mutation == Some(Mutation::Unread);
        state.is_done |= is_unread;
        is_unread
    }

    /// Removes the mutation.
    pub(crate) fn revive(&self) {
        *self.state.lock().unwrap() = MutantState::default();
    }

    /// Counts a change; returns an error once the process is dead.
    fn count(&self, kind: &'static str, operation: &'static str, path: &Path) -> Result<Step> {
        let mut state = self.state.lock().unwrap();
        state.seen.push(kind);
        let nth = state.seen.iter().filter(|seen| **seen == kind).count();
        let now = step(kind, nth);
        if let Some((_, call)) = state.meanwhile.take_if(|(step, _)| *step == now) {
            drop(state);
            call();
            state = self.state.lock().unwrap();
        }
        let errno = match (state.mutation, state.failing) {
            (Some(Mutation::Die(nth)), _) if state.seen.len() >= nth => {
                state.is_done = true;
                EIO
            }
            (_, Some((failed, errno))) if failed == now => errno,
            _ => return Ok(now),
        };
        Err(Error::Storage {
            operation,
            path: path.to_owned(),
            source: io::Error::from_raw_os_error(errno),
        })
    }

    /// Whether the step that it was armed for has occurred.
    pub(crate) fn is_done(&self) -> bool {
        self.state.lock().unwrap().is_done
    }

    /// The file system that it mutates: that of the store at `root`, below `top`.
    pub(crate) fn wrap(
        self: &Arc<Mutant>,
        inner: Arc<dyn FileSystem>,
        root: &Path,
        top: &Path,
    ) -> Mutated {
        Mutated {
            mutant: Arc::clone(self),
            inner,
            root: root.to_owned(),
            top: top.to_owned(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Mutated {
    mutant: Arc<Mutant>,
    inner: Arc<dyn FileSystem>,
    root: PathBuf,
    top: PathBuf,
}

impl Mutated {
    /// The role of a change in the protocol.
    fn kind(&self, change: &Change<'_>) -> &'static str {
        let path = change.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let of = |kinds: [&'static str; 4]| match name.split(['-', '.']).next() {
            Some("shard") => kinds[0],
            Some("part") => kinds[1],
            Some("manifest") => kinds[2],
            _ => kinds[3],
        };
        if let Some(kind) = Mutated::kind_of_sidecar(change, &name) {
            return kind;
        }
        match change {
            Change::CreateDirectory(_) => "create directory",
            Change::RemoveDirectory(_) => "remove directory",
            Change::SyncDirectory(path) if *path == self.root => "sync store",
            Change::SyncDirectory(path) if *path == self.top => "sync above",
            Change::SyncDirectory(path) if path.starts_with(&self.root) => "sync step",
            Change::SyncDirectory(_) => "sync outside",
            Change::Allocate(..) => "allocate",
            Change::Write(..) => of(["write shard", "write part", "write manifest", "write marks"]),
            Change::Truncate(..) => "truncate",
            Change::Clone { .. } => "clone",
            Change::Rename { from, .. } | Change::Link { from, .. } if is_taken(from) => "put back",
            Change::RemoveFile(path) if is_taken(path) => "remove taken",
            Change::Rename { to, .. } if is_taken(to) => "take manifest",
            Change::SyncData(_) => of(["sync shard", "sync part", "sync manifest", "sync marks"]),
            Change::Rename { .. } if name.starts_with("damaged-") => "quarantine",
            Change::Rename { .. }
            | Change::RenameNew { .. }
            | Change::Replace { .. }
            | Change::Link { .. } => of(["link shard", "rename part", "publish", "rename marks"]),
            Change::RemoveFile(_) if name == "manifest.json" => "remove manifest",
            Change::RemoveFile(_) if name.ends_with(".tmp") => "remove temporary",
            Change::RemoveFile(_) | Change::RemoveSeen(..) => "remove data",
        }
    }

    /// The role of a change to sidecars and their copies.
    fn kind_of_sidecar(change: &Change<'_>, name: &str) -> Option<&'static str> {
        match change {
            Change::Write(..) if name.starts_with("beside.") => Some("write beside"),
            Change::SyncData(_) if name.starts_with("beside.") => Some("sync beside"),
            Change::Write(..) if name.starts_with("copy.") => Some("write copy"),
            Change::SyncData(_) if name.starts_with("copy.") => Some("sync copy"),
            Change::Rename { to, .. } if is_placed(to) => Some("place copy"),
            Change::RemoveFile(path) if is_placed(path) => Some("remove copy"),
            _ => None,
        }
    }

    fn release(&self, held: &Held) -> Result<()> {
        match held {
            Held::SyncData(path) => {
                let file = File::open(path, Direct::Off)?;
                self.inner.change(Change::SyncData(&file))
            }
            Held::SyncDirectory(path) => self.inner.change(Change::SyncDirectory(path)),
            Held::Rename(from, to) => self.inner.change(Change::Rename { from, to }),
            Held::Link(from, to) => self.inner.change(Change::Link { from, to }),
            Held::Remove(path) => self.inner.change(Change::RemoveFile(path)),
        }
    }
}

/// Whether a path is a copy of a sidecar.
fn is_placed(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name == "config.json" || name == "model.safetensors.index.json"
}

/// Whether it is a manifest that a deletion has renamed.
fn is_taken(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with("deleted-")
}

fn hold(change: &Change<'_>) -> Held {
    match *change {
        Change::SyncData(file) => Held::SyncData(file.path().to_owned()),
        Change::SyncDirectory(path) => Held::SyncDirectory(path.to_owned()),
        Change::Rename { from, to } => Held::Rename(from.to_owned(), to.to_owned()),
        Change::Link { from, to } => Held::Link(from.to_owned(), to.to_owned()),
        Change::RemoveFile(path) => Held::Remove(path.to_owned()),
        _ => panic!("no mutant holds {change:?}"),
    }
}

impl FileSystem for Mutated {
    fn files(&self) -> &dyn Files {
        self.inner.files()
    }

    fn locks(&self, directory: BorrowedFd<'_>) -> bool {
        !self.mutant.is_unlocked.load(Ordering::Relaxed) && self.inner.locks(directory)
    }

    fn create(&self, path: &Path, direct: Direct) -> Result<File> {
        self.mutant.count("create", "create", path)?;
        self.inner.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> Result<()> {
        let kind = self.kind(&change);
        let now = self.mutant.count(kind, change.operation(), change.path())?;
        let mut state = self.mutant.state.lock().unwrap();
        match state.mutation {
            Some(Mutation::Skip(skipped)) if skipped == now => {
                state.is_done = true;
                return Ok(());
            }
            Some(Mutation::Late { held, .. }) if held == now => {
                state.held = Some(hold(&change));
                state.is_done = true;
                return Ok(());
            }
            _ => {}
        }
        self.inner.change(change)?;
        // A file that is still to be synced is found by its present name.
        if let (Some(Held::SyncData(path)), Change::Rename { from, to }) = (&mut state.held, change)
            && path == from
        {
            *path = to.to_owned();
        }
        if let Some(Mutation::Late { after, .. }) = state.mutation
            && after == now
            && let Some(held) = state.held.take()
        {
            return self.release(&held);
        }
        Ok(())
    }
}
