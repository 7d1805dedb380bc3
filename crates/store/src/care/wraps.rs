//! Changing who can open a sealed checkpoint: its wraps are replaced, and no data is touched.
//!
//! The manifest is replaced as a whole, under the exclusive lease of the checkpoint, as a save that
//! replaces the checkpoint at the same time would be undone. Readers hold a shared lease, so this
//! waits for them, ten seconds at most. In a bucket, where there is no lease, the manifest is
//! replaced only if it is still the one that was read. On file systems whose locks other hosts do
//! not see, the caller must know that no save runs there.
//!
//! Before wraps are added or replaced, the data key is checked against the manifest: a wrap that
//! somebody else put there cannot make the checkpoint unreadable.
//!
//! A removed recipient can no longer open this checkpoint. It keeps the data that it has read, and a
//! data key that it has copied.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::file_system::{Change, FileSystem};
use penstock_keys::{KeyError, RECIPIENTS_MAX, Recipients};

use crate::commit::files::discard;
use crate::error::{Error, Result};
use crate::format::description::{MANIFEST_BYTES_MAX, read_manifest};
use crate::format::manifest::{Manifest, replace_wraps};
use crate::format::name::{self, MANIFEST};
use crate::lease::{Exclusive, Lease};
use crate::seal::{Unwrap, Wrap};

/// How long readers and saves are waited for.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_PAUSE: Duration = Duration::from_millis(10);

/// How often others may replace the manifest of a checkpoint in a bucket first.
const TURNS_MAX: usize = 64;

/// Held while the manifest of a checkpoint in a bucket is replaced.
static IN_BUCKETS: Mutex<()> = Mutex::new(());

/// A change of the recipients.
pub enum Rewrap<'a> {
    /// Adds recipients; those that are there are wrapped for anew.
    Add(&'a dyn Unwrap, &'a Recipients),
    /// Removes recipients by their names in public.
    Remove(&'a [String]),
    /// Replaces all recipients.
    Replace(&'a dyn Unwrap, &'a Recipients),
}

/// The wraps of a sealed checkpoint.
///
/// # Errors
/// Those of an open; [`Error::NotSealed`].
pub fn read(path: &Path, file_system: &dyn FileSystem) -> Result<Vec<Wrap>> {
    let (manifest, _) = read_manifest(path, file_system.files())?;
    manifest.wraps.ok_or_else(|| Error::NotSealed {
        path: path.to_owned(),
    })
}

/// Changes the recipients of a sealed checkpoint, durably; returns the new wraps.
///
/// # Errors
/// [`Error::NotSealed`]; [`Error::Key`] if the identities do not open the checkpoint, if a
/// recipient to be removed is not there, or if none would be left;
/// [`std::io::ErrorKind::ResourceBusy`] while others read or save the checkpoint; the system's
/// errors.
pub fn rewrap(path: &Path, file_system: &dyn FileSystem, change: &Rewrap<'_>) -> Result<Vec<Wrap>> {
    let _lease = lock(path, file_system)?;
    if file_system.files().has_directories() {
        return replace(path, file_system, change);
    }
    // Two calls would use the same temporary name. Those of other processes are not seen here.
    let _turn = IN_BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 1..TURNS_MAX {
        match replace(path, file_system, change) {
            Err(Error::Io(error)) if error.kind() == Some(ErrorKind::AlreadyExists) => {}
            result => return result,
        }
    }
    replace(path, file_system, change)
}

