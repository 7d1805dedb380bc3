//! Salvage: the intact tensors of a damaged checkpoint, in a new one that says what it lacks.
//!
//! Every tensor that is taken over was read against its digest in this very call, and the new
//! checkpoint is saved as any other is, with digests of its own. What is missing is listed in it
//! with the reason, and the tree refers to that list in its place.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::HostRegion;
use serde_json::value::RawValue;

use crate::digest::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::manifest::Partial;
use crate::name::{parse_step, step_directory};
use crate::options::Options;
use crate::part::{Alias, Missing, TensorEntry};
use crate::pipeline::Run;
use crate::pipeline::read::{OnDamage, Source, read};
use crate::pipeline::target::Target;
use crate::plan::read::{Goal, Placement, Request, plan};
use crate::plan::write::TensorSpec;
use crate::progress::Progress;
use crate::references::{Place, Renumbering, renumber};
use crate::report::SaveReport;
use crate::save::{self, Salvaged, State, save_as};
use crate::survey::{Described, Survey, survey};

/// What a salvage brought.
#[derive(Debug)]
pub struct SalvageReport {
    /// The new checkpoint.
    pub saved: SaveReport,
    /// Identity of the damaged one, where that could be read.
    pub source: Option<String>,
    /// Bytes of the tensors that were taken over.
    pub recovered_bytes: u64,
    /// Tensors and further names that were not.
    pub missing: Vec<Missing>,
    /// Whether what was taken over could not be checked.
    pub unverified: bool,
    /// Whether structure and plain values are lost.
    pub tree_is_lost: bool,
    /// Time it took.
    pub seconds: f64,
}

