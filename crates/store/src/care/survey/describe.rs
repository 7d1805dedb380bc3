//! Describes which ranks and tensors a checkpoint had, from the best source left for each rank.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::Path;

use penstock_io::file_system::{Files, Kind};
use serde_json::value::RawValue;

use crate::FORMAT_VERSION;
use crate::error::{Error, Result};
use crate::format::description::{read_manifest, read_part};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::directory::names;
use crate::format::dtype;
use crate::format::header::{Header, HeaderTensor};
use crate::format::manifest::Manifest;
use crate::format::name::{self, MANIFEST};
use crate::format::part::{
    self, FileEntry, FileOpener, Missing, MissingKind, Part, Stored, TensorBox, TensorEntry,
};
use crate::format::plain::{self, is_lost};
use crate::format::shard;
use crate::load::checkpoint::unseal;
use crate::load::sidecar;
use crate::report::Problem;
use crate::seal::{DECOY, DataKey, ShardOpener, Unsealing};

/// Limit on ranks without files that are assumed from file names when there is no manifest.
const RANKS_WITHOUT_FILES_MAX: u64 = 4096;

/// Source of the names, types and positions of a rank's tensors; the best source first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Described {
    /// Manifest and part are whole: intact tensors are proven intact.
    Whole,
    /// A part without a manifest that records its digest.
    PartAlone,
    /// The headers of the shards only: digests and plain values are lost.
    Headers,
}

/// The readable description of a checkpoint.
#[derive(Default)]
pub(super) struct Description {
    pub(super) manifest: Option<Manifest>,
    /// The parts in rank order.
    pub(super) parts: Vec<(Part, Described)>,
    pub(super) missing_files: Vec<String>,
    pub(super) problems: Vec<Problem>,
    pub(super) bytes_checked: u64,
    /// The openers of all files of the parts, in order, if the checkpoint is sealed.
    pub(super) openers: Vec<ShardOpener>,
}

/// Reads the description of the checkpoint from whatever is left.
pub(super) fn describe(
    path: &Path,
    files: &dyn Files,
    unsealing: &Unsealing,
) -> Result<Description> {
    let mut found = Description::default();
    let mut key = None;
    match read_manifest(path, files) {
        Ok((mut manifest, bytes)) => {
            // Nothing of a manifest is used before its MAC is checked.
            key = unseal(path, &mut manifest, unsealing)?;
            found.bytes_checked += bytes;
            found.check_sidecars(path, files, &manifest)?;
            found.manifest = Some(manifest);
        }
        Err(
            error @ (Error::Corrupt { .. }
            | Error::Malformed { .. }
            | Error::Incomplete { .. }
            | Error::Storage { .. }),
        ) => {
            found.lose(path, files, MANIFEST, error)?;
        }
        Err(error) => return Err(error),
    }
    let mut names = names(path, files)?;
    names.sort();
    let (id, world_size) = match &found.manifest {
        Some(manifest) => (manifest.id.clone(), manifest.world_size),
        None => {
            let id = only_attempt(path, &names)?;
            let world_size = ranks_left(path, &names)?;
            (id, world_size)
        }
    };
    for rank in 0..world_size {
        let part = match &key {
            Some(key) => found.sealed_part(path, files, rank, key)?,
            None => found.part(path, files, &names, &id, rank, world_size)?,
        };
        found.parts.push(part);
    }
    if key.is_none() {
        found.check_clear(path, unsealing)?;
    }
    let is_nothing = |(part, described): &(Part, Described)| {
        *described == Described::Headers && part.files.is_empty()
    };
    if found.parts.iter().all(is_nothing) {
        let detail = match world_size {
            1 => "neither it nor the header of any shard can be read",
            _ => "neither a part nor the header of any shard can be read",
        };
        return Err(Error::corrupt(path, &name::part_file(0, &id), detail));
    }
    Ok(found)
}

