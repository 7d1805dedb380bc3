//! BLAKE3 of files, by their chunks.

use std::fmt;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blake3::Hasher;
use blake3::hazmat::{
    HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::seal::Sha256;

/// Bytes of a chunk, as of one digest: a subtree of BLAKE3, as it is a power of two.
const CHUNK_BYTES: u64 = 1 << 20;

/// The BLAKE3 of a file; hexadecimal in JSON.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Blake3(pub [u8; 32]);

/// The hash of a chunk: the chaining value of its subtree, or the BLAKE3 of a file that is one
/// chunk.
pub type ChunkHash = [u8; 32];

/// The hashes of all chunks of a file, in order; base64 of one after another in JSON.
#[derive(Clone, PartialEq, Eq)]
pub struct Hashes(pub Vec<ChunkHash>);

impl Blake3 {
    /// The hash of bytes.
    pub fn of(bytes: &[u8]) -> Blake3 {
        Blake3(blake3::hash(bytes).into())
    }

    /// Reads 64 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Blake3> {
        let is_lower = !text.bytes().any(|digit| digit.is_ascii_uppercase());
        let hash = blake3::Hash::from_hex(text).ok().filter(|_| is_lower)?;
        Some(Blake3(hash.into()))
    }
}

impl Hashes {
    /// The hash of the file, whose size is `bytes`.
    ///
    /// # Panics
    /// If these are not the hashes of as many bytes.
    pub fn root(&self, bytes: u64) -> Blake3 {
        assert_eq!(
            self.0.len() as u64,
            bytes.div_ceil(CHUNK_BYTES),
            "a hash for each chunk"
        );
        match self.0.as_slice() {
            [] => Blake3::of(b""),
            [hash] => Blake3(*hash),
            hashes => {
                let (left, right) = halves(hashes, bytes);
                Blake3(merge_subtrees_root(&left, &right, Mode::Hash).into())
            }
        }
    }
}

/// The chaining values of the two subtrees of several chunks.
fn halves(hashes: &[ChunkHash], bytes: u64) -> (ChunkHash, ChunkHash) {
    let left_bytes = left_subtree_len(bytes);
    let (left, right) = hashes.split_at((left_bytes / CHUNK_BYTES) as usize);
    (
        subtree(left, left_bytes),
        subtree(right, bytes - left_bytes),
    )
}

/// The chaining value of a subtree. It is as deep as the logarithm of the number of chunks.
fn subtree(hashes: &[ChunkHash], bytes: u64) -> ChunkHash {
    match hashes {
        [hash] => *hash,
        hashes => {
            let (left, right) = halves(hashes, bytes);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

/// Hashes the chunks of a file, each by itself.
pub(crate) struct FileHasher {
    is_one_chunk: bool,
}

impl FileHasher {
    /// For a file of this size.
    pub(crate) fn new(bytes: u64) -> FileHasher {
        FileHasher {
            is_one_chunk: bytes <= CHUNK_BYTES,
        }
    }

    /// Hashes the pieces of the chunk with this index.
    pub(crate) fn chunk<'a>(
        &self,
        index: u64,
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> ChunkHash {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(index * CHUNK_BYTES);
        for piece in pieces {
            hasher.update(piece);
        }
        match self.is_one_chunk {
            true => hasher.finalize().into(),
            false => hasher.finalize_non_root(),
        }
    }
}

/// Hashes a file from its begin to its end, in both ways.
pub(crate) struct StreamHasher {
    blake3: Hasher,
    sha256: digest::Context,
}

impl StreamHasher {
    pub(crate) fn new() -> StreamHasher {
        StreamHasher {
            blake3: Hasher::new(),
            sha256: digest::Context::new(&digest::SHA256),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.blake3.update(bytes);
        self.sha256.update(bytes);
    }

    pub(crate) fn finish(self) -> (Blake3, Sha256) {
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(self.sha256.finish().as_ref());
        (Blake3(self.blake3.finalize().into()), Sha256(sha256))
    }
}

impl fmt::Display for Blake3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from(self.0).to_hex())
    }
}

impl fmt::Debug for Blake3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blake3({self})")
    }
}

impl fmt::Debug for Hashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hashes({})", self.0.len())
    }
}

impl Serialize for Blake3 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Blake3 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Blake3, D::Error> {
        let text = String::deserialize(deserializer)?;
        Blake3::parse(&text).ok_or_else(|| de::Error::custom("not a BLAKE3 of 64 hex digits"))
    }
}

impl Serialize for Hashes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(self.0.as_flattened()))
    }
}

impl<'de> Deserialize<'de> for Hashes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Hashes, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).map_err(de::Error::custom)?;
        match bytes.as_chunks() {
            (hashes, []) => Ok(Hashes(hashes.to_vec())),
            _ => Err(de::Error::custom("not a multiple of 32 bytes")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_add_up_to_the_hash_of_the_file() {
        let size = CHUNK_BYTES as usize;
        for bytes in [
            0,
            1,
            size - 1,
            size,
            size + 1,
            2 * size,
            3 * size + 7,
            5 * size,
            6 * size,
        ] {
            let content: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
            let hasher = FileHasher::new(bytes as u64);
            let chunks = (0..).zip(content.chunks(size));
            let hashes = chunks.map(|(index, chunk)| {
                let (first, rest) = chunk.split_at(chunk.len() / 3);
                hasher.chunk(index, [first, rest])
            });
            let hashes = Hashes(hashes.collect());
            assert_eq!(hashes.root(bytes as u64), Blake3::of(&content), "{bytes}");
        }
    }

    #[test]
    fn hashes_round_trip_in_json() {
        let hashes = Hashes(vec![[1; 32], [255; 32]]);
        let text = serde_json::to_string(&hashes).unwrap();
        assert_eq!(serde_json::from_str::<Hashes>(&text).unwrap(), hashes);
        let hash = Blake3::of(b"abc");
        let text = serde_json::to_string(&hash).unwrap();
        assert!(text.starts_with("\"6437b3ac38465133"), "{text}");
        assert_eq!(serde_json::from_str::<Blake3>(&text).unwrap(), hash);
        for text in ["\"AAAA\"", "\"!\"", "3"] {
            serde_json::from_str::<Hashes>(text).unwrap_err();
        }
        assert_eq!(Blake3::parse(&"A".repeat(64)), None);
        assert_eq!(Blake3::parse(&"a".repeat(63)), None);
    }
}
