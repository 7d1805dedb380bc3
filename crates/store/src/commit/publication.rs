//! Publishing a manifest, and finding out whether that succeeded.
//!
//! Where no lock shows which attempts are live, the directory is checked again after the manifest
//! is published: if files of the checkpoint are being removed, the manifest is removed, or the
//! replaced one is put back ([`fence`]).

use std::io;
use std::path::{Path, PathBuf};

use penstock_io::file_system::{Change, Seen};

use super::files::link_new;
use super::{Attempt, End, fence};
use crate::error::{Error, Result};
use crate::format::directory::entries;
use crate::format::name::{self, MANIFEST};

/// How often other savers may replace the checkpoint first.
const TURNS_MAX: usize = 64;

const SWEPT: &str =
    "somebody took this save for dead, or deletes the step, and removes what it had written";

impl Attempt {
    /// Publishes the manifest: from here on the checkpoint is complete, whatever happens.
    pub(crate) fn publish(&mut self, text: &[u8], overwrite: bool) -> Result<()> {
        let temporary = self.write_temporary(&name::temporary_manifest(&self.id), text)?;
        self.check_publishable(&temporary, overwrite)?;
        let manifest = self.path.join(MANIFEST);
        let (from, to) = (temporary.as_path(), manifest.as_path());
        let moved = match overwrite {
            true if self.is_swept_by_age() => self.replace(from, to).map_err(Error::from),
            true => {
                let renamed = self.file_system.change(Change::Rename { from, to });
                renamed.map_err(Error::from)
            }
            false => link_new(self.file_system.as_ref(), from, to),
        };
        if let Err(error) = moved {
            self.judge_failure(&manifest, text, overwrite, error)?;
        }
        if self.is_swept_by_age() {
            self.check_committed(&manifest, text)?;
        }
        self.end = End::Published(text.to_owned());
        self.sync_directory().map_err(|error| match error {
            Error::Storage { path, source, .. } => Error::Unsynced { path, source },
            error => error,
        })?;
        if !overwrite {
            // The manifest's temporary name; the checkpoint is complete with or without it.
            let _ = self.file_system.change(Change::RemoveFile(from));
        }
        Ok(())
    }

    /// Puts the manifest in place of the existing one, or of none, and remembers which.
    fn replace(&mut self, from: &Path, to: &Path) -> penstock_io::Result<()> {
        let mut turns = 0;
        loop {
            let seen = match self.files().stat_and_read(to, u64::MAX) {
                Ok((_, seen)) => Some(seen),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(source) => {
                    return Err(penstock_io::Error::Storage {
                        operation: "read",
                        path: to.to_owned(),
                        source,
                    });
                }
            };
            let moved = self.file_system.change(match &seen {
                Some(seen) => Change::Replace { from, to, seen },
                None => Change::RenameNew { from, to },
            });
            turns += 1;
            match moved {
                // Another saver replaced it first.
                Err(error) if error.kind().is_some_and(fence::is_gone) && turns < TURNS_MAX => {}
                Ok(()) => {
                    self.replaced = seen.map(|seen| seen.bytes);
                    return Ok(());
                }
                failed => return failed,
            }
        }
    }

    /// Whether the age of files is all that shows that an attempt is live.
    pub(super) fn is_swept_by_age(&self) -> bool {
        !self.files().has_directories()
    }

    /// Revokes the publication if files of the checkpoint are being removed.
    fn check_committed(&mut self, manifest: &Path, text: &[u8]) -> Result<()> {
        let own = self
            .made
            .iter()
            .filter_map(|path| path.file_name()?.to_str());
        let others = self.others.iter().map(String::as_str);
        let is_data = |name: &&str| *name != name::temporary_manifest(&self.id);
        let expected = own.chain(others).filter(is_data);
        let missing = match fence::flaw(&self.path, self.files(), &self.id, expected) {
            Ok(None) => return Ok(()),
            Ok(Some(missing)) => missing,
            // The manifest exists, and readers see it, whether its files are complete or not.
            Err(error) => return Err(self.undecided(error)),
        };
        // A deletion of the step is meant to include the checkpoint that this one replaced.
        let name = missing.file_name().and_then(|name| name.to_str());
        let is_deleted = name.is_some_and(name::is_tombstone);
        let changed = match self.replaced.as_ref().filter(|_| !is_deleted) {
            Some(replaced) => self.put_back(manifest, text, replaced),
            None => {
                let seen = &Seen::of(text);
                self.file_system.change(Change::RemoveSeen(manifest, seen))
            }
        };
        match changed {
            Ok(()) => Err(swept(missing)),
            // Another checkpoint has replaced this one and removed its files.
            Err(failed) if failed.kind() == Some(io::ErrorKind::AlreadyExists) => Ok(()),
            // Our own request revoked it, or somebody else deleted it.
            Err(failed) => Err(self.undecided(failed.into())),
        }
    }