impl Description {
    /// Refuses a sealed checkpoint that is not opened: nothing says which of its tensors are where.
    /// Refuses a clear one, whose manifest is lost, if a sealed one is demanded.
    fn check_clear(&self, path: &Path, unsealing: &Unsealing) -> Result<()> {
        let manifest = self.manifest.as_ref();
        let is_decoy = |tensor: &TensorEntry| tensor.name == DECOY;
        let is_sealed = |(part, _): &(Part, Described)| {
            part.sealed.is_some() || part.tensors.iter().any(is_decoy)
        };
        if manifest.is_none_or(|manifest| manifest.sealing.is_none())
            && !self.parts.iter().any(is_sealed)
        {
            return match unsealing.is_demanded {
                true => Err(Error::NotSealed {
                    path: path.to_owned(),
                }),
                false => Ok(()),
            };
        }
        if manifest.is_some() {
            return Err(Error::Sealed {
                path: path.to_owned(),
            });
        }
        let detail = "the checkpoint is sealed, and its keys were in the manifest: restore the \
                      manifest from a copy";
        Err(Error::corrupt(path, MANIFEST, detail))
    }

    /// The part of a rank of a sealed checkpoint; an empty one if it is lost, or does not open. The
    /// header of a sealed shard names no tensors.
    fn sealed_part(
        &mut self,
        path: &Path,
        files: &dyn Files,
        rank: u32,
        key: &DataKey,
    ) -> Result<(Part, Described)> {
        let manifest = self.manifest.as_ref().expect("it has the key");
        let (id, entry) = (manifest.id.clone(), &manifest.parts[rank as usize]);
        self.bytes_checked += entry.bytes;
        let file = entry.file.clone();
        let read = read_part(path, files, manifest, entry).and_then(|mut part| {
            let openers = part.unseal(key, path, &file)?;
            Ok((part, openers))
        });
        match read {
            Ok((part, openers)) => {
                for (number, opener) in openers.into_iter().enumerate() {
                    let FileOpener::Chunks(opener) = opener else {
                        let inside = |entry: &&TensorEntry| entry.file == number;
                        let entry = part.tensors.iter().find(inside);
                        return Err(Error::SealedByBlocks {
                            path: path.to_owned(),
                            key: entry.map(|entry| entry.name.clone()).unwrap_or_default(),
                        });
                    };
                    self.openers.push(opener);
                }
                return Ok((part, Described::Whole));
            }
            Err(Error::Tampered { detail, .. }) => self.note(&file, detail, true),
            Err(error) => self.lose(path, files, &file, error)?,
        }
        Ok((empty_part(&id, rank), Described::Headers))
    }

    /// A rank's part, from the best source left.
    fn part(
        &mut self,
        path: &Path,
        files: &dyn Files,
        names: &[String],
        id: &str,
        rank: u32,
        world_size: u32,
    ) -> Result<(Part, Described)> {
        let entry = self
            .manifest
            .as_ref()
            .map(|found| &found.parts[rank as usize]);
        let (read, described) = match (&self.manifest, entry) {
            (Some(manifest), Some(entry)) => {
                self.bytes_checked += entry.bytes;
                (read_part(path, files, manifest, entry), Described::Whole)
            }
            // No digest covers this part, so an unknown value may as well be damage.
            _ => (
                believed(part_alone(path, files, id, rank)),
                Described::PartAlone,
            ),
        };
        match read {
            Ok(part) => Ok((part, described)),
            Err(error) => {
                self.lose(path, files, &name::part_file(rank, id), error)?;
                let part = self.by_headers(path, files, names, id, rank, world_size);
                Ok((part, Described::Headers))
            }
        }
    }

    /// Checks the checkpoint's sidecars.
    fn check_sidecars(
        &mut self,
        path: &Path,
        files: &dyn Files,
        manifest: &Manifest,
    ) -> Result<()> {
        for entry in &manifest.sidecars {
            match sidecar::read(path, files, entry) {
                Ok(text) => self.bytes_checked += text.len() as u64,
                Err(error) => self.lose(path, files, &entry.file, error)?,
            }
        }
        Ok(())
    }

