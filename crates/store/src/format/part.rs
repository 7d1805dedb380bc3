//! Part manifests: what one rank wrote.
//!
//! A part lists the rank's files with their digests, its tensors with the bytes that hold them,
//! the tied names, and the tree of everything else. It is parsed as hostile input although the
//! manifest vouches for its digest: a checkpoint may come from anywhere.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use penstock_io::buffer::Bounds;

use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, Digest, hex_list};
use crate::format::dtype;
use crate::format::name;

/// Value of a part's `format` member.
pub(crate) const FORMAT: &str = "penstock-part";

/// A parsed part.
#[derive(Debug, Serialize, Deserialize)]
pub struct Part {
    /// Always `penstock-part`.
    pub format: String,
    /// Version of the format; see [`crate::FORMAT_VERSION`].
    pub version: u64,
    /// The attempt that wrote it.
    pub id: String,
    /// The rank that wrote it.
    pub rank: u32,
    /// The shards of this rank.
    pub files: Vec<FileEntry>,
    /// The tensors of this rank.
    pub tensors: Vec<TensorEntry>,
    /// Further names of tensors, and views into them.
    pub aliases: Vec<Alias>,
    /// The state's structure and its plain leaves, as typed JSON.
    pub tree: Box<RawValue>,
    /// Tensors of the state that could not be salvaged; the tree refers to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
}

/// What could not be salvaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Dotted name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Why it is missing.
    pub reason: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "MissingKind::is_own")]
    pub kind: MissingKind,
}

/// What a missing entry stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingKind {
    /// A tensor of the rank, or a further name of one; the tree refers to it by its place in the list.
    #[default]
    Own,
    /// A global tensor, under its global name, which trees refer to as if it were there.
    Shared,
    /// The rank's state: its structure and plain values, and tensors that nothing names any more.
    State,
}

impl MissingKind {
    fn is_own(&self) -> bool {
        *self == MissingKind::Own
    }
}

/// One shard with its digests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the checkpoint directory.
    pub name: String,
    /// Exact size.
    pub bytes: u64,
    /// Digest of all of it.
    pub digest: Digest,
    /// Bytes that share a chunk digest.
    pub chunk_bytes: u64,
    /// Digest of each chunk in order.
    #[serde(with = "hex_list")]
    pub chunks: Vec<Digest>,
}

/// One tensor and the bytes that hold it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Dotted name, unique in the part.
    pub name: String,
    /// Element type; see [`crate::format::dtype`].
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Index into the part's files.
    pub file: usize,
    /// First byte and the byte after the last, counted from the start of the file.
    pub range: (u64, u64),
    /// How the shard's header describes it, where that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Stored>,
    /// The box of a larger tensor that it is; without it, it is its rank's alone.
    #[serde(
        default,
        rename = "box",
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    pub region: Option<TensorBox>,
}

/// Where in a global tensor, of which ranks hold parts, an entry belongs. Its size is the entry's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorBox {
    /// Name of the global tensor; the same in all parts.
    pub tensor: String,
    /// Dimensions of the global tensor, outermost first.
    pub shape: Vec<u64>,
    /// First index along each of them.
    pub start: Vec<u64>,
}

/// A member that is there has a value: null is none.
fn present<'de, D>(deserializer: D) -> std::result::Result<Option<TensorBox>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    TensorBox::deserialize(deserializer).map(Some)
}

/// The carrier of a dtype that safetensors has no name for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// The safetensors type.
    pub dtype: String,
    /// The shape in the shard's header.
    pub shape: Vec<u64>,
}

/// Another name of a stored tensor, or a view into it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// Dotted name.
    pub name: String,
    /// Index of the tensor.
    pub tensor: usize,
    /// Which of its elements; all of them in the same order where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view: Option<View>,
}

/// A strided window over a stored tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each dimension, in elements.
    pub strides: Vec<i64>,
    /// Index of the first element.
    pub offset: u64,
}

