//! Quarantine: a damaged step makes way, and is kept for salvage.
//!
//! A step that is known to be damaged gets a name that no step has (`damaged-N-M`). From then on no
//! load, save or retention meets it, and users can examine it by its path. Quarantining is one
//! rename, made durable before anything takes the step's place: at every moment, and after any
//! crash, the step exists under one of the two names. If the system cannot rename the directory,
//! its files are linked (`steps::layered`).
//!
//! A step is known to be damaged if two reads did not match its digests, or if a file is missing. A
//! step that this version, this user or this host cannot read may be good, and stays in place; so
//! does a step in which another host with an invisible lease may be working.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use penstock_io::file_system::{Change, Kind};

use crate::error::{Error, Result};
use crate::format::directory::is_protected_at;
use crate::format::name::{self, MANIFEST};
use crate::progress::Progress;
use crate::steps::store::{StepState, Store};

/// How many quarantined steps are kept, besides protected ones: enough to investigate, few enough
/// not to fill a disk with data that cannot be loaded.
pub const QUARANTINED_MAX: usize = 3;

const NO_LOCKS: &str = "the file system has no locks that all hosts see, so that one of them may \
                        be saving there";

/// How often others may take a name first.
const NAMES_MAX: u64 = 64;

/// How long a save waits for a reader of the step that it replaces.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_PAUSE: Duration = Duration::from_millis(10);

/// A quarantined step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedStep {
    /// The original step number.
    pub step: u64,
    /// Sequence number: later ones are higher.
    pub number: u64,
    /// Present path of the directory.
    pub path: PathBuf,
}

impl Store {
    /// Quarantines a step, durably, if it is known to be damaged; returns its new path. Its
    /// protection moves with it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Storage`] with [`io::ErrorKind::ResourceBusy`] during a save
    /// or a load in it, with [`io::ErrorKind::Unsupported`] if locks are not visible to all hosts,
    /// with [`io::ErrorKind::NotADirectory`] for a link, and system errors.
    pub fn quarantine(&self, step: u64) -> Result<Option<PathBuf>> {
        self.quarantine_if(step, |path| self.is_known_damaged(step, path))
    }

