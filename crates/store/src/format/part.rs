//! Part manifests: the record of one rank's files and state.
//!
//! A part lists the rank's files with their digests, its tensors with their byte ranges, the tied
//! names, and the tree of everything else. It is parsed as hostile input although its digest is in
//! the manifest: a checkpoint may come from anywhere.

mod alias;
mod file;
mod missing;
mod rank;
mod sealed;
mod tensor;

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::dtype;
pub use alias::{Alias, View};
pub use file::{FileEntry, SealedBlocks, SealedBody, SealedFile};
pub use missing::{Missing, MissingKind};
pub(crate) use rank::Rank;
pub(crate) use sealed::FileOpener;
pub use tensor::{Stored, TensorBox, TensorEntry};

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
    /// The sealed tensors, aliases, tree and missing tensors, which are empty here then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<SealedBody>,
}

impl Part {
    /// Parses and checks a part of the checkpoint at `path`, whose digest already matched.
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
        part.check_types(path, file)?;
        part.check_sealed().map_err(malformed)?;
        part.check().map_err(malformed)?;
        Ok(part)
    }

    fn check_types(&self, path: &Path, file: &str) -> Result<()> {
        match self.unknown_type() {
            Some(detail) => Err(Error::Unknown {
                path: path.to_owned(),
                file: file.to_owned(),
                detail,
            }),
            None => Ok(()),
        }
    }

    /// Describes a type that this version does not know, if there is one; a newer version wrote it.
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

    /// Checks that all numbers are consistent and within bounds; called before a commit and after a
    /// read.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        for file in &self.files {
            file.check(&self.id, self.rank)?;
        }
        for tensor in &self.tensors {
            tensor
                .check(&self.files)
                .map_err(|detail| format!("tensor {:?}: {detail}", tensor.name))?;
        }
        check_overlaps(self)?;
        check_repeats(self)?;
        for alias in &self.aliases {
            alias
                .check(&self.tensors)
                .map_err(|detail| format!("alias {:?}: {detail}", alias.name))?;
        }
        Ok(())
    }
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

/// Refuses repeated names. A file listed twice would let a small checkpoint claim its bytes many
/// times over, and hide overlaps; a tensor name used twice would be ambiguous. Global names are a
/// separate namespace.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::digest::{CHUNK_BYTES, Digest};
    use crate::format::name;

    const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

    fn region(tensor: &str, shape: &[u64], start: &[u64]) -> serde_json::Value {
        serde_json::json!({"tensor": tensor, "shape": shape, "start": start})
    }

    fn sample() -> serde_json::Value {
        let digest = Digest::of(&[7; 100]);
        serde_json::json!({
            "format": "penstock-part", "version": 1, "id": ATTEMPT, "rank": 0,
            "files": [{
                "name": name::shard_file(0, 0, ATTEMPT), "bytes": 100, "digest": digest.to_string(),
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
                name::shard_file(1, 0, ATTEMPT).into(),
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
