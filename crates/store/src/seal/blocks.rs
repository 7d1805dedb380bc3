//! Files sealed by blocks, which open one by one: rows that are read by id.
//!
//! A chunk is too much to read for a row. Such a file is sealed while it is written, before the
//! save that links it into a checkpoint knows the file's size or its number. So it has a key of its
//! own, drawn for it alone. The part holds that key encrypted under the data key of the attempt, and
//! the size of the file; the checkpoint holds the tags, in a sealed tensor. Both are authenticated
//! there, so no block can be cut off or added.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use penstock_io::process;
use zeroize::Zeroizing;

use super::derive::{self, MessageKeys, NONCE_BYTES};
use super::message::{cipher, is_same, nonce_of};
use super::record::{self, Seal, Witness};
use super::{Block, Closed, DataKey, KeyError, MessageKey, Sealing, Sha256, Tag, Text};
use crate::error::{Error, Result};

/// Sealing of one file by blocks, in any order and from any thread; each block once.
pub struct BlockSealer {
    key: DataKey,
    cipher: LessSafeKey,
    keys: MessageKeys,
    header_bytes: u64,
    block_bytes: u64,
    /// A bit for each block that is sealed; it grows with the file.
    sealed: Mutex<Vec<u64>>,
    process: u32,
    witness: Option<Witness>,
}

impl BlockSealer {
    /// A sealer with a new key, for a file whose data begin at `header_bytes`.
    ///
    /// # Errors
    /// [`KeyError::Entropy`].
    pub fn new(header_bytes: u64, block_bytes: u64) -> std::result::Result<BlockSealer, KeyError> {
        let key = DataKey::generate()?;
        let keys = derive::of_blocks(&key, header_bytes, block_bytes);
        Ok(BlockSealer {
            cipher: cipher(&keys),
            key,
            keys,
            header_bytes,
            block_bytes,
            sealed: Mutex::default(),
            process: process::id(),
            witness: record::witness(),
        })
    }

    /// Bytes before the first block, which stay clear.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Bytes of a block; the last one may be shorter.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Seals consecutive blocks in place, and returns their tags.
    ///
    /// # Errors
    /// In a fork of the process that began.
    ///
    /// # Panics
    /// If a block was sealed before.
    pub fn seal(&self, first: u64, bytes: &mut [u8]) -> Result<Vec<[u8; 16]>> {
        if process::id() != self.process {
            let process = self.process;
            return Err(Error::Io(penstock_io::Error::Forked { process }));
        }
        let blocks = bytes.chunks_mut(self.block_bytes as usize);
        self.claim(first, blocks.len() as u64);
        let seal = |(index, block): (u64, &mut [u8])| {
            let nonce = nonce_of(&self.keys.nonce, index);
            if let Some(witness) = &self.witness {
                let key = Sha256::of(self.keys.key.as_slice()).0;
                witness(&Seal { key, nonce });
            }
            let nonce = Nonce::assume_unique_for_key(nonce);
            let tag = self
                .cipher
                .seal_in_place_separate_tag(nonce, Aad::empty(), block)
                .expect("a block is far shorter than 64 GiB");
            tag.as_ref().try_into().expect("tags have 16 bytes")
        };
        Ok((first..).zip(blocks).map(seal).collect())
    }

    /// Notes that blocks are sealed now.
    fn claim(&self, first: u64, count: u64) {
        let mut sealed = self.sealed.lock().unwrap_or_else(PoisonError::into_inner);
        let words = (first + count).div_ceil(u64::from(u64::BITS)) as usize;
        if sealed.len() < words {
            sealed.resize(words, 0);
        }
        for block in first..first + count {
            let word = &mut sealed[(block / u64::from(u64::BITS)) as usize];
            let bit = 1 << (block % u64::from(u64::BITS));
            assert!(*word & bit == 0, "block {block} is sealed once");
            *word |= bit;
        }
    }

    /// Binds the file to its key.
    pub(crate) fn commitment(&self) -> Block {
        self.keys.commitment
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
}

impl fmt::Debug for BlockSealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockSealer")
            .field("block_bytes", &self.block_bytes)
            .finish_non_exhaustive()
    }
}