    fn quarantine_if(&self, step: u64, goes: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>> {
        let (path, lease) = self.take(self.step_path(step), "quarantine")?;
        if !goes(&path) {
            return Ok(None);
        }
        if lease.is_none() {
            // Another host may be saving a good checkpoint there. The rename could be reversed, but
            // not by a process that has died.
            let source = io::Error::new(io::ErrorKind::Unsupported, NO_LOCKS);
            return Err(Error::storage("quarantine", path)(source));
        }
        let quarantined = self.rename_quarantined(step, &path)?;
        // Synced before anything else gets the name: a crash may keep one change without the other.
        self.sync(self.root())?;
        Ok(Some(quarantined))
    }

    /// Makes way for a save of a step: quarantines the present one if it is known to be damaged, or
    /// if the system cannot read it, and returns its new path. Otherwise a resumed run would fail
    /// at this step again and again. Waits for readers, for a limited time. If locks are not
    /// visible to all hosts the step stays, and only a save that overwrites replaces it.
    pub fn make_way(&self, step: u64, progress: &Progress) -> Result<Option<PathBuf>> {
        let begun = Instant::now();
        let path = self.step_path(step);
        if !self.files().has_directories() {
            // Nothing is renamed there, so no request is sent either.
            return Ok(None);
        }
        let mut judged = None;
        loop {
            let manifest = self.files().stat(&path.join(MANIFEST)).ok();
            if manifest.is_none() && !is_protected_at(&path, self.files()) {
                // An earlier quarantine may have died before the rename was durable.
                if self
                    .quarantined()?
                    .iter()
                    .any(|quarantined| quarantined.step == step)
                {
                    self.sync(self.root())?;
                }
                return Ok(None);
            }
            let is_in_the_way =
                |path: &Path| self.is_known_damaged(step, path) || self.is_unreadable(step);
            match self.quarantine_if(step, is_in_the_way) {
                Err(error) if error.kind() == Some(io::ErrorKind::ResourceBusy) => {
                    progress.check()?;
                    // A good step does not make way, even if it is only busy. Checking that takes
                    // all files of a step, so it is repeated only after another checkpoint has
                    // taken its place.
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

    /// All quarantined steps, oldest first.
    pub fn quarantined(&self) -> Result<Vec<QuarantinedStep>> {
        let mut found = Vec::new();
        for entry in self.list_root()? {
            let is_directory = entry.kind == Some(Kind::Directory);
            let named = entry.name.to_str().and_then(name::parse_quarantined);
            if let Some((step, number)) = named.filter(|_| is_directory) {
                let path = self.root().join(entry.name);
                found.push(QuarantinedStep { step, number, path });
            }
        }
        found.sort_by_key(|quarantined| (quarantined.number, quarantined.step));
        Ok(found)
    }

    /// Removes all but the last [`QUARANTINED_MAX`] quarantined steps, and returns the removed ones.
    /// Protected steps stay, and those that are being read or cannot be read here.
    ///
    /// # Errors
    /// System errors; one step that cannot be removed does not stop the removal of others.
    pub fn retire_quarantined(&self) -> Result<Vec<PathBuf>> {
        let mut found = self.quarantined()?;
        found.retain(|quarantined| !is_protected_at(&quarantined.path, self.files()));
        found.truncate(found.len().saturating_sub(QUARANTINED_MAX));
        let (mut removed, mut failed) = (Vec::new(), None);
        for quarantined in found {
            match self.remove_quarantined(&quarantined.path) {
                Ok(true) => removed.push(quarantined.path),
                Ok(false) | Err(Error::NotFound { .. }) => {}
                Err(error) if error.kind() == Some(io::ErrorKind::ResourceBusy) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(removed), Err)
    }

    fn remove_quarantined(&self, path: &Path) -> Result<bool> {
        let (path, _lease) = self.take(path.to_owned(), "delete")?;
        let is_known = matches!(
            self.open_unleased(&path),
            Ok(_) | Err(Error::Corrupt { .. } | Error::Incomplete { .. })
        );
        // It may have been protected since.
        if !is_known || is_protected_at(&path, self.files()) {
            return Ok(false);
        }
        // Also safe without locks: nobody saves to a quarantined step.
        self.remove(&path)?;
        Ok(!self.files().leads(&path))
    }

    /// Renames a step to a quarantine name.
    fn rename_quarantined(&self, step: u64, from: &Path) -> Result<PathBuf> {
        match self.name_quarantined(step, from) {
            Err(error) if error.kind() == Some(io::ErrorKind::CrossesDevices) => {
                self.link_quarantined(from, |filled| self.name_quarantined(step, filled))
            }
            result => result,
        }
    }

    /// Renames a directory to the next quarantine name.
    fn name_quarantined(&self, step: u64, from: &Path) -> Result<PathBuf> {
        let last = self.quarantined()?.last().map_or(0, |last| last.number);
        let mut refused = None;
        for number in (1..=NAMES_MAX).map(|more| last.saturating_add(more)) {
            let to = self.root().join(name::quarantined(step, number));
            // A rename does not replace a directory that is not empty.
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

    /// Whether the checkpoint at a step is damaged beyond doubt: its files show it, or an earlier
    /// read marked it.
    fn is_known_damaged(&self, step: u64, path: &Path) -> bool {
        // Marks are a hint: without them, nothing counts against a step.
        let is_marked = |id: &str| self.known().is_ok_and(|known| known.is_damaged(step, id));
        match self.open_unleased(path) {
            // The checkpoint of another step is good, but in the wrong place.
            Ok(checkpoint) => {
                let manifest = checkpoint.manifest();
                manifest.step.is_none_or(|found| found == step) && is_marked(&manifest.id)
            }
            Err(Error::Corrupt { .. }) => true,
            // It had a manifest when it was protected.
            Err(Error::Incomplete { .. }) => is_protected_at(path, self.files()),
            // A failing device or host proves nothing about the stored data.
            Err(_) => false,
        }
    }
}

/// Whether a save may continue although the present step cannot be quarantined.
fn stays(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{NotADirectory, Unsupported};
    matches!(kind, NotADirectory | Unsupported)
}

fn is_taken(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
    matches!(kind, AlreadyExists | DirectoryNotEmpty | NotADirectory)
}
