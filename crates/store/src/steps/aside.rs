//! Setting aside: a damaged step gives way, and is kept for salvage.
//!
//! A step that is known to be damaged gets a name that no step has (`damaged-N-M`). From then on it
//! is in the way of no load, no save and no retention, and whoever wants to see what is left of it
//! takes it by its path. It is one rename, made durable before anything takes the place of the
//! step: at every moment, and after any crash, the step is there by one name or by the other. Where the
//! system does not rename the directory, its files are linked (`steps::layered`).
//!
//! Known to be damaged is what was read twice and does not match its digests, or what has lost a
//! file. What this version, this user or this host cannot read may be good, and stays where it is;
//! so does a step where another host may be at work whose lease nobody here sees.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use penstock_io::file_system::{Change, Kind};

use crate::error::{Error, Result};
use crate::format::directory::is_protected_at;
use crate::format::name::{self, MANIFEST};
use crate::progress::Progress;
use crate::steps::store::{StepState, Store};

/// How many are kept, besides protected ones: enough to look into what goes wrong, few enough not
/// to fill a disk with what nobody can load.
pub const ASIDE_MAX: usize = 3;

const NO_LOCKS: &str = "the file system has no locks that all hosts see, so that one of them may \
                        be saving there";

/// How often another one may take a name first.
const NAMES_MAX: u64 = 64;

/// How long a save waits for a reader of the step that it is to replace.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_PAUSE: Duration = Duration::from_millis(10);

/// A damaged step that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside {
    /// The step it was.
    pub step: u64,
    /// Which one it is: later ones have higher numbers.
    pub number: u64,
    /// Where it is now.
    pub path: PathBuf,
}

impl Store {
    /// Sets a step aside, durably, if it is known to be damaged; tells where it is then. Its
    /// protection goes with it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Storage`] with [`io::ErrorKind::ResourceBusy`] while a save or
    /// a load is under way in it, with [`io::ErrorKind::Unsupported`] where locks are not seen by
    /// all, with [`io::ErrorKind::NotADirectory`] for a link, and the system's errors.
    pub fn set_aside(&self, step: u64) -> Result<Option<PathBuf>> {
        self.set_aside_if(step, |path| self.is_known_damaged(step, path))
    }

