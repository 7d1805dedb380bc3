//! Opening a complete checkpoint and loading from it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use penstock_io::buffer::{HostRegionMut, Memory};
use penstock_io::file::{Direct, File};
use serde_json::value::RawValue;

use crate::description::{check_size, read_manifest, read_part};
use crate::digest::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::manifest::Manifest;
use crate::name::MANIFEST;
use crate::options::{Options, Settings};
use crate::part::{FileEntry, Part, TensorEntry};
use crate::pipeline::Run;
use crate::pipeline::damage::Damage;
use crate::pipeline::read::{OnDamage, Outcome, Source, read};
use crate::plan::read::{FileFacts, Placement, ReadPlan, Request, plan};
use crate::progress::Progress;
use crate::report::{LoadReport, Transport};

/// How often a checkpoint may be replaced while it is opened.
const REPLACED_MAX: usize = 16;

/// A complete checkpoint, its manifest and part read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    part: Part,
    manifest_bytes: u64,
    lease: Mutex<Option<Lease>>,
}

/// Tensors in memory.
#[derive(Debug)]
pub struct Loaded {
    /// Fresh memory that holds them.
    pub segments: Vec<Memory>,
    /// Where each one is, in the order asked for.
    pub placements: Vec<Placement>,
    /// How it went.
    pub report: LoadReport,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`: reads its manifest and part, and checks that its files are
    /// there with exact sizes. No tensor data is read.
    ///
    /// As long as it is open, neither a deletion nor an overwrite nor a sweep removes its files,
    /// where the file system has locks.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Incomplete`], [`Error::Corrupt`], [`Error::Version`].
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let lease = Lease::share_to_read(path);
        let mut opened = Checkpoint::look(path)?;
        opened.lease = Mutex::new(lease);
        Ok(opened)
    }

    /// Lets its files be removed. Loading is still possible, as long as they are there.
    pub fn release(&self) {
        *self.lease.lock().expect("nothing panics with the lock") = None;
    }

    /// Opens it without keeping anybody from removing its files.
    pub(crate) fn look(path: &Path) -> Result<Checkpoint> {
        for _ in 0..REPLACED_MAX {
            let (manifest, manifest_bytes) = read_manifest(path)?;
            let id = manifest.id.clone();
            match Checkpoint::open_parts(path, manifest, manifest_bytes) {
                // Replaced between two of the reads: the new one is there and whole.
                Err(error) if is_replaced(path, &id, &error) => {}
                result => return result,
            }
        }
        let path = path.to_owned();
        Err(Error::Replaced { path })
    }

    fn open_parts(path: &Path, manifest: Manifest, manifest_bytes: u64) -> Result<Checkpoint> {
        let parts = manifest.parts.iter();
        let parts: Result<Vec<Part>> = parts
            .map(|entry| read_part(path, &manifest, entry))
            .collect();
        let part = Part::merge(parts?).expect("a manifest lists a part");
        for file in &part.files {
            check_size(path, file)?;
        }
        Ok(Checkpoint {
            path: path.to_owned(),
            manifest,
            part,
            manifest_bytes,
            lease: Mutex::default(),
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the commit recorded.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What the ranks recorded, all in one: files, tensors and aliases of each, in their order. Its
    /// tree is that of the first; see [`Checkpoint::tree`].
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// Structure and plain leaves, as typed JSON.
    ///
    /// # Errors
    /// [`Error::Ranks`] for a checkpoint of several ranks: each has a tree of its own, and putting
    /// them together is for a later version.
    pub fn tree(&self) -> Result<&RawValue> {
        match self.manifest.world_size {
            1 => Ok(&self.part.tree),
            world_size => Err(Error::Ranks {
                path: self.path.clone(),
                world_size,
            }),
        }
    }

    /// Names and sizes of all files, the manifest first.
    pub fn files(&self) -> Vec<(&str, u64)> {
        let parts = self
            .manifest
            .parts
            .iter()
            .map(|part| (part.file.as_str(), part.bytes));
        let shards = self
            .part
            .files
            .iter()
            .map(|file| (file.name.as_str(), file.bytes));
        std::iter::once((MANIFEST, self.manifest_bytes))
            .chain(parts)
            .chain(shards)
            .collect()
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.part.tensors.iter().map(TensorEntry::nbytes).sum()
    }

    /// Loads the tensors with the indices in `selection`, or all of them and with them every byte
    /// of every file. Those with an entry in `targets` fill that memory, the others fresh memory.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for bytes that do not match their digest: no fresh memory is handed out
    /// then, but targets may have been filled in part. [`Error::Mismatch`] for a target of another
    /// size, before anything is read. [`Error::Replaced`] where an overwrite was faster.
    /// [`Error::Interrupted`], and the system's errors.
    pub fn load(
        &self,
        selection: Option<&[usize]>,
        targets: HashMap<usize, HostRegionMut>,
        options: &Options,
        progress: &Progress,
    ) -> Result<Loaded> {
        let begun = Instant::now();
        let every: Vec<usize>;
        let indices = match selection {
            Some(indices) => indices,
            None => {
                every = (0..self.part.tensors.len()).collect();
                &every
            }
        };
        let targets = self.arrange_targets(indices, targets)?;
        let settings = options.settle(&self.path, self.bytes_to_read(indices));
        let used = self.used_files(indices, selection.is_none());
        let mut run = Run::default();
        let opened = self.open_files(&used, settings.direct, &mut run);
        let sources = opened.map_err(|error| self.replaced_or(error))?;
        let plan = self.plan_read(
            indices,
            &targets,
            &used,
            &sources,
            selection.is_none(),
            &settings,
        );
        progress.expect(
            plan.items
                .iter()
                .map(|item| item.range.end - item.range.start)
                .sum(),
        );
        let placements = plan.placements.clone();

        let stop = OnDamage::Stop;
        let outcome = read(plan, targets, &sources, &settings, stop, progress, &mut run);
        let outcome = outcome.map_err(|error| self.replaced_or(error))?;
        if let Some(damage) = outcome.damage.first() {
            return Err(self.corrupt(used[damage.file], damage, indices));
        }
        let report = self.report(indices, &sources, &settings, run, &outcome, begun);
        Ok(Loaded {
            segments: outcome.segments,
            placements,
            report,
        })
    }

    /// About how much is read for some tensors: each for itself in whole chunks.
    fn bytes_to_read(&self, indices: &[usize]) -> u64 {
        let chunks = |&index: &usize| {
            self.part.tensors[index]
                .nbytes()
                .next_multiple_of(CHUNK_BYTES)
        };
        let all: u64 = self.part.files.iter().map(|file| file.bytes).sum();
        all.min(indices.iter().map(chunks).fold(0, u64::saturating_add))
    }

    fn bytes_of(&self, indices: &[usize]) -> u64 {
        let bytes = |&index: &usize| self.part.tensors[index].nbytes();
        indices.iter().map(bytes).sum()
    }

    fn report(
        &self,
        indices: &[usize],
        sources: &[Source<'_>],
        settings: &Settings,
        run: Run,
        outcome: &Outcome,
        begun: Instant,
    ) -> LoadReport {
        let direct_io = !sources.is_empty() && sources.iter().all(|s| s.file.is_direct());
        LoadReport {
            bytes: self.bytes_of(indices),
            bytes_read: outcome.bytes_read,
            bounced_bytes: outcome.bounced_bytes,
            tensors: indices.len(),
            files: sources.len(),
            seconds: begun.elapsed().as_secs_f64(),
            verified: settings.verify,
            transport: Transport::new(settings, run, direct_io),
        }
    }

    /// The targets in the order of `indices`, each checked against its tensor.
    fn arrange_targets(
        &self,
        indices: &[usize],
        mut targets: HashMap<usize, HostRegionMut>,
    ) -> Result<Vec<Option<HostRegionMut>>> {
        let mismatch = |key: String, detail: String| Error::Mismatch { key, detail };
        let mut seen = vec![false; self.part.tensors.len()];
        let mut arranged = Vec::with_capacity(indices.len());
        for &index in indices {
            let Some(tensor) = self.part.tensors.get(index) else {
                return Err(mismatch(
                    format!("tensor {index}"),
                    "there is no such tensor".into(),
                ));
            };
            if std::mem::replace(&mut seen[index], true) {
                return Err(mismatch(
                    tensor.name.clone(),
                    "it was asked for twice".into(),
                ));
            }
            let target = targets.remove(&index);
            if let Some(target) = target
                .as_ref()
                .filter(|t| t.len() as u64 != tensor.nbytes())
            {
                let (stored, given) = (tensor.nbytes(), target.len());
                let detail = format!("{stored} bytes are stored, the target takes {given}");
                return Err(mismatch(tensor.name.clone(), detail));
            }
            arranged.push(target);
        }
        Ok(arranged)
    }

    /// Indices of the files that a load reads from, ascending.
    fn used_files(&self, indices: &[usize], all: bool) -> Vec<usize> {
        let mut is_used = vec![all; self.part.files.len()];
        for &index in indices {
            let tensor = &self.part.tensors[index];
            is_used[tensor.file] |= tensor.nbytes() > 0;
        }
        (0..is_used.len()).filter(|&file| is_used[file]).collect()
    }

    fn open_files(&self, used: &[usize], direct: Direct, run: &mut Run) -> Result<Vec<Source<'_>>> {
        let open = |&index: &usize| open_shard(&self.path, &self.part.files[index], direct, run);
        used.iter().map(open).collect()
    }

    fn plan_read(
        &self,
        indices: &[usize],
        targets: &[Option<HostRegionMut>],
        used: &[usize],
        sources: &[Source<'_>],
        cover_all: bool,
        settings: &Settings,
    ) -> ReadPlan {
        let requests: Vec<Request> = indices
            .iter()
            .zip(targets)
            .map(|(&index, target)| {
                let tensor = &self.part.tensors[index];
                Request {
                    // A tensor without bytes may lie in a file that is not used; its place is
                    // never looked at.
                    file: used.binary_search(&tensor.file).unwrap_or_default(),
                    range: tensor.range.0..tensor.range.1,
                    target_address: target.as_ref().map(HostRegionMut::address),
                }
            })
            .collect();
        let files: Vec<FileFacts> = sources.iter().map(Source::facts).collect();
        plan(&files, &requests, cover_all, settings.extent_bytes as u64)
    }

    /// A file that is missing because another checkpoint is in place now is no damage.
    fn replaced_or(&self, error: Error) -> Error {
        if is_replaced(&self.path, &self.manifest.id, &error) {
            let path = self.path.clone();
            return Error::Replaced { path };
        }
        error
    }

    fn corrupt(&self, file: usize, damage: &Damage, indices: &[usize]) -> Error {
        // Of several tensors that may be hit, one that was asked for says most.
        let asked = indices.iter().map(|&index| &self.part.tensors[index]);
        let touched = touched_tensor(asked, file, damage);
        let touched = touched.or_else(|| touched_tensor(&self.part.tensors, file, damage));
        Error::Corrupt {
            path: self.path.clone(),
            file: Some(self.part.files[file].name.clone()),
            offset: Some(damage.offset()),
            tensor: touched.map(str::to_owned),
            detail: damage.detail(),
        }
    }
}

/// Whether an error about files of the checkpoint `id` only says that it is gone, or that another
/// one is in its place.
pub(crate) fn is_replaced(path: &Path, id: &str, error: &Error) -> bool {
    let is_about_files = matches!(
        error,
        Error::Corrupt { .. } | Error::Storage { .. } | Error::Io(_)
    );
    is_about_files
        && match read_manifest(path) {
            Ok((manifest, _)) => manifest.id != id,
            Err(error) => matches!(error, Error::NotFound { .. } | Error::Incomplete { .. }),
        }
}

/// The first of some tensors that damage touches.
pub(crate) fn touched_tensor<'a>(
    tensors: impl IntoIterator<Item = &'a TensorEntry>,
    file: usize,
    damage: &Damage,
) -> Option<&'a str> {
    let touches = |tensor: &&TensorEntry| tensor.file == file && damage.touches(tensor.range);
    let touched = tensors.into_iter().filter(touches);
    let first = touched.min_by_key(|tensor| tensor.range.0);
    first.map(|tensor| tensor.name.as_str())
}

/// Opens a shard for reading and checks its size.
pub(crate) fn open_shard<'a>(
    path: &Path,
    entry: &'a FileEntry,
    direct: Direct,
    run: &mut Run,
) -> Result<Source<'a>> {
    check_size(path, entry)?;
    let file = File::open(&path.join(&entry.name), direct)?;
    if let Some(reason) = file.fallback() {
        run.note(reason.to_owned());
    }
    Ok(Source {
        file: Arc::new(file),
        bytes: entry.bytes,
        chunks: &entry.chunks,
    })
}
