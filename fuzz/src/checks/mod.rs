//! The assertions of the fuzz targets. `crates/store/tests/load/corpus.rs` includes this file, so
//! the ordinary tests run the same checks on the seeds.

pub mod keys;
pub mod library;
pub mod open;
pub mod read_plan;
pub mod signing;

use std::path::Path;

use penstock_store::format::digest::Digest;
use penstock_store::format::header::parse_header;
use penstock_store::format::manifest::Manifest;
use penstock_store::format::part::Part;
use penstock_store::format::shard::encode_header;

/// The attempt that the seeds belong to.
pub const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

/// Any bytes as a manifest: refused or parsed, never a panic.
pub fn manifest(text: &[u8]) {
    drop(Manifest::parse(text, Path::new("ckpt")));
}

/// Any JSON with a correct digest: the input of an attacker who can compute a CRC.
///
/// [`Manifest::parse`] verifies the digest first, and a fuzzer never guesses it. An accepted text
/// must encode to a manifest with the same content.
pub fn stamped_manifest(unstamped: &[u8]) {
    let Ok(manifest) = Manifest::parse(&stamp(unstamped), Path::new("ckpt")) else {
        return;
    };
    for part in &manifest.parts {
        assert!(
            !part.file.contains('/'),
            "{:?} leaves the directory",
            part.file
        );
    }
    let again = Manifest::parse(&manifest.stamp(), Path::new("ckpt")).expect("its own text");
    assert_eq!(again.stamp(), manifest.stamp());
}

/// Appends the correct digest to a manifest's text.
pub fn stamp(unstamped: &[u8]) -> Vec<u8> {
    let body = unstamped.strip_suffix(b"}").unwrap_or(unstamped);
    let mut text = body.to_vec();
    text.extend_from_slice(format!(",\"digest\":\"{}\"}}\n", Digest::of(body)).as_bytes());
    text
}

/// Any bytes as a part: refused, or every number in it is in its bounds.
pub fn part(text: &[u8]) {
    let Ok(part) = Part::parse(text, Path::new("ckpt"), "part", ATTEMPT, 0) else {
        return;
    };
    for file in &part.files {
        assert!(
            !file.name.contains('/'),
            "{:?} leaves the directory",
            file.name
        );
        assert_eq!(
            file.chunks.len() as u64,
            file.bytes.div_ceil(file.chunk_bytes)
        );
    }
    for tensor in &part.tensors {
        assert!(tensor.range.0 <= tensor.range.1);
        assert!(tensor.range.1 <= part.files[tensor.file].bytes);
        if let Some(region) = &tensor.region {
            let ends = region.start.iter().zip(&tensor.shape);
            let ends: Vec<u64> = ends.map(|(start, size)| start + size).collect();
            assert_eq!(
                (ends.len(), tensor.shape.len()),
                (region.shape.len(), ends.len())
            );
            assert!(
                ends.iter()
                    .zip(&region.shape)
                    .all(|(end, size)| end <= size)
            );
        }
    }
    let bytes: u64 = part.tensors.iter().map(|tensor| tensor.nbytes()).sum();
    assert!(
        bytes <= part.files.iter().map(|file| file.bytes).sum(),
        "bytes are claimed twice"
    );
    for alias in &part.aliases {
        assert!(alias.tensor < part.tensors.len());
    }
}

/// Any bytes as the start of a shard: refused, or a layout that fills the file exactly.
pub fn header(file: &[u8]) {
    let Ok(header) = parse_header(file, file.len() as u64) else {
        return;
    };
    let held: u64 = header
        .tensors
        .iter()
        .map(|(_, tensor)| tensor.data_offsets.1 - tensor.data_offsets.0)
        .sum();
    assert_eq!(header.data_start + held, file.len() as u64);
}

/// Any JSON as a shard's header, preceded by its length, in a file as long as the first eight
/// bytes of the input say: tests the code behind the checks of both lengths.
pub fn framed_header(input: &[u8]) {
    let Some((data_bytes, text)) = input.split_first_chunk() else {
        return;
    };
    let data_bytes = u64::from_le_bytes(*data_bytes);
    let mut start = (text.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(text);
    let file_bytes = (start.len() as u64).saturating_add(data_bytes);
    let Ok(header) = parse_header(&start, file_bytes) else {
        return;
    };
    // An accepted header can be encoded, with the same content.
    let tensors = || {
        header
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor.clone()))
    };
    let again = encode_header(tensors());
    let data_bytes = file_bytes - header.data_start;
    let Some(file_bytes) = data_bytes.checked_add(again.len() as u64) else {
        return;
    };
    let again = parse_header(&again, file_bytes).expect("its own text");
    assert_eq!(again.tensors, header.tensors);
}
