//! Salvage: the intact tensors of a damaged checkpoint, in a new one that says what it lacks.
//!
//! Every tensor that is taken over was read against its digest in this very call, and the new
//! checkpoint is saved as any other is, by as many ranks, with digests of its own. What is missing is
//! listed in it with the reason. A tensor that ranks share is taken over with all of its boxes, or
//! with none. What is of a group stays in it, and small files that the manifest vouches for go with
//! the new checkpoint as they did with the old one.

mod rank;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use penstock_io::file_system::Files;
use serde_json::value::RawValue;

use crate::care::beside;
use crate::care::survey::{Described, Survey, loss, survey};
use crate::error::{Error, Result};
use crate::format::index::INDEX;
use crate::format::manifest::{BesideEntry, Partial};
use crate::format::name::{parse_step, step_directory};
use crate::format::part::Missing;
use crate::options::Options;
use crate::progress::Progress;
use crate::save::{self, Attempt, Job, check_manifest_size, commit_as};
use rank::Salvage;

/// The group whose index lies in the directory.
const INDEXED: &str = "";

/// What a salvage brought.
#[derive(Debug)]
pub struct SalvageReport {
    /// Identity of the new checkpoint.
    pub id: String,
    /// The step it was saved as, where that is known.
    pub step: Option<u64>,
    /// Identity of the damaged one, where that could be read.
    pub source: Option<String>,
    /// Bytes of all files that were written.
    pub bytes: u64,
    /// Tensors that were taken over; one that ranks share counts once.
    pub tensors: usize,
    /// Bytes of them.
    pub recovered_bytes: u64,
    /// What was not taken over, with the rank whose own it is where there are several.
    pub missing: Vec<(Option<u32>, Missing)>,
    /// Small files that do not go with it, with the reason. They are no part of the state.
    pub files_lost: Vec<(String, String)>,
    /// Whether what was taken over could not be checked.
    pub unverified: bool,
    /// The ranks whose structure and plain values are lost.
    pub ranks_lost: Vec<u32>,
    /// Time it took.
    pub seconds: f64,
}

/// Saves what is intact of the checkpoint at `path` as a new one at `out`, of as many ranks. If
/// nothing is missing after all, it is a complete one. The tensors that one rank stored are in memory
/// meanwhile.
///
/// `unverified` also takes over what cannot be checked, where the manifest or parts are lost. `into` are
/// the options of `out`, which may be of another file system.
///
/// # Errors
/// As [`survey`] and [`crate::save::save`]; [`Error::Corrupt`] where nothing can be checked and
/// `unverified` is not given.
pub fn salvage(
    path: &Path,
    out: &Path,
    unverified: bool,
    options: &Options,
    into: &Options,
    progress: &Progress,
) -> Result<SalvageReport> {
    let begun = Instant::now();
    check_is_new(path, out, options.file_system.files(), into)?;
    let found = survey(path, options, progress)?;
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
    let listed = manifest.map_or_else(Vec::new, |manifest| manifest.beside.clone());
    let mut salvage = Salvage::new(path, found, unverified, options);
    let mut attempt = Attempt::begin(out, false, &into.file_system, progress)?;
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
        &mut publication.beside,
    )?;
    let is_partial = is_unverified || salvage.lacks_something();
    let partial = is_partial.then(|| Partial {
        source: source.clone(),
        unverified: is_unverified,
    });
    let committed = commit_as(attempt, &publication, partial, parts)?;
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

/// Takes over small files that are what was saved; returns the others with the reason. An index names
/// the shards of one checkpoint, so it is made anew, and only of a group that is all there: whoever
/// looks for a model by it does not know a checkpoint that lacks something.
fn take_files(
    path: &Path,
    files: &dyn Files,
    listed: &[BesideEntry],
    salvage: &Salvage<'_>,
    beside: &mut save::Beside,
) -> Result<Vec<(String, String)>> {
    let mut lost = Vec::new();
    for entry in listed {
        let name = entry.name.clone();
        if name != INDEX {
            match beside::read_either(path, files, entry) {
                Ok(text) => beside.files.push((name, text)),
                Err(error) => lost.push((name, loss(error)?)),
            }
        } else if salvage.has_all_of(INDEXED) {
            beside.group = Some(INDEXED.to_owned());
        } else {
            lost.push((
                name,
                "the tensors of its group are not all there".to_owned(),
            ));
        }
    }
    Ok(lost)
}

/// What is recovered goes to a place of its own: a save tidies up what lies beside it, and that may be
/// what is being recovered, or somebody else's last hope.
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
    // A URL is absolute as it is.
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

/// A store takes a checkpoint for damaged that lies at another step than its own.
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

/// Says what is lost, and what there would be without proof.
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
        beside: save::Beside::default(),
    }
}
