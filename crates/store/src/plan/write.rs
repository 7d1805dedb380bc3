//! The write plan: the tensors of each shard as one byte stream, cut into extents.
//!
//! Within a shard the tensors whose size is a multiple of a page come first, then the multiples of
//! 64 bytes, then the rest by falling element size. So nearly every tensor of a real model starts
//! on a page, and every one on a boundary of its own element size.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::format::dtype::{self, Carrier};
use crate::format::header::HeaderTensor;
use crate::format::part::{Stored, TensorBox, TensorEntry};
use crate::format::shard::{self, PAGE_BYTES};
use crate::seal::DECOY;

/// Limit on a shard's header. The safetensors library reads up to 100 MB.
const HEADER_BYTES_MAX: u64 = 64 << 20;

/// Tensors whose size is a multiple of this begin at multiples of it.
const LINE_BYTES: u64 = 64;

/// Longest name of a tensor. Escaped, it takes at most six times as many bytes, and fits in a
/// header alone.
const NAME_BYTES_MAX: usize = 1 << 20;

/// The properties of a tensor that the plan needs.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Dotted name, unique among the tensors and aliases.
    pub name: String,
    /// Element type; see [`crate::format::dtype`].
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of one element.
    pub item_bytes: usize,
    /// The box of a global tensor that it stores, if it does.
    pub region: Option<TensorBox>,
    /// The group whose shards contain it, if it has one.
    pub group: Option<Grouped>,
}

/// The group of a tensor and its name there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grouped {
    /// The group.
    pub group: String,
    /// The tensor's name in the header of the shard; unique in the group.
    pub name: String,
}

impl TensorSpec {
    /// The tensor's name in the header of its shard.
    fn header_name(&self) -> &str {
        self.group.as_ref().map_or(&self.name, |of| &of.name)
    }

    fn group_name(&self) -> Option<&str> {
        self.group.as_ref().map(|of| of.group.as_str())
    }

    /// Size of the tensor's data in bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a dtype or a size that the format does not support.
    pub fn nbytes(&self) -> Result<u64> {
        Ok(measure(self)?.0)
    }

    /// The tensor's entry in a part, if its data begins at byte `start` of a file.
    pub(crate) fn entry(&self, file: usize, start: u64) -> Result<TensorEntry> {
        let (bytes, carrier) = measure(self)?;
        let stored = (!dtype::is_natural(&self.dtype)).then(|| Stored {
            dtype: carrier.name.to_owned(),
            shape: stored_shape(&self.shape, carrier),
        });
        Ok(TensorEntry {
            name: self.name.clone(),
            dtype: self.dtype.clone(),
            shape: self.shape.clone(),
            file,
            range: (start, start + bytes),
            stored,
            stored_name: (self.header_name() != self.name).then(|| self.header_name().to_owned()),
            group: self.group_name().map(str::to_owned),
            region: self.region.clone(),
        })
    }
}

/// One shard: a header and the tensors that follow it without gaps.
#[derive(Debug)]
pub struct ShardPlan {
    /// First bytes of the file.
    pub header: Vec<u8>,
    /// Indices of the tensors, in file order.
    pub tensors: Vec<u32>,
    /// Offset of each of them in the file, ascending.
    pub starts: Vec<u64>,
    /// File size.
    pub bytes: u64,
}

/// Every shard of one rank.
#[derive(Debug)]
pub struct WritePlan {
    /// In the order of their file names.
    pub shards: Vec<ShardPlan>,
    /// Bytes of one extent; extents start at multiples of it in each file.
    pub extent_bytes: u64,
    /// Number of the first extent of each shard, and of all extents at the end.
    first_extents: Vec<u64>,
}

/// A run of one shard that is written with one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the shard.
    pub shard: usize,
    /// Bytes of the file.
    pub range: Range<u64>,
}

impl Extent {
    /// Number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }
}

/// The source of a piece of an extent.
#[derive(Debug, PartialEq, Eq)]
pub enum ExtentPart<'a> {
    /// Bytes of the header.
    Header(&'a [u8]),
    /// `bytes` of the tensor with this index, from its byte `start` on.
    Tensor {
        /// Index of the tensor.
        tensor: usize,
        /// First byte within the tensor.
        start: u64,
        /// How many bytes.
        bytes: u64,
    },
}

/// A tensor that is not placed yet.
struct Candidate {
    index: u32,
    bytes: u64,
    carrier: Carrier,
}

