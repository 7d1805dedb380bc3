//! Bytes of sealing as they stand in JSON.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The tag of a chunk.
pub(crate) type Tag = [u8; 16];

/// Base64 digits of a [`Block`].
const BLOCK_DIGITS: usize = 44;

/// 32 bytes: a salt, a commitment or a MAC; base64 in JSON.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Block(pub [u8; 32]);

/// Any bytes; base64 in JSON.
#[derive(Clone, PartialEq, Eq)]
pub struct Text(pub Vec<u8>);

/// The tags of all chunks of a shard, in order; base64 of one after another in JSON.
#[derive(Clone, PartialEq, Eq)]
pub struct Tags(pub Vec<[u8; 16]>);

/// The SHA-256 of a file; hexadecimal in JSON.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sha256(pub [u8; 32]);

impl Sha256 {
    /// The hash of bytes.
    pub fn of(bytes: &[u8]) -> Sha256 {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Sha256(hash)
    }

    /// Reads 64 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Sha256> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut hash = [0; 32];
        if text.len() != 2 * hash.len() {
            return None;
        }
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = digit(digits[0])? << 4 | digit(digits[1])?;
        }
        Some(Sha256(hash))
    }
}

impl Block {
    /// The digits of the block.
    pub(crate) fn encode(&self) -> String {
        STANDARD.encode(self.0)
    }
}

/// Reads a block from the start of a text; returns it with the rest of the text.
pub(super) fn base64_block(text: &[u8]) -> Option<(Block, &[u8])> {
    let (digits, rest) = text.split_at_checked(BLOCK_DIGITS)?;
    let bytes = STANDARD.decode(digits).ok()?;
    Some((Block(bytes.try_into().ok()?), rest))
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sha256({self})")
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({})", self.encode())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} bytes)", self.0.len())
    }
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tags({})", self.0.len())
    }
}

impl Serialize for Sha256 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sha256 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sha256, D::Error> {
        let text = String::deserialize(deserializer)?;
        Sha256::parse(&text).ok_or_else(|| de::Error::custom("not a SHA-256 of 64 hex digits"))
    }
}

impl Serialize for Block {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.encode())
    }
}

impl<'de> Deserialize<'de> for Block {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Block, D::Error> {
        let bytes = decode(deserializer)?;
        let bytes = bytes.try_into();
        bytes
            .map(Block)
            .map_err(|_| de::Error::custom("not 32 bytes"))
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Text, D::Error> {
        decode(deserializer).map(Text)
    }
}

impl Serialize for Tags {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(self.0.as_flattened()))
    }
}

impl<'de> Deserialize<'de> for Tags {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tags, D::Error> {
        let bytes = decode(deserializer)?;
        match bytes.as_chunks() {
            (tags, []) => Ok(Tags(tags.to_vec())),
            _ => Err(de::Error::custom("not a multiple of 16 bytes")),
        }
    }
}

fn decode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_in_json() {
        let tags = Tags(vec![[1; 16], [255; 16]]);
        let text = serde_json::to_string(&tags).unwrap();
        assert_eq!(serde_json::from_str::<Tags>(&text).unwrap(), tags);
        let hash = Sha256::of(b"abc");
        let text = serde_json::to_string(&hash).unwrap();
        assert!(text.starts_with("\"ba7816bf8f01cfea"), "{text}");
        assert_eq!(serde_json::from_str::<Sha256>(&text).unwrap(), hash);
        let block = Block(hash.0);
        let text = block.encode() + "rest";
        assert_eq!(base64_block(text.as_bytes()), Some((block, &b"rest"[..])));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "\"AAAA\"",
            "\"A\"",
            "\"!\"",
            "\"AAAAAAAAAAAAAAAAAAAAAB==\"",
            "3",
        ] {
            serde_json::from_str::<Tags>(text).unwrap_err();
            serde_json::from_str::<Block>(text).unwrap_err();
        }
        assert_eq!(Sha256::parse(&"A".repeat(64)), None);
        assert_eq!(Sha256::parse(&"a".repeat(63)), None);
        assert_eq!(base64_block(b"AAAA"), None);
    }
}
