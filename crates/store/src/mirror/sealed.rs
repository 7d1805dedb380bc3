//! A sealed copy of a clear checkpoint: saved in the bucket as an attempt with a key of its own.
//!
//! Shards keep their size and the places of their tensors. Each part of a shard is read, compared
//! with its digests, sealed in place and sent; the start of the header gives way to the header of a
//! sealed shard, and the rest of it is sealed too. The manifest names the checkpoint that it is a
//! copy of, so a later call recognizes the copy without a key.
//!
//! No byte of a clear file is sent. A call that fails or is killed leaves files that no other call
//! uses, as another key cannot continue them: another call begins anew, and a sweep removes them.

use std::path::Path;
use std::sync::Arc;

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem};

use super::ends::Ends;
use crate::commit::Attempt;
use crate::error::{Error, Result};
use crate::format::description::{read_manifest, read_part};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::manifest::{Manifest, PartEntry};
use crate::format::name;
use crate::format::part::{FileEntry, Part, SealedFile, TensorEntry};
use crate::format::shard::{PAGE_BYTES, encode_decoy};
use crate::load::checkpoint::Checkpoint;
use crate::load::checkpoint::fetch::open_shard;
use crate::pipeline::send::{Seal, Sending, send};
use crate::progress::Progress;
use crate::report::Run;
use crate::save::{Publication, Sidecars, commit_as, put_part};
use crate::seal::{Sealing, ShardPlace, ShardSealer, Tags, draw_salt};

/// The files of a copy.
pub(super) struct Copied {
    pub(super) bytes: u64,
    pub(super) files: usize,
    pub(super) sent_bytes: u64,
}

/// One sealed mirroring in progress.
pub(super) struct SealedCopy<'a> {
    from: &'a Path,
    to: &'a Path,
    ends: &'a Ends,
    target: Arc<dyn FileSystem>,
    progress: &'a Progress,
}

/// A rank's part, and the headers of its sealed shards.
struct PlannedPart {
    part: Part,
    headers: Vec<Vec<u8>>,
    /// Number of its first shard among those of all ranks.
    first: usize,
}

