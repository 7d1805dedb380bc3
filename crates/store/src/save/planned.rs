//! A planned write: every decision made and nothing written.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_io::buffer::Region;
use penstock_io::file::File;
use penstock_io::file_system::FileSystem;
use serde_json::value::RawValue;

use super::linked::{Holder, Linked, LinkedFile, Links};
use super::shard_files::ShardFiles;
use super::state::SaveState;
use super::written::Written;
use crate::FORMAT_VERSION;
use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::manifest::PartEntry;
use crate::format::name;
use crate::format::part::{self, Alias, FileEntry, Missing, Part, SealedFile};
use crate::options::{Options, Settings};
use crate::pipeline::write::WrittenChunks;
use crate::plan::reshard::GlobalTensors;
use crate::plan::write::{Grouped, ShardPlan, TensorSpec, WritePlan, plan};
use crate::report::{Run, Transport};
use crate::seal::{Block, Sha256, ShardPlace, ShardSealer, Tags};
use crate::sign::Hashes;

/// A state without its bytes, and the plan for writing those.
pub(super) struct PlannedWrite {
    tensors: Vec<TensorSpec>,
    pub(super) linked: Linked,
    holders: Mutex<Vec<Holder>>,
    aliases: Vec<Alias>,
    tree: Box<RawValue>,
    missing: Vec<Missing>,
    device_bytes: u64,
    /// Whether the attempt has a key.
    is_sealed: bool,
    pub(super) plan: Arc<WritePlan>,
    pub(super) settings: Settings,
    pub(super) file_system: Arc<dyn FileSystem>,
}

impl PlannedWrite {
    /// Plans the write of a state to the device behind `path`, with the list of its missing
    /// tensors; returns the sources with the plan.
    pub(super) fn new(
        mut state: SaveState,
        missing: Vec<Missing>,
        path: &Path,
        options: &Options,
    ) -> Result<(PlannedWrite, Vec<Region>)> {
        check_names(&state)?;
        state.linked.check()?;
        if options.is_sealed {
            check_sealable(&state, path)?;
        } else if let Some(file) = state.linked.files.iter().find(|file| file.sealer.is_some()) {
            return Err(Error::CannotSeal {
                path: file.path.clone(),
                detail: "it is sealed, and a clear checkpoint has no place for its key".to_owned(),
            });
        }
        let holders = std::mem::take(&mut state.linked.holders);
        let of_devices = state
            .sources
            .iter()
            .filter(|source| source.host().is_none());
        let device_bytes = of_devices.map(Region::len).sum();
        let bytes = state.sources.iter().map(Region::len);
        let settings = options.choose(path, bytes.sum());
        let mut plan = plan(
            &state.tensors,
            settings.shard_bytes,
            settings.extent_bytes as u64,
        )?;
        if options.is_sealed {
            plan = plan.sealed();
        }
        let planned = PlannedWrite {
            tensors: state.tensors,
            linked: state.linked,
            holders: Mutex::new(holders),
            aliases: state.aliases,
            tree: state.tree,
            missing,
            device_bytes,
            is_sealed: options.is_sealed,
            plan: Arc::new(plan),
            settings,
            file_system: Arc::clone(&options.file_system),
        };
        Ok((planned, state.sources))
    }

    /// The name of a tensor.
    pub(super) fn name(&self, tensor: usize) -> &str {
        &self.tensors[tensor].name
    }

