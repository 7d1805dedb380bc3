//! Files with a key of their own that are sealed by chunks: states that change, in files.
//!
//! An optimizer writes its state again at each step, in place of files that nobody needs any more.
//! A checkpoint that links such a file learns of it when it is written. So each writing of a file
//! draws a key for it alone: no counter has to survive a crash for a key and a nonce to stay
//! unused. Each chunk is sealed once under that key. The part of a checkpoint holds the key
//! encrypted under the data key of its attempt, and the tags: the file opens as any other shard,
//! also in several checkpoints.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use penstock_io::process;
use zeroize::Zeroizing;

use super::derive::{self, MessageKeys};
use super::message::{cipher, is_same, nonce_of};
use super::record::{self, Seal, Witness};
use super::{Block, Closed, DataKey, KeyError, MessageKey, Sealing, Sha256, ShardPlace, Tag, Text};
use crate::error::{Error, Result};

/// The key of one file and the tags of its chunks: seals each chunk once, and opens it.
pub struct FileSeal {
    key: DataKey,
    cipher: LessSafeKey,
    keys: MessageKeys,
    file_bytes: u64,
    header_bytes: u64,
    chunk_bytes: u64,
    /// A bit for each chunk whose nonce is used up.
    sealed: Vec<AtomicU64>,
    tags: Vec<OnceLock<Tag>>,
    process: u32,
    witness: Option<Witness>,
}

impl FileSeal {
    /// A new key for a file of so many bytes, of which the first `header_bytes` stay clear.
    ///
    /// # Errors
    /// [`KeyError::Entropy`].
    ///
    /// # Panics
    /// If the header is longer than the file or a chunk.
    pub fn new(
        file_bytes: u64,
        header_bytes: u64,
        chunk_bytes: u64,
    ) -> std::result::Result<FileSeal, KeyError> {
        let key = DataKey::generate()?;
        Ok(FileSeal::of(key, file_bytes, header_bytes, chunk_bytes))
    }

    fn of(key: DataKey, file_bytes: u64, header_bytes: u64, chunk_bytes: u64) -> FileSeal {
        assert!(header_bytes <= file_bytes.min(chunk_bytes), "it is one");
        let keys = derive::of_chunks(&key, file_bytes, header_bytes, chunk_bytes);
        let chunks = file_bytes.div_ceil(chunk_bytes);
        let words = chunks.div_ceil(u64::from(u64::BITS));
        FileSeal {
            cipher: cipher(&keys),
            key,
            keys,
            file_bytes,
            header_bytes,
            chunk_bytes,
            sealed: (0..words).map(|_| AtomicU64::new(0)).collect(),
            tags: (0..chunks).map(|_| OnceLock::new()).collect(),
            process: process::id(),
            witness: record::witness(),
        }
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes before the first sealed one.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Seals consecutive chunks in place, the first of which has this number. The header at the
    /// start of the file stays clear, and is authenticated.
    ///
    /// # Errors
    /// In a fork of the process that began.
    ///
    /// # Panics
    /// If a chunk was sealed before, or the bytes are not whole chunks of the file.
    pub fn seal(&self, first: u64, bytes: &mut [u8]) -> Result<()> {
        if process::id() != self.process {
            let process = self.process;
            return Err(Error::Io(penstock_io::Error::Forked { process }));
        }
        self.check(first, bytes.len());
        for (index, chunk) in (first..).zip(bytes.chunks_mut(self.chunk_bytes as usize)) {
            let nonce = self.use_up(index);
            let (header, text) = self.split(index, chunk);
            let tag = self
                .cipher
                .seal_in_place_separate_tag(nonce, Aad::from(header), text)
                .expect("a chunk is far shorter than 64 GiB");
            let tag = tag.as_ref().try_into().expect("tags have 16 bytes");
            self.tags[index as usize].get_or_init(|| tag);
        }
        Ok(())
    }

    /// Opens consecutive sealed chunks in place; returns the number of the first one that does not
    /// open, which is zeros then. Those behind it stay sealed.
    ///
    /// # Panics
    /// If a chunk was not sealed, or the bytes are not whole chunks of the file.
    pub fn open(&self, first: u64, bytes: &mut [u8]) -> Option<u64> {
        self.check(first, bytes.len());
        (first..)
            .zip(bytes.chunks_mut(self.chunk_bytes as usize))
            .find_map(|(index, chunk)| {
                let tag = self.tags[index as usize].get();
                let tag = tag.expect("it was sealed before");
                let nonce = Nonce::assume_unique_for_key(nonce_of(&self.keys.nonce, index));
                let (header, text) = self.split(index, chunk);
                let cipher = &self.cipher;
                let opened = cipher.open_in_place_separate_tag(nonce, Aad::from(header), tag, text);
                if opened.is_ok() {
                    return None;
                }
                // A failed open may leave bytes of the attacker's choice.
                text.fill(0);
                Some(index)
            })
    }

    /// Whether all chunks are sealed.
    pub fn is_whole(&self) -> bool {
        self.tags.iter().all(|tag| tag.get().is_some())
    }

    /// The nonce of a chunk, for its only message.
    fn use_up(&self, index: u64) -> Nonce {
        let bit = 1 << (index % u64::from(u64::BITS));
        let word = &self.sealed[(index / u64::from(u64::BITS)) as usize];
        let before = word.fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "chunk {index} is sealed once");
        let nonce = nonce_of(&self.keys.nonce, index);
        if let Some(witness) = &self.witness {
            let key = Sha256::of(self.keys.key.as_slice()).0;
            witness(&Seal { key, nonce });
        }
        Nonce::assume_unique_for_key(nonce)
    }

