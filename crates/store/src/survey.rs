//! A survey: which tensors of a damaged checkpoint are intact, which are hit, and by what.
//!
//! It reads what a load would refuse: shards that are cut, sectors that the device cannot give
//! back, and, where manifest or part are gone, the headers of the shards. Those vouch for nothing:
//! what is found by them alone is *unverified*, and nobody gets it without asking for it.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_io::file::{Direct, File};
use serde_json::value::RawValue;

use crate::FORMAT_VERSION;
use crate::description::{is_lost, read_manifest, read_part};
use crate::digest::{CHUNK_BYTES, Digest};
use crate::dtype;
use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::name::{self, MANIFEST};
use crate::options::Options;
use crate::part::{self, FileEntry, Part, TensorEntry};
use crate::pipeline::Run;
use crate::pipeline::damage::Damage;
use crate::pipeline::read::{OnDamage, Source, read};
use crate::plain;
use crate::plan::read::plan;
use crate::progress::Progress;
use crate::report::Problem;
use crate::shard;

/// Where the names, types and places of the tensors come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Described {
    /// Manifest and part, whole: what is intact is proven so.
    Whole,
    /// A part that no manifest vouches for.
    PartAlone,
    /// The headers of the shards: no digest is left, and nothing of the plain values.
    Headers,
}

/// A checkpoint as far as it can be read.
#[derive(Debug)]
pub struct Survey {
    /// The manifest, where it is whole.
    pub manifest: Option<Manifest>,
    /// What the ranks recorded, or what could be made out.
    pub part: Part,
    /// Where that comes from.
    pub described: Described,
    /// For each tensor of the part what is wrong with it; `None` for one that is intact, or that
    /// cannot be checked.
    pub hits: Vec<Option<String>>,
    /// Files that are not there.
    pub missing_files: Vec<String>,
    /// Everything that was found.
    pub problems: Vec<Problem>,
    /// Bytes that were read and digested.
    pub bytes_checked: u64,
    /// Time it took.
    pub seconds: f64,
    /// How much of each file is there in whole chunks.
    usable_bytes: Vec<u64>,
}

/// Looks at everything of the checkpoint at `path` that can be read.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Version`], [`Error::Interrupted`]; [`Error::Corrupt`] where
/// nothing tells what tensors there were; and the system's errors, but not those that say that
/// bytes are lost.
pub fn survey(path: &Path, options: &Options, progress: &Progress) -> Result<Survey> {
    let begun = Instant::now();
    // A digest covers a chunk: what shares a request with a bad sector is not lost with it.
    let options = Options {
        extent_bytes: Some(CHUNK_BYTES as usize),
        ..options.clone()
    };
    let mut survey = describe(path)?;
    survey.hits = vec![None; survey.part.tensors.len()];
    survey.check_files(path, &options, progress)?;
    survey.seconds = begun.elapsed().as_secs_f64();
    Ok(survey)
}

impl Survey {
    /// Whether what is intact is proven to be.
    pub fn is_vouched_for(&self) -> bool {
        self.described == Described::Whole
    }

    /// Indices of the tensors that nothing is known to be wrong with.
    pub fn intact(&self) -> Vec<usize> {
        let tensors = 0..self.hits.len();
        tensors
            .filter(|&tensor| self.hits[tensor].is_none())
            .collect()
    }

    /// The files as far as they are there, with their numbers.
    pub(crate) fn open(&self, path: &Path, direct: Direct) -> Result<Vec<(usize, Source<'_>)>> {
        let mut sources = Vec::new();
        for (number, entry) in self.part.files.iter().enumerate() {
            let bytes = self.usable_bytes[number];
            if bytes > 0 {
                let file = Arc::new(File::open(&path.join(&entry.name), direct)?);
                let has_digests = self.described != Described::Headers;
                let chunks = has_digests.then_some(entry.chunks.as_slice());
                sources.push((
                    number,
                    Source {
                        file,
                        bytes,
                        chunks,
                    },
                ));
            }
        }
        Ok(sources)
    }

