//! Files of the caller's that become shards as they are.
//!
//! What lies on stable storage already, as a shard does, need not be read and written again: the
//! file gets a second name in the checkpoint. Both names are of one file from then on, so whoever
//! has the other must never change it; a new one takes its place. Nothing here does, nor assumes
//! that a shard is a file of its own.
//!
//! Where a file cannot have a second name there, a new one shares its blocks, or has a copy of its
//! bytes, which is checked against the digests on the way.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_io::file::File;
use penstock_io::file_system::Found;

use super::shard_files::ShardFiles;
use crate::commit::Attempt;
use crate::commit::files::has_no_links;
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::part::{FileEntry, TensorEntry};
use crate::format::plain;
use crate::pipeline::copy::Copy;
use crate::pipeline::damage::Damage;
use crate::plan::write::TensorSpec;
use crate::report::{FallbackKind, Run};

/// Files that become shards, and the tensors in them.
#[derive(Default)]
pub struct Linked {
    /// The files.
    pub files: Vec<LinkedFile>,
    /// The tensors of the state that lie in them; there may be others, which are none of its own.
    pub tensors: Vec<LinkedTensor>,
    /// What keeps the files there until they are part of the checkpoint.
    pub holders: Vec<Holder>,
}

/// Something that is there for its end alone.
pub type Holder = Box<dyn Send + Sync>;

/// A file on stable storage that is a shard as the format has them, and that nobody changes.
pub struct LinkedFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The digests of its chunks.
    pub chunks: Vec<Digest>,
}

/// A tensor in a linked file.
pub struct LinkedTensor {
    /// What it is in the state.
    pub spec: TensorSpec,
    /// Index of the file.
    pub file: usize,
    /// Its first byte in there.
    pub start: u64,
    /// What the header of the file calls it.
    pub stored_name: String,
}

/// What became of linked files.
#[derive(Default)]
pub(super) struct Links {
    /// Files that are made instead, not durable yet, with their sizes.
    pub(super) made: Vec<(Arc<File>, u64)>,
    /// What has to be copied to some of them.
    pub(super) copies: Vec<Copy>,
    /// Which of the linked files that is, by index.
    copied: Vec<usize>,
    /// Bytes of the files that are linked, or share their blocks.
    pub(super) linked_bytes: u64,
    /// Bytes of the others.
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
    /// Whether the sizes of the files and the tensors agree.
    ///
    /// # Panics
    /// If a tensor lies in no file.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |key: &str, detail: String| Error::Unsupported {
            key: key.to_owned(),
            detail,
        };
        for file in &self.files {
            let (found, expected) = (file.chunks.len(), file.bytes.div_ceil(CHUNK_BYTES));
            if found as u64 != expected {
                let detail = format!("{found} digests of {expected} chunks");
                return Err(refuse(&file.path.display().to_string(), detail));
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

    /// Gives the files their names in the attempt, as far as that takes no copying.
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
                    let found = attempt.files().look(&path);
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

    /// What a part says of the tensors, where `first` is the index of the first file.
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

    /// What damage means that copying has found.
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
    /// What a part says of it under a name in the checkpoint.
    pub(super) fn entry(&self, name: String) -> FileEntry {
        FileEntry {
            name,
            bytes: self.bytes,
            digest: Digest::of_chunks(&self.chunks, self.bytes),
            chunk_bytes: CHUNK_BYTES,
            chunks: self.chunks.clone(),
        }
    }

    /// Has a new file share its blocks, and tells whether it does; if not, adds what to copy.
    fn fill(
        &self,
        made: &Arc<File>,
        refusal: &Error,
        shards: &ShardFiles<'_>,
        run: &mut Run,
        copies: &mut Vec<Copy>,
    ) -> Result<bool> {
        let files = shards.file_system.files();
        let found = files.look(&self.path);
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

    /// Whether it is a file of its size.
    fn check(&self, found: &Found) -> Result<()> {
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

/// What a file cannot have a second name for: it is of another file system, has as many as there
/// can be, is somebody else's (`protected_hardlinks`), or its file system has no hard links.
fn has_no_link(kind: io::ErrorKind) -> bool {
    let has_other = matches!(
        kind,
        io::ErrorKind::CrossesDevices | io::ErrorKind::TooManyLinks
    );
    has_other || has_no_links(kind)
}
