//! CRC-64/NVME digests of chunks and whole files.
//!
//! Every file is digested in chunks of [`CHUNK_BYTES`]; the digest of the whole file is combined
//! from those of its chunks, so no byte is digested twice.

use std::fmt;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::buffer::HostRegion;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Bytes of a file that share one digest. The last chunk of a file may be shorter.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Bytes copied at a time for digesting.
const PIECE_BYTES: u64 = 32 << 10;

const PREFIX: &str = "crc64nvme:";

/// The generator polynomial, its highest coefficient in the lowest bit (the leading x⁶⁴ left out).
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// The polynomial that moves a digest over a whole chunk. A constant, since a file has a thousand
/// chunks per gibibyte, and `crc-fast` would compute it from the length each time (0.3 ms).
const CHUNK_SHIFT: u64 = power_of_x(CHUNK_BYTES * 8);

/// Product of two polynomials modulo [`POLYNOMIAL`]; bit 63 is the coefficient of x⁰.
const fn multiply(mut a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    while a != 0 {
        if a >> 63 == 1 {
            product ^= b;
        }
        a <<= 1;
        let carry = if b & 1 == 1 { POLYNOMIAL } else { 0 };
        b = b >> 1 ^ carry;
    }
    product
}

/// Divides by x modulo [`POLYNOMIAL`].
const fn divide_by_x(a: u64) -> u64 {
    if a >> 63 == 1 {
        (a ^ POLYNOMIAL) << 1 | 1
    } else {
        a << 1
    }
}

/// x to the `exponent` modulo [`POLYNOMIAL`], by squaring.
const fn power_of_x(mut exponent: u64) -> u64 {
    let mut power = 1 << 63;
    let mut square = 1 << 62;
    while exponent != 0 {
        if exponent & 1 == 1 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    power
}

/// CRC-64/NVME of a byte sequence; that of no bytes is [`Digest::EMPTY`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest(pub u64);

/// Digests the chunks of bytes that come in pieces.
#[derive(Debug)]
pub struct ChunkDigester {
    chunk: crc_fast::Digest,
    /// Bytes of the chunk so far.
    bytes: usize,
    chunks: Vec<Digest>,
}

impl Default for ChunkDigester {
    fn default() -> ChunkDigester {
        ChunkDigester {
            chunk: crc_fast::Digest::new(Crc64Nvme),
            bytes: 0,
            chunks: Vec::new(),
        }
    }
}

impl ChunkDigester {
    /// Adds the next bytes.
    pub fn update(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let room = CHUNK_BYTES as usize - self.bytes;
            let (now, later) = piece.split_at(room.min(piece.len()));
            self.chunk.update(now);
            self.bytes += now.len();
            if self.bytes == CHUNK_BYTES as usize {
                self.end_chunk();
            }
            piece = later;
        }
    }

    /// The digest of each chunk.
    pub fn finish(mut self) -> Vec<Digest> {
        if self.bytes > 0 {
            self.end_chunk();
        }
        self.chunks
    }

    fn end_chunk(&mut self) {
        self.chunks.push(Digest(self.chunk.finalize_reset()));
        self.bytes = 0;
    }
}

impl Digest {
    /// The digest of no bytes.
    pub const EMPTY: Digest = Digest(0);

    /// Digests `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(crc_fast::checksum(Crc64Nvme, bytes))
    }

    /// Digests the contents of a memory region, in row-major order.
    pub fn of_memory(memory: &HostRegion) -> Digest {
        let chunks = Digest::chunks_of_memory(memory);
        Digest::of_chunks(&chunks, memory.len())
    }

    /// Digests each chunk of a memory region, in row-major order.
    pub fn chunks_of_memory(memory: &HostRegion) -> Vec<Digest> {
        // Copied, since other threads may write to the region meanwhile, and in pieces that fit in
        // the CPU caches.
        let mut buffer = vec![0; memory.len().min(PIECE_BYTES) as usize];
        let chunk = |first: u64| {
            let end = (first + CHUNK_BYTES).min(memory.len());
            let mut digest = crc_fast::Digest::new(Crc64Nvme);
            let mut at = first;
            while at < end {
                let piece = &mut buffer[..(end - at).min(PIECE_BYTES) as usize];
                memory.copy_to(at, piece);
                digest.update(piece);
                at += piece.len() as u64;
            }
            Digest(digest.finalize())
        };
        let firsts = (0..memory.len()).step_by(CHUNK_BYTES as usize);
        firsts.map(chunk).collect()
    }

    /// The digest of the bytes of `self` followed by `next_bytes` bytes whose digest is `next`.
    pub fn then(self, next: Digest, next_bytes: u64) -> Digest {
        if next_bytes == 0 {
            return self;
        }
        let shift = match next_bytes {
            CHUNK_BYTES => CHUNK_SHIFT,
            _ => power_of_x(next_bytes * 8),
        };
        Digest(multiply(self.0, shift) ^ next.0)
    }

    /// The digest of a file of `file_bytes` from those of its chunks.
    pub fn of_chunks(chunks: &[Digest], file_bytes: u64) -> Digest {
        let mut whole = Digest::EMPTY;
        for (index, chunk) in chunks.iter().enumerate() {
            let start = index as u64 * CHUNK_BYTES;
            whole = whole.then(*chunk, CHUNK_BYTES.min(file_bytes - start));
        }
        whole
    }

    /// Finds the only changed byte among the `bytes` that a digest covers: a CRC is linear, so the
    /// difference of two digests is the changed bits shifted by the number of bytes that follow
    /// them. `found` is the digest of the damaged bytes. Other damage looks like a single changed
    /// byte with a probability of 2⁻⁵⁶ per byte.
    pub fn changed_byte(self, found: Digest, bytes: u64) -> Option<u64> {
        const ABOVE_ONE_BYTE: u64 = u64::MAX >> 8;
        // The digest is the remainder after 64 appended zero bits, which are removed first.
        let mut bits = (0..64).fold(self.0 ^ found.0, |bits, _| divide_by_x(bits));
        if bits == 0 {
            return None;
        }
        for following in 0..bytes {
            if bits & ABOVE_ONE_BYTE == 0 {
                return Some(bytes - 1 - following);
            }
            bits = (0..8).fold(bits, |bits, _| divide_by_x(bits));
        }
        None
    }

    /// Reads the form that [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Option<Digest> {
        parse_hex(text.strip_prefix(PREFIX)?)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{:016x}", self.0)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        Digest::parse(&text).ok_or_else(|| de::Error::custom("not a crc64nvme digest"))
    }
}