/// Arranges `tensors` into shards, with at most `shard_bytes` of data in a shard of several
/// tensors.
///
/// # Errors
/// [`Error::Unsupported`] for a dtype or a size that the format does not support.
pub fn plan(tensors: &[TensorSpec], shard_bytes: u64, extent_bytes: u64) -> Result<WritePlan> {
    let mut order = Vec::with_capacity(tensors.len());
    for (index, tensor) in (0u32..).zip(tensors) {
        let (bytes, carrier) = measure(tensor)?;
        order.push(Candidate {
            index,
            bytes,
            carrier,
        });
    }
    // Stable, so that ties stay in the order of the state.
    order.sort_by_key(|candidate| {
        let group = tensors[candidate.index as usize].group_name();
        (group, rank_in_file(candidate, tensors))
    });

    let mut shards = Vec::new();
    let mut rest = order.as_slice();
    while !rest.is_empty() {
        let taken = shard_length(rest, tensors, shard_bytes);
        let (members, others) = rest.split_at(taken);
        shards.push(plan_shard(members, tensors));
        rest = others;
    }
    Ok(WritePlan::of(shards, extent_bytes))
}

/// Whole pages first, then cache lines, then the rest by falling element size.
fn rank_in_file(candidate: &Candidate, tensors: &[TensorSpec]) -> (u8, usize) {
    let rank = rank_of_size(candidate.bytes);
    if rank < UNALIGNED {
        return (rank, 0);
    }
    // Types of odd sizes (a text of five characters) need no alignment.
    let item_bytes = tensors[candidate.index as usize].item_bytes;
    let alignment = if item_bytes.is_power_of_two() {
        item_bytes
    } else {
        1
    };
    (rank, usize::MAX - alignment)
}

const UNALIGNED: u8 = 2;

fn rank_of_size(bytes: u64) -> u8 {
    if bytes.is_multiple_of(PAGE_BYTES) {
        0
    } else if bytes.is_multiple_of(LINE_BYTES) {
        1
    } else {
        UNALIGNED
    }
}

/// The order of tensors of these sizes in a shard, as far as sizes decide it: copies of them that
/// lie in this order, whole pages and lines without gaps, are at the same places in a page.
pub fn order_of_sizes(sizes: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| rank_of_size(sizes[index]));
    order
}

fn measure(tensor: &TensorSpec) -> Result<(u64, Carrier)> {
    let unsupported = |detail: &str| Error::Unsupported {
        key: tensor.name.clone(),
        detail: format!(
            "dtype {} with shape {:?} {detail}",
            tensor.dtype, tensor.shape
        ),
    };
    if tensor.name.len() > NAME_BYTES_MAX {
        return Err(Error::Unsupported {
            key: tensor.name.chars().take(100).collect(),
            detail: format!("a name of {} bytes is too long", tensor.name.len()),
        });
    }
    let carrier = dtype::carrier(&tensor.dtype, tensor.item_bytes, &tensor.shape)
        .ok_or_else(|| unsupported("has no place in the format"))?;
    let bytes = dtype::nbytes(&tensor.shape, tensor.item_bytes)
        .ok_or_else(|| unsupported("is too large"))?;
    Ok((bytes, carrier))
}

fn stored_shape(shape: &[u64], carrier: Carrier) -> Vec<u64> {
    let stored = carrier.stored_shape(shape);
    stored.expect("the carrier was chosen for the shape")
}

/// How many of `rest` go into the next shard, all of one group or none; at least one.
fn shard_length(rest: &[Candidate], tensors: &[TensorSpec], shard_bytes: u64) -> usize {
    let (mut data_bytes, mut header_bytes) = (0u64, 0u64);
    let group = tensors[rest[0].index as usize].group_name();
    for (count, candidate) in rest.iter().enumerate() {
        let tensor = &tensors[candidate.index as usize];
        let name = tensor.header_name();
        data_bytes = data_bytes.saturating_add(candidate.bytes);
        header_bytes += shard::header_bytes_bound(name, tensor.shape.len() + 1);
        let region = tensor.region.as_ref();
        header_bytes += region.map_or(0, |region| shard::box_bytes_bound(name, region));
        let is_full = data_bytes > shard_bytes || header_bytes > HEADER_BYTES_MAX;
        if count > 0 && (is_full || tensor.group_name() != group) {
            return count;
        }
    }
    rest.len()
}

