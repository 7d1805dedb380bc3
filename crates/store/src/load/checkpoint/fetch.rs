//! Loading from an open checkpoint.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_io::buffer::{Memory, RegionMut};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::Files;
use penstock_io::trace;

use super::{Checkpoint, is_replaced};
use crate::error::{Error, Result};
use crate::format::description::check_size;
use crate::format::digest::CHUNK_BYTES;
use crate::format::part::{FileEntry, FileOpener, TensorEntry};
use crate::options::Options;
use crate::pipeline::damage::Damage;
use crate::pipeline::read::{Hashing, OnDamage, Source, read};
use crate::pipeline::target::Target;
use crate::plan::read::{FileFacts, Goal, Item, Placement, Request, plan};
use crate::progress::Progress;
use crate::report::{FallbackKind, LoadReport, Run, Transport};

/// Tensors in memory.
#[derive(Debug)]
pub struct Loaded {
    /// New memory that holds them.
    pub segments: Vec<Memory>,
    /// The position of each tensor, in the order of the request.
    pub placements: Vec<Placement>,
    /// How the load went.
    pub report: LoadReport,
}

/// Everything to read in one load.
pub(crate) struct Fetch {
    /// Requests by index of the part's files.
    pub(crate) requests: Vec<Request>,
    /// The memory of each request.
    pub(crate) targets: Vec<Target>,
    /// The entries that are read, for naming damaged tensors.
    pub(crate) entries: Vec<usize>,
    /// Bytes that the caller receives.
    pub(crate) bytes: u64,
    /// Tensors, or boxes of them, that the caller receives.
    pub(crate) tensors: usize,
    /// Whether every byte of every file is read.
    pub(crate) is_all: bool,
}

impl Checkpoint {
    /// Loads the tensors with the indices in `selection`; without a selection loads all tensors and
    /// reads every byte of every file. Tensors with an entry in `targets` fill that memory, the
    /// others new memory. Copies made by devices are complete when this returns.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for bytes that do not match their digest: no new memory is returned then,
    /// but targets may have been filled in part. [`Error::Mismatch`] for a target of another size,
    /// before anything is read. [`Error::Replaced`] if an overwrite removed the files.
    /// [`Error::Interrupted`], and system errors, including those of devices.
    pub fn load(
        &self,
        selection: Option<&[usize]>,
        targets: HashMap<usize, RegionMut>,
        options: &Options,
        progress: &Progress,
    ) -> Result<Loaded> {
        let every = || (0..self.part.tensors.len()).collect();
        let entries: Vec<usize> = selection.map_or_else(every, <[usize]>::to_vec);
        let targets = self.arrange_targets(&entries, targets)?;
        let request = |(&entry, target): (&usize, &Target)| {
            let entry = &self.part.tensors[entry];
            Request {
                file: entry.file,
                range: entry.range.0..entry.range.1,
                goal: match target {
                    Target::Fresh => Goal::Fresh,
                    Target::Plain(memory) => Goal::Plain(memory.address()),
                    Target::Scattered(_) => Goal::Scattered,
                },
            }
        };
        let requests = entries.iter().zip(&targets).map(request).collect();
        let bytes = |&entry: &usize| self.part.tensors[entry].nbytes();
        let fetch = Fetch {
            requests,
            targets,
            bytes: entries.iter().map(bytes).sum(),
            tensors: entries.len(),
            entries,
            is_all: selection.is_none(),
        };
        self.fetch(fetch, options, progress)
    }

