//! Global tensors: put together from the boxes that ranks stored, and taken apart for whoever wants
//! a box of another kind. Pure; what comes out are runs of files and where their items go.
//!
//! Boxes of one tensor never overlap ([`GlobalTensors::new`] refuses what does), so what is stored
//! of a wanted box is the sum of what each stored box has of it, and it is whole when that sum is.

use std::collections::HashMap;
use std::ops::Range;

use penstock_io::buffer::{Bounds, find_overlap};

use crate::digest::CHUNK_BYTES;
use crate::part::{TensorBox, TensorEntry};

/// Runs that lie together in the file and in memory are read in place from this size on: a request
/// each, and some hundred bytes of plan.
const PLAIN_BYTES_MIN: u64 = 256 << 10;

/// What finding a hole for a message may cost.
const HOLE_STEPS_MAX: usize = 1 << 20;

/// A tensor of which entries hold boxes.
#[derive(Debug)]
pub(crate) struct GlobalTensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) item_bytes: usize,
    /// The boxes that hold something, by where they start along `axis`.
    boxes: Vec<Bounds>,
    /// The entry of each box.
    entries: Vec<usize>,
    /// Where, along `axis`, the boxes up to each one end at last.
    ends: Vec<u64>,
    /// The dimension that tells most of the boxes apart.
    axis: usize,
}

/// The tensors of a checkpoint that have boxes, by name.
#[derive(Debug, Default)]
pub(crate) struct GlobalTensors {
    tensors: HashMap<String, GlobalTensor>,
}

/// Two entries that cannot both be right about a global tensor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor {tensor:?}: {detail}")]
pub(crate) struct Conflict {
    pub(crate) tensor: String,
    pub(crate) first: usize,
    pub(crate) second: usize,
    pub(crate) detail: String,
}

/// A run of a file, and the box of the wanted one that its items belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// Index of the entry.
    pub(crate) entry: usize,
    /// Bytes of its file.
    pub(crate) range: Range<u64>,
    /// Where they go in the box that is wanted.
    pub(crate) to: Bounds,
    /// Bytes between neighbours along each dimension, in the file.
    pub(crate) source_strides: Vec<usize>,
}

/// A box that is wanted, and the memory it is to be put in.
pub(crate) struct Wanted<'a> {
    pub(crate) bounds: &'a Bounds,
    pub(crate) item_bytes: usize,
    /// Bytes between neighbours along each dimension, in memory.
    pub(crate) strides: &'a [isize],
}

impl GlobalTensors {
    /// Gathers the boxes among some entries, and checks that they fit each other.
    pub(crate) fn new(entries: &[TensorEntry]) -> Result<GlobalTensors, Conflict> {
        let mut tensors: HashMap<String, GlobalTensor> = HashMap::new();
        let mut firsts: HashMap<&str, usize> = HashMap::new();
        for (index, entry) in entries.iter().enumerate() {
            let Some(region) = &entry.region else {
                continue;
            };
            let tensor = tensors.entry(region.tensor.clone()).or_insert_with(|| {
                firsts.insert(&region.tensor, index);
                GlobalTensor::of(entry, region)
            });
            let has_type = tensor.dtype == entry.dtype && tensor.item_bytes == entry.item_bytes();
            if !has_type || tensor.shape != region.shape {
                let (dtype, shape) = (&tensor.dtype, &tensor.shape);
                return Err(Conflict {
                    tensor: region.tensor.clone(),
                    first: firsts[region.tensor.as_str()],
                    second: index,
                    detail: format!(
                        "a box of a tensor of {} {:?}, others are of one of {dtype} {shape:?}",
                        entry.dtype, region.shape
                    ),
                });
            }
            let bounds = bounds(entry, region);
            if !bounds.is_empty() {
                tensor.boxes.push(bounds);
                tensor.entries.push(index);
            }
        }
        for (name, tensor) in &mut tensors {
            tensor.check_apart(name)?;
            tensor.sort();
        }
        Ok(GlobalTensors { tensors })
    }

    /// The tensor with this name.
    pub(crate) fn get(&self, name: &str) -> Option<&GlobalTensor> {
        self.tensors.get(name)
    }
}

fn bounds(entry: &TensorEntry, region: &TensorBox) -> Bounds {
    Bounds {
        start: region.start.clone(),
        shape: entry.shape.clone(),
    }
}

impl GlobalTensor {
    fn of(entry: &TensorEntry, region: &TensorBox) -> GlobalTensor {
        GlobalTensor {
            dtype: entry.dtype.clone(),
            shape: region.shape.clone(),
            item_bytes: entry.item_bytes(),
            boxes: Vec::new(),
            entries: Vec::new(),
            ends: Vec::new(),
            axis: 0,
        }
    }