impl TensorEntry {
    /// Bytes of data.
    pub fn nbytes(&self) -> u64 {
        self.range.1 - self.range.0
    }

    /// Bytes of an element.
    pub fn item_bytes(&self) -> usize {
        // A type of NumPy's own: its carrier has one more dimension, the bytes of an element.
        let carried = || self.stored.as_ref()?.shape.last().copied();
        dtype::item_bytes(&self.dtype).unwrap_or_else(|| carried().unwrap_or_default() as usize)
    }

    /// The type that the shard's header gives it.
    pub(crate) fn stored_dtype(&self) -> Option<&str> {
        match &self.stored {
            Some(stored) => Some(&stored.dtype),
            None => dtype::natural(&self.dtype),
        }
    }
}

/// What stays a rank's own where the parts of all are taken as one.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) tree: Box<RawValue>,
    /// Where its tensors begin among those of all.
    pub(crate) first_tensor: usize,
    /// Where its aliases begin among those of all.
    pub(crate) first_alias: usize,
    /// Where what it lacks begins among what all lack.
    pub(crate) first_missing: usize,
}

impl Part {
    /// One part out of those of all ranks, and what is each rank's own; `None` out of none.
    pub(crate) fn merge(parts: Vec<Part>) -> Option<(Part, Vec<Rank>)> {
        let nothing = || RawValue::from_string("null".to_owned()).expect("it is JSON");
        let mut ranks = Vec::with_capacity(parts.len());
        let mut merged: Option<Part> = None;
        for mut part in parts {
            let count = |count: fn(&Part) -> usize| merged.as_ref().map_or(0, count);
            let files = count(|part| part.files.len());
            let rank = Rank {
                tree: std::mem::replace(&mut part.tree, nothing()),
                first_tensor: count(|part| part.tensors.len()),
                first_alias: count(|part| part.aliases.len()),
                first_missing: count(|part| part.missing.len()),
            };
            part.tensors
                .iter_mut()
                .for_each(|entry| entry.file += files);
            let aliases = part.aliases.iter_mut();
            aliases.for_each(|alias| alias.tensor += rank.first_tensor);
            ranks.push(rank);
            match &mut merged {
                None => merged = Some(part),
                Some(merged) => {
                    merged.files.extend(part.files);
                    merged.tensors.extend(part.tensors);
                    merged.aliases.extend(part.aliases);
                    merged.missing.extend(part.missing);
                }
            }
        }
        merged.map(|part| (part, ranks))
    }

    /// Parses and checks a part of the checkpoint at `path`, of which the digest is right.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::Version`], and [`Error::Unknown`] for types that this version
    /// does not know.
    pub fn parse(text: &[u8], path: &Path, file: &str, id: &str, rank: u32) -> Result<Part> {
        let malformed = |detail: String| Error::malformed(path, file, detail);
        let part: Part = serde_json::from_slice(text)
            .map_err(|error| malformed(format!("not a part manifest: {error}")))?;
        if part.format == FORMAT && part.version > crate::FORMAT_VERSION {
            return Err(Error::Version {
                path: path.to_owned(),
                found: part.version,
                supported: crate::FORMAT_VERSION,
            });
        }
        if part.format != FORMAT || part.version != crate::FORMAT_VERSION {
            return Err(malformed(format!(
                "not a part of format version {}: {:?} version {}",
                crate::FORMAT_VERSION,
                part.format,
                part.version
            )));
        }
        if part.id != id || part.rank != rank {
            return Err(malformed(format!(
                "belongs to attempt {} rank {}, the manifest to attempt {id} rank {rank}",
                part.id, part.rank
            )));
        }
        if let Some(detail) = part.unknown_type() {
            return Err(Error::Unknown {
                path: path.to_owned(),
                file: file.to_owned(),
                detail,
            });
        }
        part.check().map_err(malformed)?;
        Ok(part)
    }

