//! Saving a checkpoint: plan, write, sync, commit.
//!
//! [`save`] does all of it for one process. With several ranks, one rank begins the [`Attempt`] and
//! the others join it; each writes its part with [`write_rank`], and the first commits their votes
//! with [`commit`]. A [`Job`] is the same write split into copying out of the caller's memory and
//! writing, for background saves. A checkpoint is complete by the votes of all ranks, never by a
//! directory listing.

mod arena;
mod eager_copy;
mod job;
mod linked;
mod planned;
mod shard_files;
mod sidecar;
mod signed;
mod state;
mod written;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use penstock_io::file_system::Files;
use penstock_io::trace;
use serde_json::value::RawValue;

use crate::FORMAT_VERSION;
pub use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::description::{
    MANIFEST_BYTES_MAX, check_size, read_manifest, read_part, read_part_of,
};
use crate::format::manifest::{self, Manifest, PartEntry};
use crate::format::part::TensorEntry;
use crate::options::Options;
use crate::progress::Progress;
use crate::report::{Fallback, FallbackKind, SaveReport};
use crate::seal::{Sealing, SealingEntry};
use crate::sign::SigningKey;
pub use arena::Arena;
pub use job::{Job, Shards, Staging};
pub use linked::{Holder, Linked, LinkedFile, LinkedSeal, LinkedTensor};
pub(crate) use planned::put_part;
use planned::unreadable;
pub use sidecar::Sidecars;
pub use state::SaveState;
pub use written::Written;

/// The path and the recorded properties of a new checkpoint.
pub struct Publication {
    /// The checkpoint directory; created with its parents.
    pub path: PathBuf,
    /// The training step, recorded in the manifest.
    pub step: Option<u64>,
    /// The caller's own JSON object, recorded in the manifest.
    pub metadata: Box<RawValue>,
    /// Whether a complete checkpoint at the path is replaced.
    pub overwrite: bool,
    /// Sidecars to save with the checkpoint.
    pub sidecars: Sidecars,
}

/// Maximum number of threads that read parts.
const READERS_MAX: usize = 16;

/// The only rank of a save from one process.
const RANK: u32 = 0;

/// Saves a checkpoint; when it returns, the checkpoint is complete and on stable storage.
///
/// # Errors
/// [`Error::Exists`] if a complete checkpoint exists, [`Error::Unsupported`] for a tensor that the
/// format does not support, [`Error::Full`] if storage is full, [`Error::Interrupted`] once the
/// caller cancels, and system errors. After an error, earlier data is unchanged and the files of
/// the attempt are removed, with one exception: when the last sync of the directory fails, the
/// checkpoint is in place but may not survive a crash, so it is not acknowledged.
pub fn save(
    state: SaveState,
    publication: &Publication,
    options: &Options,
    progress: &Progress,
) -> Result<SaveReport> {
    save_authentic(
        state,
        publication,
        Authenticity::default(),
        options,
        progress,
    )
}

/// The keys that seal and sign a save, and the checkpoints that it comes after.
#[derive(Default)]
pub struct Authenticity {
    /// A key that nothing else uses; `None` for a clear checkpoint.
    pub sealing: Option<Sealing>,
    /// The keys that sign the checkpoint. Its chunks are hashed while they are written.
    pub signing: Option<Arc<[SigningKey]>>,
    /// Ids of checkpoints that are older, newest first; at most [`manifest::PREVIOUS_MAX`].
    pub previous: Vec<String>,
}

/// Saves a checkpoint as [`save`] does, sealed with a key that nothing else uses.
///
/// # Errors
/// Those of [`save_authentic`].
pub fn save_sealed(
    state: SaveState,
    publication: &Publication,
    sealing: Sealing,
    options: &Options,
    progress: &Progress,
) -> Result<SaveReport> {
    let authenticity = Authenticity {
        sealing: Some(sealing),
        ..Authenticity::default()
    };
    save_authentic(state, publication, authenticity, options, progress)
}

