//! Verification: reads every byte of a checkpoint against its digest and lists all damage.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use penstock_io::file_system::Files;

use crate::care::hashed::Hashed;
use crate::error::{Error, Result};
use crate::format::description::{Sizes, read_manifest, read_part, read_part_hashed};
use crate::format::header::{self, Header, HeaderTensor};
use crate::format::part::{FileEntry, Part, TensorEntry};
use crate::format::shard;
use crate::lease::Lease;
use crate::load::checkpoint::fetch::{open_shard, open_unseen, touched_tensor};
use crate::load::checkpoint::global_tensors_of;
use crate::load::sidecar;
use crate::load::signed::Signed;
use crate::options::Options;
use crate::pipeline::read::{Hashing, OnDamage, Source, read};
use crate::plan::read::plan;
use crate::progress::Progress;
use crate::report::{Problem, Run, VerifyReport};
use crate::sign::{Blake3, ChunkHash, Hashes, Signers};

/// First read of a file, before the length of its header is known; larger than most headers.
const HEADER_BYTES: u64 = 64 << 10;

/// Reads every file of the checkpoint at `path` and lists all damage. Digests cover what is stored,
/// so a sealed checkpoint is verified without its key; tampering shows only when it is opened.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Incomplete`], [`Error::Version`], [`Error::Unknown`],
/// [`Error::Interrupted`], and system errors. Damage is no error here but a [`Problem`].
pub fn verify(path: &Path, options: &Options, progress: &Progress) -> Result<VerifyReport> {
    verify_as(path, OnDamage::List, options, progress)
}

/// Verifies as [`verify`] does, and compares every file with a signature by one of the keys. A file
/// that the signature does not cover is a problem too, except for what belongs to no reader of the
/// checkpoint.
///
/// # Errors
/// Those of [`verify`]; [`Error::NotSigned`] and [`Error::Signature`] if none of the keys has signed
/// the manifest. Other files that differ are problems.
pub fn verify_signed(
    path: &Path,
    signers: &Signers,
    options: &Options,
    progress: &Progress,
) -> Result<VerifyReport> {
    let mut hashed = Hashed::default();
    let list = OnDamage::List;
    let mut report = verify_hashed(path, list, options, progress, Some(&mut hashed))?;
    let Some(manifest) = &hashed.manifest else {
        return Ok(report);
    };
    let files = options.file_system.files();
    let signed = Signed::find(path, files, manifest, signers)?;
    hashed.add_others(path, files, progress)?;
    report.problems.extend(hashed.differences(&signed));
    report.signer = Some(signed.signer);
    Ok(report)
}

/// Verifies as [`verify`] does; `on_damage` decides whether unreadable sectors are problems or
/// errors.
pub(crate) fn verify_as(
    path: &Path,
    on_damage: OnDamage,
    options: &Options,
    progress: &Progress,
) -> Result<VerifyReport> {
    verify_hashed(path, on_damage, options, progress, None)
}

/// Verifies, and hashes every file that is read for it.
pub(super) fn verify_hashed(
    path: &Path,
    on_damage: OnDamage,
    options: &Options,
    progress: &Progress,
    mut hashed: Option<&mut Hashed>,
) -> Result<VerifyReport> {
    let begun = Instant::now();
    let files = options.file_system.files();
    let _lease = Lease::share_to_read(path, files);
    loop {
        let mut report = VerifyReport::default();
        if let Some(hashed) = hashed.as_deref_mut() {
            *hashed = Hashed::default();
        }
        let found = hashed.as_deref_mut();
        let id = verify_files(path, on_damage, options, progress, &mut report, found)?;
        let now = || read_manifest(path, files).map(|(manifest, _)| manifest.id);
        // A file that is missing because another checkpoint replaced this one is no damage.
        let is_replaced = |id: &String| now().is_ok_and(|now| now != *id);
        if report.problems.is_empty() || !id.as_ref().is_some_and(is_replaced) {
            report.seconds = begun.elapsed().as_secs_f64();
            return Ok(report);
        }
    }
}

