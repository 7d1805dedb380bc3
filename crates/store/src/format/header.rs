//! The parser for headers of safetensors files, both our shards and files of other writers.
//!
//! It accepts exactly the files that the safetensors library accepts: files that the library
//! refuses are refused here too ([`InvalidHeader::Damaged`]). An unknown element type comes from a
//! newer library and stays in the header as text; the few other things that the library reads and
//! this parser does not are [`InvalidHeader::Unsupported`], and `docs/format.md` lists them. A fuzz
//! target compares the two parsers.
//!
//! All input is treated as hostile: every number is checked against the file before it is used.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::format::dtype;

/// Longest header that the safetensors library reads; longer ones are refused.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Size of the length field before the header.
pub const LENGTH_BYTES: u64 = 8;

const METADATA: &str = "__metadata__";

/// A tensor's entry in a header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeaderTensor {
    /// The safetensors type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// First byte and the byte after the last, counted from the start of the data.
    pub data_offsets: (u64, u64),
}

impl HeaderTensor {
    /// Whether this version knows the element size. If not, the shape cannot be checked against the
    /// byte range.
    pub fn is_known(&self) -> bool {
        dtype::stored_bits(&self.dtype).is_some()
    }
}

/// A parsed header.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    /// Where the data starts in the file.
    pub data_start: u64,
    /// Free text from the writer.
    pub metadata: BTreeMap<String, String>,
    /// Names and entries of the tensors, in the order of the header.
    pub tensors: Vec<(String, HeaderTensor)>,
}

/// Why the start of a file is not a header that this version reads.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidHeader {
    /// The safetensors library also refuses it.
    #[error("{}{detail}", of_tensor(tensor.as_deref()))]
    Damaged {
        /// The tensor concerned, if any.
        tensor: Option<String>,
        /// The reason.
        detail: String,
    },
    /// The safetensors library reads it, this version does not.
    #[error("{}{detail}", of_tensor(tensor.as_deref()))]
    Unsupported {
        /// The tensor concerned, if any.
        tensor: Option<String>,
        /// The unsupported property.
        detail: String,
    },
}

fn of_tensor(tensor: Option<&str>) -> String {
    tensor.map_or_else(String::new, |name| format!("{name:?} "))
}

fn damaged(detail: impl Into<String>) -> InvalidHeader {
    let detail = detail.into();
    InvalidHeader::Damaged {
        tensor: None,
        detail,
    }
}

fn damaged_at(name: &str, detail: impl Into<String>) -> InvalidHeader {
    InvalidHeader::Damaged {
        tensor: Some(name.to_owned()),
        detail: detail.into(),
    }
}

fn unsupported_at(name: &str, detail: impl Into<String>) -> InvalidHeader {
    InvalidHeader::Unsupported {
        tensor: Some(name.to_owned()),
        detail: detail.into(),
    }
}

/// Computes from a file's first eight bytes how many bytes [`parse_header`] needs.
pub fn header_end(prefix: [u8; 8], file_bytes: u64) -> Result<u64, InvalidHeader> {
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(damaged(format!(
            "the header claims {header_bytes} bytes, too many"
        )));
    }
    let end = LENGTH_BYTES + header_bytes;
    if end > file_bytes {
        return Err(damaged(format!(
            "the header claims to end at byte {end} of a file of {file_bytes} bytes"
        )));
    }
    Ok(end)
}

/// Computes [`header_end`] for a file that may be shorter than eight bytes.
pub fn header_end_of(start: &[u8], file_bytes: u64) -> Result<u64, InvalidHeader> {
    match start.first_chunk::<{ LENGTH_BYTES as usize }>() {
        Some(prefix) => header_end(*prefix, file_bytes),
        None => Err(damaged("the file is too short to hold a header")),
    }
}

/// Parses the start of a file of `file_bytes` and checks that its tensors fill the data without
/// gaps or overlaps, as the format requires.
pub fn parse_header(start: &[u8], file_bytes: u64) -> Result<Header, InvalidHeader> {
    let data_start = header_end_of(start, file_bytes)?;
    let Some(text) = start.get(LENGTH_BYTES as usize..data_start as usize) else {
        return Err(damaged("the header was cut short"));
    };
    let no_json = |error: &dyn fmt::Display| damaged(format!("the header is no JSON: {error}"));
    let text = std::str::from_utf8(text).map_err(|error| no_json(&error))?;
    // Ignored members must be valid JSON too.
    let Sound = serde_json::from_str(text).map_err(|error| no_json(&error))?;
    let raw: RawHeader = serde_json::from_str(text)
        .map_err(|error| damaged(format!("the header is none of safetensors: {error}")))?;
    check_layout(&raw.tensors, file_bytes - data_start)?;
    if let Some(name) = raw.repeated {
        return Err(unsupported_at(
            &name,
            "is there twice, and readers differ about which of them counts",
        ));
    }
    let tensors = raw.tensors.into_iter().map(supported);
    Ok(Header {
        data_start,
        metadata: raw.metadata.unwrap_or_default(),
        tensors: tensors.collect::<Result<_, _>>()?,
    })
}

