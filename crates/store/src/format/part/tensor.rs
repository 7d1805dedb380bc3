//! A tensor's entry in the part of its rank.

use penstock_io::buffer::Bounds;
use serde::{Deserialize, Serialize};

use super::file::FileEntry;
use crate::format::dtype;

/// A tensor and its byte range.
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
    /// The description in the shard's header, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Stored>,
    /// The name in the shard's header, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_name: Option<String>,
    /// The group of the tensor: groups have shards of their own, with the names that model loaders
    /// know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The box of a global tensor that this entry stores; without it, the tensor belongs to its
    /// rank alone.
    #[serde(
        default,
        rename = "box",
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    pub region: Option<TensorBox>,
}

/// The position of an entry in a global tensor that ranks share. The entry's shape is the box's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorBox {
    /// Name of the global tensor; the same in all parts.
    pub tensor: String,
    /// Dimensions of the global tensor, outermost first.
    pub shape: Vec<u64>,
    /// First index along each dimension.
    pub start: Vec<u64>,
}

/// Deserializes a member that must not be null if present.
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

impl TensorEntry {
    /// Size of the data in bytes.
    pub fn nbytes(&self) -> u64 {
        self.range.1 - self.range.0
    }

    /// Bytes per element.
    pub fn item_bytes(&self) -> usize {
        // A `numpy:` type: its carrier has an additional last dimension, the bytes of an element.
        let carried = || self.stored.as_ref()?.shape.last().copied();
        dtype::item_bytes(&self.dtype).unwrap_or_else(|| carried().unwrap_or_default() as usize)
    }

    /// The element type in the shard's header.
    pub(crate) fn stored_dtype(&self) -> Option<&str> {
        match &self.stored {
            Some(stored) => Some(&stored.dtype),
            None => dtype::natural(&self.dtype),
        }
    }

    /// The name in the shard's header.
    pub fn stored_name(&self) -> &str {
        self.stored_name.as_deref().unwrap_or(&self.name)
    }

    /// Checks that its byte range is within its file and has the size of its type and shape.
    pub(super) fn check(&self, files: &[FileEntry]) -> std::result::Result<(), String> {
        let (begin, end) = self.range;
        let file = files.get(self.file).ok_or("its file is not in the list")?;
        if begin > end || end > file.bytes {
            return Err(format!(
                "bytes {begin}..{end} lie outside {} bytes",
                file.bytes
            ));
        }
        let expected = match &self.stored {
            None if dtype::is_natural(&self.dtype) => {
                let item_bytes = dtype::item_bytes(&self.dtype).unwrap_or_default();
                dtype::nbytes(&self.shape, item_bytes)
            }
            None => return Err(format!("{:?} needs a carrier and has none", self.dtype)),
            Some(stored) => self.carried_bytes(stored)?,
        };
        let expected = expected.ok_or("the shape is too large")?;
        if end - begin != expected {
            return Err(format!(
                "{} bytes where the shape takes {expected}",
                end - begin
            ));
        }
        self.region
            .as_ref()
            .map_or(Ok(()), |region| self.check_box(region))
    }

    /// Checks that the box fits in the global tensor.
    pub(crate) fn check_box(&self, region: &TensorBox) -> std::result::Result<(), String> {
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
            shape: self.shape.clone(),
        };
        let is_sane = dtype::nbytes(shape, self.item_bytes().max(1)).is_some();
        if is_sane && bounds.fits(shape) {
            return Ok(());
        }
        let size = &self.shape;
        Err(format!(
            "a box of {size:?} at {start:?} has no place in {name:?} of {shape:?}"
        ))
    }

    /// Whether a reader of the shard alone sees this dtype, and not a carrier's.
    pub fn is_under_its_own_name(&self) -> bool {
        let named = |stored: &Stored| dtype::of_stored(&stored.dtype, &stored.shape);
        let stored = self.stored.as_ref();
        stored.is_none_or(|stored| named(stored).is_some_and(|(dtype, _)| dtype == self.dtype))
    }

    fn carried_bytes(&self, stored: &Stored) -> std::result::Result<Option<u64>, String> {
        let mismatch = || format!("{:?} is not carried by {stored:?}", self.dtype);
        let item_bytes = match dtype::item_bytes(&self.dtype) {
            Some(item_bytes) => item_bytes,
            None => {
                let last = *stored.shape.last().ok_or_else(mismatch)?;
                usize::try_from(last).map_err(|_| mismatch())?
            }
        };
        let holds = |carrier: dtype::Carrier| {
            carrier.name == stored.dtype
                && carrier.stored_shape(&self.shape).as_ref() == Some(&stored.shape)
        };
        if !dtype::carriers(&self.dtype, item_bytes).any(holds) {
            return Err(mismatch());
        }
        // With elements of zero bytes, any shape would pass the check.
        Ok(match item_bytes {
            0 => dtype::nbytes(&stored.shape, 1),
            _ => dtype::nbytes(&self.shape, item_bytes),
        })
    }
}