/// Checks manifest, part and shards in turn, each against the one before; returns the id of the
/// checkpoint if its manifest could be read.
fn verify_files(
    path: &Path,
    on_damage: OnDamage,
    options: &Options,
    progress: &Progress,
    report: &mut VerifyReport,
    mut hashed: Option<&mut Hashed>,
) -> Result<Option<String>> {
    let files = options.file_system.files();
    report.files += 1;
    let Some((manifest, bytes)) = or_problem(read_manifest(path, files), report)? else {
        return Ok(None);
    };
    report.bytes_checked += bytes;
    report.is_partial = manifest.partial.is_some();
    report.is_sealed = manifest.sealing.is_some();
    let mut parts = Vec::with_capacity(manifest.parts.len());
    for entry in &manifest.parts {
        report.files += 1;
        progress.pay(entry.bytes)?;
        let read = match &mut hashed {
            None => read_part(path, files, &manifest, entry),
            Some(hashed) => read_part_hashed(path, files, &manifest, entry).map(|(part, hash)| {
                hashed.files.insert(entry.file.clone(), hash);
                part
            }),
        };
        if let Some(part) = or_problem(read, report)? {
            report.bytes_checked += entry.bytes;
            parts.push(part);
        }
    }
    // Users may edit the copies of sidecars, so only the originals are checked.
    for entry in &manifest.sidecars {
        report.files += 1;
        if let Some(text) = or_problem(sidecar::read(path, files, entry), report)? {
            report.bytes_checked += entry.bytes;
            if let Some(hashed) = &mut hashed {
                hashed.files.insert(entry.file.clone(), Blake3::of(&text));
            }
        }
    }
    if let Some((part, _)) = Part::merge(parts) {
        or_problem(global_tensors_of(path, &part), report)?;
        report.tensors = part.tensors.len();
        let found = hashed.as_deref_mut();
        verify_shards(path, &part, on_damage, options, progress, report, found)?;
    }
    let id = manifest.id.clone();
    if let Some(hashed) = hashed {
        hashed.manifest = Some(manifest);
    }
    Ok(Some(id))
}

/// Turns damage into a problem on the list; passes other errors on.
fn or_problem<T>(result: Result<T>, report: &mut VerifyReport) -> Result<Option<T>> {
    let (file, problem) = match result {
        Ok(value) => return Ok(Some(value)),
        Err(Error::Corrupt {
            file,
            offset,
            tensor,
            detail,
            ..
        })
        | Err(Error::Tampered {
            file,
            offset,
            tensor,
            detail,
            ..
        }) => (file, (offset, tensor, detail, true)),
        Err(Error::Malformed {
            file,
            tensor,
            detail,
            ..
        }) => (file, (None, tensor, detail, false)),
        Err(error) => return Err(error),
    };
    let (offset, tensor, detail, is_proven) = problem;
    report.problems.push(Problem {
        file: file.unwrap_or_default(),
        offset,
        tensor,
        detail,
        is_proven,
    });
    Ok(None)
}

