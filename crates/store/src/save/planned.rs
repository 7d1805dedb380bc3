//! A state with every decision made and nothing written.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use penstock_io::buffer::HostRegion;
use penstock_io::file::File;
use penstock_io::file_system::{Change, FileSystem};
use serde_json::value::RawValue;

use super::state::State;
use super::written::Written;
use crate::FORMAT_VERSION;
use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::manifest::PartEntry;
use crate::format::name;
use crate::format::part::{self, Alias, FileEntry, Missing, Part};
use crate::format::shard::PAGE_BYTES;
use crate::options::{Options, Settings};
use crate::plan::reshard::GlobalTensors;
use crate::plan::write::{TensorSpec, WritePlan, plan};
use crate::report::{FallbackKind, Run, Transport};

/// All of a state but its bytes, with the plan for those.
pub(super) struct PlannedWrite {
    tensors: Vec<TensorSpec>,
    aliases: Vec<Alias>,
    tree: Box<RawValue>,
    missing: Vec<Missing>,
    pub(super) plan: Arc<WritePlan>,
    pub(super) settings: Settings,
    pub(super) file_system: Arc<dyn FileSystem>,
}

impl PlannedWrite {
    /// Plans a state that lacks something, or nothing, for the device behind `path`; its sources come
    /// back beside the plan.
    pub(super) fn new(
        state: State,
        missing: Vec<Missing>,
        path: &Path,
        options: &Options,
    ) -> Result<(PlannedWrite, Vec<HostRegion>)> {
        check_names(&state)?;
        let bytes = state.sources.iter().map(HostRegion::len);
        let settings = options.choose(path, bytes.sum());
        let plan = plan(
            &state.tensors,
            settings.shard_bytes,
            settings.extent_bytes as u64,
        )?;
        let planned = PlannedWrite {
            tensors: state.tensors,
            aliases: state.aliases,
            tree: state.tree,
            missing,
            plan: Arc::new(plan),
            settings,
            file_system: Arc::clone(&options.file_system),
        };
        Ok((planned, state.sources))
    }

    /// What a tensor is called.
    pub(super) fn name(&self, tensor: usize) -> &str {
        &self.tensors[tensor].name
    }

    pub(super) fn create_shards(
        &self,
        attempt: &mut Attempt,
        rank: u32,
        run: &mut Run,
    ) -> Result<Vec<Arc<File>>> {
        let mut files = Vec::with_capacity(self.plan.shards.len());
        for (index, shard) in self.plan.shards.iter().enumerate() {
            let name = name::shard(rank, index, attempt.id());
            let file = attempt.create(&name, self.settings.direct)?;
            if let Some(reason) = file.fallback() {
                run.note(FallbackKind::Buffered, reason.to_owned());
            }
            let length = if file.is_direct() {
                shard.bytes.next_multiple_of(PAGE_BYTES)
            } else {
                shard.bytes
            };
            match self.file_system.change(Change::Allocate(&file, length)) {
                Err(error) if error.kind() == Some(io::ErrorKind::Unsupported) => {
                    let reason = "the file system cannot reserve space".to_owned();
                    run.note(FallbackKind::Unreserved, reason);
                }
                result => result?,
            }
            files.push(file);
        }
        Ok(files)
    }

    /// Cuts the shards to size and makes them durable.
    pub(super) fn finish_shards(&self, files: &[Arc<File>]) -> Result<()> {
        for (file, shard) in files.iter().zip(&self.plan.shards) {
            // A direct write ends on a page; the file ends where its data does.
            if file.is_direct() && !shard.bytes.is_multiple_of(PAGE_BYTES) {
                self.file_system
                    .change(Change::Truncate(file, shard.bytes))?;
            }
            self.file_system.change(Change::SyncData(file))?;
        }
        Ok(())
    }

    /// Writes the part, with `tree` instead of the state's own if there is one.
    pub(super) fn write_part(
        &self,
        attempt: &mut Attempt,
        rank: u32,
        chunks: Vec<Vec<Digest>>,
        tree: Option<Box<RawValue>>,
    ) -> Result<PartEntry> {
        let part = self.part(chunks, rank, attempt.id(), tree);
        part.check().map_err(unreadable)?;
        GlobalTensors::new(&part.tensors).map_err(|conflict| unreadable(conflict.to_string()))?;
        let mut text = serde_json::to_vec(&part).expect("a part always serialises");
        text.push(b'\n');
        attempt.write_part(rank, &text)?;
        Ok(PartEntry {
            rank,
            file: name::part_file(rank, attempt.id()),
            bytes: text.len() as u64,
            digest: Digest::of(&text),
        })
    }

    fn part(
        &self,
        chunks: Vec<Vec<Digest>>,
        rank: u32,
        id: &str,
        tree: Option<Box<RawValue>>,
    ) -> Part {
        let file = |(index, chunks): (usize, Vec<Digest>)| {
            let bytes = self.plan.shards[index].bytes;
            FileEntry {
                name: name::shard(rank, index, id),
                bytes,
                digest: Digest::of_chunks(&chunks, bytes),
                chunk_bytes: CHUNK_BYTES,
                chunks,
            }
        };
        Part {
            format: part::FORMAT.to_owned(),
            version: FORMAT_VERSION,
            id: id.to_owned(),
            rank,
            files: chunks.into_iter().enumerate().map(file).collect(),
            tensors: self.plan.entries(&self.tensors),
            aliases: self.aliases.clone(),
            tree: tree.unwrap_or_else(|| self.tree.clone()),
            missing: self.missing.clone(),
        }
    }

    /// What there is to say once the vote is cast.
    pub(super) fn written(
        &self,
        part: PartEntry,
        run: Run,
        phases: Vec<(&'static str, f64)>,
    ) -> Written {
        let is_direct = run.is_direct && !self.plan.shards.is_empty();
        let headers = self.plan.shards.iter().map(|shard| shard.header.len());
        Written {
            bytes: self.plan.bytes() + part.bytes,
            part,
            tensor_bytes: self.plan.bytes() - headers.sum::<usize>() as u64,
            tensors: self.tensors.len(),
            files: self.plan.shards.len() + 1,
            transport: Transport::new(&self.settings, run, is_direct),
            phases,
        }
    }
}

/// Names are what users ask for later: each has to stand for one thing.
fn check_names(state: &State) -> Result<()> {
    assert_eq!(
        state.tensors.len(),
        state.sources.len(),
        "every tensor has its bytes"
    );
    let tensors = state.tensors.iter().map(|tensor| &tensor.name);
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
    Ok(())
}

/// What a reader would refuse is not committed: its caller made an impossible state.
pub(super) fn unreadable(detail: String) -> Error {
    Error::Unsupported {
        key: "the state".to_owned(),
        detail,
    }
}