impl<'a> SealedCopy<'a> {
    pub(super) fn new(
        from: &'a Path,
        to: &'a Path,
        ends: &'a Ends,
        progress: &'a Progress,
    ) -> SealedCopy<'a> {
        SealedCopy {
            from,
            to,
            ends,
            target: Arc::clone(&ends.objects) as Arc<dyn FileSystem>,
            progress,
        }
    }

    pub(super) fn run(&self, sealing: &Sealing) -> Result<Copied> {
        if let Some(copied) = self.existing()? {
            self.progress.advance(self.ends.checkpoint.size().0);
            return Ok(copied);
        }
        let planned = self.plan()?;
        match self.save(planned, sealing) {
            // Another process may have made the copy meanwhile.
            Err(Error::Exists { .. }) => self.existing()?.ok_or_else(|| self.exists()),
            result => result,
        }
    }

    /// The complete sealed copy in the bucket, if there is one.
    ///
    /// # Errors
    /// [`Error::Exists`] if another checkpoint, or a clear copy, is there.
    fn existing(&self) -> Result<Option<Copied>> {
        let manifest = match read_manifest(self.to, self.ends.objects.as_ref()) {
            Ok((manifest, _)) => manifest,
            Err(Error::Version { .. } | Error::Unknown { .. }) => return Err(self.exists()),
            Err(Error::NotFound { .. } | Error::Incomplete { .. } | Error::Store { .. }) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let id = &self.ends.checkpoint.manifest().id;
        if manifest.sealing.is_none() || manifest.copy_of.as_ref() != Some(id) {
            return Err(self.exists());
        }
        let (bytes, files) = Checkpoint::open_on(self.to, &self.target)?.size();
        Ok(Some(Copied {
            bytes,
            files,
            sent_bytes: 0,
        }))
    }

    fn exists(&self) -> Error {
        Error::Exists {
            path: self.to.to_owned(),
        }
    }

    fn cannot_seal(&self, detail: String) -> Error {
        Error::CannotSeal {
            path: self.from.to_owned(),
            detail,
        }
    }

    /// Reads the parts, and refuses a checkpoint of which something would stay clear.
    fn plan(&self) -> Result<Vec<PlannedPart>> {
        let checkpoint = &self.ends.checkpoint;
        let manifest = checkpoint.manifest();
        let has_group = |tensor: &TensorEntry| tensor.group.is_some();
        if checkpoint.is_sealed() {
            return Err(self.cannot_seal("it is sealed already, and is mirrored as it is".into()));
        }
        if !manifest.sidecars.is_empty() || checkpoint.part().tensors.iter().any(has_group) {
            let detail = "groups and files beside the shards are for readers of models, and stay \
                          clear";
            return Err(self.cannot_seal(detail.to_owned()));
        }
        let (mut planned, mut first) = (Vec::with_capacity(manifest.parts.len()), 0);
        for entry in &manifest.parts {
            let part = read_part(self.from, self.ends.source.files(), manifest, entry)?;
            let headers = self.headers(&part)?;
            let shards = headers.len();
            planned.push(PlannedPart {
                part,
                headers,
                first,
            });
            first += shards;
        }
        Ok(planned)
    }

    /// The clear headers of the sealed shards of a part. Each ends in front of all tensors.
    fn headers(&self, part: &Part) -> Result<Vec<Vec<u8>>> {
        let mut ends: Vec<u64> = part.files.iter().map(|file| file.bytes).collect();
        for tensor in part.tensors.iter().filter(|tensor| tensor.nbytes() > 0) {
            let end = &mut ends[tensor.file];
            *end = tensor.range.0.min(*end);
        }
        let header = |(file, end): (&FileEntry, u64)| {
            let checked = self.ends.objects.check_size(file.bytes);
            checked.map_err(Error::storage("send", self.to.join(&file.name)))?;
            encode_decoy(end.min(PAGE_BYTES), file.bytes).ok_or_else(|| {
                let name = &file.name;
                self.cannot_seal(format!("the header of {name} is too short, {end} bytes"))
            })
        };
        part.files.iter().zip(ends).map(header).collect()
    }

    fn save(&self, planned: Vec<PlannedPart>, sealing: &Sealing) -> Result<Copied> {
        let mut attempt = Attempt::begin(self.to, false, &self.target, self.progress)?;
        attempt.seal(sealing.clone());
        let (mut parts, mut bytes, mut files) = (Vec::with_capacity(planned.len()), 0, 1);
        for planned in planned {
            let shards = &planned.part.files;
            bytes += shards.iter().map(|file| file.bytes).sum::<u64>();
            files += shards.len() + 1;
            let part = self.send_rank(&mut attempt, planned, sealing)?;
            bytes += part.bytes;
            parts.push(part);
        }
        self.progress.check()?;
        let original = self.ends.checkpoint.manifest();
        let publication = Publication {
            path: self.to.to_owned(),
            step: original.step,
            metadata: original.metadata.clone(),
            overwrite: false,
            sidecars: Sidecars::default(),
        };
        let adjust = |manifest: &mut Manifest| {
            manifest.created.clone_from(&original.created);
            manifest.copy_of = Some(original.id.clone());
        };
        let committed = commit_as(attempt, &publication, adjust, parts)?;
        bytes += committed.manifest_bytes;
        Ok(Copied {
            bytes,
            files,
            sent_bytes: bytes,
        })
    }

    /// Sends the shards and the part of a rank.
    fn send_rank(
        &self,
        attempt: &mut Attempt,
        planned: PlannedPart,
        sealing: &Sealing,
    ) -> Result<PartEntry> {
        let PlannedPart {
            mut part,
            headers,
            first,
        } = planned;
        let salt = draw_salt(self.to)?;
        let id = attempt.id().to_owned();
        for (number, header) in headers.iter().enumerate() {
            let place = ShardPlace {
                id: &id,
                rank: part.rank,
                number: u32::try_from(number).expect("shards are counted in 32 bits"),
                file_bytes: part.files[number].bytes,
                header_bytes: header.len() as u64,
                chunk_bytes: CHUNK_BYTES,
            };
            let sealer = ShardSealer::new(sealing, &salt, &place);
            let name = name::shard_file(part.rank, number, &id);
            let seal = Seal {
                sealer: &sealer,
                header,
            };
            part.files[number] = self.send_shard(attempt, first + number, name, seal)?;
        }
        part.id = id;
        for tensor in &mut part.tensors {
            // The header of a sealed shard names no tensors.
            tensor.stored_name = None;
        }
        let entry = put_part(attempt, part, Some(salt))?;
        self.progress.advance(entry.bytes);
        Ok(entry)
    }

    /// Sends a shard, sealed, and makes it durable.
    fn send_shard(
        &self,
        attempt: &mut Attempt,
        file: usize,
        name: String,
        seal: Seal<'_>,
    ) -> Result<FileEntry> {
        let entry = &self.ends.checkpoint.part().files[file];
        let Ends {
            source,
            reads,
            sends,
            objects,
            ..
        } = self.ends;
        let (bytes, part_bytes) = (entry.bytes, objects.part_bytes() as u64);
        let commitment = seal.sealer.commitment();
        let header_bytes = seal.header.len() as u64;
        let mut run = Run::default();
        let from = open_shard(self.from, source.files(), entry, reads.direct, &mut run)?;
        let to = attempt.create(&name, Direct::Off)?;
        self.target.change(Change::Allocate(&to, bytes))?;
        let range = |number: u64| {
            let start = number * part_bytes;
            start..(start + part_bytes).min(bytes)
        };
        let sending = Sending {
            from: from.file,
            to: Arc::clone(&to),
            chunks: &entry.chunks,
            parts: (0..bytes.div_ceil(part_bytes)).map(range).collect(),
            seal: Some(seal),
        };
        let sent = send(&sending, reads, sends, self.progress)?;
        if let Some(damage) = sent.damage {
            return Err(self.ends.checkpoint.corrupt(file, &damage, &[]));
        }
        self.progress.check()?;
        self.target.change(Change::SyncData(&to))?;
        Ok(FileEntry {
            name,
            bytes,
            digest: Digest::of_chunks(&sent.digests, bytes),
            chunk_bytes: CHUNK_BYTES,
            chunks: sent.digests,
            // Signatures are of files, and these are others.
            blake3: None,
            sealed: Some(SealedFile {
                header_bytes,
                commitment,
                tags: Tags(sent.tags),
                blocks: None,
                key: None,
            }),
        })
    }
}
