//! Opens the chunks of one shard.

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};

use super::derive::{self, NONCE_BYTES};
use super::message::{cipher, is_same, nonce_of};
use super::{Block, Closed, DataKey, ShardPlace, Tag};

/// Opens the chunks of a shard, in any order and from any thread.
pub(crate) struct ShardOpener {
    cipher: LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    header_bytes: u64,
    tags: Vec<Tag>,
}

impl ShardOpener {
    /// The opener of a shard at a place, if the commitment is that of its key.
    pub(crate) fn new(
        key: &DataKey,
        salt: &Block,
        place: &ShardPlace<'_>,
        commitment: &Block,
        tags: Vec<Tag>,
    ) -> Result<ShardOpener, Closed> {
        let keys = derive::of_shard(key, salt, place);
        if !is_same(&keys.commitment, commitment) {
            return Err(Closed);
        }
        Ok(ShardOpener {
            cipher: cipher(&keys),
            nonce: keys.nonce,
            header_bytes: place.header_bytes,
            tags,
        })
    }

    /// Bytes of the header, which stay clear.
    pub(crate) fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Opens a chunk into `text`, which has as many bytes as `sealed`. `header` are the clear bytes
    /// at the start of the first chunk, and empty for the others. Where the chunk does not open,
    /// `text` is zeros.
    pub(crate) fn open(
        &self,
        index: u64,
        header: &[u8],
        sealed: &[u8],
        text: &mut [u8],
    ) -> Result<(), Closed> {
        let (nonce, tag) = self.nonce_and_tag(index);
        let header = Aad::from(header);
        let opened = self
            .cipher
            .open_separate_gather(nonce, header, sealed, tag, text);
        opened.map_err(|_| wipe(text))
    }

    /// Opens a chunk in place, as [`open`](ShardOpener::open) does.
    pub(crate) fn open_in_place(
        &self,
        index: u64,
        header: &[u8],
        text: &mut [u8],
    ) -> Result<(), Closed> {
        let (nonce, tag) = self.nonce_and_tag(index);
        let header = Aad::from(header);
        let opened = self
            .cipher
            .open_in_place_separate_tag(nonce, header, tag, text)
            .map(|_| ());
        opened.map_err(|_| wipe(text))
    }

    fn nonce_and_tag(&self, index: u64) -> (Nonce, &Tag) {
        let nonce = Nonce::assume_unique_for_key(nonce_of(&self.nonce, index));
        (nonce, &self.tags[index as usize])
    }
}

/// A failed open may leave bytes of the attacker's choice.
fn wipe(text: &mut [u8]) -> Closed {
    text.fill(0);
    Closed
}

impl std::fmt::Debug for ShardOpener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardOpener")
            .field("chunks", &self.tags.len())
            .finish_non_exhaustive()
    }
}