    /// A type that this version has no name for, in words; whoever wrote it did.
    fn unknown_type(&self) -> Option<String> {
        self.tensors.iter().find_map(|tensor| {
            let carrier = tensor.stored.as_ref().map(|stored| &stored.dtype);
            let unknown = match carrier {
                _ if !dtype::is_known(&tensor.dtype) => &tensor.dtype,
                Some(carrier) if !dtype::is_carrier(carrier) => carrier,
                _ => return None,
            };
            Some(format!(
                "tensor {:?} has elements of a type that this version of Penstock does not know: \
                 {unknown:?}",
                tensor.name
            ))
        })
    }

    /// Whether every number in it stays inside the others; a writer asks before it commits, a
    /// reader before it believes.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        for file in &self.files {
            check_file(file, &self.id, self.rank)?;
        }
        for tensor in &self.tensors {
            check_tensor(tensor, &self.files)
                .map_err(|detail| format!("tensor {:?}: {detail}", tensor.name))?;
        }
        check_overlaps(self)?;
        check_repeats(self)?;
        for alias in &self.aliases {
            check_alias(alias, &self.tensors)
                .map_err(|detail| format!("alias {:?}: {detail}", alias.name))?;
        }
        Ok(())
    }
}

fn check_file(file: &FileEntry, attempt: &str, rank: u32) -> std::result::Result<(), String> {
    if !name::is_shard(&file.name, rank, attempt) {
        return Err(format!(
            "{:?} is no name of a shard of this attempt",
            file.name
        ));
    }
    if file.chunk_bytes != CHUNK_BYTES {
        return Err(format!(
            "{}: chunks of {} bytes",
            file.name, file.chunk_bytes
        ));
    }
    if file.bytes > i64::MAX as u64 || file.chunks.len() as u64 != file.bytes.div_ceil(CHUNK_BYTES)
    {
        return Err(format!(
            "{}: {} chunk digests for {} bytes",
            file.name,
            file.chunks.len(),
            file.bytes
        ));
    }
    if Digest::of_chunks(&file.chunks, file.bytes) != file.digest {
        return Err(format!(
            "{}: the chunk digests do not add up to the file's",
            file.name
        ));
    }
    Ok(())
}

fn check_tensor(tensor: &TensorEntry, files: &[FileEntry]) -> std::result::Result<(), String> {
    let (begin, end) = tensor.range;
    let file = files
        .get(tensor.file)
        .ok_or("its file is not in the list")?;
    if begin > end || end > file.bytes {
        return Err(format!(
            "bytes {begin}..{end} lie outside {} bytes",
            file.bytes
        ));
    }
    let expected = match &tensor.stored {
        None if dtype::is_natural(&tensor.dtype) => {
            let item_bytes = dtype::item_bytes(&tensor.dtype).unwrap_or_default();
            dtype::nbytes(&tensor.shape, item_bytes)
        }
        None => return Err(format!("{:?} needs a carrier and has none", tensor.dtype)),
        Some(stored) => carried_bytes(tensor, stored)?,
    };
    let expected = expected.ok_or("the shape is too large")?;
    if end - begin != expected {
        return Err(format!(
            "{} bytes where the shape takes {expected}",
            end - begin
        ));
    }
    tensor
        .region
        .as_ref()
        .map_or(Ok(()), |region| check_box(tensor, region))
}

pub(crate) fn check_box(
    tensor: &TensorEntry,
    region: &TensorBox,
) -> std::result::Result<(), String> {
    let TensorBox {
        tensor: name,
        shape,
        start,
    } = region;
    if name.is_empty() {
        return Err("a box of a tensor without a name".into());
    }
    let bounds = Bounds {
        start: start.clone(),
        shape: tensor.shape.clone(),
    };
    let is_sane = dtype::nbytes(shape, tensor.item_bytes().max(1)).is_some();
    if is_sane && bounds.fits(shape) {
        return Ok(());
    }
    let size = &tensor.shape;
    Err(format!(
        "a box of {size:?} at {start:?} has no place in {name:?} of {shape:?}"
    ))
}

