//! Keys derived from the data key of an attempt.
//!
//! The context of a derivation says what its keys are for, with every number that a reader takes
//! from the description: another place or another size gives other keys. The salt is drawn for
//! each part and each manifest, so two processes that both act as one rank share no key either.

use std::path::Path;

use aws_lc_rs::hkdf::{self, HKDF_SHA256, KeyType, Salt};
use aws_lc_rs::rand;
use zeroize::Zeroizing;

use super::{Block, DataKey, KeyError};
use crate::error::{Error, Result};

/// Bytes of a nonce of AES-GCM.
pub(super) const NONCE_BYTES: usize = 12;
const KEY_BYTES: usize = 32;
const COMMITMENT_BYTES: usize = 32;

const SHARD: &str = "penstock.v1.shard";
const PART: &str = "penstock.v1.part";
const METADATA: &str = "penstock.v1.metadata";
const MANIFEST: &str = "penstock.v1.manifest";
const FILE: &str = "penstock.v1.file";
const BLOCKS: &str = "penstock.v1.blocks";
const CHUNKS: &str = "penstock.v1.chunks";

/// The place of a shard, which its keys are bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardPlace<'a> {
    pub(crate) id: &'a str,
    pub(crate) rank: u32,
    /// Number of the shard among those of its rank.
    pub(crate) number: u32,
    pub(crate) file_bytes: u64,
    pub(crate) header_bytes: u64,
    pub(crate) chunk_bytes: u64,
}

/// The keys of a shard, a part or the metadata.
pub(super) struct MessageKeys {
    pub(super) key: Zeroizing<[u8; KEY_BYTES]>,
    pub(super) nonce: [u8; NONCE_BYTES],
    /// Binds the ciphertext to the key: AES-GCM alone lets one ciphertext open under two keys.
    pub(super) commitment: Block,
}

/// A new salt, for the checkpoint at a path.
pub(crate) fn draw_salt(path: &Path) -> Result<Block> {
    let mut salt = Block([0; 32]);
    rand::fill(&mut salt.0).map_err(|_| Error::Key {
        path: path.to_owned(),
        source: KeyError::Entropy,
    })?;
    Ok(salt)
}

pub(super) fn of_shard(key: &DataKey, salt: &Block, place: &ShardPlace<'_>) -> MessageKeys {
    let mut context = context(SHARD, place.id);
    context.extend_from_slice(&place.rank.to_le_bytes());
    context.extend_from_slice(&place.number.to_le_bytes());
    for number in [place.file_bytes, place.header_bytes, place.chunk_bytes] {
        context.extend_from_slice(&number.to_le_bytes());
    }
    message_keys(key, salt, &context)
}

pub(super) fn of_part(key: &DataKey, salt: &Block, id: &str, rank: u32) -> MessageKeys {
    let mut context = context(PART, id);
    context.extend_from_slice(&rank.to_le_bytes());
    message_keys(key, salt, &context)
}

/// The keys that wrap the key of a file that has one of its own.
pub(super) fn of_file(
    key: &DataKey,
    salt: &Block,
    id: &str,
    rank: u32,
    number: u32,
) -> MessageKeys {
    let mut context = context(FILE, id);
    context.extend_from_slice(&rank.to_le_bytes());
    context.extend_from_slice(&number.to_le_bytes());
    message_keys(key, salt, &context)
}

/// The keys of the blocks of a file, from its own key, which is drawn for it alone: so no salt.
pub(super) fn of_blocks(file_key: &DataKey, header_bytes: u64, block_bytes: u64) -> MessageKeys {
    let mut context = context(BLOCKS, "");
    for number in [header_bytes, block_bytes] {
        context.extend_from_slice(&number.to_le_bytes());
    }
    message_keys(file_key, &Block([0; 32]), &context)
}

/// The keys of a file that is sealed by chunks with a key of its own, for which it holds as well.
pub(super) fn of_chunks(
    file_key: &DataKey,
    file_bytes: u64,
    header_bytes: u64,
    chunk_bytes: u64,
) -> MessageKeys {
    let mut context = context(CHUNKS, "");
    for number in [file_bytes, header_bytes, chunk_bytes] {
        context.extend_from_slice(&number.to_le_bytes());
    }
    message_keys(file_key, &Block([0; 32]), &context)
}