    /// Leaves the publication undecided, and the files in place.
    fn undecided(&mut self, error: Error) -> Error {
        self.end = End::Undecided;
        match error {
            Error::Storage { source, .. } => Error::CommitUndecided {
                path: self.path.clone(),
                attempt: self.id.clone(),
                source,
            },
            error => error,
        }
    }

    fn put_back(&self, manifest: &Path, text: &[u8], replaced: &[u8]) -> penstock_io::Result<()> {
        let from = self.path.join(name::temporary_manifest(&self.id));
        let file = self.file_system.create_temporary(&from)?;
        self.file_system.change(Change::Write(&file, replaced))?;
        self.file_system.change(Change::Replace {
            from: &from,
            to: manifest,
            seen: &Seen::of(text),
        })
    }

    /// Whether the lease is visible to everybody who removes files here.
    pub(crate) fn is_guarded(&self) -> bool {
        self.lease.is_seen_by_all()
    }

    /// Refuses to publish if a file is missing, since somebody to whom the lease is invisible may
    /// have removed it, or if the manifest would hide another checkpoint.
    fn check_publishable(&self, temporary: &Path, overwrite: bool) -> Result<()> {
        if self.is_swept_by_age() {
            // One list answers all of it.
            let entries = entries(&self.path, self.files())?;
            let made = self.made.iter().filter(|path| *path != temporary);
            let own = made.filter_map(|path| path.file_name()?.to_str());
            let expected = own.chain(self.others.iter().map(String::as_str));
            return match fence::flaw_among(&self.path, self.files(), &entries, &self.id, expected) {
                Some(missing) => Err(swept(missing)),
                None if !overwrite && self.is_taken_by(&entries) => Err(self.exists()),
                None => Ok(()),
            };
        }
        for path in &self.made {
            let found = self.files().follow(path);
            found.map_err(Error::storage("publish", path))?;
        }
        match !overwrite && !self.is_guarded() && self.is_taken() {
            true => Err(self.exists()),
            false => Ok(()),
        }
    }

    /// Decides the outcome of a publication that reported failure. Storage reached over a network
    /// may report failure for an operation that it carried out, or carries out later. If the
    /// outcome is open, the files stay, since a manifest may refer to them; a sweep decides later.
    /// A local failure carries out nothing later, and its own error says more.
    fn judge_failure(
        &mut self,
        manifest: &Path,
        text: &[u8],
        overwrite: bool,
        error: Error,
    ) -> Result<()> {
        let is_taken = error.kind() == Some(io::ErrorKind::AlreadyExists);
        let is_own = |found: &io::Result<Vec<u8>>| matches!(found, Ok(found) if found == text);
        let mut found = self.files().read(manifest);
        if !is_own(&found) {
            // A transfer can fail although the stored bytes are right, and a wrong answer here
            // removes the files of a checkpoint.
            found = self.files().read(manifest);
        }
        match found {
            Ok(found) if found == text => return Ok(()),
            // A late publication could not replace that manifest.
            Ok(_) if !overwrite => return Err(self.exists()),
            Err(missing) if is_taken && missing.kind() == io::ErrorKind::NotFound => {
                return Err(self.exists());
            }
            _ if !is_taken && error.kind().is_some_and(is_definite) => return Err(error),
            _ => {}
        }
        match self.is_guarded() {
            true => {
                self.end = End::Undecided;
                Err(error)
            }
            false => Err(self.undecided(error)),
        }
    }
}

/// Returns the error for an attempt whose files were removed or are about to be.
fn swept(missing: PathBuf) -> Error {
    let source = io::Error::new(io::ErrorKind::NotFound, SWEPT);
    Error::storage("publish", missing)(source)
}

/// Whether the system refused the operation, rather than lost its outcome.
fn is_definite(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::TooManyLinks
            | io::ErrorKind::Unsupported
            | io::ErrorKind::InvalidInput
    )
}