/// The key of a file sealed by blocks, as a part has it.
pub(crate) struct BlockKey {
    key: DataKey,
    pub(crate) header_bytes: u64,
    pub(crate) block_bytes: u64,
}

impl BlockKey {
    /// Opens the key of file `number` of a part.
    pub(crate) fn unwrap(
        wrapping: &MessageKey,
        wrapped: &Text,
        header_bytes: u64,
        block_bytes: u64,
        commitment: &Block,
    ) -> std::result::Result<BlockKey, Closed> {
        let bytes = Zeroizing::new(wrapping.open(wrapped)?);
        let bytes: &[u8; 32] = bytes.as_slice().try_into().map_err(|_| Closed)?;
        let key = DataKey::from_bytes(bytes);
        let keys = derive::of_blocks(&key, header_bytes, block_bytes);
        if !is_same(&keys.commitment, commitment) {
            return Err(Closed);
        }
        Ok(BlockKey {
            key,
            header_bytes,
            block_bytes,
        })
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockKey")
            .field("block_bytes", &self.block_bytes)
            .finish_non_exhaustive()
    }
}

/// Opens the blocks of a file, in any order and from any thread.
pub struct BlockOpener {
    cipher: LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    header_bytes: u64,
    block_bytes: u64,
    tags: Vec<Tag>,
}

impl BlockOpener {
    /// The opener of a file of so many bytes; `None` if the number of tags is not that of the
    /// blocks.
    pub(crate) fn new(key: &BlockKey, tags: Vec<Tag>, bytes: u64) -> Option<BlockOpener> {
        let blocks = bytes.checked_sub(key.header_bytes)?;
        if tags.len() as u64 != blocks.div_ceil(key.block_bytes) {
            return None;
        }
        let keys = derive::of_blocks(&key.key, key.header_bytes, key.block_bytes);
        Some(BlockOpener {
            cipher: cipher(&keys),
            nonce: keys.nonce,
            header_bytes: key.header_bytes,
            block_bytes: key.block_bytes,
            tags,
        })
    }

    /// Bytes before the first block.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Bytes of a block; the last one may be shorter.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Opens a block into memory of the same size; returns whether it opened. If not, the memory
    /// is zeros.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn open(&self, block: u64, sealed: &[u8], text: &mut [u8]) -> bool {
        let (nonce, tag) = self.nonce_and_tag(block);
        let cipher = &self.cipher;
        let opened = cipher.open_separate_gather(nonce, Aad::empty(), sealed, tag, text);
        opened.is_ok() || wiped(text)
    }

    /// Opens a block in place, as [`open`](BlockOpener::open) does.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn open_in_place(&self, block: u64, text: &mut [u8]) -> bool {
        let (nonce, tag) = self.nonce_and_tag(block);
        let cipher = &self.cipher;
        let opened = cipher.open_in_place_separate_tag(nonce, Aad::empty(), tag, text);
        opened.is_ok() || wiped(text)
    }

    fn nonce_and_tag(&self, block: u64) -> (Nonce, &Tag) {
        let nonce = Nonce::assume_unique_for_key(nonce_of(&self.nonce, block));
        (nonce, &self.tags[block as usize])
    }
}

/// A failed open may leave bytes of the attacker's choice.
fn wiped(text: &mut [u8]) -> bool {
    text.fill(0);
    false
}