    fn set_aside_if(&self, step: u64, goes: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>> {
        let (path, lease) = self.take(self.step_path(step), "set aside")?;
        if !goes(&path) {
            return Ok(None);
        }
        if lease.is_none() {
            // Another host may save a good one in its place at this moment. That could be renamed
            // back, but not by somebody who has died.
            let source = io::Error::new(io::ErrorKind::Unsupported, NO_LOCKS);
            return Err(Error::storage("set aside", path)(source));
        }
        let aside = self.rename_aside(step, &path)?;
        // Before anything else gets the name: a crash may keep one change without the other.
        self.sync(self.root())?;
        Ok(Some(aside))
    }

    /// Makes way for a save of a step: sets aside what is there if it is known to be damaged, or if
    /// the system does not let it be read, and tells where it is then. A run that went back past it
    /// would come to it again and again. Waits for whoever reads it, not for ever. Where locks are
    /// not seen by all it stays, and only a save that overwrites takes its place.
    ///
    /// # Errors
    /// As [`Store::set_aside`], and [`Error::Interrupted`].
    pub fn give_way(&self, step: u64, progress: &Progress) -> Result<Option<PathBuf>> {
        let begun = Instant::now();
        let path = self.step_path(step);
        if !self.files().has_directories() {
            // Nothing is renamed there, so nothing gives way: nor is anything asked for.
            return Ok(None);
        }
        let mut judged = None;
        loop {
            let manifest = self.files().look(&path.join(MANIFEST)).ok();
            if manifest.is_none() && !is_protected_at(&path, self.files()) {
                // Whoever set it aside may have died before that was durable.
                if self.aside()?.iter().any(|aside| aside.step == step) {
                    self.sync(self.root())?;
                }
                return Ok(None);
            }
            let is_in_the_way =
                |path: &Path| self.is_known_damaged(step, path) || self.is_unreadable(step);
            match self.set_aside_if(step, is_in_the_way) {
                Err(error) if error.kind() == Some(io::ErrorKind::ResourceBusy) => {
                    progress.check()?;
                    // What is good does not give way, whoever reads it. To see that takes all files
                    // of a step, so it is not looked at again before another one has its place.
                    let found = Some(manifest.map(|one| one.identity));
                    if judged != found {
                        if !is_in_the_way(&path) {
                            return Ok(None);
                        }
                        judged = found;
                    }
                    if begun.elapsed() >= WAIT_MAX {
                        return Err(error);
                    }
                    std::thread::sleep(WAIT_PAUSE);
                }
                Err(Error::NotFound { .. }) => return Ok(None),
                Err(error) if error.kind().is_some_and(stays) => return Ok(None),
                result => return result,
            }
        }
    }

    /// What was set aside, in the order in which it was.
    ///
    /// # Errors
    /// The system's errors.
    pub fn aside(&self) -> Result<Vec<Aside>> {
        let mut found = Vec::new();
        for entry in self.list_root()? {
            let is_directory = entry.kind == Some(Kind::Directory);
            let named = entry.name.to_str().and_then(name::parse_aside);
            if let Some((step, number)) = named.filter(|_| is_directory) {
                let path = self.root().join(entry.name);
                found.push(Aside { step, number, path });
            }
        }
        found.sort_by_key(|aside| (aside.number, aside.step));
        Ok(found)
    }

    /// Removes all but the last [`ASIDE_MAX`] of what was set aside, and returns what went. One
    /// that is protected, that somebody reads, or that cannot be read here stays.
    ///
    /// # Errors
    /// The system's errors; one that cannot be removed does not keep the others from it.
    pub fn retire_aside(&self) -> Result<Vec<PathBuf>> {
        let mut found = self.aside()?;
        found.retain(|aside| !is_protected_at(&aside.path, self.files()));
        found.truncate(found.len().saturating_sub(ASIDE_MAX));
        let (mut removed, mut failed) = (Vec::new(), None);
        for aside in found {
            match self.remove_aside(&aside.path) {
                Ok(true) => removed.push(aside.path),
                Ok(false) | Err(Error::NotFound { .. }) => {}
                Err(error) if error.kind() == Some(io::ErrorKind::ResourceBusy) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(removed), Err)
    }

    fn remove_aside(&self, path: &Path) -> Result<bool> {
        let (path, _lease) = self.take(path.to_owned(), "delete")?;
        let is_known = matches!(
            self.look(&path),
            Ok(_) | Err(Error::Corrupt { .. } | Error::Incomplete { .. })
        );
        // It may have been protected since.
        if !is_known || is_protected_at(&path, self.files()) {
            return Ok(false);
        }
        // Also without locks: nobody saves to what is no step.
        self.remove(&path)?;
        Ok(!self.files().leads(&path))
    }

    /// Gives a step a name that no step has.
    fn rename_aside(&self, step: u64, from: &Path) -> Result<PathBuf> {
        match self.name_aside(step, from) {
            Err(error) if error.kind() == Some(io::ErrorKind::CrossesDevices) => {
                self.link_aside(from, |filled| self.name_aside(step, filled))
            }
            result => result,
        }
    }

    /// Gives a directory the next name of what was set aside.
    fn name_aside(&self, step: u64, from: &Path) -> Result<PathBuf> {
        let last = self.aside()?.last().map_or(0, |last| last.number);
        let mut refused = None;
        for number in (1..=NAMES_MAX).map(|more| last.saturating_add(more)) {
            let to = self.root().join(name::aside(step, number));
            // No directory takes the place of another one that holds something.
            match self.file_system().change(Change::Rename { from, to: &to }) {
                Ok(()) => return Ok(to),
                Err(error) if error.kind().is_some_and(is_taken) => refused = Some(error),
                Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => {
                    let path = from.to_owned();
                    return Err(Error::NotFound { path });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(refused.expect("a name was tried").into())
    }

    fn is_unreadable(&self, step: u64) -> bool {
        matches!(self.state(step), Ok(StepState::Unreadable(_)))
    }

    /// Whether the checkpoint at a step is damaged beyond doubt: its files are, or whoever read it
    /// has left a mark.
    fn is_known_damaged(&self, step: u64, path: &Path) -> bool {
        // A hint: not to be had, it says nothing against a step.
        let is_marked = |id: &str| self.known().is_ok_and(|known| known.is_damaged(step, id));
        match self.look(path) {
            // That of another step is good, if in the wrong place.
            Ok(checkpoint) => {
                let manifest = checkpoint.manifest();
                manifest.step.is_none_or(|found| found == step) && is_marked(&manifest.id)
            }
            Err(Error::Corrupt { .. }) => true,
            // It had a manifest when it was protected.
            Err(Error::Incomplete { .. }) => is_protected_at(path, self.files()),
            // A device or a host that fails says nothing of what is stored.
            Err(_) => false,
        }
    }
}

/// Whether it is no error of a save that what is there cannot be set aside.
fn stays(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{NotADirectory, Unsupported};
    matches!(kind, NotADirectory | Unsupported)
}

fn is_taken(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
    matches!(kind, AlreadyExists | DirectoryNotEmpty | NotADirectory)
}
