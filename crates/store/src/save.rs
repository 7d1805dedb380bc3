//! Saving a checkpoint: plan, write, sync, commit.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::HostRegion;
use penstock_io::file::File;
use serde_json::value::RawValue;

use crate::FORMAT_VERSION;
use crate::commit::Attempt;
use crate::digest::{CHUNK_BYTES, Digest};
use crate::error::{Error, Result};
use crate::manifest::{self, Manifest, PartEntry};
use crate::name;
use crate::options::{Options, Settings};
use crate::part::{self, Alias, FileEntry, Part};
use crate::pipeline::{self, Run};
use crate::plan::write::{TensorSpec, WritePlan, plan};
use crate::progress::Progress;
use crate::report::{SaveReport, Transport};
use crate::shard::PAGE_BYTES;

/// What is to be saved.
pub struct State {
    /// The tensors, by name, type and shape.
    pub tensors: Vec<TensorSpec>,
    /// Their bytes, in the same order.
    pub sources: Vec<HostRegion>,
    /// Further names of tensors, and views into them.
    pub aliases: Vec<Alias>,
    /// Structure and plain leaves, as typed JSON.
    pub tree: Box<RawValue>,
}

/// Where and as what it is to be saved.
pub struct Target {
    /// The checkpoint directory; created with its parents.
    pub path: PathBuf,
    /// The training step, recorded in the manifest.
    pub step: Option<u64>,
    /// The caller's own JSON object, recorded in the manifest.
    pub metadata: Box<RawValue>,
    /// Whether a complete checkpoint at the path is replaced.
    pub overwrite: bool,
}

/// The only rank of a save from one process.
const RANK: u32 = 0;

/// Measures the phases of a call.
struct Stopwatch {
    begun: Instant,
    last: Instant,
    phases: Vec<(&'static str, f64)>,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        let now = Instant::now();
        Stopwatch {
            begun: now,
            last: now,
            phases: Vec::new(),
        }
    }

    fn lap(&mut self, phase: &'static str) {
        let now = Instant::now();
        self.phases.push((phase, (now - self.last).as_secs_f64()));
        self.last = now;
    }
}