    /// Records a file that cannot be used. Returns errors that do not mean damage.
    fn lose(&mut self, path: &Path, files: &dyn Files, file: &str, error: Error) -> Result<()> {
        let is_proven = !matches!(error, Error::Malformed { .. } | Error::Storage { .. });
        let detail = loss(error)?;
        if !files.is_there(&path.join(file)) {
            self.missing_files.push(file.to_owned());
        }
        self.note(file, detail, is_proven);
        Ok(())
    }

    fn note(&mut self, file: &str, detail: String, is_proven: bool) {
        self.problems.push(Problem {
            file: file.to_owned(),
            offset: None,
            tensor: None,
            detail,
            is_proven,
        });
    }

    /// Builds a part from the headers of a rank's shards, without digests and with an empty tree.
    ///
    /// With several ranks, only shards whose headers mark boxes are used: a box looks like any
    /// tensor, and must not pass for the whole tensor that it is a piece of.
    fn by_headers(
        &mut self,
        path: &Path,
        files: &dyn Files,
        names: &[String],
        id: &str,
        rank: u32,
        world_size: u32,
    ) -> Part {
        let mut part = empty_part(id, rank);
        for name in names.iter().filter(|name| name::is_shard(name, rank, id)) {
            match tensors_of(&path.join(name), files, part.files.len(), world_size > 1) {
                Ok(Listed {
                    bytes,
                    tensors,
                    unknown,
                }) => {
                    part.files.push(FileEntry {
                        name: name.clone(),
                        bytes,
                        digest: Digest::EMPTY,
                        chunk_bytes: CHUNK_BYTES,
                        chunks: Vec::new(),
                        sealed: None,
                        blake3: None,
                    });
                    part.tensors.extend(tensors);
                    for missing in &unknown {
                        let detail = format!("{:?}: {}", missing.name, missing.reason);
                        self.note(name, detail, false);
                    }
                    part.missing.extend(unknown);
                }
                Err(detail) => self.note(name, detail, false),
            }
        }
        let mut seen = HashSet::new();
        part.tensors
            .retain(|tensor| seen.insert(tensor.name.clone()));
        part.missing
            .retain(|missing| seen.insert(missing.name.clone()));
        part
    }
}

fn empty_part(id: &str, rank: u32) -> Part {
    Part {
        format: part::FORMAT.to_owned(),
        version: FORMAT_VERSION,
        id: id.to_owned(),
        rank,
        files: Vec::new(),
        tensors: Vec::new(),
        aliases: Vec::new(),
        tree: RawValue::from_string("null".to_owned()).expect("it is JSON"),
        missing: Vec::new(),
        sealed: None,
    }
}

/// Describes the damage to a file in words; returns errors that do not mean damage.
pub(crate) fn loss(error: Error) -> Result<String> {
    match error {
        Error::Corrupt { detail, .. }
        | Error::Malformed { detail, .. }
        | Error::Incomplete { detail, .. } => Ok(detail),
        Error::Storage { source, .. } if is_lost(&source) => Ok(source.to_string()),
        error => Err(error),
    }
}

/// Reports unknown types in a part without a recorded digest as damage, since damage may have made
/// them.
fn believed(read: Result<Part>) -> Result<Part> {
    read.map_err(|error| match error {
        Error::Unknown { path, file, detail } => Error::malformed(&path, &file, detail),
        error => error,
    })
}

/// Reads a part for which there is no manifest.
fn part_alone(path: &Path, files: &dyn Files, id: &str, rank: u32) -> Result<Part> {
    let name = name::part_file(rank, id);
    let file = path.join(&name);
    match files.stat(&file) {
        Ok(found) if found.kind == Kind::File => {
            let text = files.read(&file).map_err(Error::storage("read", &file))?;
            Part::parse(&text, path, &name, id, rank)
        }
        Ok(found) => {
            let flaw = plain::flaw(&found).unwrap_or_default();
            Err(Error::corrupt(path, &name, flaw))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::corrupt(path, &name, "the file is missing"))
        }
        Err(error) => Err(Error::storage("stat", &file)(error)),
    }
}