impl fmt::Debug for BlockOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockOpener")
            .field("blocks", &self.tags.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";
    const SALT: Block = Block([9; 32]);
    const HEADER_BYTES: u64 = 128;
    const BLOCK_BYTES: u64 = 64;

    fn sealing() -> Sealing {
        Sealing::new(Arc::new(DataKey::from_bytes(&[7; 32])), Vec::new())
    }

    fn text() -> Vec<u8> {
        (0..150).collect()
    }

    fn opened_key(sealer: &BlockSealer, number: u32) -> std::result::Result<BlockKey, Closed> {
        let wrapped = sealer.wrap(&sealing(), &SALT, ID, 0, 3);
        let wrapping = MessageKey::of_file(sealing().key(), &SALT, ID, 0, number);
        let commitment = sealer.commitment();
        BlockKey::unwrap(&wrapping, &wrapped, HEADER_BYTES, BLOCK_BYTES, &commitment)
    }

    fn opener(sealer: &BlockSealer, tags: Vec<Tag>) -> Option<BlockOpener> {
        let key = opened_key(sealer, 3).unwrap();
        BlockOpener::new(&key, tags, HEADER_BYTES + 150)
    }

    #[test]
    fn blocks_open_in_their_place_and_nowhere_else() {
        let sealer = BlockSealer::new(HEADER_BYTES, BLOCK_BYTES).unwrap();
        let mut bytes = text();
        let (first, rest) = bytes.split_at_mut(64);
        let behind = sealer.seal(1, rest).unwrap();
        let mut tags = sealer.seal(0, first).unwrap();
        tags.extend(behind);
        let opener = opener(&sealer, tags.clone()).unwrap();
        let mut again = Vec::new();
        for (index, block) in (0..).zip(bytes.chunks(64)) {
            let mut text = vec![0xEE; block.len()];
            assert!(opener.open(index, block, &mut text));
            let mut in_place = block.to_vec();
            assert!(opener.open_in_place(index, &mut in_place));
            assert_eq!(text, in_place);
            again.extend(text);
        }
        assert_eq!(again, text());
        for bit in 0..150 * 8 {
            let index = bit / 8 / 64;
            let mut block = bytes.chunks(64).nth(index).unwrap().to_vec();
            block[bit / 8 - index * 64] ^= 1 << (bit % 8);
            let mut text = vec![0xEE; block.len()];
            assert!(!opener.open(index as u64, &block, &mut text));
            assert!(!opener.open_in_place(index as u64, &mut block));
            assert!(text.iter().chain(&block).all(|&byte| byte == 0));
        }
        let mut text = vec![0; 64];
        assert!(!opener.open(1, &bytes[..64], &mut text), "another place");
        let mut text = vec![0; 21];
        assert!(!opener.open(2, &bytes[128..149], &mut text), "it was cut");
        // Blocks that are exchanged with their tags.
        tags.swap(0, 1);
        let opener = self::opener(&sealer, tags).unwrap();
        for (index, other) in [(0, &bytes[64..128]), (1, &bytes[..64])] {
            assert!(!opener.open(index, other, &mut [0; 64]), "exchanged");
        }
    }

    #[test]
    fn a_file_opens_with_its_key_tags_and_place_alone() {
        let sealer = BlockSealer::new(HEADER_BYTES, BLOCK_BYTES).unwrap();
        let tags = sealer.seal(0, &mut text()).unwrap();
        assert!(opened_key(&sealer, 2).is_err(), "the key of another file");
        assert!(opener(&sealer, tags[..2].to_vec()).is_none());
        let wrapped = sealer.wrap(&sealing(), &SALT, ID, 0, 3);
        let wrapping = MessageKey::of_file(sealing().key(), &SALT, ID, 0, 3);
        let commitment = sealer.commitment();
        let other = BlockKey::unwrap(&wrapping, &wrapped, HEADER_BYTES, 32, &commitment);
        assert!(other.is_err(), "blocks of another size");
        let sealed = |sealer: &BlockSealer| {
            let mut bytes = text();
            sealer.seal(10, &mut bytes).unwrap();
            bytes
        };
        let other = BlockSealer::new(HEADER_BYTES, BLOCK_BYTES).unwrap();
        assert_ne!(sealed(&sealer), sealed(&other), "each file has its own key");
    }

    #[test]
    fn a_fork_seals_no_block() {
        let mut sealer = BlockSealer::new(HEADER_BYTES, BLOCK_BYTES).unwrap();
        sealer.process = sealer.process.wrapping_add(1);
        let mut bytes = text();
        let result = sealer.seal(0, &mut bytes);
        let is_refused = matches!(result, Err(Error::Io(penstock_io::Error::Forked { .. })));
        assert!(is_refused, "{result:?}");
        assert_eq!(bytes, text());
    }

    #[test]
    #[should_panic(expected = "sealed once")]
    fn a_block_is_sealed_once() {
        let sealer = BlockSealer::new(HEADER_BYTES, BLOCK_BYTES).unwrap();
        sealer.seal(0, &mut text()).unwrap();
        sealer.seal(2, &mut [1; 64]).unwrap();
    }
}
