//! Shards: safetensors files whose data starts on a page.
//!
//! The header is written padded with spaces, as the format allows, so that the first tensor lies
//! on a [`PAGE_BYTES`] boundary. It is parsed as hostile input: every number is checked against
//! the file before anything follows from it.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io;
use std::path::Path;

use penstock_io::file_system::Files;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer as _};
use serde::{Deserialize, Serialize};

use crate::format::dtype;
use crate::format::part::TensorBox;

/// Boundary on which the data of a shard starts, and that direct I/O is aligned to.
pub const PAGE_BYTES: u64 = 4096;

/// The longest header that the safetensors library reads; longer ones are refused.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Where the metadata of a shard says which of its tensors are boxes of larger ones.
const BOXES: &str = "penstock.boxes";

/// Bytes of the length that precedes the header.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// One tensor as a shard's header describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeaderTensor {
    /// The safetensors type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// First byte and the byte after the last, counted from the start of the data.
    pub data_offsets: (u64, u64),
}

/// A parsed header.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    /// Where the data starts in the file.
    pub data_start: u64,
    /// Free text that the writer left.
    pub metadata: BTreeMap<String, String>,
    /// The tensors that are boxes of global ones, where the writer said so. Nothing vouches for it.
    pub boxes: Option<BTreeMap<String, TensorBox>>,
    /// Names and descriptions, in the order of the header.
    pub tensors: Vec<(String, HeaderTensor)>,
}

/// Why a file is no valid shard.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct InvalidHeader(String);

/// Builds the first bytes of a shard, up to where its data starts.
pub fn encode_header<'a>(tensors: impl Iterator<Item = (&'a str, HeaderTensor)>) -> Vec<u8> {
    encode_header_of(tensors, &BTreeMap::new())
}

/// The same of a shard some of whose tensors are boxes of global ones: it says which, for whoever
/// has nothing but the shard.
pub(crate) fn encode_header_of<'a>(
    tensors: impl Iterator<Item = (&'a str, HeaderTensor)>,
    boxes: &BTreeMap<&str, &TensorBox>,
) -> Vec<u8> {
    let mut bytes = vec![0; LENGTH_BYTES as usize];
    write_header_json(&mut bytes, tensors, boxes).expect("writing JSON to memory cannot fail");
    let padded = (bytes.len() as u64).next_multiple_of(PAGE_BYTES);
    bytes.resize(padded as usize, b' ');
    let header_bytes = padded - LENGTH_BYTES;
    bytes[..LENGTH_BYTES as usize].copy_from_slice(&header_bytes.to_le_bytes());
    bytes
}

fn write_header_json<'a>(
    bytes: &mut Vec<u8>,
    tensors: impl Iterator<Item = (&'a str, HeaderTensor)>,
    boxes: &BTreeMap<&str, &TensorBox>,
) -> serde_json::Result<()> {
    let mut serializer = serde_json::Serializer::new(bytes);
    let mut map = serializer.serialize_map(None)?;
    // "format": "pt" is what transformers asks of a file before it loads it.
    let mut metadata = BTreeMap::from([("format", "pt"), ("penstock", "1")]);
    let boxes_json = serde_json::to_string(boxes)?;
    if !boxes.is_empty() {
        metadata.insert(BOXES, &boxes_json);
    }
    map.serialize_entry("__metadata__", &metadata)?;
    for (name, tensor) in tensors {
        map.serialize_entry(name, &tensor)?;
    }
    map.end()
}

/// Upper bound of what one tensor adds to a header, for cutting shards before they grow too long.
pub(crate) fn header_bytes_bound(name: &str, dims: usize) -> u64 {
    // A byte of a name takes at most six when escaped (\u0000); a number at most twenty digits.
    const FIXED_BYTES: usize = 128;
    (name.len() * 6 + dims * 21 + FIXED_BYTES) as u64
}

/// The same of what a box adds beside that. Its JSON stands in a string and is escaped twice: a byte
/// of a name takes at most seven (\\u0000).
pub(crate) fn box_bytes_bound(name: &str, region: &TensorBox) -> u64 {
    const FIXED_BYTES: usize = 128;
    let dims = region.shape.len() + region.start.len();
    ((name.len() + region.tensor.len()) * 7 + dims * 21 + FIXED_BYTES) as u64
}

/// Bytes of the file's start that [`parse_header`] needs, read off its first eight bytes.
pub fn header_end(prefix: [u8; 8], file_bytes: u64) -> Result<u64, InvalidHeader> {
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(InvalidHeader(format!(
            "the header claims {header_bytes} bytes, too many"
        )));
    }
    let end = LENGTH_BYTES + header_bytes;
    if end > file_bytes {
        return Err(InvalidHeader(format!(
            "the header claims to end at byte {end} of a file of {file_bytes} bytes"
        )));
    }
    Ok(end)
}