fn plan_shard(members: &[Candidate], tensors: &[TensorSpec]) -> ShardPlan {
    let mut filled = 0;
    let specs = members.iter().map(|member| &tensors[member.index as usize]);
    let boxes = specs.filter_map(|spec| Some((spec.header_name(), spec.region.as_ref()?)));
    let boxes = boxes.collect();
    let headers = members.iter().map(|candidate| {
        let tensor = &tensors[candidate.index as usize];
        let begin = filled;
        filled += candidate.bytes;
        let described = HeaderTensor {
            dtype: candidate.carrier.name.to_owned(),
            shape: stored_shape(&tensor.shape, candidate.carrier),
            data_offsets: (begin, filled),
        };
        (tensor.header_name(), described)
    });
    let header = shard::encode_header_of(headers, &boxes);
    let mut next = header.len() as u64;
    let mut starts = Vec::with_capacity(members.len());
    for candidate in members {
        starts.push(next);
        next += candidate.bytes;
    }
    let indices = members.iter().map(|candidate| candidate.index).collect();
    ShardPlan {
        header,
        tensors: indices,
        starts,
        bytes: next,
    }
}

impl WritePlan {
    fn of(shards: Vec<ShardPlan>, extent_bytes: u64) -> WritePlan {
        let mut first_extents = vec![0];
        for shard in &shards {
            first_extents
                .push(first_extents[first_extents.len() - 1] + shard.bytes.div_ceil(extent_bytes));
        }
        WritePlan {
            shards,
            extent_bytes,
            first_extents,
        }
    }

    /// The plan with headers that say nothing of the tensors: each shows one of the shard's size.
    #[must_use]
    pub fn sealed(self) -> WritePlan {
        let seal = |shard: ShardPlan| {
            let header_bytes = shard.header.len() as u64;
            let data_bytes = shard.bytes - header_bytes;
            let decoy = HeaderTensor {
                dtype: "U8".to_owned(),
                shape: vec![data_bytes],
                data_offsets: (0, data_bytes),
            };
            let header = shard::encode_header([(DECOY, decoy)].into_iter());
            let first = header.len() as u64;
            let starts = shard
                .starts
                .iter()
                .map(|start| start - header_bytes + first);
            ShardPlan {
                starts: starts.collect(),
                bytes: first + data_bytes,
                tensors: shard.tensors,
                header,
            }
        };
        let shards = self.shards.into_iter().map(seal).collect();
        WritePlan::of(shards, self.extent_bytes)
    }

    /// Number of extents in all shards.
    pub fn extents(&self) -> u64 {
        self.first_extents[self.first_extents.len() - 1]
    }

    /// Size of all shards.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// The extent with this number, counted through all shards.
    pub fn extent(&self, number: u64) -> Extent {
        let shard = self.first_extents.partition_point(|&first| first <= number) - 1;
        let start = (number - self.first_extents[shard]) * self.extent_bytes;
        let end = (start + self.extent_bytes).min(self.shards[shard].bytes);
        Extent {
            shard,
            range: start..end,
        }
    }

    /// Calls `fill` with the pieces of an extent, in order and without gaps.
    pub fn pieces<'a>(&'a self, extent: &Extent, mut fill: impl FnMut(ExtentPart<'a>)) {
        let shard = &self.shards[extent.shard];
        let header_bytes = shard.header.len() as u64;
        let mut at = extent.range.start;
        if at < header_bytes {
            let end = extent.range.end.min(header_bytes);
            fill(ExtentPart::Header(&shard.header[at as usize..end as usize]));
            at = end;
        }
        // The last tensor that starts at or before `at`; empty ones are skipped.
        let mut member = shard
            .starts
            .partition_point(|&start| start <= at)
            .saturating_sub(1);
        while at < extent.range.end {
            let end = shard.starts.get(member + 1).copied().unwrap_or(shard.bytes);
            let end = end.min(extent.range.end);
            if end > at {
                let start = at - shard.starts[member];
                let tensor = shard.tensors[member] as usize;
                fill(ExtentPart::Tensor {
                    tensor,
                    start,
                    bytes: end - at,
                });
                at = end;
            }
            member += 1;
        }
    }