    /// An entry as a tensor of one box, whether it is part of a larger one or not.
    pub(crate) fn alone(index: usize, entry: &TensorEntry) -> GlobalTensor {
        let whole = TensorBox {
            tensor: entry.name.clone(),
            shape: entry.shape.clone(),
            start: vec![0; entry.shape.len()],
        };
        let mut tensor = GlobalTensor::of(entry, &whole);
        tensor.boxes.push(Bounds::whole(&entry.shape));
        tensor.entries.push(index);
        tensor.sort();
        tensor
    }

    fn check_apart(&self, name: &str) -> Result<(), Conflict> {
        let conflict = |first: usize, second: usize, detail: String| Conflict {
            tensor: name.to_owned(),
            first: self.entries[first],
            second: self.entries[second],
            detail,
        };
        match find_overlap(&self.boxes) {
            Ok(None) => Ok(()),
            Ok(Some((one, other))) => {
                let (first, second) = (one.min(other), one.max(other));
                let (one, other) = (text(&self.boxes[first]), text(&self.boxes[second]));
                let detail = format!("the box {other} overlaps the box {one}");
                Err(conflict(first, second, detail))
            }
            Err(tangled) => Err(conflict(0, self.boxes.len() - 1, tangled.to_string())),
        }
    }

    /// Puts the boxes in an order in which those that a wanted one touches are found.
    fn sort(&mut self) {
        let mut order: Vec<usize> = (0..self.boxes.len()).collect();
        let mut starts = |dim: usize| {
            order.sort_unstable_by_key(|&index| self.boxes[index].start[dim]);
            let equal =
                |&a: &usize, &b: &usize| self.boxes[a].start[dim] == self.boxes[b].start[dim];
            order.chunk_by(equal).count()
        };
        let Some(axis) = (0..self.shape.len()).max_by_key(|&dim| starts(dim)) else {
            self.ends = vec![1; self.boxes.len()];
            return;
        };
        order.sort_unstable_by_key(|&index| self.boxes[index].start[axis]);
        self.axis = axis;
        self.boxes = order
            .iter()
            .map(|&index| self.boxes[index].clone())
            .collect();
        self.entries = order.iter().map(|&index| self.entries[index]).collect();
        let mut end = 0;
        let ends = self.boxes.iter().map(|stored| {
            end = end.max(stored.along(axis).end);
            end
        });
        self.ends = ends.collect();
    }

    /// What the stored boxes have of a wanted one.
    fn touching<'a>(&'a self, wanted: &'a Bounds) -> impl Iterator<Item = (usize, Bounds)> + 'a {
        let places = match self.shape.is_empty() {
            true => 0..self.boxes.len(),
            false => {
                let along = wanted.along(self.axis);
                let first = self.ends.partition_point(|&end| end <= along.start);
                let starts_before = |stored: &Bounds| stored.start[self.axis] < along.end;
                first..self.boxes.partition_point(starts_before).max(first)
            }
        };
        places.filter_map(|place| Some((place, self.boxes[place].intersection(wanted)?)))
    }

    /// The runs that a wanted box, not an empty one, is put together from.
    ///
    /// # Errors
    /// A box that is not stored, as text, where the stored ones do not cover it.
    pub(crate) fn cut(
        &self,
        wanted: &Wanted<'_>,
        entries: &[TensorEntry],
    ) -> Result<Vec<Fragment>, String> {
        let mut fragments = Vec::new();
        let mut items = 0;
        for (place, common) in self.touching(wanted.bounds) {
            items += common.items();
            let entry = self.entries[place];
            let stored = (entry, entries[entry].range.0, &self.boxes[place]);
            cut_common(stored, &common, wanted, &mut fragments);
        }
        if items == wanted.bounds.items() {
            return Ok(fragments);
        }
        Err(text(&self.hole(wanted.bounds)))
    }

    /// A box of the wanted one that nothing is stored of; all of it if that takes long to find.
    fn hole(&self, wanted: &Bounds) -> Bounds {
        let mut left = vec![wanted.clone()];
        for _ in 0..HOLE_STEPS_MAX {
            let Some(piece) = left.pop() else {
                break;
            };
            let Some((_, common)) = self.touching(&piece).next() else {
                return piece;
            };
            around(&piece, &common, &mut left);
        }
        wanted.clone()
    }
}