/// The attempt that all files of the directory belong to. Without a manifest, files of several
/// attempts cannot be told apart, and an unfinished attempt is no checkpoint.
fn only_attempt(path: &Path, names: &[String]) -> Result<String> {
    let attempts = names.iter().filter_map(|name| name::attempt_of(name));
    let attempts: HashSet<&str> = attempts.collect();
    let mut attempts = attempts.into_iter();
    match (attempts.next(), attempts.next()) {
        (Some(id), None) => Ok(id.to_owned()),
        (None, _) => Err(Error::corrupt(path, MANIFEST, "no file of a save is there")),
        _ => Err(Error::corrupt(
            path,
            MANIFEST,
            "files of several saves are there, and no manifest that tells which is which",
        )),
    }
}

/// Derives the number of ranks from file names when there is no manifest; at least one. A rank
/// without files below the highest one found has lost everything; ranks above the highest are
/// unknown.
fn ranks_left(path: &Path, names: &[String]) -> Result<u32> {
    let ranks: BTreeSet<u32> = names
        .iter()
        .filter_map(|name| name::rank_of_file(name))
        .collect();
    let last = ranks.last().copied().unwrap_or_default();
    let lost = u64::from(last) + 1 - (ranks.len() as u64).min(u64::from(last) + 1);
    if lost > RANKS_WITHOUT_FILES_MAX {
        let detail = format!("there are files up to rank {last}, and none of {lost} ranks before");
        return Err(Error::corrupt(path, MANIFEST, detail));
    }
    Ok(last.saturating_add(1))
}

/// The contents of a shard according to its header.
struct Listed {
    /// File size.
    bytes: u64,
    tensors: Vec<TensorEntry>,
    /// Tensors whose element type this version does not know.
    unknown: Vec<Missing>,
}

/// Reads the tensors of a shard from its own header.
fn tensors_of(
    path: &Path,
    files: &dyn Files,
    file: usize,
    needs_boxes: bool,
) -> std::result::Result<Listed, String> {
    let (header, bytes) = shard::read_header(path, files)?;
    let boxes = shard::boxes(&header)?;
    let Header {
        data_start,
        tensors,
        ..
    } = header;
    if boxes.is_none() && needs_boxes {
        return Err("it does not say which of its tensors are pieces of larger ones".to_owned());
    }
    let mut boxes = boxes.unwrap_or_default();
    let (mut entries, mut unknown) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let region = boxes.remove(&name);
        let Some((dtype, shape)) = dtype::of_stored(&tensor.dtype, &tensor.shape) else {
            unknown.push(of_unknown_type(name, tensor));
            continue;
        };
        let (begin, end) = tensor.data_offsets;
        let entry = TensorEntry {
            name,
            dtype: dtype.to_owned(),
            // A part records a carrier for types that earlier versions had no name for.
            stored: (!dtype::is_natural(dtype)).then_some(Stored {
                dtype: tensor.dtype,
                shape: tensor.shape,
            }),
            shape,
            file,
            range: (data_start + begin, data_start + end),
            stored_name: None,
            group: None,
            region: None,
        };
        // If the type's carrier adds a dimension, the shape in the header does not match the box:
        // such a piece cannot be recovered.
        let fits = |region: &TensorBox| entry.check_box(region).is_ok();
        if region.as_ref().is_none_or(fits) {
            entries.push(TensorEntry { region, ..entry });
        }
    }
    Ok(Listed {
        bytes,
        tensors: entries,
        unknown,
    })
}

/// A tensor that only a newer version can recover: its element size is unknown here.
fn of_unknown_type(name: String, tensor: HeaderTensor) -> Missing {
    let reason = format!(
        "it has elements of type {:?}, which this version of Penstock does not know: salvage it with \
         a newer one",
        tensor.dtype
    );
    Missing {
        name,
        dtype: tensor.dtype,
        shape: tensor.shape,
        reason,
        kind: MissingKind::Own,
    }
}