/// Converts an entry whose byte range fits its shape into the form used by this crate.
fn supported((name, raw): (String, RawTensor)) -> Result<(String, HeaderTensor), InvalidHeader> {
    let Type::Name(dtype) = raw.dtype else {
        return Err(unsupported_at(&name, "has a type that is no text"));
    };
    // No reader can hold such a shape, and multiplied in another order it overflows.
    if dtype::nbytes(&raw.shape, 1).is_none() {
        return Err(unsupported_at(
            &name,
            format!("has the shape {:?}, which is too large", raw.shape),
        ));
    }
    let tensor = HeaderTensor {
        dtype,
        shape: raw.shape,
        data_offsets: raw.data_offsets,
    };
    Ok((name, tensor))
}

fn check_layout(tensors: &[(String, RawTensor)], data_bytes: u64) -> Result<(), InvalidHeader> {
    let mut ranges: Vec<(u64, u64, &str)> = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let (begin, end) = tensor.data_offsets;
        check_size(name, tensor)?;
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
            let detail = format!("{kind} at byte {filled} of the data");
            return Err(damaged_at(name, detail));
        }
        filled = end;
    }
    if filled != data_bytes {
        return Err(damaged(format!(
            "the header accounts for {filled} of {data_bytes} bytes of data"
        )));
    }
    Ok(())
}

/// Checks the byte range of a tensor against its type and shape, computed as the library does.
fn check_size(name: &str, tensor: &RawTensor) -> Result<(), InvalidHeader> {
    let (begin, end) = tensor.data_offsets;
    let Some(bytes) = end.checked_sub(begin) else {
        return Err(damaged_at(name, format!("has bytes {begin}..{end}")));
    };
    let Type::Name(dtype) = &tensor.dtype else {
        return Ok(());
    };
    let Some(bits) = dtype::stored_bits(dtype) else {
        return Ok(());
    };
    let shape = &tensor.shape;
    let mut sizes = shape.iter().copied();
    let elements = sizes.try_fold(1, u64::checked_mul);
    let Some(taken) = elements.and_then(|elements| elements.checked_mul(bits)) else {
        return Err(damaged_at(
            name,
            format!("has the shape {shape:?}, which is too large"),
        ));
    };
    if !taken.is_multiple_of(8) || taken / 8 != bytes {
        let detail =
            format!("has {bytes} bytes, its {shape:?} elements of {dtype} take {taken} bits");
        return Err(damaged_at(name, detail));
    }
    Ok(())
}

/// The header's JSON object, with `__metadata__` separated from the tensors.
#[derive(Default)]
struct RawHeader {
    metadata: Option<BTreeMap<String, String>>,
    /// A repeated name appears once, with its last value.
    tensors: Vec<(String, RawTensor)>,
    repeated: Option<String>,
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
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        let mut places = HashMap::new();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(de::Error::duplicate_field(METADATA));
                }
                header.metadata = map.next_value()?;
                continue;
            }
            let tensor = map.next_value()?;
            match places.entry(name) {
                Entry::Vacant(place) => {
                    header.tensors.push((place.key().clone(), tensor));
                    place.insert(header.tensors.len() - 1);
                }
                Entry::Occupied(place) => {
                    header.tensors[*place.get()].1 = tensor;
                    header.repeated = Some(place.key().clone());
                }
            }
        }
        Ok(header)
    }
}