/// Saves a checkpoint; when it returns, the checkpoint is complete and on stable storage.
///
/// # Errors
/// [`Error::Exists`] where a complete checkpoint is in the way, [`Error::Unsupported`] for a
/// tensor without a place in the format, [`Error::Interrupted`] once the caller cancels, and the
/// system's errors. What was stored before is as it was, and the files of the attempt are removed.
/// One error leaves more: when the very last sync of the directory fails, the checkpoint is in
/// place but may not survive a crash, so it is not acknowledged.
pub fn save(
    state: &State,
    target: &Target,
    options: &Options,
    progress: &Progress,
) -> Result<SaveReport> {
    let mut watch = Stopwatch::start();
    check_names(state)?;
    let bytes = state.sources.iter().map(HostRegion::len);
    let settings = options.settle(&target.path, bytes.sum());
    let plan = plan(
        &state.tensors,
        settings.shard_bytes,
        settings.extent_bytes as u64,
    )?;
    progress.expect(plan.bytes());
    watch.lap("plan");

    let mut run = Run::default();
    let mut attempt = Attempt::begin(&target.path, target.overwrite, progress)?;
    let files = create_shards(&mut attempt, &plan, &settings, &mut run)?;
    let chunks =
        pipeline::write::write(&plan, &state.sources, &files, &settings, progress, &mut run)?;
    watch.lap("write");

    for (file, shard) in files.iter().zip(&plan.shards) {
        // A direct write ends on a page; the file ends where its data does.
        if file.is_direct() && !shard.bytes.is_multiple_of(PAGE_BYTES) {
            file.truncate(shard.bytes)?;
        }
        file.sync_data()?;
    }
    progress.check()?;
    watch.lap("sync");

    let direct_io = files.iter().all(|file| file.is_direct());
    let mut referenced: HashSet<String> = files.iter().map(|file| file_name(file.path())).collect();
    // Closed before the commit, so that no reader of a complete checkpoint finds it open.
    drop(files);
    let part = encode_part(state, &plan, chunks, attempt.id())?;
    attempt.write_part(RANK, &part)?;
    let manifest = manifest_of(target, attempt.id(), &part);
    manifest.check().map_err(unreadable)?;
    let manifest = manifest.seal();
    attempt.publish(&manifest, target.overwrite)?;
    let id = attempt.id().to_owned();
    referenced.insert(name::part(RANK, &id));
    // The checkpoint is acknowledged; failing to tidy up must not make it look otherwise.
    if let Err(error) = attempt.remove_replaced(&referenced) {
        run.note(format!(
            "files of earlier attempts were left behind: {error}"
        ));
    }
    watch.lap("commit");

    let transport = Transport::new(&settings, run, direct_io && !plan.shards.is_empty());
    Ok(SaveReport {
        path: target.path.clone(),
        step: target.step,
        id,
        bytes: plan.bytes() + (part.len() + manifest.len()) as u64,
        tensor_bytes: plan
            .shards
            .iter()
            .map(|shard| shard.bytes - shard.header.len() as u64)
            .sum(),
        tensors: state.tensors.len(),
        files: plan.shards.len() + 2,
        seconds: watch.begun.elapsed().as_secs_f64(),
        phases: watch.phases,
        transport,
    })
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

fn create_shards(
    attempt: &mut Attempt,
    plan: &WritePlan,
    settings: &Settings,
    run: &mut Run,
) -> Result<Vec<Arc<File>>> {
    let mut files = Vec::with_capacity(plan.shards.len());
    for (index, shard) in plan.shards.iter().enumerate() {
        let name = name::shard(RANK, index, attempt.id());
        let file = attempt.create(&name, settings.direct)?;
        if let Some(reason) = file.fallback() {
            run.note(reason.to_owned());
        }
        let length = if file.is_direct() {
            shard.bytes.next_multiple_of(PAGE_BYTES)
        } else {
            shard.bytes
        };
        if let Some(reason) = file.allocate(length)? {
            run.note(reason);
        }
        files.push(file);
    }
    Ok(files)
}

/// What a reader would refuse is not committed: its caller made an impossible state.
fn unreadable(detail: String) -> Error {
    Error::Unsupported {
        key: "the state".to_owned(),
        detail,
    }
}

fn encode_part(
    state: &State,
    plan: &WritePlan,
    chunks: Vec<Vec<Digest>>,
    id: &str,
) -> Result<Vec<u8>> {
    let file = |(index, chunks): (usize, Vec<Digest>)| {
        let bytes = plan.shards[index].bytes;
        FileEntry {
            name: name::shard(RANK, index, id),
            bytes,
            digest: Digest::of_chunks(&chunks, bytes),
            chunk_bytes: CHUNK_BYTES,
            chunks,
        }
    };
    let part = Part {
        format: part::FORMAT.to_owned(),
        version: FORMAT_VERSION,
        id: id.to_owned(),
        rank: RANK,
        files: chunks.into_iter().enumerate().map(file).collect(),
        tensors: plan.entries(&state.tensors),
        aliases: state.aliases.clone(),
        tree: state.tree.clone(),
    };
    part.check().map_err(unreadable)?;
    let mut text = serde_json::to_vec(&part).expect("a part always serialises");
    text.push(b'\n');
    Ok(text)
}

fn manifest_of(target: &Target, id: &str, part: &[u8]) -> Manifest {
    Manifest {
        format: manifest::FORMAT.to_owned(),
        version: FORMAT_VERSION,
        id: id.to_owned(),
        step: target.step,
        created: jiff::Timestamp::now()
            .round(jiff::Unit::Second)
            .map_or_else(
                |_| jiff::Timestamp::now().to_string(),
                |second| second.to_string(),
            ),
        writer: concat!("penstock ", env!("CARGO_PKG_VERSION")).to_owned(),
        world_size: 1,
        parts: vec![PartEntry {
            rank: RANK,
            file: name::part(RANK, id),
            bytes: part.len() as u64,
            digest: Digest::of(part),
        }],
        metadata: target.metadata.clone(),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}
