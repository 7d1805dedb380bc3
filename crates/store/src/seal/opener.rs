//! Opens the chunks of one shard.

use std::sync::Arc;

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};

use super::derive::{self, NONCE_BYTES};
use super::message::{cipher, is_same, nonce_of};
use super::{Block, Closed, DataKey, FileSeal, ShardPlace, Tag};

/// Opens the chunks of a shard, in any order and from any thread.
pub(crate) struct ShardOpener {
    cipher: LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    header_bytes: u64,
    tags: Vec<Tag>,
    /// The seal of a file that has a key of its own.
    seal: Option<Arc<FileSeal>>,
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
            seal: None,
        })
    }

    /// The opener of a file with a key of its own.
    pub(crate) fn of_file(seal: FileSeal) -> ShardOpener {
        let keys = seal.keys();
        ShardOpener {
            cipher: cipher(&keys),
            nonce: keys.nonce,
            header_bytes: seal.header_bytes(),
            tags: seal.tags(),
            seal: Some(Arc::new(seal)),
        }
    }

    /// The seal of the file, if it has a key of its own.
    pub(crate) fn seal(&self) -> Option<&Arc<FileSeal>> {
        self.seal.as_ref()
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::seal::{Sealing, ShardSealer};

    const ID: &str = "0123456789abcdef0123456789abcdef";
    const CHUNK_BYTES: u64 = 64;
    const SALT: Block = Block([9; 32]);

    fn key() -> DataKey {
        DataKey::from_bytes(&[7; 32])
    }

    fn place() -> ShardPlace<'static> {
        ShardPlace {
            id: ID,
            rank: 1,
            number: 2,
            file_bytes: 150,
            header_bytes: 16,
            chunk_bytes: CHUNK_BYTES,
        }
    }

    fn text() -> Vec<u8> {
        (0..150).collect()
    }

    fn sealer() -> ShardSealer {
        let sealing = Sealing::new(Arc::new(key()), Vec::new());
        ShardSealer::new(&sealing, &SALT, &place())
    }

    /// The shard sealed, its commitment and its tags.
    fn sealed() -> (Vec<u8>, Block, Vec<Tag>) {
        let (mut bytes, sealer) = (text(), sealer());
        let chunks = bytes.chunks_mut(CHUNK_BYTES as usize);
        let tags = (0..).zip(chunks);
        let tags = tags.map(|(index, chunk)| sealer.seal(index, chunk).unwrap());
        let tags = tags.collect();
        (bytes, sealer.commitment(), tags)
    }

    fn open(opener: &ShardOpener, index: u64, bytes: &[u8]) -> Result<Vec<u8>, Closed> {
        let start = (index * CHUNK_BYTES) as usize;
        let chunk = &bytes[start..bytes.len().min(start + CHUNK_BYTES as usize)];
        let header_bytes = if index == 0 { 16 } else { 0 };
        let (header, chunk) = chunk.split_at(header_bytes);
        let mut text = vec![0xEE; chunk.len()];
        let opened = opener.open(index, header, chunk, &mut text);
        let mut again = chunk.to_vec();
        assert_eq!(opener.open_in_place(index, header, &mut again), opened);
        let is_wiped = text.iter().chain(&again).all(|&byte| byte == 0);
        assert!(opened.is_ok() || is_wiped, "a failed open hands out bytes");
        assert_eq!(text, again);
        opened.map(|()| text)
    }

    #[test]
    fn chunks_open_in_their_place_and_nowhere_else() {
        let (bytes, commitment, tags) = sealed();
        assert_eq!(bytes[..16], text()[..16], "the header stays clear");
        let opener = ShardOpener::new(&key(), &SALT, &place(), &commitment, tags.clone()).unwrap();
        assert_eq!(open(&opener, 0, &bytes).unwrap(), text()[16..64]);
        assert_eq!(open(&opener, 1, &bytes).unwrap(), text()[64..128]);
        assert_eq!(open(&opener, 2, &bytes).unwrap(), text()[128..]);
        // Any bit of a chunk, the header among them.
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let index = bit as u64 / 8 / CHUNK_BYTES;
            assert_eq!(open(&opener, index, &flipped), Err(Closed), "bit {bit}");
        }
        // Chunks of one shard that are exchanged with their tags.
        let mut swapped = bytes.clone();
        let (first, second) = swapped.split_at_mut(CHUNK_BYTES as usize);
        first[16..].swap_with_slice(&mut second[16..CHUNK_BYTES as usize]);
        let mut exchanged = tags.clone();
        exchanged.swap(0, 1);
        let opener = ShardOpener::new(&key(), &SALT, &place(), &commitment, exchanged).unwrap();
        assert_eq!(open(&opener, 0, &swapped), Err(Closed));
        assert_eq!(open(&opener, 1, &swapped), Err(Closed));
        for (index, bit) in (0..3).flat_map(|index| (0..128).map(move |bit| (index, bit))) {
            let mut flipped = tags.clone();
            flipped[index][bit / 8] ^= 1 << (bit % 8);
            let opener = ShardOpener::new(&key(), &SALT, &place(), &commitment, flipped).unwrap();
            assert_eq!(open(&opener, index as u64, &bytes), Err(Closed));
        }
    }

    #[test]
    fn a_shard_opens_in_its_place_with_its_key_alone() {
        let (bytes, commitment, tags) = sealed();
        let changes: &[fn(&mut ShardPlace<'_>)] = &[
            |place| place.id = "1123456789abcdef0123456789abcdef",
            |place| place.rank = 0,
            |place| place.number = 1,
            |place| place.file_bytes = 151,
            |place| place.header_bytes = 15,
            |place| place.chunk_bytes = 128,
        ];
        for change in changes {
            let mut elsewhere = place();
            change(&mut elsewhere);
            let opener = ShardOpener::new(&key(), &SALT, &elsewhere, &commitment, tags.clone());
            assert!(opener.is_err(), "the commitment is that of another place");
            // Also if the commitment is replaced by that of the other place.
            let sealing = Sealing::new(Arc::new(key()), Vec::new());
            let forged = ShardSealer::new(&sealing, &SALT, &elsewhere).commitment();
            let opener = ShardOpener::new(&key(), &SALT, &elsewhere, &forged, tags.clone());
            assert_eq!(open(&opener.unwrap(), 1, &bytes), Err(Closed));
        }
        let other = DataKey::from_bytes(&[8; 32]);
        assert!(ShardOpener::new(&other, &SALT, &place(), &commitment, tags.clone()).is_err());
        let salt = Block([8; 32]);
        assert!(ShardOpener::new(&key(), &salt, &place(), &commitment, tags).is_err());
    }

    #[test]
    fn a_chunk_is_sealed_alike_in_place_and_on_the_way() {
        let (bytes, _, tags) = sealed();
        let mut chunk = [0; 64];
        let tag = sealer().seal_to(1, &text()[64..128], &mut chunk).unwrap();
        assert_eq!((&chunk[..], tag), (&bytes[64..128], tags[1]));
    }

    #[test]
    #[should_panic(expected = "sealed once")]
    fn a_chunk_that_was_sealed_on_the_way_is_not_sealed_again() {
        let sealer = sealer();
        sealer.seal_to(1, &[1; 64], &mut [0; 64]).unwrap();
        sealer.seal(1, &mut [1; 64]).unwrap();
    }

    #[test]
    #[should_panic(expected = "sealed once")]
    fn a_chunk_is_sealed_once() {
        let sealer = sealer();
        for _ in 0..2 {
            sealer.seal(1, &mut [1; 64]).unwrap();
        }
    }
}