/// A tensor's JSON entry; unknown members are ignored, as in the library.
#[derive(Deserialize)]
struct RawTensor {
    dtype: Type,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The element type in an entry.
enum Type {
    Name(String),
    /// The library also accepts `{"F32": null}`.
    Object,
}

impl<'de> Deserialize<'de> for Type {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Type, D::Error> {
        deserializer.deserialize_any(TypeVisitor)
    }
}

struct TypeVisitor;

impl<'de> Visitor<'de> for TypeVisitor {
    type Value = Type;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a type")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Type, E> {
        Ok(Type::Name(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Type, A::Error> {
        Sound.visit_map(map).map(|Sound| Type::Object)
    }
}

/// Any valid JSON: a deserializer that only skips a value checks neither its strings and numbers
/// nor its nesting depth.
struct Sound;

impl<'de> Deserialize<'de> for Sound {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sound, D::Error> {
        deserializer.deserialize_any(Sound)
    }
}

impl<'de> Visitor<'de> for Sound {
    type Value = Sound;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_str<E>(self, _: &str) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Sound, A::Error> {
        while seq.next_element::<Sound>()?.is_some() {}
        Ok(Sound)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sound, A::Error> {
        while map.next_entry::<Sound, Sound>()?.is_some() {}
        Ok(Sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data_bytes: u64) -> (Vec<u8>, u64) {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        let file_bytes = bytes.len() as u64 + data_bytes;
        (bytes, file_bytes)
    }

    fn parse(json: &str, data_bytes: u64) -> Result<Header, InvalidHeader> {
        let (bytes, file_bytes) = file(json, data_bytes);
        parse_header(&bytes, file_bytes)
    }

    fn one(dtype: &str, shape: &str, end: u64) -> String {
        format!(r#"{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    }

    #[test]
    fn what_the_library_takes_is_taken() {
        let plain = one(r#""F32""#, "[2]", 8);
        let more = plain.replace("\"dtype\"", "\"note\":[{\"x\":1e3}],\"dtype\"");
        let cases = [
            plain.clone(),
            format!(" \t\r\n{plain} \n"),
            plain.replace("{\"a\"", "{\"__metadata__\":null,\"a\""),
            more,
            r#"{"a":["F32",[2],[0,8]]}"#.into(),
            one(r#""F4""#, "[16]", 8),
            one(r#""F6_E2M3""#, "[4]", 3),
            one(r#""F6_E3M2""#, "[2,2]", 3),
            one(r#""F8_E4M3FNUZ""#, "[8]", 8),
            one(r#""F8_E5M2FNUZ""#, "[8]", 8),
            one(r#""F8_E8M0""#, "[8]", 8),
        ];
        for json in cases {
            let end = if json.contains("F6") { 3 } else { 8 };
            let header = parse(&json, end).unwrap_or_else(|error| panic!("{json}: {error}"));
            assert!(header.tensors[0].1.is_known(), "{json}");
        }
    }

    #[test]
    fn a_type_of_a_newer_library_is_no_damage() {
        let header = parse(&one(r#""F128""#, "[2]", 8), 8).unwrap();
        assert!(!header.tensors[0].1.is_known());
        // The size of the data is still checked.
        parse(&one(r#""F128""#, "[2]", 8), 9).unwrap_err();
    }

    #[test]
    fn what_the_library_refuses_is_damaged() {
        let f32 = |end| one(r#""F32""#, "[2]", end);
        let two = |first: &str, second: &str| {
            format!(
                r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{first}}},
                    "b":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
            )
        };
        let cases = [
            (f32(4), 8, "take 64 bits"),
            (f32(8).replace("[0,8]", "[8,0]"), 8, "bytes 8..0"),
            (f32(8).replace("[0,8]", "[4,12]"), 12, "leaves a hole"),
            (f32(8), 9, "accounts for 8 of 9"),
            (two("[0,8]", "[4,12]"), 12, "overlaps"),
            (two("[0,8]", "[0,8]"), 8, "overlaps"),
            (
                f32(8).replace("[2]", "[4611686018427387904,4]"),
                8,
                "too large",
            ),
            (
                f32(0).replace("[2]", "[18446744073709551615,2,0]"),
                0,
                "too large",
            ),
            (f32(8).replace("[2]", "[-2]"), 8, "invalid value"),
            (f32(8).replace("[2]", "[2.0]"), 8, "invalid type"),
            (f32(8).replace("\"F32\"", "7"), 8, "the name of a type"),
            (f32(8).replace("\"F32\"", "null"), 8, "the name of a type"),
            (one(r#""F4""#, "[3]", 2), 2, "take 12 bits"),
            (
                f32(8).replace("\"dtype\"", "\"x\":\"\\ud800\",\"dtype\""),
                8,
                "no JSON",
            ),
            (
                f32(8).replace("\"dtype\"", "\"x\":1e999,\"dtype\""),
                8,
                "no JSON",
            ),
            (
                r#"{"__metadata__":{},"__metadata__":{}}"#.into(),
                0,
                "duplicate",
            ),
            (r#"{"__metadata__":{"a":1}}"#.into(), 0, "string"),
            ("[]".into(), 0, "none of safetensors"),
            ("{".into(), 0, "EOF"),
            (String::new(), 0, "EOF"),
        ];
        for (json, data_bytes, expected) in cases {
            let error = parse(&json, data_bytes).expect_err(&json);
            assert!(
                matches!(error, InvalidHeader::Damaged { .. }),
                "{json}: {error:?}"
            );
            assert!(error.to_string().contains(expected), "{json}: {error}");
        }
        let (mut bytes, file_bytes) = file(&f32(8), 8);
        bytes[9] = 0xff;
        parse_header(&bytes, file_bytes).unwrap_err();
    }

    #[test]
    fn what_only_the_library_takes_is_unsupported() {
        let f32 = one(r#""F32""#, "[2]", 8);
        let entry = &f32[1..f32.len() - 1];
        let cases = [
            (format!("{{{entry},{entry}}}"), 8, "twice"),
            (f32.replace("\"F32\"", "{\"F32\":null}"), 8, "no text"),
            (
                one(r#""F32""#, "[0,18446744073709551615,3]", 0),
                0,
                "too large",
            ),
        ];
        for (json, data_bytes, expected) in cases {
            let error = parse(&json, data_bytes).expect_err(&json);
            assert!(
                matches!(&error, InvalidHeader::Unsupported { tensor, .. } if tensor.as_deref() == Some("a")),
                "{json}: {error:?}"
            );
            assert!(error.to_string().contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn lengths_beyond_the_file_are_refused() {
        header_end(u64::MAX.to_le_bytes(), 1 << 40).unwrap_err();
        header_end(100u64.to_le_bytes(), 107).unwrap_err();
        assert_eq!(header_end(100u64.to_le_bytes(), 108).unwrap(), 108);
        parse_header(b"short", 5).unwrap_err();
    }
}
