//! Resharding: global tensors are assembled from the boxes that ranks stored, and any other box can
//! be requested of them. Pure; the result is runs of files and the destinations of their items.
//!
//! Boxes of one tensor never overlap ([`GlobalTensors::new`] refuses overlaps), so the stored part
//! of a requested box is the sum of its intersections with the stored boxes, and the box is
//! complete exactly when the sum has its size.

mod cut;

use std::collections::HashMap;
use std::ops::Range;

use penstock_io::buffer::{Bounds, find_overlap};

use crate::format::part::{TensorBox, TensorEntry};
use cut::cut_common;
pub(crate) use cut::{Fragment, WantedBox};

/// Limit on the effort to find a hole for a message.
const HOLE_STEPS_MAX: usize = 1 << 20;

/// A tensor of which entries store boxes.
#[derive(Debug)]
pub(crate) struct GlobalTensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) item_bytes: usize,
    /// The boxes that are not empty, ordered by their start along `axis`.
    boxes: Vec<Bounds>,
    /// The entry of each box.
    entries: Vec<usize>,
    /// For each box the greatest end, along `axis`, of the boxes up to it.
    ends: Vec<u64>,
    /// The dimension along which most of the boxes differ.
    axis: usize,
}

/// The tensors of a checkpoint that are stored as boxes, by name.
#[derive(Debug, Default)]
pub(crate) struct GlobalTensors {
    tensors: HashMap<String, GlobalTensor>,
}

/// Two entries that contradict each other about a global tensor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor {tensor:?}: {detail}")]
pub(crate) struct Conflict {
    pub(crate) tensor: String,
    pub(crate) first: usize,
    pub(crate) second: usize,
    pub(crate) detail: String,
}

impl GlobalTensors {
    /// Collects the boxes among the entries, and checks that they are consistent.
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