    fn split<'a>(&self, index: u64, chunk: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
        let header_bytes = if index == 0 { self.header_bytes } else { 0 };
        let (header, text) = chunk.split_at_mut(header_bytes as usize);
        (header, text)
    }

    /// That bytes are whole chunks of the file: a part of one would get the tag of all.
    fn check(&self, first: u64, bytes: usize) {
        let begin = first * self.chunk_bytes;
        let end = begin + bytes as u64;
        let is_whole = end == self.file_bytes || end.is_multiple_of(self.chunk_bytes);
        assert!(
            is_whole && end <= self.file_bytes,
            "bytes {begin}..{end} are no whole chunks of {}",
            self.file_bytes
        );
    }

    /// Binds the file to its key.
    pub(crate) fn commitment(&self) -> Block {
        self.keys.commitment
    }

    /// The keys of its chunks.
    pub(super) fn keys(&self) -> MessageKeys {
        derive::of_chunks(
            &self.key,
            self.file_bytes,
            self.header_bytes,
            self.chunk_bytes,
        )
    }

    /// The tags of all chunks.
    ///
    /// # Panics
    /// If one is not sealed yet.
    pub(crate) fn tags(&self) -> Vec<Tag> {
        let tags = self.tags.iter();
        tags.map(|tag| *tag.get().expect("all chunks are sealed"))
            .collect()
    }

    /// The key of the file, encrypted for the part of a rank, in which it is file `number`.
    pub(crate) fn wrap(
        &self,
        sealing: &Sealing,
        salt: &Block,
        id: &str,
        rank: u32,
        number: u32,
    ) -> Text {
        MessageKey::of_file(sealing.key(), salt, id, rank, number).wrap(sealing, &self.key)
    }

    /// Opens the key of a complete file at a place in a part.
    pub(crate) fn unwrap(
        data_key: &DataKey,
        salt: &Block,
        place: &ShardPlace<'_>,
        wrapped: &Text,
        commitment: &Block,
        tags: &[Tag],
    ) -> std::result::Result<FileSeal, Closed> {
        let wrapping = MessageKey::of_file(data_key, salt, place.id, place.rank, place.number);
        let bytes = Zeroizing::new(wrapping.open(wrapped)?);
        let bytes: &[u8; 32] = bytes.as_slice().try_into().map_err(|_| Closed)?;
        let key = DataKey::from_bytes(bytes);
        let seal = FileSeal::of(key, place.file_bytes, place.header_bytes, place.chunk_bytes);
        if !is_same(&seal.keys.commitment, commitment) || tags.len() != seal.tags.len() {
            return Err(Closed);
        }
        for (place, tag) in seal.tags.iter().zip(tags) {
            place.get_or_init(|| *tag);
        }
        for word in &seal.sealed {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        Ok(seal)
    }
}