/// Serialization of chunk digests in a list: sixteen hexadecimal digits without the prefix, which
/// would be repeated for each mebibyte.
pub(crate) mod hex_list {
    use super::{Digest, parse_hex};
    use serde::{Deserialize, Deserializer, Serializer, de, ser::SerializeSeq};

    pub(crate) fn serialize<S: Serializer>(
        digests: &[Digest],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(digests.len()))?;
        for digest in digests {
            seq.serialize_element(&format!("{:016x}", digest.0))?;
        }
        seq.end()
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Digest>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let parse = |text: &String| {
            parse_hex(text).ok_or_else(|| de::Error::custom("not a chunk digest of 16 hex digits"))
        };
        texts.iter().map(parse).collect()
    }
}

/// Parses sixteen lower-case hexadecimal digits; anything else, such as a sign, is refused.
fn parse_hex(text: &str) -> Option<Digest> {
    let lower_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 16 || !text.bytes().all(lower_hex) {
        return None;
    }
    u64::from_str_radix(text, 16).ok().map(Digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_value_of_the_catalogue() {
        // The check value of CRC-64/NVME in the RevEng catalogue of parametrised CRC algorithms.
        assert_eq!(Digest::of(b"123456789"), Digest(0xae8b_1486_0a79_9888));
        assert_eq!(Digest::of(b""), Digest::EMPTY);
    }

    #[test]
    fn whole_follows_from_chunks() {
        let bytes: Vec<u8> = (0..CHUNK_BYTES * 2 + 12345)
            .map(|i| (i * 31 % 251) as u8)
            .collect();
        let chunks: Vec<Digest> = bytes.chunks(CHUNK_BYTES as usize).map(Digest::of).collect();
        assert_eq!(
            Digest::of_chunks(&chunks, bytes.len() as u64),
            Digest::of(&bytes)
        );
    }

    #[test]
    fn combination_agrees_with_the_library() {
        let (first, second) = (Digest::of(b"some bytes"), Digest::of(b"and some more"));
        for next_bytes in [1, 13, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, 5 << 40] {
            let expected = crc_fast::checksum_combine(Crc64Nvme, first.0, second.0, next_bytes);
            assert_eq!(
                first.then(second, next_bytes),
                Digest(expected),
                "{next_bytes}"
            );
        }
    }

    #[test]
    fn a_changed_byte_is_found_and_other_damage_is_not_taken_for_one() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 7 % 253) as u8).collect();
        let right = Digest::of(&bytes);
        let length = bytes.len() as u64;
        for place in [0, 1, 777, 99_998, 99_999] {
            for change in [1, 0x80, 0xff, 0x5a] {
                let mut damaged = bytes.clone();
                damaged[place] ^= change;
                let found = Digest::of(&damaged);
                assert_eq!(right.changed_byte(found, length), Some(place as u64));
            }
        }
        let mut damaged = bytes.clone();
        damaged[10] ^= 1;
        damaged[90_000] ^= 1;
        assert_eq!(right.changed_byte(Digest::of(&damaged), length), None);
        assert_eq!(right.changed_byte(right, length), None);
    }

    #[test]
    fn text_form_round_trips_and_rejects_others() {
        let digest = Digest(0x00ab_cdef_0123_4567);
        assert_eq!(Digest::parse(&digest.to_string()), Some(digest));
        for bad in [
            "",
            "crc64nvme:",
            "crc64nvme:00ABCDEF01234567",
            "crc64nvme:+0abcdef01234567",
        ] {
            assert_eq!(Digest::parse(bad), None, "{bad}");
        }
    }
}