fn verify_shards(
    path: &Path,
    part: &Part,
    on_damage: OnDamage,
    options: &Options,
    progress: &Progress,
    report: &mut VerifyReport,
    hashed: Option<&mut Hashed>,
) -> Result<()> {
    let files = options.file_system.files();
    let bytes = part.files.iter().map(|file| file.bytes).sum();
    let settings = options.choose_to_read(path, bytes);
    let mut run = Run::default();
    let mut sources: Vec<Source<'_>> = Vec::new();
    let mut numbers = Vec::new();
    let sizes = Sizes::of(path, files, part.files.len());
    let mut listed = vec![Vec::new(); part.files.len()];
    for tensor in &part.tensors {
        listed[tensor.file].push(tensor);
    }
    for (number, (entry, listed)) in part.files.iter().zip(listed).enumerate() {
        report.files += 1;
        let opened = match files.has_directories() {
            true => open_shard(path, files, entry, settings.direct, &mut run),
            false => sizes
                .check(entry)
                .and_then(|()| open_unseen(path, files, entry, settings.direct)),
        };
        if let Some(source) = or_problem(opened, report)? {
            or_problem(check_header(path, files, entry, listed, progress), report)?;
            sources.push(source);
            numbers.push(number);
        }
    }
    let sink = |&number: &usize| Mutex::new(vec![[0; 32]; part.files[number].chunks.len()]);
    let sinks: Vec<Mutex<Vec<ChunkHash>>> = match &hashed {
        Some(_) => numbers.iter().map(sink).collect(),
        None => Vec::new(),
    };
    for (source, sink) in sources.iter_mut().zip(&sinks) {
        source.hashing = Hashing::Collect(sink);
    }
    let facts: Vec<_> = sources.iter().map(Source::facts).collect();
    let plan = plan(&facts, &[], true, settings.extent_bytes as u64);
    progress.expect(facts.iter().map(|file| file.bytes).sum());
    let outcome = read(
        plan,
        Vec::new(),
        &sources,
        &settings,
        on_damage,
        progress,
        &mut run,
    )?;
    report.bytes_checked += facts.iter().map(|file| file.bytes).sum::<u64>();
    drop(sources);
    if let Some(hashed) = hashed {
        for (index, (sink, &number)) in sinks.into_iter().zip(&numbers).enumerate() {
            // A damaged file is a problem already, and its hash says nothing more.
            if outcome.damage.iter().all(|damage| damage.file != index) {
                let hashes = Hashes(sink.into_inner().expect("no worker panics with the lock"));
                let entry = &part.files[number];
                hashed
                    .files
                    .insert(entry.name.clone(), hashes.root(entry.bytes));
            }
        }
    }
    report.problems.extend(outcome.damage.iter().map(|damage| {
        let file = numbers[damage.file];
        Problem {
            file: part.files[file].name.clone(),
            offset: Some(damage.offset()),
            tensor: touched_tensor(&part.tensors, file, damage).map(str::to_owned),
            detail: damage.detail(),
            is_proven: damage.unreadable.is_none(),
        }
    }));
    Ok(())
}

/// Checks that other tools, which trust a shard's own header, see the tensors that the part lists.
fn check_header(
    path: &Path,
    files: &dyn Files,
    entry: &FileEntry,
    listed: Vec<&TensorEntry>,
    progress: &Progress,
) -> Result<()> {
    // The chunk digests already decide whether the header was damaged; a mismatch here is
    // malformed.
    let malformed = |detail: String| Error::malformed(path, &entry.name, detail);
    let file = path.join(&entry.name);
    let read = |range| {
        let read = files.read_range(&file, range);
        read.map_err(Error::storage("read", &file))
    };
    let first = entry.bytes.min(HEADER_BYTES);
    progress.pay(first)?;
    let mut start = read(0..first)?;
    let prefix = start.first_chunk().copied().unwrap_or_default();
    let end =
        header::header_end(prefix, entry.bytes).map_err(|error| malformed(error.to_string()))?;
    if end > first {
        progress.pay(end - first)?;
        start.extend(read(first..end)?);
    }
    start.truncate(end as usize);
    let header =
        header::parse_header(&start, entry.bytes).map_err(|error| malformed(error.to_string()))?;
    compare(&header, listed).map_err(malformed)
}

/// Checks that the header has each listed tensor. A linked file may also hold tensors that are not
/// listed.
fn compare(header: &Header, listed: Vec<&TensorEntry>) -> std::result::Result<(), String> {
    let boxes = shard::boxes(header)?;
    let found: HashMap<&str, &HeaderTensor> = header
        .tensors
        .iter()
        .map(|(name, described)| (name.as_str(), described))
        .collect();
    for tensor in listed {
        let stored_name = tensor.stored_name();
        let Some(described) = found.get(stored_name) else {
            let name = &tensor.name;
            return Err(format!(
                "the header lacks tensor {stored_name:?}, the part's {name:?}"
            ));
        };
        let shape = tensor
            .stored
            .as_ref()
            .map_or(&tensor.shape, |stored| &stored.shape);
        let dtype = tensor.stored_dtype().unwrap_or_default();
        let (begin, end) = described.data_offsets;
        let range = (header.data_start + begin, header.data_start + end);
        let has_box = boxes
            .as_ref()
            .is_none_or(|boxes| boxes.get(stored_name) == tensor.region.as_ref());
        let agree = range == tensor.range
            && has_box
            && described.dtype == dtype
            && described.shape == *shape;
        if !agree {
            return Err(format!(
                "the header and the part disagree about tensor {stored_name:?}"
            ));
        }
    }
    Ok(())
}