    /// Returns the guards that keep linked files in place.
    pub(super) fn take_holders(&self) -> Vec<Holder> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *holders)
    }

    /// The functions that make its files.
    pub(super) fn shard_files(&self) -> ShardFiles<'_> {
        ShardFiles {
            file_system: self.file_system.as_ref(),
            direct: self.settings.direct,
        }
    }

    pub(super) fn create_shards(
        &self,
        attempt: &mut Attempt,
        rank: u32,
        run: &mut Run,
    ) -> Result<Vec<Arc<File>>> {
        let shard_files = self.shard_files();
        let mut files = Vec::with_capacity(self.plan.shards.len());
        for (index, shard) in self.plan.shards.iter().enumerate() {
            let file = shard_files.create(attempt, &name::shard_file(rank, index, attempt.id()))?;
            shard_files.reserve(&file, shard.bytes, run)?;
            files.push(file);
        }
        Ok(files)
    }

    /// The sealers of the shards, with the salt of their part; none of a clear attempt.
    ///
    /// # Panics
    /// If the plan and the attempt differ in whether they are sealed.
    pub(super) fn sealers(&self, attempt: &Attempt, rank: u32, salt: &Block) -> Vec<ShardSealer> {
        let sealing = attempt.sealing();
        assert_eq!(
            self.is_sealed,
            sealing.is_some(),
            "a sealed save is planned as one"
        );
        let Some(sealing) = sealing else {
            return Vec::new();
        };
        let shards = (0..).zip(&self.plan.shards);
        let sealer = |(number, shard): (u32, &ShardPlan)| {
            let place = ShardPlace {
                id: attempt.id(),
                rank,
                number,
                file_bytes: shard.bytes,
                header_bytes: shard.header.len() as u64,
                chunk_bytes: CHUNK_BYTES,
            };
            ShardSealer::new(sealing, salt, &place)
        };
        shards.map(sealer).collect()
    }

    /// The names of linked files in a checkpoint, numbered after the other shards.
    pub(super) fn linked_names(&self, rank: u32, id: &str) -> Vec<String> {
        let first = self.plan.shards.len();
        let numbers = first..first + self.linked.files.len();
        numbers
            .map(|number| name::shard_file(rank, number, id))
            .collect()
    }

    /// Truncates the shards to size and makes them durable.
    pub(super) fn finish_shards(&self, files: &[Arc<File>]) -> Result<()> {
        let mut each = files.iter().zip(&self.plan.shards);
        each.try_for_each(|(file, shard)| self.shard_files().finish(file, shard.bytes))
    }

    /// Writes the part, with `tree` instead of the state's own if given.
    pub(super) fn write_part(
        &self,
        attempt: &mut Attempt,
        rank: u32,
        shards: Vec<WrittenShard>,
        salt: Option<Block>,
        tree: Option<Box<RawValue>>,
    ) -> Result<PartEntry> {
        let mut part = self.part(shards, rank, attempt.id(), tree);
        if let (Some(sealing), Some(salt)) = (attempt.sealing(), &salt) {
            for (number, file) in (self.plan.shards.len()..).zip(&self.linked.files) {
                let sealed = file.sealed(sealing, salt, attempt.id(), rank, number as u32);
                part.files[number].sealed = sealed;
            }
        }
        put_part(attempt, part, salt)
    }

    fn part(
        &self,
        shards: Vec<WrittenShard>,
        rank: u32,
        id: &str,
        tree: Option<Box<RawValue>>,
    ) -> Part {
        let written = |(index, shard): (usize, WrittenShard)| {
            let planned = &self.plan.shards[index];
            let WrittenChunks {
                digests,
                tags,
                hashes,
            } = shard.chunks;
            FileEntry {
                name: name::shard_file(rank, index, id),
                bytes: planned.bytes,
                digest: Digest::of_chunks(&digests, planned.bytes),
                chunk_bytes: CHUNK_BYTES,
                chunks: digests,
                sealed: shard.commitment.map(|commitment| SealedFile {
                    header_bytes: planned.header.len() as u64,
                    commitment,
                    tags: Tags(tags),
                    blocks: None,
                    key: None,
                }),
                blake3: self.settings.is_hashed.then_some(Hashes(hashes)),
            }
        };
        let mut files: Vec<_> = shards.into_iter().enumerate().map(written).collect();
        let mut tensors = self.plan.entries(&self.tensors);
        tensors.extend(self.linked.entries(files.len()));
        let names = self.linked_names(rank, id).into_iter();
        files.extend(
            names
                .zip(&self.linked.files)
                .map(|(name, file)| file.entry(name)),
        );
        Part {
            format: part::FORMAT.to_owned(),
            version: FORMAT_VERSION,
            id: id.to_owned(),
            rank,
            files,
            tensors,
            aliases: self.aliases.clone(),
            tree: tree.unwrap_or_else(|| self.tree.clone()),
            missing: self.missing.clone(),
            sealed: None,
        }
    }

    /// Builds the result of a write whose vote is cast.
    pub(super) fn written(
        &self,
        part: PartEntry,
        run: Run,
        links: &Links,
        phases: Vec<(&'static str, f64)>,
    ) -> Written {
        let has_written = !self.plan.shards.is_empty() || links.copied_bytes > 0;
        let is_direct = run.is_direct && has_written;
        let headers = self.plan.shards.iter().map(|shard| shard.header.len());
        let tensor_bytes = self.plan.bytes() - headers.sum::<usize>() as u64;
        Written {
            bytes: self.plan.bytes() + links.copied_bytes + part.bytes,
            part,
            tensor_bytes,
            zero_copy_bytes: run.zero_copy_bytes,
            sealed_bytes: if self.is_sealed { tensor_bytes } else { 0 },
            linked_bytes: links.linked_bytes,
            device_bytes: self.device_bytes,
            tensors: self.tensors.len() + self.linked.tensors.len(),
            files: self.plan.shards.len() + self.linked.files.len() + 1,
            transport: Transport::new(&self.settings, run, is_direct),
            phases,
        }
    }
}