/// Parses the start of a shard of `file_bytes` and checks that its tensors fill the data without
/// holes or overlaps, as the format demands.
pub fn parse_header(start: &[u8], file_bytes: u64) -> Result<Header, InvalidHeader> {
    let Some(prefix) = start.first_chunk::<{ LENGTH_BYTES as usize }>() else {
        return Err(InvalidHeader(
            "the file is too short to hold a header".into(),
        ));
    };
    let data_start = header_end(*prefix, file_bytes)?;
    let Some(text) = start.get(LENGTH_BYTES as usize..data_start as usize) else {
        return Err(InvalidHeader("the header was cut short".into()));
    };
    if text.first() != Some(&b'{') {
        return Err(InvalidHeader("the header does not start with `{`".into()));
    }
    let raw: RawHeader =
        serde_json::from_slice(text).map_err(|error| InvalidHeader(error.to_string()))?;
    check_layout(&raw.tensors, file_bytes - data_start)?;
    let boxes = raw.metadata.get(BOXES);
    let boxes = boxes.map(|text| serde_json::from_str(text)).transpose();
    let boxes = boxes.map_err(|error| InvalidHeader(format!("{BOXES}: {error}")))?;
    Ok(Header {
        data_start,
        boxes,
        metadata: raw.metadata,
        tensors: raw.tensors,
    })
}

/// The header of a shard, and the size of the file.
pub(crate) fn read_header(path: &Path, files: &dyn Files) -> Result<(Header, u64), String> {
    let read = || -> io::Result<(Vec<u8>, u64)> {
        let bytes = files.look(path)?.bytes;
        let mut start = files.read_range(path, 0..LENGTH_BYTES)?;
        let prefix = start.first_chunk().copied().unwrap_or_default();
        // One that makes no sense is refused below.
        let end = header_end(prefix, bytes).unwrap_or_default();
        start.extend(files.read_range(path, LENGTH_BYTES..end.max(LENGTH_BYTES))?);
        Ok((start, bytes))
    };
    let (start, bytes) = read().map_err(|error| error.to_string())?;
    let header = parse_header(&start, bytes).map_err(|error| error.to_string())?;
    Ok((header, bytes))
}

fn check_layout(tensors: &[(String, HeaderTensor)], data_bytes: u64) -> Result<(), InvalidHeader> {
    let mut ranges: Vec<(u64, u64, &str)> = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let (begin, end) = tensor.data_offsets;
        let item_bytes = dtype::stored_item_bytes(&tensor.dtype)
            .ok_or_else(|| InvalidHeader(format!("{name}: unknown type {:?}", tensor.dtype)))?;
        let expected = dtype::nbytes(&tensor.shape, item_bytes)
            .ok_or_else(|| InvalidHeader(format!("{name}: the shape is too large")))?;
        if end.checked_sub(begin) != Some(expected) {
            return Err(InvalidHeader(format!(
                "{name}: bytes {begin}..{end} do not hold {expected} bytes of {:?} {}",
                tensor.shape, tensor.dtype
            )));
        }
        ranges.push((begin, end, name));
    }
    ranges.sort_unstable();
    let mut filled = 0;
    for (begin, end, name) in ranges {
        if begin != filled {
            let kind = if begin < filled {
                "overlaps the one before"
            } else {
                "leaves a hole"
            };
            return Err(InvalidHeader(format!(
                "{name}: {kind} at byte {filled} of the data"
            )));
        }
        filled = end;
    }
    if filled != data_bytes {
        return Err(InvalidHeader(format!(
            "the header accounts for {filled} of {data_bytes} bytes of data"
        )));
    }
    Ok(())
}

