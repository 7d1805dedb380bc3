//! Seals the chunks of one shard, each once.

use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use penstock_io::process;

use super::derive::{self, MessageKeys};
use super::message::{cipher, nonce_of};
use super::{Block, Sealing, ShardPlace, Tag};
use crate::error::{Error, Result};

/// Seals the chunks of a shard, in any order and from any thread.
///
/// Two texts under one nonce would give away their difference and the key of the tags. So the
/// first text of a chunk is its last: a bitmap refuses a second one, and so does a fork, whose
/// bitmap would be a copy.
pub(crate) struct ShardSealer {
    cipher: LessSafeKey,
    keys: MessageKeys,
    header_bytes: usize,
    /// A bit for each chunk that is sealed.
    sealed: Vec<AtomicU64>,
    process: u32,
    sealing: Sealing,
}

impl ShardSealer {
    /// The sealer of a shard at a place, with the salt of its part.
    pub(crate) fn new(sealing: &Sealing, salt: &Block, place: &ShardPlace<'_>) -> ShardSealer {
        let keys = derive::of_shard(sealing.key(), salt, place);
        let chunks = place.file_bytes.div_ceil(place.chunk_bytes);
        let words = chunks.div_ceil(u64::from(u64::BITS));
        ShardSealer {
            cipher: cipher(&keys),
            keys,
            header_bytes: usize::try_from(place.header_bytes).expect("headers are in memory"),
            sealed: (0..words).map(|_| AtomicU64::new(0)).collect(),
            process: process::id(),
            sealing: sealing.clone(),
        }
    }

    /// Binds the shard to its key.
    pub(crate) fn commitment(&self) -> Block {
        self.keys.commitment
    }

    /// Seals a chunk in place, and returns its tag. The header, at the start of the first chunk,
    /// stays clear and is authenticated with it.
    ///
    /// # Errors
    /// In a fork of the process that began.
    ///
    /// # Panics
    /// If the chunk was sealed before.
    pub(crate) fn seal(&self, index: u64, chunk: &mut [u8]) -> Result<Tag> {
        let nonce = self.use_up(index)?;
        let header_bytes = if index == 0 { self.header_bytes } else { 0 };
        let (header, text) = chunk.split_at_mut(header_bytes);
        let tag = self
            .cipher
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), text)
            .expect("a chunk is far shorter than 64 GiB");
        Ok(tag.as_ref().try_into().expect("tags have 16 bytes"))
    }

    /// Seals a chunk without a header from `text` into `sealed`, and returns its tag. Another
    /// thread may be writing to `text`: only the cipher reads it, each byte once.
    ///
    /// # Errors
    /// As [`seal`](ShardSealer::seal).
    ///
    /// # Panics
    /// As [`seal`](ShardSealer::seal), if the lengths differ, or for the chunk of the header.
    pub(crate) fn seal_to(&self, index: u64, text: &[u8], sealed: &mut [u8]) -> Result<Tag> {
        assert!(index > 0, "the header stays clear");
        let nonce = self.use_up(index)?;
        let mut tag = Tag::default();
        self.cipher
            .seal_out_of_place_scatter(nonce, Aad::empty(), text, sealed, &[], &mut tag)
            .expect("a chunk is as long as its place, and far shorter than 64 GiB");
        Ok(tag)
    }

    /// The nonce of a chunk, for its only message.
    fn use_up(&self, index: u64) -> Result<Nonce> {
        if process::id() != self.process {
            let process = self.process;
            return Err(Error::Io(penstock_io::Error::Forked { process }));
        }
        let bit = 1 << (index % u64::from(u64::BITS));
        let word = &self.sealed[(index / u64::from(u64::BITS)) as usize];
        let before = word.fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "chunk {index} is sealed once");
        let nonce = nonce_of(&self.keys.nonce, index);
        self.sealing.witness(self.keys.key.as_slice(), nonce);
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::seal::DataKey;

    /// A fork has the bitmap as it was: a chunk that the parent seals next is free in it, too.
    #[test]
    fn a_fork_seals_nothing() {
        let sealing = Sealing::new(Arc::new(DataKey::from_bytes(&[7; 32])), Vec::new());
        let place = ShardPlace {
            id: "0123456789abcdef0123456789abcdef",
            rank: 0,
            number: 0,
            file_bytes: 300,
            header_bytes: 16,
            chunk_bytes: 64,
        };
        let mut sealer = ShardSealer::new(&sealing, &Block([9; 32]), &place);
        sealer.seal(0, &mut [1; 64]).unwrap();
        // The state of a sealer in a fork: the process that began is another one.
        sealer.process = sealer.process.wrapping_add(1);
        let (mut chunk, mut sealed) = ([1; 64], [0; 64]);
        let forked = [
            sealer.seal(1, &mut chunk).map(|_| ()),
            sealer.seal_to(2, &[1; 64], &mut sealed).map(|_| ()),
        ];
        for result in forked {
            let is_refused = matches!(result, Err(Error::Io(penstock_io::Error::Forked { .. })));
            assert!(is_refused, "{result:?}");
        }
        assert_eq!((chunk, sealed), ([1; 64], [0; 64]));
    }
}
