//! Marks: which checkpoints were read back, when, and with which result.
//!
//! `verified.json` in a store's root records which checkpoints were read whole, so that retention
//! keeps the newest good one and a scrub resumes where the last one stopped. It is a hint: losing
//! it loses no data, but while it is unreadable nothing is deleted. A mark applies only to the
//! checkpoint that it was made for, by id.
//!
//! Writers serialize by a lock on the root, if the file system has one visible to all hosts, and
//! replace the file whole. In a bucket each writer replaces only the version that it has read; a
//! writer that loses this race reads the new version. On other storage without locks two
//! simultaneous writers may lose a mark, never the file.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use penstock_io::file_system::{Change, Seen};
use serde::{Deserialize, Serialize};

use crate::commit::fence::is_gone;
use crate::commit::files::remove_file;
use crate::error::{Error, Result};
use crate::format::description::read_manifest;
use crate::format::directory::names;
use crate::format::name::{self, MARKS};
use crate::format::plain;
use crate::lease::{Exclusive, Lease};
use crate::steps::store::Store;

/// Maximum number of marks: limits the file's size, and exceeds any real store.
const MARKS_MAX: usize = 16_384;

/// How long a writer waits for others. Each needs two syncs, so hundreds may be ahead of it.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_PAUSE: Duration = Duration::from_millis(5);

/// How often other writers may replace the file first.
const TURNS_MAX: usize = 64;

/// A younger mark is not written again: the ranks of a job load at the same time.
const FRESH_SECONDS: u64 = 60;

/// The result of reading a checkpoint back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The step.
    pub step: u64,
    /// Identity of the checkpoint.
    pub id: String,
    /// Time of the read, in seconds since 1970; 0 if unknown.
    #[serde(default)]
    pub at_seconds: u64,
    /// Whether it was found damaged, and so is not verified.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_damaged: bool,
}

impl Mark {
    /// Time since the read; `None` if unknown, or if the clock was set back since.
    pub(crate) fn age(&self, now_seconds: u64) -> Option<Duration> {
        let is_known = self.at_seconds > 0;
        let age = now_seconds
            .checked_sub(self.at_seconds)
            .filter(|_| is_known);
        age.map(Duration::from_secs)
    }
}

/// The version of the file that was read, if there is one, and its marks.
type Stored = (Option<Seen>, Vec<Mark>);

/// All stored marks, including those of replaced checkpoints.
#[derive(Default)]
pub(crate) struct Known(Vec<Mark>);

impl Known {
    /// Whether the checkpoint was read back whole.
    pub(crate) fn is_good(&self, step: u64, id: &str) -> bool {
        self.has(step, |mark| mark.id == id && !mark.is_damaged)
    }

    /// Whether the checkpoint was found damaged.
    pub(crate) fn is_damaged(&self, step: u64, id: &str) -> bool {
        self.has(step, |mark| mark.id == id && mark.is_damaged)
    }

    /// Whether some checkpoint of the step was read back whole, the present one or an earlier one.
    pub(crate) fn may_be_good(&self, step: u64) -> bool {
        self.has(step, |mark| !mark.is_damaged)
    }

    fn has(&self, step: u64, is_it: impl Fn(&Mark) -> bool) -> bool {
        let first = self.0.partition_point(|mark| mark.step < step);
        let of_step = self.0[first..].iter().take_while(|mark| mark.step == step);
        of_step.into_iter().any(is_it)
    }
}

