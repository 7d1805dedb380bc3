//! A shard's entry in the part of its rank, and what a sealed part says beside.

use serde::{Deserialize, Serialize};

use crate::format::digest::{CHUNK_BYTES, Digest, hex_list};
use crate::format::name;
use crate::seal::{Block, Tags, Text};
use crate::sign::Hashes;

/// One shard with its digests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the checkpoint directory.
    pub name: String,
    /// Exact size.
    pub bytes: u64,
    /// Digest of the whole file.
    pub digest: Digest,
    /// Bytes covered by one chunk digest.
    pub chunk_bytes: u64,
    /// Digest of each chunk in order.
    #[serde(with = "hex_list")]
    pub chunks: Vec<Digest>,
    /// Set if the shard is sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<SealedFile>,
    /// The hash of each chunk, if the save made them to sign the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Hashes>,
}

/// The members that a sealed shard needs to be opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SealedFile {
    /// Bytes of the header, which is clear.
    pub header_bytes: u64,
    /// Binds the shard to its key.
    pub commitment: Block,
    /// The tag of each chunk in order; none if it is sealed by blocks.
    pub tags: Tags,
    /// Set if it is sealed by blocks instead of chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<SealedBlocks>,
    /// The key of the file, encrypted under a key of the attempt, if it is sealed by chunks with a
    /// key of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Text>,
}

/// How a shard is sealed by blocks that open alone, whose tags a tensor holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SealedBlocks {
    /// Bytes of a block; the first one begins behind the header.
    pub block_bytes: u64,
    /// The key of the file, encrypted under a key of the attempt.
    pub key: Text,
}

/// Sizes of blocks that a reader takes: whole sectors, and no more than a chunk.
const SECTOR_BYTES: u64 = 512;

/// The member `sealed` of a part.
#[derive(Debug, Serialize, Deserialize)]
pub struct SealedBody {
    /// Drawn for this part; the keys of its shards depend on it.
    pub salt: Block,
    /// Binds the body to its key.
    pub commitment: Block,
    /// The sealed JSON object.
    pub body: Text,
}

impl FileEntry {
    /// Checks that it is a file of this rank's attempt and that its numbers agree with each other.
    pub(super) fn check(&self, attempt: &str, rank: u32) -> std::result::Result<(), String> {
        if !name::is_shard(&self.name, rank, attempt) {
            return Err(format!(
                "{:?} is no name of a shard of this attempt",
                self.name
            ));
        }
        if self.chunk_bytes != CHUNK_BYTES {
            return Err(format!(
                "{}: chunks of {} bytes",
                self.name, self.chunk_bytes
            ));
        }
        if self.bytes > i64::MAX as u64
            || self.chunks.len() as u64 != self.bytes.div_ceil(CHUNK_BYTES)
        {
            return Err(format!(
                "{}: {} chunk digests for {} bytes",
                self.name,
                self.chunks.len(),
                self.bytes
            ));
        }
        if Digest::of_chunks(&self.chunks, self.bytes) != self.digest {
            return Err(format!(
                "{}: the chunk digests do not add up to the file's",
                self.name
            ));
        }
        let hashes = self.blake3.as_ref().map(|hashes| hashes.0.len());
        if let Some(hashes) = hashes.filter(|hashes| *hashes != self.chunks.len()) {
            let (name, chunks) = (&self.name, self.chunks.len());
            return Err(format!("{name}: {hashes} hashes for {chunks} chunks"));
        }
        match &self.sealed {
            Some(sealed) => self.check_sealed(sealed),
            None => Ok(()),
        }
    }

    fn check_sealed(&self, sealed: &SealedFile) -> std::result::Result<(), String> {
        let (name, tags) = (&self.name, sealed.tags.0.len());
        let chunks = match &sealed.blocks {
            None => self.chunks.len(),
            Some(_) => 0,
        };
        if tags != chunks {
            return Err(format!("{name}: {tags} tags for {chunks} chunks"));
        }
        if let Some(SealedBlocks { block_bytes, .. }) = sealed.blocks
            && (block_bytes == 0
                || block_bytes > CHUNK_BYTES
                || !block_bytes.is_multiple_of(SECTOR_BYTES))
        {
            return Err(format!("{name}: blocks of {block_bytes} bytes"));
        }
        if sealed.blocks.is_some() && sealed.key.is_some() {
            return Err(format!("{name}: it is sealed by blocks and by chunks"));
        }
        let header_bytes = sealed.header_bytes;
        if header_bytes > self.bytes.min(self.chunk_bytes) {
            return Err(format!(
                "{name}: a header of {header_bytes} bytes is not in the first chunk"
            ));
        }
        Ok(())
    }
}