    /// Reads and verifies the requested bytes.
    pub(crate) fn fetch(
        &self,
        fetch: Fetch,
        options: &Options,
        progress: &Progress,
    ) -> Result<Loaded> {
        let begun = Instant::now();
        let openers = self.openers()?;
        let span = trace::span("plan");
        let Fetch {
            mut requests,
            targets,
            entries,
            bytes,
            tensors,
            is_all,
        } = fetch;
        let mut settings = options.choose_to_read(&self.path, self.bytes_to_read(&requests));
        let used = self.used_files(&requests, is_all);
        let mut run = Run::default();
        let opened = self.open_files(&used, settings.direct, &mut run);
        let mut sources = opened.map_err(|error| self.replaced_or(error, &used))?;
        self.learn_hashes(&used, &sources, &settings, progress, &mut run)?;
        for (source, &file) in sources.iter_mut().zip(&used) {
            source.hashing = self.hashing(file);
        }
        if let Some(openers) = openers {
            for (source, &file) in sources.iter_mut().zip(&used) {
                source.opener = match &openers[file] {
                    FileOpener::Chunks(opener) => Some(opener),
                    FileOpener::Blocks(_) => return Err(self.read_by_blocks(file)),
                };
            }
        }
        for request in &mut requests {
            // The file of an empty tensor may not be in use; its position is never used.
            request.file = used.binary_search(&request.file).unwrap_or_default();
        }
        let files: Vec<FileFacts> = sources.iter().map(Source::facts).collect();
        let plan = plan(&files, &requests, is_all, settings.extent_bytes as u64);
        let item_bytes = |item: &Item| item.range.end - item.range.start;
        progress.expect(plan.items.iter().map(item_bytes).sum());
        let placements = plan.placements.clone();
        if let Some(device_streams) = targets.iter().find_map(Target::device_streams) {
            settings.pin(device_streams.device(), plan.items.len());
        }
        drop(span);

        let _span = trace::span("read");
        let stop = OnDamage::Stop;
        let outcome = read(plan, targets, &sources, &settings, stop, progress, &mut run);
        let outcome = outcome.map_err(|error| self.replaced_or(error, &used))?;
        if let Some(damage) = outcome.damage.first() {
            return Err(self.corrupt(used[damage.file], damage, &entries));
        }
        if let Some(reason) = settings.pool.unpinned() {
            run.note(FallbackKind::Unpinned, reason);
        }
        let direct_io = !sources.is_empty() && sources.iter().all(|s| s.file.is_direct());
        let report = LoadReport {
            bytes,
            bytes_read: outcome.bytes_read,
            bounced_bytes: outcome.bounced_bytes,
            device_bytes: outcome.device_bytes,
            opened_bytes: outcome.opened_bytes,
            tensors,
            files: sources.len(),
            seconds: begun.elapsed().as_secs_f64(),
            verified: settings.verify,
            transport: Transport::new(&settings, run, direct_io),
        };
        Ok(Loaded {
            segments: outcome.segments,
            placements,
            report,
        })
    }

    /// Estimates the bytes read for some requests, each rounded separately to whole chunks.
    fn bytes_to_read(&self, requests: &[Request]) -> u64 {
        let chunks = |request: &Request| {
            let bytes = request.range.end - request.range.start;
            bytes.next_multiple_of(CHUNK_BYTES)
        };
        let all: u64 = self.part.files.iter().map(|file| file.bytes).sum();
        all.min(requests.iter().map(chunks).fold(0, u64::saturating_add))
    }

    /// Arranges the targets in the order of `entries`, each checked against its tensor.
    fn arrange_targets(
        &self,
        entries: &[usize],
        mut targets: HashMap<usize, RegionMut>,
    ) -> Result<Vec<Target>> {
        let mismatch = |key: String, detail: String| Error::Mismatch { key, detail };
        let mut seen = vec![false; self.part.tensors.len()];
        let mut arranged = Vec::with_capacity(entries.len());
        for &index in entries {
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
            arranged
                .push(target.map_or(Target::Fresh, |target| Target::of(target, tensor.range.0)));
        }
        Ok(arranged)
    }

    /// Indices of the files that a load reads, ascending.
    fn used_files(&self, requests: &[Request], all: bool) -> Vec<usize> {
        let mut is_used = vec![all; self.part.files.len()];
        for request in requests {
            is_used[request.file] |= !request.range.is_empty();
        }
        (0..is_used.len()).filter(|&file| is_used[file]).collect()
    }