/// Saves a checkpoint as [`save`] does, sealed, signed, or both.
///
/// # Errors
/// Those of [`save`]; [`Error::CannotSeal`] before anything is written, and [`Error::Signature`] if
/// the directory holds something that cannot be signed.
pub fn save_authentic(
    state: SaveState,
    publication: &Publication,
    authenticity: Authenticity,
    options: &Options,
    progress: &Progress,
) -> Result<SaveReport> {
    let Authenticity {
        sealing,
        signing,
        previous,
    } = authenticity;
    let options = &Options {
        is_sealed: sealing.is_some(),
        is_hashed: signing.is_some(),
        ..options.clone()
    };
    let begun = Instant::now();
    if sealing.is_some() {
        check_sealable(publication)?;
    }
    // Checked before gigabytes are written in vain.
    check_manifest_size(publication.metadata.get().len())?;
    let job = Job::sync(state, Vec::new(), &publication.path, options)?;
    let planned_ns = trace::now_ns();
    let mut attempt = Attempt::begin(
        &publication.path,
        publication.overwrite,
        &options.file_system,
        progress,
    )?;
    if let Some(sealing) = sealing {
        attempt.seal(sealing);
    }
    if let Some(keys) = signing {
        attempt.sign(keys);
    }
    attempt.follow(previous);
    let shards = job.write_since(planned_ns, &mut attempt, RANK, progress)?;
    let synced = Instant::now();
    let mut written = shards.describe(&mut attempt, None)?;
    let committed = commit(attempt, publication, vec![written.part])?;
    let commit_seconds = synced.elapsed().as_secs_f64();
    written.phases.push(("commit", commit_seconds));
    let fallbacks = [
        (FallbackKind::Leftover, committed.left_behind),
        (FallbackKind::Unindexed, committed.unindexed),
    ];
    for (kind, reason) in fallbacks {
        let fallback = reason.map(|reason| Fallback { kind, reason });
        written.transport.fallbacks.extend(fallback);
    }
    let _span = trace::span("release");
    // Freeing staging memory takes time.
    drop(job);
    Ok(SaveReport {
        path: publication.path.clone(),
        step: publication.step,
        id: committed.id,
        bytes: written.bytes + committed.manifest_bytes,
        tensor_bytes: written.tensor_bytes,
        linked_bytes: written.linked_bytes,
        device_bytes: written.device_bytes,
        zero_copy_bytes: written.zero_copy_bytes,
        sealed_bytes: written.sealed_bytes,
        tensors: written.tensors,
        files: written.files + 1,
        seconds: begun.elapsed().as_secs_f64(),
        phases: written.phases,
        transport: written.transport,
    })
}

/// Writes the data of one rank into an attempt that several ranks share. When it returns, the
/// rank's files are on stable storage and its vote is cast: from then on, only the coordinator
/// removes the files, or a sweep after all leases are gone.
///
/// # Errors
/// Those of [`save`]; the rank's own files are removed.
pub fn write_rank(
    attempt: &mut Attempt,
    rank: u32,
    state: SaveState,
    options: &Options,
    progress: &Progress,
) -> Result<Written> {
    let job = Job::sync(state, Vec::new(), attempt.path(), options)?;
    job.write(attempt, rank, progress)
}

/// The result of a commit.
#[derive(Debug)]
pub struct Committed {
    /// Identity of the checkpoint.
    pub id: String,
    /// Size of the manifest.
    pub manifest_bytes: u64,
    /// Why a requested index of a group was not written.
    pub unindexed: Option<String>,
    /// Why files of earlier attempts were not removed.
    pub left_behind: Option<String>,
}

/// Publishes a checkpoint from the votes of all its ranks, in order; when it returns, the
/// checkpoint is complete and on stable storage.
pub fn commit(
    attempt: Attempt,
    publication: &Publication,
    parts: Vec<PartEntry>,
) -> Result<Committed> {
    commit_as(attempt, publication, |_| {}, parts)
}

/// Reads the tensors that a rank has voted for, before the commit; also in a sealed attempt.
///
/// # Errors
/// [`Error::Corrupt`], [`Error::Malformed`], and [`Error::Tampered`] if the part is not the one
/// that the rank wrote, or does not open with the key of the attempt.
pub fn voted_tensors(attempt: &Attempt, entry: &PartEntry) -> Result<Vec<TensorEntry>> {
    let (path, files) = (attempt.path(), attempt.files());
    let sealing = attempt.sealing();
    let mut part = read_part_of(path, files, attempt.id(), sealing.is_some(), entry)?;
    if let Some(sealing) = sealing {
        part.unseal(sealing.key(), path, &entry.file)?;
    }
    Ok(part.tensors)
}

/// Whether an attempt has become the checkpoint at a path, for a rank that lost contact with the
/// committing one. False also if the manifest cannot be read.
pub fn is_committed(path: &Path, files: &dyn Files, attempt_id: &str) -> bool {
    read_manifest(path, files).is_ok_and(|(manifest, _)| manifest.id == attempt_id)
}

/// Commits as [`commit`] does; `adjust` adds to the manifest before it is sealed.
pub(crate) fn commit_as(
    mut attempt: Attempt,
    publication: &Publication,
    adjust: impl FnOnce(&mut Manifest),
    parts: Vec<PartEntry>,
) -> Result<Committed> {
    let _span = trace::span("commit");
    let mut manifest = manifest_of(publication, attempt.id(), parts);
    manifest.previous = attempt.previous().to_vec();
    adjust(&mut manifest);
    let unindexed = publication.sidecars.write(&mut manifest, &mut attempt)?;
    if let Some(sealing) = attempt.sealing() {
        seal_manifest(&mut manifest, sealing, &publication.path)?;
    }
    manifest.check().map_err(unreadable)?;
    let text = manifest.stamp();
    check_manifest_size(text.len())?;
    if manifest.parts.len() > 1 && !attempt.is_guarded() {
        let names = check_votes(&attempt, &manifest)?;
        attempt.expect(names);
    }
    if let Some(keys) = attempt.signing() {
        signed::sign(&mut attempt, &manifest, &text, &keys)?;
    }
    let names = || manifest.sidecars.iter().map(|entry| entry.name.as_str());
    let has_sidecars = !manifest.sidecars.is_empty();
    if has_sidecars && !attempt.is_taken() {
        attempt.place(names())?;
    }
    attempt.publish(&text, publication.overwrite)?;
    let id = attempt.id().to_owned();
    // The checkpoint is acknowledged; a failed cleanup must not change that.
    let mut placed = Ok(());
    if has_sidecars && publication.overwrite {
        placed = attempt.place(names());
    }
    let removed = placed.and_then(|()| attempt.remove_replaced());
    let left_behind =
        removed.map_err(|error| format!("files of earlier attempts were left behind: {error}"));
    Ok(Committed {
        id,
        manifest_bytes: text.len() as u64,
        unindexed,
        left_behind: left_behind.err(),
    })
}