/// Saves what is intact of the checkpoint at `path` as a new one at `out`. If nothing is missing
/// after all, it is a complete one. The tensors that are taken over are in memory meanwhile.
///
/// `unverified` also takes over what cannot be checked, where manifest or part are lost.
///
/// # Errors
/// As [`survey`] and [`crate::save::save`]; [`Error::Corrupt`] where nothing can be checked and
/// `unverified` is not given.
pub fn salvage(
    path: &Path,
    out: &Path,
    unverified: bool,
    options: &Options,
    progress: &Progress,
) -> Result<SalvageReport> {
    let begun = Instant::now();
    check_is_new(path, out)?;
    let mut found = survey(path, options, progress)?;
    check_is_its_step(&found, out)?;
    if !found.is_vouched_for() && !unverified {
        return Err(unproven(path, &found));
    }
    let earlier = found
        .manifest
        .as_ref()
        .and_then(|manifest| manifest.partial.clone());
    let unverified = !found.is_vouched_for() || earlier.is_some_and(|earlier| earlier.unverified);
    let sources = load(path, &mut found, options, progress)?;
    let (mut state, missing) = assemble(path, &found)?;
    state.sources = sources;
    let recovered_bytes = state.sources.iter().map(HostRegion::len).sum();
    let source = found.manifest.as_ref().map(|manifest| manifest.id.clone());
    let target = target_of(&found, out);
    let salvaged = Salvaged {
        partial: Partial {
            source: source.clone(),
            unverified,
        },
        missing: missing.clone(),
    };
    let is_whole = missing.is_empty() && !unverified;
    let salvaged = (!is_whole).then_some(&salvaged);
    let saved = save_as(state, &target, salvaged, options, progress)?;
    Ok(SalvageReport {
        saved,
        source,
        recovered_bytes,
        missing,
        unverified,
        tree_is_lost: found.described == Described::Headers,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// What is recovered goes to a place of its own: a save tidies up what lies beside it, and that may be
/// what is being recovered, or somebody else's last hope.
fn check_is_new(path: &Path, out: &Path) -> Result<()> {
    let refused = |source| Error::storage("salvage to", out)(source);
    match fs::read_dir(out).map(Iterator::count) {
        Ok(entries) if entries > 0 => {
            return Err(refused(io::ErrorKind::DirectoryNotEmpty.into()));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refused(error)),
        _ => {}
    }
    let source = fs::canonicalize(path).ok();
    let above = std::path::absolute(out).ok();
    let mut above = above.iter().flat_map(|out| out.ancestors());
    if above.any(|above| fs::canonicalize(above).ok() == source && source.is_some()) {
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
    let tensors = found.intact().len();
    let what = match found.described {
        Described::Headers => "the headers of the shards list",
        _ => "its part, which nothing vouches for, lists",
    };
    let detail = format!(
        "{problem}; no digest proves what is left: {what} {tensors} tensors, which unverified=True \
         (--unverified) takes over as they are"
    );
    Error::corrupt(path, file, detail)
}

fn target_of(found: &Survey, out: &Path) -> save::Target {
    let nothing = || RawValue::from_string("{}".to_owned()).expect("it is JSON");
    let manifest = found.manifest.as_ref();
    save::Target {
        path: PathBuf::from(out),
        step: manifest.and_then(|manifest| manifest.step),
        metadata: manifest.map_or_else(nothing, |manifest| manifest.metadata.clone()),
        overwrite: false,
    }
}

/// Reads the intact tensors, each chunk against its digest once more; what turns out not to be
/// intact is hit from then on. A chunk with damage may hold intact tensors beside it, where the
/// digest tells which byte was changed.
fn load(
    path: &Path,
    found: &mut Survey,
    options: &Options,
    progress: &Progress,
) -> Result<Vec<HostRegion>> {
    let intact = found.intact();
    let part = &found.part;
    let tensors = || intact.iter().map(|&index| &part.tensors[index]);
    let options = Options {
        extent_bytes: Some(CHUNK_BYTES as usize),
        ..options.clone()
    };
    let settings = options.settle(path, tensors().map(TensorEntry::nbytes).sum());
    let opened = found.open(path, settings.direct)?;
    let (numbers, sources): (Vec<usize>, Vec<Source<'_>>) = opened.into_iter().unzip();
    let request = |tensor: &TensorEntry| Request {
        // A tensor without bytes may lie in a file that is gone; nothing is read for it.
        file: numbers.binary_search(&tensor.file).unwrap_or_default(),
        range: tensor.range.0..tensor.range.1,
        goal: Goal::Fresh,
    };
    let requests: Vec<Request> = tensors().map(request).collect();
    let files: Vec<_> = sources.iter().map(Source::facts).collect();
    let plan = plan(&files, &requests, false, settings.extent_bytes as u64);
    let placements = plan.placements.clone();
    let none = requests.iter().map(|_| Target::Fresh).collect();
    let mut run = Run::default();
    let survey = OnDamage::Survey;
    let outcome = read(plan, none, &sources, &settings, survey, progress, &mut run)?;
    let segments: Vec<_> = outcome.segments.into_iter().map(Arc::new).collect();
    let region = |(tensor, placement): (&TensorEntry, Placement)| match placement {
        Placement::Segment { segment, offset } => {
            let start = offset as usize;
            HostRegion::within(&segments[segment], start..start + tensor.nbytes() as usize)
        }
        Placement::Empty | Placement::Target => HostRegion::from(Vec::new()),
    };
    let regions: Vec<HostRegion> = tensors().zip(placements).map(region).collect();
    drop(sources);
    for damage in &outcome.damage {
        found.hit(numbers[damage.file], damage);
    }
    let regions = intact.iter().zip(regions);
    let kept = regions.filter(|(index, _)| found.hits[**index].is_none());
    Ok(kept.map(|(_, region)| region).collect())
}

/// The state without its bytes, and what is missing from it.
fn assemble(path: &Path, found: &Survey) -> Result<(State, Vec<Missing>)> {
    let part = &found.part;
    let mut to = Renumbering::default();
    let mut missing = part.missing.clone();
    let mut tensors = Vec::new();
    for (index, (tensor, hit)) in part.tensors.iter().zip(&found.hits).enumerate() {
        let place = match hit {
            None => Place::Kept(tensors.len()),
            Some(_) => Place::Missing(missing.len()),
        };
        to.tensors.insert(index, place);
        match hit {
            None => tensors.push(spec(tensor)),
            Some(reason) => missing.push(Missing {
                name: tensor.name.clone(),
                dtype: tensor.dtype.clone(),
                shape: tensor.shape.clone(),
                reason: reason.clone(),
            }),
        }
    }
    let mut aliases: Vec<Alias> = Vec::new();
    for (index, alias) in part.aliases.iter().enumerate() {
        let tensor = &part.tensors[alias.tensor];
        let place = match to.tensors[&alias.tensor] {
            Place::Kept(tensor) => {
                aliases.push(Alias {
                    tensor,
                    ..alias.clone()
                });
                Place::Kept(aliases.len() - 1)
            }
            Place::Missing(_) => {
                let view = alias.view.as_ref();
                missing.push(Missing {
                    name: alias.name.clone(),
                    dtype: tensor.dtype.clone(),
                    shape: view.map_or(&tensor.shape, |view| &view.shape).clone(),
                    reason: format!("it shares the elements of {:?}", tensor.name),
                });
                Place::Missing(missing.len() - 1)
            }
        };
        to.aliases.insert(index, place);
    }
    let tree = match found.described {
        Described::Headers => flat_tree(&tensors),
        _ => renumber(&part.tree, &to).map_err(|detail| {
            let file = crate::name::part(part.rank, &part.id);
            Error::corrupt(path, &file, detail)
        })?,
    };
    let state = State {
        tensors,
        sources: Vec::new(),
        aliases,
        tree,
    };
    Ok((state, missing))
}

fn spec(tensor: &TensorEntry) -> TensorSpec {
    TensorSpec {
        name: tensor.name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        item_bytes: tensor.item_bytes(),
        region: None,
    }
}

/// A dictionary of the tensors by name: all that can be said where the tree is lost.
fn flat_tree(tensors: &[TensorSpec]) -> Box<RawValue> {
    let pair = |(index, tensor): (usize, &TensorSpec)| serde_json::json!([tensor.name, {"$": "tensor", "i": index}]);
    let pairs: Vec<_> = tensors.iter().enumerate().map(pair).collect();
    let tree = serde_json::json!({"$": "dict", "v": pairs});
    RawValue::from_string(tree.to_string()).expect("it is JSON")
}
