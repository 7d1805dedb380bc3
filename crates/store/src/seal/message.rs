//! Messages sealed in one piece, and the MAC of a manifest.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;

use super::derive::{self, MessageKeys, NONCE_BYTES};
use super::{Block, Closed, DataKey, Sealing, Text};

/// The key of one message: the body of a part, or the metadata.
pub(crate) struct MessageKey(MessageKeys);

impl MessageKey {
    pub(super) fn new(keys: MessageKeys) -> MessageKey {
        MessageKey(keys)
    }

    /// The key for the body of a part.
    pub(crate) fn of_part(key: &DataKey, salt: &Block, id: &str, rank: u32) -> MessageKey {
        MessageKey(derive::of_part(key, salt, id, rank))
    }

    /// The key that encrypts the key of a file that has one of its own.
    pub(crate) fn of_file(
        key: &DataKey,
        salt: &Block,
        id: &str,
        rank: u32,
        number: u32,
    ) -> MessageKey {
        MessageKey(derive::of_file(key, salt, id, rank, number))
    }

    /// Binds the message to the key.
    pub(crate) fn commitment(&self) -> Block {
        self.0.commitment
    }

    /// Whether a message with this commitment is of the key.
    pub(crate) fn is_committed(&self, commitment: &Block) -> bool {
        is_same(&self.0.commitment, commitment)
    }

    /// Seals the only message of the key, which is used up.
    pub(crate) fn seal(self, sealing: &Sealing, mut message: Vec<u8>) -> Text {
        sealing.witness(self.0.key.as_slice(), self.0.nonce);
        let key = cipher(&self.0);
        let nonce = Nonce::assume_unique_for_key(self.0.nonce);
        key.seal_in_place_append_tag(nonce, Aad::empty(), &mut message)
            .expect("a message is far shorter than 64 GiB");
        Text(message)
    }

    /// Seals the key of a file as the only message.
    pub(super) fn wrap(self, sealing: &Sealing, key: &DataKey) -> Text {
        // Room for the tag: no copy of the key is left behind by a reallocation.
        let mut message = Vec::with_capacity(64);
        message.extend_from_slice(key.expose());
        self.seal(sealing, message)
    }

    /// Opens the message.
    pub(crate) fn open(&self, sealed: &Text) -> Result<Vec<u8>, Closed> {
        let mut message = sealed.0.clone();
        let nonce = Nonce::assume_unique_for_key(self.0.nonce);
        let opened = cipher(&self.0).open_in_place(nonce, Aad::empty(), &mut message);
        let bytes = opened.map_err(|_| Closed)?.len();
        message.truncate(bytes);
        Ok(message)
    }
}

/// The keys of a manifest.
pub(crate) struct ManifestKeys {
    commitment: Block,
    mac: hmac::Key,
}

impl ManifestKeys {
    /// The keys of a manifest with this salt.
    pub(crate) fn new(key: &DataKey, salt: &Block, id: &str) -> ManifestKeys {
        let (commitment, mac) = derive::of_manifest(key, salt, id);
        ManifestKeys {
            commitment,
            mac: hmac::Key::new(hmac::HMAC_SHA256, mac.as_slice()),
        }
    }

    /// Tells the data key from others.
    pub(crate) fn commitment(&self) -> Block {
        self.commitment
    }

    /// The MAC of a text.
    pub(crate) fn sign(&self, text: &[u8]) -> Block {
        let mut mac = Block([0; 32]);
        mac.0.copy_from_slice(hmac::sign(&self.mac, text).as_ref());
        mac
    }

    /// Whether the MAC is that of the text.
    pub(crate) fn verify(&self, text: &[u8], mac: &Block) -> bool {
        hmac::verify(&self.mac, text, &mac.0).is_ok()
    }
}

/// Whether two commitments are equal.
pub(super) fn is_same(one: &Block, other: &Block) -> bool {
    verify_slices_are_equal(&one.0, &other.0).is_ok()
}

/// The cipher with the key of a message or a shard.
pub(super) fn cipher(keys: &MessageKeys) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, keys.key.as_slice());
    LessSafeKey::new(key.expect("the key has the length of the cipher's"))
}

/// The nonce of a chunk: the base with the index added modulo 2 to its last 8 bytes, big-endian.
pub(super) fn nonce_of(base: &[u8; NONCE_BYTES], index: u64) -> [u8; NONCE_BYTES] {
    let mut nonce = *base;
    for (byte, counter) in nonce[4..].iter_mut().zip(index.to_be_bytes()) {
        *byte ^= counter;
    }
    nonce
}
