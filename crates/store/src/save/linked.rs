//! Linked files: existing files of the caller that become shards unchanged.
//!
//! A file that is already on stable storage in the form of a shard need not be read and written
//! again: it gets a second name in the checkpoint, by a hard link. Both names then refer to one
//! file, so the owner of the other name must never change the file, only replace it by a new one.
//! Nothing here changes it, or assumes that a shard is a file of its own.
//!
//! If a file cannot be hard-linked there, a new file shares its blocks, or gets a copy of its
//! bytes, which is checked against the digests on the way.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_io::file::File;
use penstock_io::file_system::FileStat;

use super::shard_files::ShardFiles;
use crate::commit::Attempt;
use crate::commit::files::has_no_links;
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::part::{FileEntry, SealedBlocks, SealedFile, TensorEntry};
use crate::format::plain;
use crate::pipeline::copy::Copy;
use crate::pipeline::damage::Damage;
use crate::plan::write::TensorSpec;
use crate::report::{FallbackKind, Run};
use crate::seal::{Block, BlockSealer, FileSeal, Sealing, Tags};

/// Files that become shards, and the tensors in them.
#[derive(Default)]
pub struct Linked {
    /// The files.
    pub files: Vec<LinkedFile>,
    /// Tensors of the state that are stored in them; other tensors in the files are ignored.
    pub tensors: Vec<LinkedTensor>,
    /// Guards that keep the files in place until they are part of the checkpoint.
    pub holders: Vec<Holder>,
}

/// A guard that is only dropped.
pub type Holder = Box<dyn Send + Sync>;

/// A file on stable storage that is a valid shard and never changed.
pub struct LinkedFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
    /// Digests of the file's chunks.
    pub chunks: Vec<Digest>,
    /// Set if it is sealed; then it can only be part of a sealed checkpoint.
    pub sealer: Option<LinkedSeal>,
}

/// The seal of a linked file, with a key of its own.
#[derive(Clone)]
pub enum LinkedSeal {
    /// It is sealed by blocks, with tags that a tensor of the checkpoint holds.
    Blocks(Arc<BlockSealer>),
    /// It is sealed by chunks, as loads read it.
    Chunks(Arc<FileSeal>),
}

/// A tensor in a linked file.
pub struct LinkedTensor {
    /// The tensor's name, type and shape in the state.
    pub spec: TensorSpec,
    /// Index of the file.
    pub file: usize,
    /// Offset of the tensor's first byte in the file.
    pub start: u64,
    /// The tensor's name in the header of the file.
    pub stored_name: String,
}

/// The outcome of linking files.
#[derive(Default)]
pub(super) struct Links {
    /// New files made instead of links, not durable yet, with their sizes.
    pub(super) made: Vec<(Arc<File>, u64)>,
    /// The copies to make into some of them.
    pub(super) copies: Vec<Copy>,
    /// For each copy, the index of the linked file.
    copied: Vec<usize>,
    /// Size of the files that are linked, or share their blocks.
    pub(super) linked_bytes: u64,
    /// Size of the others.
    pub(super) copied_bytes: u64,
}

impl Links {
    /// Closes the files.
    pub(super) fn close(&mut self) {
        self.made.clear();
        self.copies.clear();
    }
}