/// What is left of a box around another one inside it.
fn around(outer: &Bounds, inner: &Bounds, left: &mut Vec<Bounds>) {
    let mut rest = outer.clone();
    for dim in 0..outer.start.len() {
        let (all, taken) = (rest.along(dim), inner.along(dim));
        for range in [taken.end..all.end, all.start..taken.start] {
            if !range.is_empty() {
                let mut piece = rest.clone();
                piece.start[dim] = range.start;
                piece.shape[dim] = range.end - range.start;
                left.push(piece);
            }
        }
        rest.start[dim] = taken.start;
        rest.shape[dim] = taken.end - taken.start;
    }
}

/// A box as users write it.
pub(crate) fn text(bounds: &Bounds) -> String {
    let along = |dim| {
        let Range { start, end } = bounds.along(dim);
        format!("{start}:{end}")
    };
    let dims: Vec<String> = (0..bounds.start.len()).map(along).collect();
    format!("[{}]", dims.join(", "))
}

/// One dimension of what a stored box and a wanted one have in common.
struct Side {
    size: u64,
    source_stride: u64,
    /// Bytes from the first to the last that are in common, in the file, at one index.
    span: u64,
    /// Bytes that are in common at one index.
    bytes: u64,
    /// Whether these lie together, in the file and in memory.
    is_plain: bool,
}

/// Cuts what a stored box (an entry, its first byte in the file, and its bounds) has of a wanted
/// one into runs. Where it lies together on both sides in long runs, each is one. Else those are
/// one run whose gaps hold no whole chunk: these chunks are read and verified in any case.
fn cut_common(
    (entry, first_byte, stored): (usize, u64, &Bounds),
    common: &Bounds,
    wanted: &Wanted<'_>,
    fragments: &mut Vec<Fragment>,
) {
    let sides = sides(stored, common, wanted);
    let dims = sides.len();
    let whole_bytes = sides
        .first()
        .map_or(wanted.item_bytes as u64, |side| side.size * side.bytes);
    let is_together = |side: &Side, stride: i128| {
        side.is_plain && (side.size == 1 || stride == i128::from(side.bytes))
    };
    // Dimensions from here on lie together on both sides.
    let plain = (0..dims).rev().take_while(|&dim| {
        let (side, stride) = (&sides[dim], wanted.strides[dim] as i128);
        is_together(side, stride) && is_together(side, i128::from(side.source_stride))
    });
    let plain = plain.last().unwrap_or(dims);
    // Dimensions from here on leave gaps smaller than a chunk. Gaps grow outwards.
    let is_close = |side: &Side| side.size == 1 || side.source_stride - side.span < CHUNK_BYTES;
    let close = (0..dims)
        .rev()
        .take_while(|&dim| is_close(&sides[dim]))
        .last()
        .unwrap_or(dims);
    let plain_bytes = match plain.checked_sub(1) {
        Some(outer) => sides[outer].bytes,
        None => whole_bytes,
    };
    let depth = if plain_bytes >= PLAIN_BYTES_MIN {
        plain
    } else {
        close
    };
    let inner_span = match depth.checked_sub(1) {
        Some(outer) => sides[outer].span,
        None => sides.first().map_or(wanted.item_bytes as u64, |side| {
            (side.size - 1) * side.source_stride + side.span
        }),
    };
    let source_strides: Vec<usize> = sides.iter().map(|s| s.source_stride as usize).collect();
    let offset = |dim: usize| (common.start[dim] - stored.start[dim]) * sides[dim].source_stride;
    let first_byte = first_byte + (0..dims).map(offset).sum::<u64>();
    let runs: u64 = sides[..depth].iter().map(|side| side.size).product();
    for run in 0..runs {
        let (mut index, mut start) = (run, first_byte);
        let mut to = Bounds {
            start: (0..dims)
                .map(|dim| common.start[dim] - wanted.bounds.start[dim])
                .collect(),
            shape: common.shape.clone(),
        };
        for dim in (0..depth).rev() {
            let at = index % sides[dim].size;
            index /= sides[dim].size;
            start += at * sides[dim].source_stride;
            to.start[dim] += at;
            to.shape[dim] = 1;
        }
        fragments.push(Fragment {
            entry,
            range: start..start + inner_span,
            to,
            source_strides: source_strides.clone(),
        });
    }
}

fn sides(stored: &Bounds, common: &Bounds, wanted: &Wanted<'_>) -> Vec<Side> {
    let mut sides = Vec::with_capacity(common.shape.len());
    let item_bytes = wanted.item_bytes as u64;
    let (mut source_stride, mut span, mut bytes) = (item_bytes, item_bytes, item_bytes);
    for dim in (0..common.shape.len()).rev() {
        let size = common.shape[dim];
        sides.push(Side {
            size,
            source_stride,
            span,
            bytes,
            is_plain: span == bytes,
        });
        span += (size - 1) * source_stride;
        bytes *= size;
        source_stride *= stored.shape[dim];
    }
    sides.reverse();
    sides
}