fn carried_bytes(
    tensor: &TensorEntry,
    stored: &Stored,
) -> std::result::Result<Option<u64>, String> {
    let mismatch = || format!("{:?} is not carried by {stored:?}", tensor.dtype);
    let stored_bytes = dtype::stored_item_bytes(&stored.dtype).ok_or_else(mismatch)?;
    let item_bytes = match dtype::item_bytes(&tensor.dtype) {
        Some(item_bytes) => item_bytes,
        None => {
            let last = *stored.shape.last().ok_or_else(mismatch)?;
            usize::try_from(last).map_err(|_| mismatch())?
        }
    };
    let carrier = dtype::carrier(&tensor.dtype, item_bytes).ok_or_else(mismatch)?;
    if carrier.name != stored.dtype || carried_shape(&tensor.shape, carrier) != stored.shape {
        return Err(mismatch());
    }
    Ok(dtype::nbytes(&stored.shape, stored_bytes))
}

/// The shape that a shard's header gives a tensor under its carrier.
pub(crate) fn carried_shape(shape: &[u64], carrier: dtype::Carrier) -> Vec<u64> {
    let extra = carrier.extra_dim.map(|dim| dim as u64);
    shape.iter().copied().chain(extra).collect()
}

fn check_overlaps(part: &Part) -> std::result::Result<(), String> {
    let mut ranges: Vec<(usize, u64, u64, &str)> = part
        .tensors
        .iter()
        .map(|tensor| {
            (
                tensor.file,
                tensor.range.0,
                tensor.range.1,
                tensor.name.as_str(),
            )
        })
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((file, _, end, name), (next_file, next_begin, _, next_name)) = (pair[0], pair[1]);
        if file == next_file && next_begin < end {
            return Err(format!("tensors {name:?} and {next_name:?} overlap"));
        }
    }
    Ok(())
}

/// A file that is listed twice would let a small checkpoint claim its bytes many times over, and
/// hide overlaps; a name that is there twice would stand for two things. Global names are apart.
fn check_repeats(part: &Part) -> std::result::Result<(), String> {
    let files = part.files.iter().map(|file| &file.name);
    let tensors = part.tensors.iter().map(|tensor| &tensor.name);
    let missing = |kind: MissingKind| {
        let of_kind = part.missing.iter().filter(move |entry| entry.kind == kind);
        of_kind.map(|missing| &missing.name)
    };
    let names = tensors
        .chain(part.aliases.iter().map(|alias| &alias.name))
        .chain(missing(MissingKind::Own));
    let repeated = first_repeated(files)
        .or_else(|| first_repeated(names))
        .or_else(|| first_repeated(missing(MissingKind::Shared)))
        .or_else(|| missing(MissingKind::State).nth(1));
    match repeated {
        Some(name) => Err(format!("the name {name:?} is there twice")),
        None => Ok(()),
    }
}

fn first_repeated<'a>(mut names: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let mut seen = HashSet::new();
    names.find(|&name| !seen.insert(name))
}