/// Checks a part, seals it if the attempt has a key, and writes it with its shards' names.
pub(crate) fn put_part(
    attempt: &mut Attempt,
    mut part: Part,
    salt: Option<Block>,
) -> Result<PartEntry> {
    part.check().map_err(unreadable)?;
    GlobalTensors::new(&part.tensors).map_err(|conflict| unreadable(conflict.to_string()))?;
    if let (Some(sealing), Some(salt)) = (attempt.sealing(), salt) {
        part.seal(sealing, salt);
    }
    let is_hashed = part.files.iter().any(|file| file.blake3.is_some());
    let mut text = serde_json::to_vec(&part).expect("a part always serialises");
    text.push(b'\n');
    attempt.write_part(part.rank, &text)?;
    Ok(PartEntry {
        rank: part.rank,
        file: name::part_file(part.rank, attempt.id()),
        bytes: text.len() as u64,
        digest: Digest::of(&text),
        // A digest can be forged; the rank that signs reads the parts of all.
        sha256: (part.sealed.is_some() || is_hashed).then(|| Sha256::of(&text)),
    })
}

/// A shard whose bytes are written.
pub(super) struct WrittenShard {
    pub(super) chunks: WrittenChunks,
    /// Binds a sealed shard to its key.
    pub(super) commitment: Option<Block>,
}

impl WrittenShard {
    /// The written shards, with their sealers if they are sealed.
    pub(super) fn all(chunks: Vec<WrittenChunks>, sealers: &[ShardSealer]) -> Vec<WrittenShard> {
        let commitments = sealers.iter().map(|sealer| Some(sealer.commitment()));
        let commitments = commitments.chain(std::iter::repeat(None));
        chunks
            .into_iter()
            .zip(commitments)
            .map(|(chunks, commitment)| WrittenShard { chunks, commitment })
            .collect()
    }
}

/// Refuses what would stay clear in a sealed checkpoint.
fn check_sealable(state: &SaveState, path: &Path) -> Result<()> {
    let is_clear = |file: &LinkedFile| file.sealer.is_none();
    let detail = if state.linked.files.iter().any(is_clear) {
        "tensors in files are linked as they are: a sealed save cannot hold them"
    } else if state.tensors.iter().any(|tensor| tensor.group.is_some()) {
        "groups are for readers of models, which cannot open a sealed checkpoint"
    } else {
        return Ok(());
    };
    Err(Error::CannotSeal {
        path: path.to_owned(),
        detail: detail.to_owned(),
    })
}

/// Checks names: users select tensors by name later, so each must be unambiguous.
fn check_names(state: &SaveState) -> Result<()> {
    assert_eq!(
        state.tensors.len(),
        state.sources.len(),
        "every tensor has its bytes"
    );
    let linked = state.linked.tensors.iter().map(|tensor| &tensor.spec);
    let tensors = state.tensors.iter().chain(linked);
    let tensors = tensors.map(|tensor| &tensor.name);
    let mut seen = HashSet::with_capacity(state.tensors.len() + state.aliases.len());
    for name in tensors.chain(state.aliases.iter().map(|alias| &alias.name)) {
        let detail = match name.as_str() {
            "" => "a tensor needs a name",
            "__metadata__" => "the name is reserved in safetensors",
            _ if !seen.insert(name) => "the name is there twice",
            _ => continue,
        };
        return Err(Error::Unsupported {
            key: name.clone(),
            detail: detail.to_owned(),
        });
    }
    let mut grouped = HashSet::new();
    for tensor in &state.tensors {
        let Some(of @ Grouped { group, name }) = &tensor.group else {
            continue;
        };
        let detail = match name.as_str() {
            "__metadata__" => format!("{name} is reserved in safetensors"),
            _ if !grouped.insert(of) => {
                format!("the group {group:?} has two tensors called {name:?}")
            }
            _ => continue,
        };
        return Err(Error::Unsupported {
            key: tensor.name.clone(),
            detail,
        });
    }
    Ok(())
}

/// Returns the error for a state that a reader would refuse: the caller passed an invalid state.
pub(super) fn unreadable(detail: String) -> Error {
    Error::Unsupported {
        key: "the state".to_owned(),
        detail,
    }
}