impl Linked {
    /// Checks that the sizes of the files and the tensors agree.
    ///
    /// # Panics
    /// If a tensor refers to a file that is not in the list.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |key: &str, detail: String| Error::Unsupported {
            key: key.to_owned(),
            detail,
        };
        for file in &self.files {
            let (found, expected) = (file.chunks.len(), file.bytes.div_ceil(CHUNK_BYTES));
            let path = || file.path.display().to_string();
            if found as u64 != expected {
                return Err(refuse(
                    &path(),
                    format!("{found} digests of {expected} chunks"),
                ));
            }
            if let Some(LinkedSeal::Chunks(seal)) = &file.sealer
                && (seal.file_bytes() != file.bytes || !seal.is_whole())
            {
                return Err(refuse(&path(), "it is not sealed to its end".to_owned()));
            }
        }
        for tensor in &self.tensors {
            let bytes = self.files[tensor.file].bytes;
            let end = tensor.spec.nbytes()?.checked_add(tensor.start);
            if end.is_none_or(|end| end > bytes) {
                let detail = format!("it ends outside of the {bytes} bytes of its file");
                return Err(refuse(&tensor.spec.name, detail));
            }
        }
        Ok(())
    }

    /// Links the files into the attempt; lists the copies to make where that fails.
    pub(super) fn link(
        &self,
        names: &[String],
        attempt: &mut Attempt,
        shards: &ShardFiles<'_>,
        run: &mut Run,
    ) -> Result<Links> {
        let mut links = Links::default();
        for (index, (file, name)) in self.files.iter().zip(names).enumerate() {
            match attempt.link(&file.path, name) {
                Ok(path) => {
                    let found = attempt.files().stat(&path);
                    file.check(&found.map_err(Error::storage("stat", &path))?)?;
                    links.linked_bytes += file.bytes;
                }
                Err(error) if error.kind().is_some_and(has_no_link) => {
                    let made = shards.create(attempt, name)?;
                    if file.fill(&made, &error, shards, run, &mut links.copies)? {
                        links.linked_bytes += file.bytes;
                    } else {
                        links.copied_bytes += file.bytes;
                        links.copied.push(index);
                    }
                    links.made.push((made, file.bytes));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(links)
    }

    /// The tensors' entries in a part, in which `first` is the index of the first file.
    pub(super) fn entries(&self, first: usize) -> impl Iterator<Item = TensorEntry> {
        self.tensors.iter().map(move |tensor| {
            let entry = tensor.spec.entry(first + tensor.file, tensor.start);
            let entry = entry.expect("it was measured before");
            let is_other = tensor.stored_name != entry.name;
            TensorEntry {
                stored_name: is_other.then(|| tensor.stored_name.clone()),
                ..entry
            }
        })
    }

    /// The error for damage found while copying.
    pub(super) fn damaged(&self, links: &Links, damage: &Damage) -> Error {
        let index = links.copied[damage.file];
        let bytes = |tensor: &LinkedTensor| tensor.spec.nbytes().unwrap_or_default();
        let is_hit = |tensor: &&LinkedTensor| {
            tensor.file == index && damage.touches((tensor.start, tensor.start + bytes(tensor)))
        };
        let hit = self.tensors.iter().find(is_hit);
        let mut error = self.files[index].corrupt(damage.detail());
        if let Error::Corrupt { offset, tensor, .. } = &mut error {
            *offset = Some(damage.offset());
            *tensor = hit.map(|tensor| tensor.spec.name.clone());
        }
        error
    }
}

impl LinkedFile {
    /// The file's entry in a part, under a name in the checkpoint.
    pub(super) fn entry(&self, name: String) -> FileEntry {
        FileEntry {
            name,
            bytes: self.bytes,
            digest: Digest::of_chunks(&self.chunks, self.bytes),
            chunk_bytes: CHUNK_BYTES,
            chunks: self.chunks.clone(),
            sealed: None,
            blake3: None,
        }
    }

    /// The sealed member of its entry, as file `number` of a part; `None` if it is clear.
    pub(super) fn sealed(
        &self,
        sealing: &Sealing,
        salt: &Block,
        id: &str,
        rank: u32,
        number: u32,
    ) -> Option<SealedFile> {
        Some(match self.sealer.as_ref()? {
            LinkedSeal::Blocks(sealer) => SealedFile {
                header_bytes: sealer.header_bytes(),
                commitment: sealer.commitment(),
                tags: Tags(Vec::new()),
                blocks: Some(SealedBlocks {
                    block_bytes: sealer.block_bytes(),
                    key: sealer.wrap(sealing, salt, id, rank, number),
                }),
                key: None,
            },
            LinkedSeal::Chunks(seal) => SealedFile {
                header_bytes: seal.header_bytes(),
                commitment: seal.commitment(),
                tags: Tags(seal.tags()),
                blocks: None,
                key: Some(seal.wrap(sealing, salt, id, rank, number)),
            },
        })
    }

    /// Makes a new file share its blocks, and returns whether it does; if not, adds a copy to make.
    fn fill(
        &self,
        made: &Arc<File>,
        refusal: &Error,
        shards: &ShardFiles<'_>,
        run: &mut Run,
        copies: &mut Vec<Copy>,
    ) -> Result<bool> {
        let files = shards.file_system.files();
        let found = files.stat(&self.path);
        self.check(&found.map_err(Error::storage("stat", &self.path))?)?;
        let from = Arc::new(files.open(&self.path, shards.direct)?);
        let why = refusal.source_text();
        if shards.clone_to(&from, made).is_ok() {
            let reason = format!("it shares the blocks of a file that cannot be linked: {why}");
            run.note(FallbackKind::Unlinked, reason);
            return Ok(true);
        }
        let reason = format!("a file that cannot be linked is copied: {why}");
        run.note(FallbackKind::Unlinked, reason);
        shards.reserve(made, self.bytes, run)?;
        copies.push(Copy {
            from,
            to: Arc::clone(made),
            bytes: self.bytes,
            chunks: self.chunks.clone(),
        });
        Ok(false)
    }

    /// Checks that it is a regular file of the recorded size.
    fn check(&self, found: &FileStat) -> Result<()> {
        if let Some(flaw) = plain::flaw(found) {
            return Err(self.corrupt(flaw));
        }
        let (found, expected) = (found.bytes, self.bytes);
        if found != expected {
            return Err(self.corrupt(format!("it has {found} bytes instead of {expected}")));
        }
        Ok(())
    }

    fn corrupt(&self, detail: impl Into<String>) -> Error {
        let name = self.path.file_name().unwrap_or_default();
        let directory = self.path.parent().unwrap_or(&self.path);
        Error::corrupt(directory, &name.to_string_lossy(), detail)
    }
}

/// Whether the error means that a file cannot be hard-linked there: it is on another file system,
/// has the maximum number of links, belongs to another user (`protected_hardlinks`), or its file
/// system has no hard links.
fn has_no_link(kind: io::ErrorKind) -> bool {
    let has_other = matches!(
        kind,
        io::ErrorKind::CrossesDevices | io::ErrorKind::TooManyLinks
    );
    has_other || has_no_links(kind)
}
