//! Shards: safetensors files whose data starts on a page boundary.
//!
//! The header is padded with spaces, as the format allows, so that the first tensor starts on a
//! [`PAGE_BYTES`] boundary. Its metadata lists which tensors are boxes of larger ones.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use penstock_io::file_system::Files;
use serde::ser::{SerializeMap, Serializer as _};

use crate::format::header::{self, Header, HeaderTensor, LENGTH_BYTES};
use crate::format::part::TensorBox;
use crate::seal::DECOY;

/// Alignment of a shard's data, and of direct I/O.
pub const PAGE_BYTES: u64 = 4096;

/// Metadata key of the list of tensors that are boxes of larger ones.
const BOXES: &str = "penstock.boxes";

/// Builds the first bytes of a shard, up to the start of its data.
pub fn encode_header<'a>(tensors: impl Iterator<Item = (&'a str, HeaderTensor)>) -> Vec<u8> {
    encode_header_of(tensors, &BTreeMap::new())
}

/// Builds the header of a shard with boxes of global tensors: its metadata lists them, for readers
/// that have only the shard.
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

/// Builds the header of a sealed shard of `file_bytes` bytes, of which the first `header_bytes` are
/// the header; `None` if it is longer.
pub(crate) fn encode_decoy(header_bytes: u64, file_bytes: u64) -> Option<Vec<u8>> {
    let data_bytes = file_bytes.checked_sub(header_bytes)?;
    let decoy = HeaderTensor {
        dtype: "U8".to_owned(),
        shape: vec![data_bytes],
        data_offsets: (0, data_bytes),
    };
    let mut bytes = vec![0; LENGTH_BYTES as usize];
    write_header_json(&mut bytes, [(DECOY, decoy)].into_iter(), &BTreeMap::new())
        .expect("writing JSON to memory cannot fail");
    if bytes.len() as u64 > header_bytes {
        return None;
    }
    bytes.resize(header_bytes as usize, b' ');
    bytes[..LENGTH_BYTES as usize].copy_from_slice(&(header_bytes - LENGTH_BYTES).to_le_bytes());
    Some(bytes)
}

fn write_header_json<'a>(
    bytes: &mut Vec<u8>,
    tensors: impl Iterator<Item = (&'a str, HeaderTensor)>,
    boxes: &BTreeMap<&str, &TensorBox>,
) -> serde_json::Result<()> {
    let mut serializer = serde_json::Serializer::new(bytes);
    let mut map = serializer.serialize_map(None)?;
    // transformers checks for "format": "pt" before it loads a file.
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

/// Upper bound of a tensor's share of a header, so that shards are split before their headers are
/// too long.
pub(crate) fn header_bytes_bound(name: &str, dims: usize) -> u64 {
    // A byte of a name takes at most six when escaped (\u0000); a number at most twenty digits.
    const FIXED_BYTES: usize = 128;
    (name.len() * 6 + dims * 21 + FIXED_BYTES) as u64
}

/// Upper bound of the additional header bytes of a box. Its JSON is inside a string and escaped
/// twice: a byte of a name takes at most seven (\\u0000).
pub(crate) fn box_bytes_bound(name: &str, region: &TensorBox) -> u64 {
    const FIXED_BYTES: usize = 128;
    let dims = region.shape.len() + region.start.len();
    ((name.len() + region.tensor.len()) * 7 + dims * 21 + FIXED_BYTES) as u64
}

/// The tensors that are boxes of global ones, if the writer listed them. No digest confirms the
/// list.
pub(crate) fn boxes(header: &Header) -> Result<Option<BTreeMap<String, TensorBox>>, String> {
    let text = header.metadata.get(BOXES);
    let boxes = text.map(|text| serde_json::from_str(text)).transpose();
    boxes.map_err(|error| format!("{BOXES}: {error}"))
}

/// Reads the header of a shard, and the size of the file.
pub(crate) fn read_header(path: &Path, files: &dyn Files) -> Result<(Header, u64), String> {
    let read = || -> io::Result<(Vec<u8>, u64)> {
        let bytes = files.stat(path)?.bytes;
        let mut start = files.read_range(path, 0..LENGTH_BYTES)?;
        let prefix = start.first_chunk().copied().unwrap_or_default();
        // An invalid length is refused below.
        let end = header::header_end(prefix, bytes).unwrap_or_default();
        start.extend(files.read_range(path, LENGTH_BYTES..end.max(LENGTH_BYTES))?);
        Ok((start, bytes))
    };
    let (start, bytes) = read().map_err(|error| error.to_string())?;
    let header = header::parse_header(&start, bytes).map_err(|error| error.to_string())?;
    Ok((header, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::header::parse_header;

    fn f32_at(begin: u64, shape: &[u64]) -> HeaderTensor {
        let bytes = shape.iter().product::<u64>() * 4;
        HeaderTensor {
            dtype: "F32".into(),
            shape: shape.to_vec(),
            data_offsets: (begin, begin + bytes),
        }
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
                dtype: "F8_E4M3FNUZ".into(),
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
    fn boxes_are_reported_and_read_back() {
        let region = TensorBox {
            tensor: "a \"whole\"\n".into(),
            shape: vec![4, 3],
            start: vec![2, 0],
        };
        let tensors = || [("a", f32_at(0, &[2, 3])), ("own", f32_at(24, &[1]))].into_iter();
        let bytes = encode_header_of(tensors(), &BTreeMap::from([("a", &region)]));
        let header = parse_header(&bytes, bytes.len() as u64 + 28).unwrap();
        assert_eq!(
            boxes(&header),
            Ok(Some(BTreeMap::from([("a".into(), region)])))
        );
        let bytes = encode_header(tensors());
        let header = parse_header(&bytes, bytes.len() as u64 + 28).unwrap();
        assert_eq!(boxes(&header), Ok(None));
        let header = Header {
            metadata: BTreeMap::from([(BOXES.to_owned(), "[1]".to_owned())]),
            ..header
        };
        let error = boxes(&header).unwrap_err();
        assert!(error.contains("penstock.boxes"), "{error}");
    }
}