/// The header's JSON object: `__metadata__` apart from the tensors, repeated names refused.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, HeaderTensor)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a safetensors header")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader {
            metadata: BTreeMap::new(),
            tensors: Vec::new(),
        };
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format!(
                    "the name {name:?} is there twice"
                )));
            }
            if name == "__metadata__" {
                header.metadata = map.next_value()?;
            } else {
                header.tensors.push((name, map.next_value()?));
            }
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32_at(begin: u64, shape: &[u64]) -> HeaderTensor {
        let bytes = shape.iter().product::<u64>() * 4;
        HeaderTensor {
            dtype: "F32".into(),
            shape: shape.to_vec(),
            data_offsets: (begin, begin + bytes),
        }
    }

    fn file(json: &str, data_bytes: u64) -> (Vec<u8>, u64) {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        let file_bytes = bytes.len() as u64 + data_bytes;
        (bytes, file_bytes)
    }

    #[test]
    fn round_trip_on_a_page() {
        let tensors = [
            ("a\"b\\ü\n", f32_at(0, &[2, 3])),
            ("", f32_at(24, &[0])),
            ("c", f32_at(24, &[])),
        ];
        let bytes = encode_header(tensors.iter().map(|(name, tensor)| (*name, tensor.clone())));
        assert_eq!(bytes.len() % PAGE_BYTES as usize, 0);
        let header = parse_header(&bytes, bytes.len() as u64 + 28).unwrap();
        assert_eq!(header.data_start, bytes.len() as u64);
        let names: Vec<_> = header
            .tensors
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(names, ["a\"b\\ü\n", "", "c"]);
    }

    #[test]
    fn the_bound_is_one() {
        for name in ["", "plain", "\u{1}\u{2}\u{3}", "ünïcode", "\"\"\"\\\\"] {
            let tensor = HeaderTensor {
                dtype: "F8_E4M3".into(),
                shape: vec![u64::MAX; 5],
                data_offsets: (u64::MAX, u64::MAX),
            };
            let mut with = Vec::new();
            let none = BTreeMap::new();
            write_header_json(&mut with, [(name, tensor.clone())].into_iter(), &none).unwrap();
            let mut without = Vec::new();
            write_header_json(&mut without, std::iter::empty(), &none).unwrap();
            let bound = header_bytes_bound(name, 5);
            assert!((with.len() - without.len()) as u64 <= bound, "{name}");

            let region = TensorBox {
                tensor: format!("{name}{name}"),
                shape: vec![u64::MAX; 5],
                start: vec![u64::MAX; 5],
            };
            let mut boxed = Vec::new();
            let boxes = BTreeMap::from([(name, &region)]);
            write_header_json(&mut boxed, [(name, tensor)].into_iter(), &boxes).unwrap();
            let bound = box_bytes_bound(name, &region);
            assert!((boxed.len() - with.len()) as u64 <= bound, "{name}");
        }
    }

    #[test]
    fn boxes_are_told_and_read_back() {
        let region = TensorBox {
            tensor: "a \"whole\"\n".into(),
            shape: vec![4, 3],
            start: vec![2, 0],
        };
        let tensors = || [("a", f32_at(0, &[2, 3])), ("own", f32_at(24, &[1]))].into_iter();
        let bytes = encode_header_of(tensors(), &BTreeMap::from([("a", &region)]));
        let header = parse_header(&bytes, bytes.len() as u64 + 28).unwrap();
        assert_eq!(header.boxes, Some(BTreeMap::from([("a".into(), region)])));
        let bytes = encode_header(tensors());
        let header = parse_header(&bytes, bytes.len() as u64 + 28).unwrap();
        assert_eq!(header.boxes, None);
        let (bytes, file_bytes) = file(r#"{"__metadata__":{"penstock.boxes":"[1]"}}"#, 0);
        let error = parse_header(&bytes, file_bytes).unwrap_err().to_string();
        assert!(error.contains("penstock.boxes"), "{error}");
    }

    #[test]
    fn hostile_headers_are_refused() {
        let one = |offsets: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#)
        };
        let two = |first: &str, second: &str| {
            format!(
                r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{first}}},
                    "b":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
            )
        };
        let cases = [
            (one("[0,4]"), 8, "do not hold"),
            (one("[8,0]"), 8, "do not hold"),
            (one("[4,12]"), 12, "leaves a hole"),
            (one("[0,8]"), 9, "accounts for 8 of 9"),
            (two("[0,8]", "[4,12]"), 12, "overlaps"),
            (two("[0,8]", "[0,8]"), 8, "overlaps"),
            (one("[0,8]").replace("F32", "F31"), 8, "unknown type"),
            (
                one("[0,8]").replace("[2]", "[4611686018427387904,4]"),
                8,
                "too large",
            ),
            (one("[0,8]").replace("[2]", "[-2]"), 8, "invalid value"),
            (
                two("[0,8]", "[8,16]").replace("\"b\"", "\"a\""),
                16,
                "twice",
            ),
            ("[]".into(), 0, "start with"),
            (" {}".into(), 0, "start with"),
            ("{".into(), 0, "EOF"),
        ];
        for (json, data_bytes, expected) in cases {
            let (bytes, file_bytes) = file(&json, data_bytes);
            let error = parse_header(&bytes, file_bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn lengths_beyond_the_file_are_refused() {
        assert!(header_end(u64::MAX.to_le_bytes(), 1 << 40).is_err());
        assert!(header_end(100u64.to_le_bytes(), 107).is_err());
        assert_eq!(header_end(100u64.to_le_bytes(), 108).unwrap(), 108);
        assert!(parse_header(b"short", 5).is_err());
    }
}
