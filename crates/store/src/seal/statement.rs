//! The members of a sealed manifest, and the text that its MAC covers.
//!
//! The MAC and the wraps stand behind all other members, in front of the digest. So the MAC covers
//! the file up to itself, and wraps can be replaced without the key.

use serde::{Deserialize, Serialize};

use super::derive::{self, draw_salt};
use super::message::is_same;
use super::{Block, CIPHER, Closed, DataKey, ManifestKeys, MessageKey, Sealing, Text, Wrap};
use crate::error::Result;

/// The text in front of a MAC, between it and the wraps.
const MAC_PREFIX: &[u8] = b",\"mac\":\"";
const WRAPS_PREFIX: &[u8] = b"\",\"wraps\":";

/// The member `sealing` of a manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SealingEntry {
    /// Always `AES-256-GCM`.
    pub cipher: String,
    /// Drawn for this manifest.
    pub salt: Block,
    /// Tells the data key from others.
    pub commitment: Block,
    /// The sealed metadata.
    pub metadata: Text,
}

impl SealingEntry {
    /// Seals the metadata; returns the member with the keys that sign the manifest.
    pub(crate) fn new(
        sealing: &Sealing,
        path: &std::path::Path,
        id: &str,
        metadata: &str,
    ) -> Result<(SealingEntry, ManifestKeys)> {
        let salt = draw_salt(path)?;
        let keys = ManifestKeys::new(sealing.key(), &salt, id);
        let key = MessageKey::new(derive::of_metadata(sealing.key(), &salt, id));
        let entry = SealingEntry {
            cipher: CIPHER.to_owned(),
            salt,
            commitment: keys.commitment(),
            metadata: key.seal(sealing, metadata.as_bytes().to_vec()),
        };
        Ok((entry, keys))
    }

    /// The keys of the manifest; `None` with the data key of another one.
    pub(crate) fn keys(&self, key: &DataKey, id: &str) -> Option<ManifestKeys> {
        let keys = ManifestKeys::new(key, &self.salt, id);
        is_same(&keys.commitment(), &self.commitment).then_some(keys)
    }

    /// Opens the metadata.
    pub(crate) fn open_metadata(
        &self,
        key: &DataKey,
        id: &str,
    ) -> std::result::Result<Vec<u8>, Closed> {
        MessageKey::new(derive::of_metadata(key, &self.salt, id)).open(&self.metadata)
    }
}

/// Splits the text of a manifest in front of its digest into what the MAC covers and the wraps.
/// `None` if anything but them stands behind the MAC.
pub(crate) fn split_mac(text: &[u8]) -> Option<(&[u8], Block, Vec<Wrap>)> {
    let mut windows = text.windows(MAC_PREFIX.len());
    let place = windows.position(|window| window == MAC_PREFIX)?;
    let (covered, rest) = text.split_at(place);
    let digits = rest.strip_prefix(MAC_PREFIX)?;
    let (mac, rest) = super::encoded::base64_block(digits)?;
    let wraps = serde_json::from_slice(rest.strip_prefix(WRAPS_PREFIX)?).ok()?;
    Some((covered, mac, wraps))
}

/// The text of a manifest in front of its digest, with other wraps.
pub(crate) fn join_wraps(covered: &[u8], mac: &Block, wraps: &[Wrap]) -> Vec<u8> {
    let mut text = covered.to_vec();
    text.extend_from_slice(MAC_PREFIX);
    text.extend_from_slice(mac.encode().as_bytes());
    text.extend_from_slice(WRAPS_PREFIX);
    serde_json::to_writer(&mut text, wraps).expect("wraps always serialise");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_wraps_stands_behind_a_mac() {
        let wrap = Wrap {
            kind: "age".into(),
            recipient: "age1,\"mac\":\"".into(),
            key: vec![1, 2],
        };
        let mac = Block([3; 32]);
        let text = join_wraps(b"{\"id\":1", &mac, std::slice::from_ref(&wrap));
        assert_eq!(split_mac(&text), Some((&b"{\"id\":1"[..], mac, vec![wrap])));
        let with = |tail: &str| [text.as_slice(), tail.as_bytes()].concat();
        assert_eq!(split_mac(&with(",\"partial\":{}")), None);
        assert_eq!(split_mac(b"{\"id\":1"), None);
        assert_eq!(split_mac(&text[..text.len() - 1]), None);
    }
}