    /// Opens files in the given order.
    pub(super) fn open_files(
        &self,
        used: &[usize],
        direct: Direct,
        run: &mut Run,
    ) -> Result<Vec<Source<'_>>> {
        let files = self.file_system.files();
        let open = |&index: &usize| {
            let entry = &self.part.files[index];
            match files.has_directories() {
                true => open_shard(&self.path, files, entry, direct, run),
                // The size was checked when the checkpoint was opened, and is checked again with
                // each response.
                false => open_unseen(&self.path, files, entry, direct),
            }
        };
        used.iter().map(open).collect()
    }

    /// Explains an error about some files: a file that is missing because another checkpoint has
    /// taken its place is no damage. A file opened without a lookup may turn out to be missing or
    /// of another size only when it is read; it is looked up here.
    fn replaced_or(&self, error: Error, used: &[usize]) -> Error {
        let files = self.file_system.files();
        if is_replaced(&self.path, files, &self.manifest.id, &error) {
            let path = self.path.clone();
            return Error::Replaced { path };
        }
        let is_of_storage = matches!(error, Error::Storage { .. } | Error::Io(_));
        if !files.has_directories() && is_of_storage {
            for &index in used {
                match check_size(&self.path, files, &self.part.files[index]) {
                    Ok(()) => {}
                    Err(flaw @ Error::Corrupt { .. }) => return flaw,
                    // The lookup itself failed.
                    Err(_) => break,
                }
            }
        }
        error
    }

    pub(crate) fn corrupt(&self, file: usize, damage: &Damage, indices: &[usize]) -> Error {
        // If several tensors may be hit, a requested one is the most useful to name.
        let asked = indices.iter().map(|&index| &self.part.tensors[index]);
        let touched = touched_tensor(asked, file, damage);
        let touched = touched.or_else(|| touched_tensor(&self.part.tensors, file, damage));
        let path = self.path.clone();
        let file = Some(self.part.files[file].name.clone());
        let offset = Some(damage.offset());
        let tensor = touched.map(str::to_owned);
        let detail = damage.detail();
        if let (Some(signed), true) = (&self.signed, damage.is_tampered) {
            let signer = &signed.signer;
            let detail = format!("the chunk that begins here is not the one that {signer} signed");
            return Error::Signature {
                path,
                file,
                offset,
                tensor,
                detail,
            };
        }
        match damage.is_tampered {
            false => Error::Corrupt {
                path,
                file,
                offset,
                tensor,
                detail,
            },
            true => Error::Tampered {
                path,
                file,
                offset,
                tensor,
                detail,
            },
        }
    }
}

/// The first of the tensors that the damage touches.
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
    files: &dyn Files,
    entry: &'a FileEntry,
    direct: Direct,
    run: &mut Run,
) -> Result<Source<'a>> {
    let opened = files.open(&path.join(&entry.name), direct);
    let is_whole = |file: &File| file.len().is_ok_and(|bytes| bytes == entry.bytes);
    if !opened.as_ref().is_ok_and(is_whole) {
        // Explains a failed check; a lookup may be a request, so it is made only after a failure.
        check_size(path, files, entry)?;
    }
    let file = opened?;
    if let Some(reason) = file.fallback() {
        run.note(FallbackKind::Buffered, reason.to_owned());
    }
    Ok(Source {
        file: Arc::new(file),
        bytes: entry.bytes,
        chunks: Some(&entry.chunks),
        opener: None,
        hashing: Hashing::Off,
    })
}

/// Opens a shard whose size was already checked, and is checked again with each response.
pub(crate) fn open_unseen<'a>(
    path: &Path,
    files: &dyn Files,
    entry: &'a FileEntry,
    direct: Direct,
) -> Result<Source<'a>> {
    let file = files.open_known(&path.join(&entry.name), direct, entry.bytes)?;
    Ok(Source {
        file: Arc::new(file),
        bytes: entry.bytes,
        chunks: Some(&entry.chunks),
        opener: None,
        hashing: Hashing::Off,
    })
}