    /// An entry as a tensor of a single box, whether it is a box itself or not.
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
            Err(undecided) => Err(conflict(0, self.boxes.len() - 1, undecided.to_string())),
        }
    }

    /// Orders the boxes so that those that intersect a requested box are found quickly.
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

    /// The intersections of the stored boxes with a requested one.
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

    /// The runs that make up a requested, non-empty box.
    pub(crate) fn cut(
        &self,
        wanted: &WantedBox<'_>,
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

    /// The text of a missing box, if the stored boxes do not cover the tensor.
    pub(crate) fn uncovered(&self) -> Option<String> {
        let whole = Bounds::whole(&self.shape);
        let items: u64 = self.boxes.iter().map(Bounds::items).sum();
        (items != whole.items()).then(|| text(&self.hole(&whole)))
    }

    /// A part of the requested box that is not stored; all of it if the search takes too long.
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

/// Adds the parts of a box outside of another one that is inside it.
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

/// A box in the form that users write.
pub(crate) fn text(bounds: &Bounds) -> String {
    let along = |dim| {
        let Range { start, end } = bounds.along(dim);
        format!("{start}:{end}")
    };
    let dims: Vec<String> = (0..bounds.start.len()).map(along).collect();
    format!("[{}]", dims.join(", "))
}

/// The box of an entry, in the form that users write.
pub(crate) fn box_text(entry: &TensorEntry, region: &TensorBox) -> String {
    text(&bounds(entry, region))
}

#[cfg(test)]
mod tests {
    use super::cut::PLAIN_BYTES_MIN;
    use super::*;
    use crate::format::digest::CHUNK_BYTES;

    fn bounds(start: [u64; 2], shape: [u64; 2]) -> Bounds {
        Bounds {
            start: start.to_vec(),
            shape: shape.to_vec(),
        }
    }

    /// Entries of `uint8` that follow each other in a file.
    fn entries(shape: [u64; 2], boxes: &[Bounds]) -> Vec<TensorEntry> {
        let mut end = 0;
        let entry = |stored: &Bounds| {
            let start = end;
            end += stored.items();
            TensorEntry {
                name: start.to_string(),
                dtype: "uint8".to_owned(),
                shape: stored.shape.clone(),
                file: 0,
                range: (start, end),
                stored: None,
                stored_name: None,
                group: None,
                region: Some(TensorBox {
                    tensor: "w".to_owned(),
                    shape: shape.to_vec(),
                    start: stored.start.clone(),
                }),
            }
        };
        boxes.iter().map(entry).collect()
    }

    /// The runs of a box, in memory whose rows are `row_bytes` apart.
    fn runs(entries: &[TensorEntry], wanted: &Bounds, row_bytes: isize) -> Vec<Range<u64>> {
        let wanted = WantedBox {
            bounds: wanted,
            item_bytes: 1,
            strides: &[row_bytes, 1],
        };
        let tensors = GlobalTensors::new(entries).unwrap();
        let fragments = tensors.get("w").unwrap().cut(&wanted, entries).unwrap();
        fragments
            .into_iter()
            .map(|fragment| fragment.range)
            .collect()
    }

    #[test]
    fn what_lies_together_is_one_run() {
        let rows = [bounds([0, 0], [512, 1024]), bounds([512, 0], [512, 1024])];
        let entries = entries([1024, 1024], &rows);
        let found = runs(&entries, &bounds([256, 0], [512, 1024]), 1024);
        assert_eq!(found, [256 << 10..512 << 10, 512 << 10..768 << 10]);
    }

    #[test]
    fn long_rows_are_runs_of_their_own_where_memory_is_apart() {
        let row_bytes = PLAIN_BYTES_MIN;
        let whole = bounds([0, 0], [3, row_bytes]);
        let entries = entries([3, row_bytes], std::slice::from_ref(&whole));
        let rows = [0, 1, 2].map(|row| row * row_bytes..(row + 1) * row_bytes);
        assert_eq!(runs(&entries, &whole, row_bytes as isize + 1), rows);
    }

    #[test]
    fn small_gaps_are_read_over_and_large_ones_left_out() {
        for (row_bytes, count) in [(1000, 1), (CHUNK_BYTES + 9, 1), (CHUNK_BYTES + 10, 3)] {
            let whole = bounds([0, 0], [3, row_bytes]);
            let entries = entries([3, row_bytes], std::slice::from_ref(&whole));
            let found = runs(&entries, &bounds([0, 5], [3, 10]), 10);
            assert_eq!(found.len(), count, "{found:?}");
            assert_eq!(
                (found[0].start, found[count - 1].end),
                (5, 2 * row_bytes + 15)
            );
        }
    }

    #[test]
    fn only_the_boxes_in_the_way_are_looked_at() {
        let place = |index: u64| bounds([index / 128 * 4, index % 128 * 4], [4, 4]);
        let grid: Vec<Bounds> = (0..128 * 128).map(place).collect();
        let entries = entries([512, 512], &grid);
        let tensors = GlobalTensors::new(&entries).unwrap();
        let tensor = tensors.get("w").unwrap();
        let wanted = bounds([6, 6], [4, 4]);
        let along = wanted.along(tensor.axis);
        let first = tensor.ends.partition_point(|&end| end <= along.start);
        assert_eq!(first, 128);
        assert_eq!(tensor.touching(&wanted).count(), 4);
    }

    #[test]
    fn a_hole_is_a_box_that_nothing_is_stored_of() {
        let stored = [
            bounds([0, 0], [4, 8]),
            bounds([4, 0], [4, 3]),
            bounds([4, 5], [4, 3]),
        ];
        let entries = entries([8, 8], &stored);
        let wanted = WantedBox {
            bounds: &bounds([2, 2], [4, 4]),
            item_bytes: 1,
            strides: &[4, 1],
        };
        let tensors = GlobalTensors::new(&entries).unwrap();
        let hole = tensors
            .get("w")
            .unwrap()
            .cut(&wanted, &entries)
            .unwrap_err();
        assert_eq!(hole, "[4:6, 3:5]");
    }
}