    /// The entries of the part manifest, in the order of `tensors`.
    pub fn entries(&self, tensors: &[TensorSpec]) -> Vec<TensorEntry> {
        let mut places = vec![(0, 0); tensors.len()];
        for (file, shard) in self.shards.iter().enumerate() {
            for (&tensor, &start) in shard.tensors.iter().zip(&shard.starts) {
                places[tensor as usize] = (file, start);
            }
        }
        let entry = |(tensor, (file, start)): (&TensorSpec, (usize, u64))| {
            let entry = tensor.entry(file, start);
            entry.expect("the plan measured it before")
        };
        tensors.iter().zip(places).map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_tensor(name: &str, bytes: u64) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            dtype: "uint8".into(),
            shape: vec![bytes],
            item_bytes: 1,
            region: None,
            group: None,
        }
    }

    #[test]
    fn pages_come_first_then_lines_then_falling_item_sizes() {
        let spec = |name: &str, dtype: &str, item_bytes: usize, items: u64| TensorSpec {
            name: name.into(),
            dtype: dtype.into(),
            shape: vec![items],
            item_bytes,
            region: None,
            group: None,
        };
        let tensors = [
            spec("odd", "uint8", 1, 3),
            spec("half", "float16", 2, 3),
            spec("double", "float64", 8, 3),
            spec("text", "numpy:<U3", 12, 1),
            spec("line", "uint8", 1, 128),
            spec("page", "float32", 4, 2048),
            spec("empty", "float32", 4, 0),
        ];
        let plan = plan(&tensors, u64::MAX, 1 << 22).unwrap();
        let names: Vec<_> = plan.shards[0]
            .tensors
            .iter()
            .map(|&index| &tensors[index as usize].name)
            .collect();
        assert_eq!(
            names,
            ["page", "empty", "line", "double", "half", "odd", "text"]
        );
    }

    #[test]
    fn shards_are_cut_by_bytes() {
        let tensors: Vec<_> = (0..5).map(|i| bytes_tensor(&i.to_string(), 8192)).collect();
        let plan = plan(&tensors, 16384, 1 << 20).unwrap();
        let members: Vec<_> = plan
            .shards
            .iter()
            .map(|shard| shard.tensors.clone())
            .collect();
        assert_eq!(members, [vec![0, 1], vec![2, 3], vec![4]]);
    }

    #[test]
    fn no_tensors_no_shards() {
        let plan = plan(&[], 1, 1 << 20).unwrap();
        assert_eq!((plan.shards.len(), plan.extents(), plan.bytes()), (0, 0, 0));
    }

    #[test]
    fn what_has_no_place_is_refused() {
        let mut tensor = bytes_tensor("x.y", 1);
        tensor.dtype = "object".into();
        let error = plan(&[tensor], 1, 1 << 20).unwrap_err();
        assert!(matches!(error, Error::Unsupported { key, .. } if key == "x.y"));
    }

    proptest! {
        #[test]
        fn extents_cover_every_file_and_pieces_every_extent(
            sizes in prop::collection::vec(0u64..20_000, 0..40),
            shard_bytes in 1u64..100_000,
            is_sealed in any::<bool>(),
        ) {
            let tensors: Vec<_> = sizes
                .iter()
                .enumerate()
                .map(|(index, &bytes)| bytes_tensor(&index.to_string(), bytes))
                .collect();
            let mut plan = plan(&tensors, shard_bytes, 4096).unwrap();
            if is_sealed {
                plan = plan.sealed();
            }
            let mut files: Vec<u64> = vec![0; plan.shards.len()];
            let mut copied: Vec<u64> = vec![0; tensors.len()];
            for number in 0..plan.extents() {
                let extent = plan.extent(number);
                prop_assert_eq!(extent.range.start, files[extent.shard]);
                prop_assert!(extent.range.start < extent.range.end);
                files[extent.shard] = extent.range.end;
                let mut filled = 0;
                plan.pieces(&extent, |piece| match piece {
                    ExtentPart::Header(bytes) => filled += bytes.len() as u64,
                    ExtentPart::Tensor { tensor, start, bytes } => {
                        assert_eq!(start, copied[tensor], "a tensor is copied in order");
                        copied[tensor] += bytes;
                        filled += bytes;
                    }
                });
                prop_assert_eq!(filled, extent.range.end - extent.range.start);
            }
            prop_assert_eq!(&copied, &sizes);
            let ends: Vec<u64> = plan.shards.iter().map(|shard| shard.bytes).collect();
            prop_assert_eq!(files, ends);
            for (entry, &bytes) in plan.entries(&tensors).iter().zip(&sizes) {
                prop_assert_eq!(entry.nbytes(), bytes);
            }
        }
    }
}