/// Replaces the manifest by one with other wraps, if it is still the one that is read here.
fn replace(path: &Path, file_system: &dyn FileSystem, change: &Rewrap<'_>) -> Result<Vec<Wrap>> {
    let files = file_system.files();
    // Read twice, as this call describes a damaged manifest and the next one says what was seen.
    read_manifest(path, files)?;
    let target = path.join(MANIFEST);
    let (_, seen) = files
        .stat_and_read(&target, MANIFEST_BYTES_MAX)
        .map_err(Error::storage("read", &target))?;
    let mut manifest = Manifest::parse(&seen.bytes, path)?;
    let Some(present) = manifest.wraps.clone() else {
        return Err(Error::NotSealed {
            path: path.to_owned(),
        });
    };
    let wraps = changed(path, &mut manifest, present, change)?;
    let text = replace_wraps(&seen.bytes, path, &wraps)?;

    let temporary = path.join(name::temporary_manifest(&manifest.id));
    // That of a process that died here: nobody else has the lease.
    discard(&temporary, file_system)?;
    let file = file_system.create_temporary(&temporary)?;
    let (from, to) = (temporary.as_path(), target.as_path());
    let moved = file_system
        .change(Change::Write(&file, &text))
        .and_then(|()| file_system.change(Change::SyncData(&file)))
        .and_then(|()| {
            file_system.change(match files.has_directories() {
                true => Change::Rename { from, to },
                false => Change::Replace {
                    from,
                    to,
                    seen: &seen,
                },
            })
        });
    if let Err(error) = moved {
        let _ = discard(&temporary, file_system);
        return Err(error.into());
    }
    file_system.change(Change::SyncDirectory(path))?;
    Ok(wraps)
}

/// The lease that keeps saves out; `None` where there are no locks.
fn lock(path: &Path, file_system: &dyn FileSystem) -> Result<Option<Lease>> {
    let begun = Instant::now();
    loop {
        match Lease::try_exclusive(path, file_system)? {
            Exclusive::Tombstone(lease) => return Ok(Some(lease)),
            Exclusive::NoLocks => return Ok(None),
            Exclusive::Gone => {
                return Err(Error::NotFound {
                    path: path.to_owned(),
                });
            }
            Exclusive::Live if begun.elapsed() < WAIT_MAX => std::thread::sleep(WAIT_PAUSE),
            Exclusive::Live => {
                let busy = std::io::Error::from(std::io::ErrorKind::ResourceBusy);
                return Err(Error::storage("lock", path)(busy));
            }
        }
    }
}

fn changed(
    path: &Path,
    manifest: &mut Manifest,
    present: Vec<Wrap>,
    change: &Rewrap<'_>,
) -> Result<Vec<Wrap>> {
    let failed = |source| Error::Key {
        path: path.to_owned(),
        source,
    };
    let refused = |reason: String| {
        let name = "recipients".to_owned();
        failed(KeyError::BadText { name, reason })
    };
    let (identities, recipients) = match change {
        Rewrap::Remove(names) => {
            if let Some(missing) = names.iter().find(|name| !is_among(name, &present)) {
                return Err(refused(format!("{missing} is none of the checkpoint's")));
            }
            let left: Vec<_> = present
                .into_iter()
                .filter(|wrap| !names.contains(&wrap.recipient))
                .collect();
            return match left.is_empty() {
                true => Err(refused(
                    "nobody would be left who can open the checkpoint".into(),
                )),
                false => Ok(left),
            };
        }
        Rewrap::Add(identities, recipients) | Rewrap::Replace(identities, recipients) => {
            (identities, recipients)
        }
    };
    let key = identities.unwrap(&present).map_err(failed)?;
    manifest.unseal(&key, path)?;
    let mut wraps = recipients.wrap(&key).map_err(failed)?;
    if matches!(change, Rewrap::Add(..)) {
        let kept: Vec<_> = present
            .into_iter()
            .filter(|wrap| !is_among(&wrap.recipient, &wraps))
            .collect();
        wraps.splice(0..0, kept);
    }
    match wraps.len() <= RECIPIENTS_MAX {
        true => Ok(wraps),
        false => Err(refused(format!(
            "there are {}: at most {RECIPIENTS_MAX}",
            wraps.len()
        ))),
    }
}

fn is_among(name: &str, wraps: &[Wrap]) -> bool {
    wraps.iter().any(|wrap| wrap.recipient == name)
}