impl fmt::Debug for FileSeal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSeal")
            .field("file_bytes", &self.file_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";
    const SALT: Block = Block([9; 32]);
    const CHUNK_BYTES: u64 = 1 << 20;
    const HEADER_BYTES: u64 = 4096;
    const FILE_BYTES: u64 = 2 * CHUNK_BYTES + 150;

    fn sealing() -> Sealing {
        Sealing::new(Arc::new(DataKey::from_bytes(&[7; 32])), Vec::new())
    }

    fn text() -> Vec<u8> {
        (0..FILE_BYTES).map(|at| ((at * 31) >> 3) as u8).collect()
    }

    fn sealed() -> (FileSeal, Vec<u8>) {
        let seal = FileSeal::new(FILE_BYTES, HEADER_BYTES, CHUNK_BYTES).unwrap();
        let mut bytes = text();
        // In two calls, the later chunks first.
        let (first, rest) = bytes.split_at_mut(CHUNK_BYTES as usize);
        seal.seal(1, rest).unwrap();
        assert!(!seal.is_whole());
        seal.seal(0, first).unwrap();
        assert!(seal.is_whole());
        (seal, bytes)
    }

    fn unwrapped(
        seal: &FileSeal,
        number: u32,
        file_bytes: u64,
        tags: &[Tag],
    ) -> std::result::Result<FileSeal, Closed> {
        let wrapped = seal.wrap(&sealing(), &SALT, ID, 0, 3);
        let place = ShardPlace {
            id: ID,
            rank: 0,
            number,
            file_bytes,
            header_bytes: HEADER_BYTES,
            chunk_bytes: CHUNK_BYTES,
        };
        let (key, commitment) = (DataKey::from_bytes(&[7; 32]), seal.commitment());
        FileSeal::unwrap(&key, &SALT, &place, &wrapped, &commitment, tags)
    }

    #[test]
    fn a_file_opens_chunk_by_chunk_and_by_its_part() {
        let (seal, bytes) = sealed();
        assert_eq!(bytes[..4096], text()[..4096], "the header stays clear");
        let clear = bytes
            .iter()
            .zip(text())
            .filter(|(one, other)| *one == other);
        assert!(clear.count() < 4096 + FILE_BYTES as usize / 100);
        let again = unwrapped(&seal, 3, FILE_BYTES, &seal.tags()).unwrap();
        for one in [&seal, &again] {
            let mut copy = bytes.clone();
            assert_eq!(one.open(0, &mut copy), None);
            assert_eq!(copy, text());
            let mut last = bytes[2 * CHUNK_BYTES as usize..].to_vec();
            assert_eq!(one.open(2, &mut last), None);
            assert_eq!(last, text()[2 * CHUNK_BYTES as usize..]);
        }
    }

    #[test]
    fn a_changed_chunk_does_not_open() {
        let (seal, bytes) = sealed();
        let chunk = CHUNK_BYTES as usize;
        for (at, index) in [(0, 0), (4095, 0), (4096, 0), (chunk, 1), (3 * chunk - 1, 2)] {
            let mut changed = bytes.clone();
            let at = at.min(changed.len() - 1);
            changed[at] ^= 1;
            assert_eq!(seal.open(0, &mut changed), Some(index), "byte {at}");
            let begin = (index as usize * chunk).max(4096);
            let end = changed.len().min((index as usize + 1) * chunk);
            assert!(changed[begin..end].iter().all(|&byte| byte == 0));
        }
        // A chunk in the place of another one of the file.
        let mut moved = bytes[chunk..2 * chunk].to_vec();
        assert_eq!(seal.open(0, &mut moved), Some(0));
        // An older writing of the same chunk has another key.
        let (older, mut old) = sealed();
        assert_eq!(seal.open(0, &mut old), Some(0));
        assert_ne!(older.commitment(), seal.commitment());
    }

    #[test]
    fn a_key_opens_in_its_place_and_for_its_sizes_alone() {
        let (seal, _) = sealed();
        let tags = seal.tags();
        assert!(unwrapped(&seal, 2, FILE_BYTES, &tags).is_err());
        assert!(unwrapped(&seal, 3, FILE_BYTES + 1, &tags).is_err());
        assert!(unwrapped(&seal, 3, FILE_BYTES, &tags[1..]).is_err());
    }

    #[test]
    #[should_panic(expected = "sealed once")]
    fn a_chunk_is_sealed_once() {
        let (seal, _) = sealed();
        seal.seal(1, &mut text()[CHUNK_BYTES as usize..]).unwrap();
    }

    #[test]
    #[should_panic(expected = "sealed once")]
    fn a_key_from_a_part_seals_nothing() {
        let (seal, _) = sealed();
        let again = unwrapped(&seal, 3, FILE_BYTES, &seal.tags()).unwrap();
        again.seal(1, &mut text()[CHUNK_BYTES as usize..]).unwrap();
    }

    #[test]
    #[should_panic(expected = "no whole chunks")]
    fn a_part_of_a_chunk_is_not_sealed() {
        let seal = FileSeal::new(FILE_BYTES, HEADER_BYTES, CHUNK_BYTES).unwrap();
        seal.seal(1, &mut [1; 4096]).unwrap();
    }
}