pub(super) fn of_metadata(key: &DataKey, salt: &Block, id: &str) -> MessageKeys {
    message_keys(key, salt, &context(METADATA, id))
}

/// The commitment of a manifest, and the key of its MAC.
pub(super) fn of_manifest(key: &DataKey, salt: &Block, id: &str) -> (Block, Zeroizing<[u8; 32]>) {
    let mut bytes = Zeroizing::new([0; COMMITMENT_BYTES + 32]);
    expand(key, salt, &context(MANIFEST, id), bytes.as_mut_slice());
    let (commitment, mac) = bytes.split_at(COMMITMENT_BYTES);
    let commitment = Block(commitment.try_into().expect("it is as long"));
    let mut mac_key = Zeroizing::new([0; 32]);
    mac_key.copy_from_slice(mac);
    (commitment, mac_key)
}

fn message_keys(key: &DataKey, salt: &Block, context: &[u8]) -> MessageKeys {
    let mut bytes = Zeroizing::new([0; KEY_BYTES + NONCE_BYTES + COMMITMENT_BYTES]);
    expand(key, salt, context, bytes.as_mut_slice());
    let (derived, rest) = bytes.split_at(KEY_BYTES);
    let (nonce, commitment) = rest.split_at(NONCE_BYTES);
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    key.copy_from_slice(derived);
    MessageKeys {
        key,
        nonce: nonce.try_into().expect("it is as long"),
        commitment: Block(commitment.try_into().expect("it is as long")),
    }
}

fn context(label: &str, id: &str) -> Vec<u8> {
    let mut context = label.as_bytes().to_vec();
    context.push(0);
    context.extend_from_slice(id.as_bytes());
    context
}

/// HKDF-SHA-256 with the salt of the part or manifest.
fn expand(key: &DataKey, salt: &Block, context: &[u8], out: &mut [u8]) {
    struct Length(usize);
    impl KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    let extracted: hkdf::Prk = Salt::new(HKDF_SHA256, &salt.0).extract(key.expose());
    let context = [context];
    let expanded = extracted.expand(&context, Length(out.len()));
    let filled = expanded.and_then(|expanded| expanded.fill(out));
    filled.expect("fewer than 255 blocks are derived");
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn place() -> ShardPlace<'static> {
        ShardPlace {
            id: ID,
            rank: 1,
            number: 2,
            file_bytes: 3 << 20,
            header_bytes: 4096,
            chunk_bytes: 1 << 20,
        }
    }

    #[test]
    fn each_number_of_a_place_gives_other_keys() {
        let key = DataKey::from_bytes(&[7; 32]);
        let salt = Block([9; 32]);
        let mut seen = std::collections::HashSet::new();
        let changes: &[fn(&mut ShardPlace<'_>)] = &[
            |_| {},
            |place| place.id = "1123456789abcdef0123456789abcdef",
            |place| place.rank = 0,
            |place| place.number = 0,
            |place| place.file_bytes += 1,
            |place| place.header_bytes += 4096,
            |place| place.chunk_bytes *= 2,
        ];
        for change in changes {
            let mut place = place();
            change(&mut place);
            let keys = of_shard(&key, &salt, &place);
            assert!(seen.insert(*keys.key) && seen.insert(keys.commitment.0));
        }
        let other_id = "1123456789abcdef0123456789abcdef";
        for keys in [
            of_part(&key, &salt, ID, 1),
            of_part(&key, &salt, ID, 0),
            of_part(&key, &salt, other_id, 1),
            of_metadata(&key, &salt, ID),
            of_metadata(&key, &salt, other_id),
        ] {
            assert!(seen.insert(*keys.key) && seen.insert(keys.commitment.0));
        }
        for (file, header, chunk) in [(9, 8, 7), (10, 8, 7), (9, 9, 7), (9, 8, 8)] {
            let keys = of_chunks(&key, file, header, chunk);
            assert!(seen.insert(*keys.key) && seen.insert(keys.commitment.0));
        }
        let (commitment, mac) = of_manifest(&key, &salt, ID);
        assert!(seen.insert(commitment.0) && seen.insert(*mac));
        let other = of_shard(&key, &Block([8; 32]), &place());
        assert!(seen.insert(*other.key));
        let other = of_shard(&DataKey::from_bytes(&[6; 32]), &salt, &place());
        assert!(seen.insert(*other.key));
    }
}