    fn check_files(&mut self, path: &Path, options: &Options, progress: &Progress) -> Result<()> {
        for number in 0..self.part.files.len() {
            let usable_bytes = self.measure(path, number)?;
            self.usable_bytes.push(usable_bytes);
        }
        if self.described == Described::Headers {
            return Ok(());
        }
        let settings = options.settle(path, self.usable_bytes.iter().sum());
        let sources = self.open(path, settings.direct)?;
        let (numbers, sources): (Vec<usize>, Vec<Source<'_>>) = sources.into_iter().unzip();
        let files: Vec<_> = sources.iter().map(Source::facts).collect();
        let bytes = files.iter().map(|file| file.bytes).sum();
        progress.expect(bytes);
        let plan = plan(&files, &[], true, settings.extent_bytes as u64);
        let mut run = Run::default();
        let outcome = read(
            plan,
            Vec::new(),
            &sources,
            &settings,
            OnDamage::Survey,
            progress,
            &mut run,
        )?;
        drop(sources);
        for damage in &outcome.damage {
            let number = numbers[damage.file];
            let first = self.hit(number, damage);
            self.problems.push(Problem {
                file: self.part.files[number].name.clone(),
                offset: Some(damage.offset()),
                tensor: first,
                detail: damage.detail(),
            });
        }
        self.bytes_checked += bytes;
        Ok(())
    }

    /// Counts the tensors that damage touches as hit; returns the first of them.
    pub(crate) fn hit(&mut self, number: usize, damage: &Damage) -> Option<String> {
        let file = &self.part.files[number].name;
        let mut first: Option<&TensorEntry> = None;
        for (tensor, hit) in self.part.tensors.iter().zip(&mut self.hits) {
            let is_touched = tensor.file == number && damage.touches(tensor.range);
            if is_touched && tensor.nbytes() > 0 {
                let reason = || format!("{file}, offset {}: {}", damage.offset(), damage.detail());
                hit.get_or_insert_with(reason);
                let is_first = first.is_none_or(|first| tensor.range < first.range);
                first = if is_first { Some(tensor) } else { first };
            }
        }
        first.map(|tensor| tensor.name.clone())
    }

    /// How many bytes of a file are there in whole chunks; what lies beyond is hit.
    fn measure(&mut self, path: &Path, number: usize) -> Result<u64> {
        let entry = &self.part.files[number];
        let file = path.join(&entry.name);
        let (usable_bytes, detail) = match fs::symlink_metadata(&file) {
            Ok(metadata) if !metadata.is_file() => (0, plain::flaw(&metadata).map(str::to_owned)),
            Ok(metadata) if metadata.len() == entry.bytes => (entry.bytes, None),
            Ok(metadata) => {
                let (found, expected) = (metadata.len(), entry.bytes);
                let whole = match found > expected {
                    true => expected,
                    false => found - found % CHUNK_BYTES,
                };
                let detail = format!("it has {found} bytes instead of {expected}");
                (whole, Some(detail))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                self.missing_files.push(entry.name.clone());
                (0, Some("the file is missing".to_owned()))
            }
            Err(source) => return Err(Error::storage("stat", &file)(source)),
        };
        let Some(detail) = detail else {
            return Ok(usable_bytes);
        };
        for (tensor, hit) in self.part.tensors.iter().zip(&mut self.hits) {
            if tensor.file == number && tensor.range.1 > usable_bytes && tensor.nbytes() > 0 {
                hit.get_or_insert_with(|| format!("{}: {detail}", entry.name));
            }
        }
        self.problems.push(Problem {
            file: entry.name.clone(),
            offset: None,
            tensor: None,
            detail,
        });
        Ok(usable_bytes)
    }
}

/// Finds out what tensors there were, from the best source that is left.
fn describe(path: &Path) -> Result<Survey> {
    let mut problems = Vec::new();
    let mut missing_files = Vec::new();
    let manifest = match read_manifest(path) {
        Ok((manifest, bytes)) => Some((manifest, bytes)),
        Err(error @ (Error::Corrupt { .. } | Error::Incomplete { .. } | Error::Storage { .. })) => {
            lost(path, MANIFEST, error, &mut problems, &mut missing_files)?;
            None
        }
        Err(error) => return Err(error),
    };
    let ranks = |world_size| Error::Ranks {
        path: path.to_owned(),
        world_size,
    };
    let world_size = match &manifest {
        Some((manifest, _)) => manifest.world_size,
        None => ranks_left(path)?,
    };
    if world_size > 1 {
        return Err(ranks(world_size));
    }
    let mut bytes_checked = manifest.as_ref().map_or(0, |(_, bytes)| *bytes);
    let manifest = manifest.map(|(manifest, _)| manifest);
    let found = match &manifest {
        Some(manifest) => {
            let entry = &manifest.parts[0];
            bytes_checked += entry.bytes;
            read_part(path, manifest, entry)
                .map(|part| (part, Described::Whole))
                .map_err(|error| (entry.file.clone(), error))
        }
        None => part_alone(path)?.map(|part| (part, Described::PartAlone)),
    };
    let (part, described) = match found {
        Ok(found) => found,
        Err((file, error)) => {
            lost(path, &file, error, &mut problems, &mut missing_files)?;
            let part = from_headers(path, manifest.as_ref(), &mut problems)?;
            (part, Described::Headers)
        }
    };
    if part.tensors.iter().any(|tensor| tensor.region.is_some()) {
        return Err(ranks(world_size));
    }
    Ok(Survey {
        manifest,
        part,
        described,
        hits: Vec::new(),
        missing_files,
        problems,
        bytes_checked,
        seconds: 0.0,
        usable_bytes: Vec::new(),
    })
}

/// How many ranks there are files of, where no manifest tells; at least one.
fn ranks_left(path: &Path) -> Result<u32> {
    let entries = fs::read_dir(path).map_err(Error::storage("list", path))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let ranks = names.filter_map(|name| name::rank_of(&name));
    Ok(ranks.max().map_or(1, |last| last.saturating_add(1)))
}

/// Takes note of a file that cannot be used; errors that say something else stay errors.
fn lost(
    path: &Path,
    file: &str,
    error: Error,
    problems: &mut Vec<Problem>,
    missing_files: &mut Vec<String>,
) -> Result<()> {
    let detail = match error {
        Error::Corrupt { detail, .. } | Error::Incomplete { detail, .. } => detail,
        Error::Storage { source, .. } if is_lost(&source) => source.to_string(),
        error => return Err(error),
    };
    if !plain::is_there(&path.join(file)) {
        missing_files.push(file.to_owned());
    }
    problems.push(Problem {
        file: file.to_owned(),
        offset: None,
        tensor: None,
        detail,
    });
    Ok(())
}

type Unusable = (String, Error);

/// The one part of a checkpoint that lost its manifest.
fn part_alone(path: &Path) -> Result<std::result::Result<Part, Unusable>> {
    let id = only_attempt(path)?;
    let file = name::part(0, &id);
    let text = plain::read(&path.join(&file)).map_err(Error::storage("read", path.join(&file)));
    let parsed = text.and_then(|text| Part::parse(&text, path, &file, &id, 0));
    Ok(parsed.map_err(|error| match error {
        Error::Storage { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            let error = Error::corrupt(path, &file, "the file is missing");
            (file, error)
        }
        error => (file, error),
    }))
}

/// The attempt that all files of the directory belong to. Several cannot be told apart without a
/// manifest, and one that never finished is no checkpoint.
fn only_attempt(path: &Path) -> Result<String> {
    let mut attempts = HashSet::new();
    for entry in fs::read_dir(path).map_err(Error::storage("list", path))? {
        let entry = entry.map_err(Error::storage("list", path))?;
        let name = entry.file_name();
        attempts.extend(name.to_str().and_then(name::attempt_of).map(str::to_owned));
    }
    let mut attempts = attempts.into_iter();
    match (attempts.next(), attempts.next()) {
        (Some(id), None) => Ok(id),
        (None, _) => Err(Error::corrupt(path, MANIFEST, "no file of a save is there")),
        _ => Err(Error::corrupt(
            path,
            MANIFEST,
            "files of several saves are there, and no manifest that tells which is which",
        )),
    }
}

/// A part made out of the headers of the shards. It has no digests and an empty tree.
fn from_headers(
    path: &Path,
    manifest: Option<&Manifest>,
    problems: &mut Vec<Problem>,
) -> Result<Part> {
    let id = match manifest {
        Some(manifest) => manifest.id.clone(),
        None => only_attempt(path)?,
    };
    let mut names: Vec<String> = fs::read_dir(path)
        .map_err(Error::storage("list", path))?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name::is_shard(name, 0, &id))
        .collect();
    names.sort();
    let mut part = Part {
        format: part::FORMAT.to_owned(),
        version: FORMAT_VERSION,
        id,
        rank: 0,
        files: Vec::new(),
        tensors: Vec::new(),
        aliases: Vec::new(),
        tree: RawValue::from_string("null".to_owned()).expect("it is JSON"),
        missing: Vec::new(),
    };
    for name in names {
        match tensors_of(&path.join(&name), part.files.len()) {
            Ok((bytes, tensors)) => {
                part.files.push(FileEntry {
                    name,
                    bytes,
                    digest: Digest::EMPTY,
                    chunk_bytes: CHUNK_BYTES,
                    chunks: Vec::new(),
                });
                part.tensors.extend(tensors);
            }
            Err(detail) => problems.push(Problem {
                file: name,
                offset: None,
                tensor: None,
                detail,
            }),
        }
    }
    let mut seen = HashSet::new();
    part.tensors
        .retain(|tensor| seen.insert(tensor.name.clone()));
    if part.files.is_empty() {
        let detail = "neither it nor the header of any shard can be read";
        return Err(Error::corrupt(path, &name::part(0, &part.id), detail));
    }
    Ok(part)
}

/// Size of a shard and its tensors as its own header lists them.
fn tensors_of(path: &Path, file: usize) -> std::result::Result<(u64, Vec<TensorEntry>), String> {
    let (header, bytes) = shard::read_header(path)?;
    let entry = |(name, tensor): (String, shard::HeaderTensor)| {
        let (begin, end) = tensor.data_offsets;
        let dtype = dtype::of_stored(&tensor.dtype)?.to_owned();
        Some(TensorEntry {
            name,
            dtype,
            shape: tensor.shape,
            file,
            range: (header.data_start + begin, header.data_start + end),
            stored: None,
            region: None,
        })
    };
    Ok((
        bytes,
        header.tensors.into_iter().filter_map(entry).collect(),
    ))
}
