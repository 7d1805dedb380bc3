//! Salvage: saves the intact tensors of a damaged checkpoint as a new one that lists its losses.
//!
//! Every recovered tensor is read and checked against its digest in the same call. The new
//! checkpoint is an ordinary save with the same number of ranks and digests of its own, and it
//! lists each missing tensor with the reason. A tensor that ranks share is recovered with all of
//! its boxes or not at all. Tensors stay in their group, and sidecars whose digests are in the
//! manifest are copied to the new checkpoint.

mod rank;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use penstock_io::file_system::Files;
use serde_json::value::RawValue;

use crate::care::survey::{Described, Survey, loss, survey_with};
use crate::error::{Error, Result};
use crate::format::index::INDEX;
use crate::format::manifest::{Manifest, Partial, SidecarEntry};
use crate::format::name::{parse_step, step_directory};
use crate::format::part::Missing;
use crate::load::sidecar;
use crate::options::Options;
use crate::progress::Progress;
use crate::save::{self, Attempt, Job, check_manifest_size, commit_as};
use crate::seal::{Sealing, Unsealing};
use rank::Salvage;

/// The group whose index file is in the checkpoint directory itself.
const INDEXED: &str = "";

/// The outcome of a salvage.
#[derive(Debug)]
pub struct SalvageReport {
    /// Identity of the new checkpoint.
    pub id: String,
    /// The step that the new checkpoint was saved as, if known.
    pub step: Option<u64>,
    /// Identity of the damaged checkpoint, if it could be read.
    pub source: Option<String>,
    /// Total size of all files written.
    pub bytes: u64,
    /// Number of recovered tensors; a tensor that ranks share counts once.
    pub tensors: usize,
    /// Total size of the recovered tensors.
    pub recovered_bytes: u64,
    /// Tensors that were not recovered; with several ranks, each with the rank that owned it.
    pub missing: Vec<(Option<u32>, Missing)>,
    /// Sidecars that were not copied, with the reason. They are no part of the state.
    pub files_lost: Vec<(String, String)>,
    /// Whether tensors were recovered that could not be checked.
    pub unverified: bool,
    /// The ranks whose structure and plain values are lost.
    pub ranks_lost: Vec<u32>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Saves the intact tensors of the checkpoint at `path` as a new checkpoint at `out`, with as many
/// ranks. If nothing is missing, the new checkpoint is complete. The tensors of one rank at a time
/// are held in memory.
///
/// `unverified` also recovers tensors that cannot be checked because the manifest or parts are
/// lost. `into` holds the options for `out`, which may be on another file system.
///
/// # Errors
/// Those of [`survey`](crate::care::survey::survey) and [`crate::save::save`]; [`Error::Corrupt`]
/// if nothing can be checked and `unverified` is not set.
pub fn salvage(
    path: &Path,
    out: &Path,
    unverified: bool,
    options: &Options,
    into: &Options,
    progress: &Progress,
) -> Result<SalvageReport> {
    let clear = Seals::default();
    salvage_with(path, out, unverified, clear, options, into, progress)
}

/// How a salvage opens the damaged checkpoint and seals the new one.
#[derive(Default)]
pub struct Seals {
    /// How a sealed checkpoint is opened.
    pub unsealing: Unsealing,
    /// How the new one is sealed; `None` for a clear one.
    pub sealing: Option<Sealing>,
}

/// Salvages as [`salvage`] does, also a sealed checkpoint. A chunk that does not open counts as
/// damaged, and so do all tensors in it.
///
/// # Errors
/// Those of [`salvage`] and of [`survey_with`].
pub fn salvage_with(
    path: &Path,
    out: &Path,
    unverified: bool,
    seals: Seals,
    options: &Options,
    into: &Options,
    progress: &Progress,
) -> Result<SalvageReport> {
    let begun = Instant::now();
    check_is_new(path, out, options.file_system.files(), into)?;
    let found = survey_with(path, options, &seals.unsealing, progress)?;
    check_is_its_step(&found, out)?;
    let described = found.described_by();
    if !described.contains(&Described::Whole) && !unverified {
        return Err(unproven(path, &found));
    }
    let manifest = found.manifest.as_ref();
    let source = manifest.map(|manifest| manifest.id.clone());
    let earlier = manifest.and_then(|manifest| manifest.partial.as_ref());
    let is_whole = described.iter().all(|from| *from == Described::Whole);
    let is_unverified = (unverified && !is_whole) || earlier.is_some_and(|from| from.unverified);
    let mut publication = publication_of(&found, out);
    check_manifest_size(publication.metadata.get().len())?;
    let listed = manifest.map_or_else(Vec::new, |manifest| manifest.sidecars.clone());
    let mut salvage = Salvage::new(path, found, unverified, options);
    let mut attempt = Attempt::begin(out, false, &into.file_system, progress)?;
    let into = &Options {
        is_sealed: seals.sealing.is_some(),
        ..into.clone()
    };
    if let Some(sealing) = seals.sealing {
        if !listed.is_empty() {
            let detail = "the small files beside it would stay clear".to_owned();
            let path = path.to_owned();
            return Err(Error::CannotSeal { path, detail });
        }
        attempt.seal(sealing);
    }
    let (mut parts, mut bytes) = (Vec::new(), 0);
    for rank in 0..described.len() as u32 {
        let (state, missing) = salvage.take(rank, progress)?;
        let job = Job::sync(state, missing, out, into)?;
        let written = job.write(&mut attempt, rank, progress)?;
        bytes += written.bytes;
        parts.push(written.part);
    }
    let files_lost = take_files(
        path,
        options.file_system.files(),
        &listed,
        &salvage,
        &mut publication.sidecars,
    )?;
    let is_partial = is_unverified || salvage.lacks_something();
    let partial = is_partial.then(|| Partial {
        source: source.clone(),
        unverified: is_unverified,
    });
    let adjust = |manifest: &mut Manifest| manifest.partial = partial;
    let committed = commit_as(attempt, &publication, adjust, parts)?;
    let ranks_lost = salvage.ranks_lost();
    Ok(SalvageReport {
        id: committed.id,
        step: publication.step,
        source,
        bytes: bytes + committed.manifest_bytes,
        tensors: salvage.tensors(),
        recovered_bytes: salvage.recovered_bytes,
        missing: salvage.missing,
        files_lost,
        unverified: is_unverified,
        ranks_lost,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Adds sidecars that match their digests to the new checkpoint; returns the others with the
/// reason. An index names the shards of one checkpoint, so it is rebuilt, and only for a group that
/// is complete: programs that find a model through its index do not know partial checkpoints.
fn take_files(
    path: &Path,
    files: &dyn Files,
    listed: &[SidecarEntry],
    salvage: &Salvage<'_>,
    sidecars: &mut save::Sidecars,
) -> Result<Vec<(String, String)>> {
    let mut lost = Vec::new();
    for entry in listed {
        let name = entry.name.clone();
        if name != INDEX {
            match sidecar::read_either(path, files, entry) {
                Ok(text) => sidecars.files.push((name, text)),
                Err(error) => lost.push((name, loss(error)?)),
            }
        } else if salvage.has_all_of(INDEXED) {
            sidecars.group = Some(INDEXED.to_owned());
        } else {
            lost.push((
                name,
                "the tensors of its group are not all there".to_owned(),
            ));
        }
    }
    Ok(lost)
}

/// Checks that `out` is a new directory outside of the damaged checkpoint. A save cleans up other
/// files in its directory, and these may be the very files that are being recovered.
fn check_is_new(path: &Path, out: &Path, files: &dyn Files, into: &Options) -> Result<()> {
    let refused = |source| Error::storage("salvage to", out)(source);
    match into
        .file_system
        .files()
        .list(out)
        .map(|entries| entries.len())
    {
        Ok(entries) if entries > 0 => {
            return Err(refused(io::ErrorKind::DirectoryNotEmpty.into()));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refused(error)),
        _ => {}
    }
    let source = files.resolve(path).ok();
    // A URL is already absolute.
    let above = std::path::absolute(out).ok();
    let mut above = out
        .ancestors()
        .chain(above.iter().flat_map(|out| out.ancestors()));
    if above.any(|above| files.resolve(above).ok() == source && source.is_some()) {
        let detail = "it lies in what is to be salvaged";
        return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, detail)));
    }
    Ok(())
}

/// Checks that the name of `out` agrees with the checkpoint's step: a store reports a checkpoint as
/// damaged if its directory names another step.
fn check_is_its_step(found: &Survey, out: &Path) -> Result<()> {
    let name = out.file_name().and_then(|name| name.to_str());
    let step = found.manifest.as_ref().and_then(|manifest| manifest.step);
    match (name.and_then(parse_step), step) {
        (Some(named), Some(step)) if named != step => Err(Error::Mismatch {
            key: out.display().to_string(),
            detail: format!(
                "this is step {step}: name the directory {}",
                step_directory(step)
            ),
        }),
        _ => Ok(()),
    }
}

/// Returns an error that says how much is lost and how much `unverified` would recover.
fn unproven(path: &Path, found: &Survey) -> Error {
    let first = found.problems.first();
    let (file, problem) = first.map_or(("", ""), |problem| (&problem.file, &problem.detail));
    let own = found.intact().into_iter();
    let own = own.filter(|&entry| found.part.tensors[entry].region.is_none());
    let shared = found.shared.iter().filter(|tensor| tensor.hit.is_none());
    let tensors = own.count() + shared.count();
    let parts = if found.world_size() > 1 {
        "parts"
    } else {
        "part"
    };
    let what = match found.described {
        Described::PartAlone => format!("its {parts}, for which nothing vouches, list"),
        _ if found.world_size() > 1 => "parts and headers of shards list".to_owned(),
        _ => "the headers of the shards list".to_owned(),
    };
    let detail = format!(
        "{problem}; no digest proves what is left: {what} {tensors} tensors, which unverified=True \
         (--unverified) takes over as they are"
    );
    Error::corrupt(path, file, detail)
}

fn publication_of(found: &Survey, out: &Path) -> save::Publication {
    let nothing = || RawValue::from_string("{}".to_owned()).expect("it is JSON");
    let manifest = found.manifest.as_ref();
    save::Publication {
        path: PathBuf::from(out),
        step: manifest.and_then(|manifest| manifest.step),
        metadata: manifest.map_or_else(nothing, |manifest| manifest.metadata.clone()),
        overwrite: false,
        sidecars: save::Sidecars::default(),
    }
}