fn check_alias(alias: &Alias, tensors: &[TensorEntry]) -> std::result::Result<(), String> {
    let tensor = tensors
        .get(alias.tensor)
        .ok_or("its tensor is not in the list")?;
    let Some(view) = &alias.view else {
        return Ok(());
    };
    if view.shape.len() != view.strides.len() {
        return Err("as many strides as dimensions are needed".into());
    }
    let items = dtype::nbytes(&tensor.shape, 1).ok_or("the tensor's shape is too large")?;
    let view_items = dtype::nbytes(&view.shape, 1).ok_or("the shape is too large")?;
    if view_items == 0 {
        return if view.offset <= items {
            Ok(())
        } else {
            Err("starts outside the tensor".into())
        };
    }
    // The view's first and last element in memory; both have to lie in the tensor.
    let (mut lowest, mut highest) = (i128::from(view.offset), i128::from(view.offset));
    for (&dim, &stride) in view.shape.iter().zip(&view.strides) {
        let reach = i128::from(dim - 1) * i128::from(stride);
        lowest += reach.min(0);
        highest += reach.max(0);
    }
    if lowest < 0 || highest >= i128::from(items) {
        return Err("reaches outside the tensor".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

    fn region(tensor: &str, shape: &[u64], start: &[u64]) -> serde_json::Value {
        serde_json::json!({"tensor": tensor, "shape": shape, "start": start})
    }

    fn sample() -> serde_json::Value {
        let digest = Digest::of(&[7; 100]);
        serde_json::json!({
            "format": "penstock-part", "version": 1, "id": ATTEMPT, "rank": 0,
            "files": [{
                "name": name::shard(0, 0, ATTEMPT), "bytes": 100, "digest": digest.to_string(),
                "chunk_bytes": CHUNK_BYTES, "chunks": [format!("{:016x}", digest.0)],
            }],
            "tensors": [
                {"name": "a", "dtype": "float32", "shape": [5], "file": 0, "range": [40, 60]},
                {"name": "b", "dtype": "complex128", "shape": [2], "file": 0, "range": [60, 92],
                 "stored": {"dtype": "F64", "shape": [2, 2]}},
                {"name": "c", "dtype": "numpy:<U2", "shape": [1], "file": 0, "range": [92, 100],
                 "stored": {"dtype": "U8", "shape": [1, 8]}, "box": region("w", &[3], &[2])},
            ],
            "aliases": [
                {"name": "tied", "tensor": 0},
                {"name": "view", "tensor": 0,
                 "view": {"shape": [2], "strides": [-2], "offset": 4}},
            ],
            "tree": {"x": 1.0},
        })
    }

    fn parse(value: &serde_json::Value) -> Result<Part> {
        Part::parse(
            value.to_string().as_bytes(),
            Path::new("ckpt"),
            "part",
            ATTEMPT,
            0,
        )
    }

    #[test]
    fn a_good_part_parses_and_serialises_to_the_same() {
        let part = parse(&sample()).unwrap();
        assert_eq!(part.aliases[0].view, None);
        assert_eq!(part.aliases[1].view.as_ref().unwrap().strides, [-2]);
        let again = serde_json::to_value(&part).unwrap();
        assert_eq!(again, sample());
    }

    #[test]
    fn numbers_that_lie_are_refused() {
        let cases: &[(&str, serde_json::Value, &str)] = &[
            ("/version", 0.into(), "version"),
            ("/rank", 1.into(), "rank"),
            ("/id", "x".into(), "attempt"),
            (
                "/files/0/name",
                "../../etc/passwd".into(),
                "no name of a shard",
            ),
            (
                "/files/0/name",
                name::shard(1, 0, ATTEMPT).into(),
                "no name of a shard",
            ),
            ("/files/0/bytes", 2_000_000.into(), "chunk digests"),
            ("/files/0/bytes", u64::MAX.into(), "chunk digests"),
            ("/files/0/chunks", serde_json::json!([]), "chunk digests"),
            ("/files/0/chunks/0", "00000000000000aa".into(), "add up"),
            ("/files/0/chunk_bytes", 0.into(), "chunks of 0"),
            ("/tensors/0/file", 1.into(), "not in the list"),
            ("/tensors/0/range", serde_json::json!([40, 61]), "overlap"),
            ("/tensors/0/range", serde_json::json!([60, 40]), "outside"),
            ("/tensors/0/range", serde_json::json!([90, 110]), "outside"),
            ("/tensors/0/range", serde_json::json!([50, 70]), "overlap"),
            (
                "/tensors/0/shape",
                serde_json::json!([6]),
                "where the shape takes",
            ),
            (
                "/tensors/0/shape",
                serde_json::json!([u64::MAX, 9]),
                "too large",
            ),
            ("/tensors/0/dtype", "complex128".into(), "needs a carrier"),
            ("/tensors/0/dtype", "numpy:<f4".into(), "needs a carrier"),
            ("/tensors/1/stored/dtype", "F32".into(), "not carried"),
            (
                "/tensors/1/stored/shape",
                serde_json::json!([4]),
                "not carried",
            ),
            (
                "/tensors/2/stored/shape",
                serde_json::json!([]),
                "not carried",
            ),
            ("/aliases/0/tensor", 3.into(), "not in the list"),
            ("/aliases/1/view/offset", 1.into(), "outside"),
            (
                "/aliases/1/view/strides",
                serde_json::json!([i64::MAX]),
                "outside",
            ),
            ("/aliases/1/view/strides", serde_json::json!([]), "strides"),
        ];
        for (pointer, value, expected) in cases {
            let mut part = sample();
            *part.pointer_mut(pointer).unwrap() = value.clone();
            let error = parse(&part).unwrap_err();
            assert!(matches!(error, Error::Malformed { .. }), "{error}");
            let error = error.to_string();
            let known = error.contains(expected)
                || (*pointer == "/tensors/0/range" && error.contains("where the shape takes"));
            assert!(known, "{pointer}: {error}");
        }
    }

    #[test]
    fn what_a_newer_version_may_write_is_no_damage() {
        let cases = [
            ("/tensors/0/dtype", "float3_e1m1".into()),
            ("/tensors/1/dtype", "object".into()),
            ("/tensors/1/stored/dtype", "F4_PACKED".into()),
        ];
        for (pointer, value) in cases {
            let mut part = sample();
            *part.pointer_mut(pointer).unwrap() = value;
            let error = parse(&part).unwrap_err();
            assert!(matches!(error, Error::Unknown { .. }), "{pointer}: {error}");
        }
        let mut part = sample();
        part["version"] = 2.into();
        assert!(matches!(parse(&part), Err(Error::Version { found: 2, .. })));
    }

    #[test]
    fn boxes_that_lie_are_refused() {
        let cases = [
            (serde_json::json!([[0, 5]]), "sequence"),
            (serde_json::json!(null), "null"),
            (region("", &[5], &[0]), "without a name"),
            (region("w", &[5], &[1]), "no place"),
            (region("w", &[u64::MAX], &[u64::MAX - 1]), "no place"),
            (region("w", &[5, 1], &[0]), "no place"),
            (region("w", &[5], &[0, 0]), "no place"),
        ];
        for (lie, expected) in cases {
            let mut part = sample();
            part["tensors"][0]["box"] = lie.clone();
            let error = parse(&part).unwrap_err().to_string();
            assert!(error.contains(expected), "{lie}: {error}");
        }
    }

    #[test]
    fn what_is_missing_has_names_of_its_kind() {
        let entry = |kind: &str| match kind {
            "" => serde_json::json!({"name": "w", "dtype": "int8", "shape": [], "reason": "x"}),
            kind => serde_json::json!(
                {"name": "w", "dtype": "int8", "shape": [], "reason": "x", "kind": kind}
            ),
        };
        let with = |kinds: &[&str]| {
            let mut part = sample();
            let entries: Vec<_> = kinds.iter().map(|kind| entry(kind)).collect();
            part["missing"] = entries.into();
            part
        };
        let kept = with(&["", "shared", "state"]);
        let part = parse(&kept).unwrap();
        assert_eq!(serde_json::to_value(&part).unwrap(), kept);
        for kinds in [&["", ""][..], &["shared", "shared"], &["state", "state"]] {
            let error = parse(&with(kinds)).unwrap_err().to_string();
            assert!(error.contains("twice"), "{error}");
        }
        parse(&with(&["other"])).unwrap_err();
    }

    #[test]
    fn anything_else_is_no_part() {
        for text in [
            "",
            "{}",
            "[]",
            "null",
            "{\"format\":\"penstock-part\"}",
            "\u{0}",
        ] {
            let result = Part::parse(text.as_bytes(), Path::new("c"), "p", ATTEMPT, 0);
            assert!(matches!(result, Err(Error::Malformed { .. })), "{text:?}");
        }
    }
}