pub(crate) fn now_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Store {
    /// Records that the checkpoint was read back whole and found right. If the existing marks are
    /// invalid, nothing is recorded.
    ///
    /// # Errors
    /// System errors, and [`std::io::ErrorKind::ResourceBusy`] if other writers take too long.
    pub fn mark_verified(&self, step: u64, id: &str) -> Result<()> {
        self.mark(step, id, false)
    }

    /// Records that the checkpoint was found damaged: it does not count as verified any more.
    pub fn mark_damaged(&self, step: u64, id: &str) -> Result<()> {
        self.mark(step, id, true)
    }

    /// The marks of checkpoints that are still in place, by step. Callers that read the checkpoints
    /// anyway use `known`, which reads no manifests.
    ///
    /// # Errors
    /// System errors, and [`Error::Corrupt`] for an invalid file: a caller that took it for empty
    /// would delete checkpoints that it protects.
    pub fn marks(&self) -> Result<Vec<Mark>> {
        let mut marks = self.stored_marks()?;
        marks.retain(|mark| self.holds(mark));
        Ok(marks)
    }

    /// All marks, for callers that read the checkpoints' ids themselves.
    pub(crate) fn known(&self) -> Result<Known> {
        self.stored_marks().map(Known)
    }

    fn mark(&self, step: u64, id: &str, is_damaged: bool) -> Result<()> {
        let mark = Mark {
            step,
            id: id.to_owned(),
            at_seconds: now_seconds(),
            is_damaged,
        };
        let is_there = |known: &Mark| {
            let is_fresh = known
                .age(mark.at_seconds)
                .is_some_and(|age| age.as_secs() < FRESH_SECONDS);
            (known.step, &known.id, known.is_damaged) == (step, &mark.id, is_damaged) && is_fresh
        };
        if !self.holds(&mark) {
            return Ok(());
        }
        // A marked checkpoint must be durable: its save may have died before its sync.
        self.sync(&self.step_path(step))?;
        // An existing mark must be durable as well.
        let Some(first) = self.known_marks()? else {
            return Ok(());
        };
        if first.1.iter().any(is_there) {
            return self.sync(self.root());
        }
        let Some(_lock) = self.lock_root()? else {
            return Ok(());
        };
        // Others may have written while this waited for a lock. In a bucket the file is replaced
        // only if it is still the version that was read.
        let mut first = Some(first).filter(|_| self.compares());
        for _ in 0..TURNS_MAX {
            let Some((seen, mut marks)) = first
                .take()
                .map_or_else(|| self.known_marks(), |first| Ok(Some(first)))?
            else {
                return Ok(());
            };
            if marks.iter().any(is_there) {
                return self.sync(self.root());
            }
            // No digest protects the marks that are written back, and a bit may have flipped while
            // reading them.
            let is_in_doubt = self.compares() && !marks.is_empty();
            if is_in_doubt && self.known_marks()? != Some((seen.clone(), marks.clone())) {
                continue;
            }
            marks.retain(|known| known.step != step);
            if !marks.is_empty() {
                let steps = self.steps()?;
                marks.retain(|known| steps.binary_search(&known.step).is_ok());
            }
            marks.push(mark.clone());
            marks.sort_by_key(|mark| mark.step);
            let surplus = marks.len().saturating_sub(MARKS_MAX);
            marks.drain(..surplus);
            match self.write_marks(&marks, seen.as_ref()) {
                // Another writer replaced it first.
                Err(error) if self.compares() && error.kind().is_some_and(is_gone) => {}
                written => return written,
            }
        }
        Err(self.busy())
    }

    /// Whether a file can be replaced on condition that its version is the one read.
    fn compares(&self) -> bool {
        !self.files().has_directories()
    }

    fn busy(&self) -> Error {
        Error::storage("lock", self.root())(io::ErrorKind::ResourceBusy.into())
    }

    /// The root's lock, or `Some(None)` if there are no locks here; `None` without a root.
    fn lock_root(&self) -> Result<Option<Option<Lease>>> {
        let begun = Instant::now();
        loop {
            match Lease::try_exclusive(self.root(), self.file_system())? {
                Exclusive::Tombstone(lease) => return Ok(Some(Some(lease))),
                Exclusive::NoLocks => return Ok(Some(None)),
                Exclusive::Gone => return Ok(None),
                Exclusive::Live if begun.elapsed() < WAIT_MAX => std::thread::sleep(WAIT_PAUSE),
                Exclusive::Live => return Err(self.busy()),
            }
        }
    }

    /// Replaces the file atomically.
    fn write_marks(&self, marks: &[Mark], seen: Option<&Seen>) -> Result<()> {
        let text = serde_json::to_vec(marks).expect("a hint always serialises");
        let temporary = self.root().join(name::temporary_marks());
        let written = self.write_synced(&temporary, &text).and_then(|()| {
            let (from, to) = (temporary.as_path(), &*self.root().join(MARKS));
            self.file_system().change(match seen {
                Some(seen) if self.compares() => Change::Replace { from, to, seen },
                None if self.compares() => Change::RenameNew { from, to },
                _ => Change::Rename { from, to },
            })?;
            self.sync(self.root())
        });
        if written.is_err() {
            let _ = self.file_system().change(Change::RemoveFile(&temporary));
        }
        written
    }

    fn write_synced(&self, path: &Path, text: &[u8]) -> Result<()> {
        let file = self.file_system().create_temporary(path)?;
        self.file_system().change(Change::Write(&file, text))?;
        Ok(self.file_system().change(Change::SyncData(&file))?)
    }

    /// Removes temporary files of writers that died; returns the bytes freed. Only the lock's
    /// holder knows that they are dead.
    pub(crate) fn sweep_marks(&self) -> Result<u64> {
        let Ok(Exclusive::Tombstone(_lock)) = Lease::try_exclusive(self.root(), self.file_system())
        else {
            return Ok(0);
        };
        let mut freed_bytes = 0;
        for name in names(self.root(), self.files()).unwrap_or_default() {
            if name::is_temporary_marks(&name) {
                freed_bytes += remove_file(&self.root().join(name), self.file_system())?;
            }
        }
        Ok(freed_bytes)
    }

    /// The stored marks; none if there is no file.
    fn stored_marks(&self) -> Result<Vec<Mark>> {
        self.read_marks().map(|(_, marks)| marks)
    }

    fn read_marks(&self) -> Result<Stored> {
        let path = self.root().join(MARKS);
        // A transfer can fail although the stored bytes are right.
        for _ in 0..2 {
            let seen = match self.files().stat_and_read(&path, u64::MAX) {
                Ok((found, seen)) => match plain::flaw(&found) {
                    Some(flaw) => return Err(Error::corrupt(self.root(), MARKS, flaw)),
                    None => seen,
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok((None, Vec::new()));
                }
                Err(source) => return Err(Error::storage("read", path)(source)),
            };
            if let Ok(mut marks) = serde_json::from_slice::<Vec<Mark>>(&seen.bytes) {
                marks.sort_by_key(|mark| mark.step);
                marks.truncate(MARKS_MAX);
                return Ok((Some(seen), marks));
            }
        }
        let detail = "it does not say which checkpoints were read back; `penstock scrub` mends it";
        Err(Error::corrupt(self.root(), MARKS, detail))
    }

    /// The existing marks, to which another is added; `None` if they are invalid: a new file with
    /// only one mark would silently discard all others.
    fn known_marks(&self) -> Result<Option<Stored>> {
        match self.read_marks() {
            Err(Error::Corrupt { .. }) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Removes invalid marks, before a scrub makes all of them again.
    pub(crate) fn forget_marks(&self) -> Result<()> {
        remove_file(&self.root().join(MARKS), self.file_system())?;
        self.sync(self.root())
    }

    /// Whether the step still holds the checkpoint of the mark. A salvaged checkpoint never counts
    /// as good, however often it is read.
    fn holds(&self, mark: &Mark) -> bool {
        let manifest = read_manifest(&self.step_path(mark.step), self.files());
        manifest.is_ok_and(|(manifest, _)| manifest.id == mark.id && manifest.partial.is_none())
    }
}