/// Seals the metadata, and signs everything else.
fn seal_manifest(manifest: &mut Manifest, sealing: &Sealing, path: &Path) -> Result<()> {
    let empty = RawValue::from_string("{}".to_owned()).expect("it is JSON");
    let metadata = std::mem::replace(&mut manifest.metadata, empty);
    let (entry, keys) = SealingEntry::new(sealing, path, &manifest.id, metadata.get())?;
    manifest.sealing = Some(entry);
    manifest.sign(&keys, sealing.wraps());
    Ok(())
}

/// Refuses a sealed save that would leave something clear.
///
/// # Errors
/// [`Error::CannotSeal`].
pub fn check_sealable(publication: &Publication) -> Result<()> {
    let sidecars = &publication.sidecars;
    if sidecars.files.is_empty() && sidecars.group.is_none() {
        return Ok(());
    }
    Err(Error::CannotSeal {
        path: publication.path.clone(),
        detail: "files beside the shards are for readers of models, and stay clear".to_owned(),
    })
}

/// Refuses manifests that readers would refuse: a manifest is parsed before any digest confirms its
/// size, so its size is limited.
pub(crate) fn check_manifest_size(bytes: usize) -> Result<()> {
    if bytes as u64 <= MANIFEST_BYTES_MAX {
        return Ok(());
    }
    Err(Error::Unsupported {
        key: "metadata".to_owned(),
        detail: format!(
            "the manifest would have {bytes} bytes, it may have {MANIFEST_BYTES_MAX}; \
             save what is large as part of the state"
        ),
    })
}

/// Checks the files that the ranks voted for once more, where others may have removed some because
/// our leases are invisible to them; returns all file names. One list replaces many lookups.
fn check_votes(attempt: &Attempt, manifest: &Manifest) -> Result<Vec<String>> {
    let (path, files) = (attempt.path(), attempt.files());
    let listed = files.list(path).map_err(Error::storage("list", path))?;
    let listed: HashMap<_, _> = listed
        .into_iter()
        .map(|entry| (entry.name, entry.bytes))
        .collect();
    let of_rank = &|entry: &PartEntry| -> Result<Vec<String>> {
        let part = read_part(path, files, manifest, entry)?;
        for file in &part.files {
            match listed.get(OsStr::new(&file.name)) {
                Some(Some(bytes)) if *bytes == file.bytes => {}
                // Lists without sizes, or a lookup for a precise error.
                _ => check_size(path, files, file)?,
            }
        }
        let names = part.files.into_iter().map(|file| file.name);
        Ok(names.chain([entry.file.clone()]).collect())
    };
    let parts = manifest.parts.as_slice();
    let share = parts.len().div_ceil(READERS_MAX);
    // Each read is a slow request.
    let found: Vec<Result<Vec<String>>> = std::thread::scope(|scope| {
        let read = |parts| scope.spawn(move || read_all(parts, of_rank));
        let readers: Vec<_> = parts.chunks(share).map(read).collect();
        let join = |reader: std::thread::ScopedJoinHandle<'_, _>| reader.join().expect("it reads");
        readers.into_iter().map(join).collect()
    });
    Ok(found.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

fn read_all(
    parts: &[PartEntry],
    of_rank: impl Fn(&PartEntry) -> Result<Vec<String>>,
) -> Result<Vec<String>> {
    let names: Result<Vec<_>> = parts.iter().map(of_rank).collect();
    Ok(names?.concat())
}

fn manifest_of(publication: &Publication, id: &str, parts: Vec<PartEntry>) -> Manifest {
    Manifest {
        format: manifest::FORMAT.to_owned(),
        version: FORMAT_VERSION,
        id: id.to_owned(),
        step: publication.step,
        created: jiff::Timestamp::now()
            .round(jiff::Unit::Second)
            .map_or_else(
                |_| jiff::Timestamp::now().to_string(),
                |second| second.to_string(),
            ),
        writer: concat!("penstock ", env!("CARGO_PKG_VERSION")).to_owned(),
        world_size: u32::try_from(parts.len()).expect("ranks are counted in 32 bits"),
        parts,
        metadata: publication.metadata.clone(),
        partial: None,
        sidecars: Vec::new(),
        copy_of: None,
        previous: Vec::new(),
        sealing: None,
        mac: None,
        wraps: None,
        covered: Vec::new(),
        hash: None,
    }
}
