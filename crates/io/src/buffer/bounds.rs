//! Boxes of an array, and a test for overlaps: memory can be split into boxes, and a stored tensor
//! be put together from them, only where no two overlap.

use std::ops::Range;

/// A box of an array: its first index along each dimension, and its size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// First index along each dimension.
    pub start: Vec<u64>,
    /// Size along each dimension.
    pub shape: Vec<u64>,
}

/// The boxes are too irregular for an overlap test in bounded time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many boxes, and in no order that would let them be told apart")]
pub struct OverlapUndecided;

/// Steps that a search for overlaps may take: mostly the pairwise comparisons of 16,384 boxes,
/// about a second.
const STEPS_MAX: u64 = 3 << 26;

/// Steps allowed for each box in addition: far more than sorting a grid of any size takes.
const STEPS_PER_BOX_MAX: u64 = 1 << 10;

impl Bounds {
    /// All of an array.
    pub fn whole(shape: &[u64]) -> Bounds {
        Bounds {
            start: vec![0; shape.len()],
            shape: shape.to_vec(),
        }
    }

    /// The range of indices along a dimension.
    pub fn along(&self, dim: usize) -> Range<u64> {
        self.start[dim]..self.start[dim] + self.shape[dim]
    }

    /// Whether it has no item.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// How many items it has.
    pub fn items(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether it is within an array of this shape, without overflow in any sum.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let dims = self.start.iter().zip(&self.shape);
        self.start.len() == shape.len()
            && self.shape.len() == shape.len()
            && dims
                .zip(shape)
                .all(|((start, size), dim)| start.checked_add(*size).is_some_and(|end| end <= *dim))
    }

    /// The common part of two boxes of one array, if there is one.
    pub fn intersection(&self, other: &Bounds) -> Option<Bounds> {
        let mut common = Bounds::default();
        for dim in 0..self.start.len() {
            let (mine, others) = (self.along(dim), other.along(dim));
            let start = mine.start.max(others.start);
            let end = mine.end.min(others.end);
            if start >= end {
                return None;
            }
            common.start.push(start);
            common.shape.push(end - start);
        }
        Some(common)
    }

    fn overlaps(&self, other: &Bounds) -> bool {
        (0..self.start.len()).all(|dim| {
            let (mine, others) = (self.along(dim), other.along(dim));
            mine.start < others.end && others.start < mine.end
        })
    }
}

/// Finds two overlapping boxes among boxes of one array.
///
/// Boxes are cut into clusters at planes that no box crosses, along each dimension in turn: a grid
/// is cut into single boxes. A cluster that cannot be cut is swept.
///
/// # Errors
/// [`OverlapUndecided`] where the search takes too long; no layout of a training run comes near that.
pub fn find_overlap(boxes: &[Bounds]) -> Result<Option<(usize, usize)>, OverlapUndecided> {
    let filled = (0..boxes.len()).filter(|&index| !boxes[index].is_empty());
    let mut clusters = vec![filled.collect::<Vec<usize>>()];
    let mut steps = STEPS_MAX + STEPS_PER_BOX_MAX * boxes.len() as u64;
    while let Some(mut cluster) = clusters.pop() {
        if cluster.len() < 2 {
            continue;
        }
        let dims = boxes[cluster[0]].start.len();
        let mut is_cut = false;
        for dim in 0..dims {
            let length = cluster.len() as u64;
            spend(&mut steps, length * u64::from(length.ilog2() + 1))?;
            cluster.sort_unstable_by_key(|&index| boxes[index].start[dim]);
            let cuts = cuts(boxes, &cluster, dim);
            if cuts.len() > 1 {
                clusters.extend(cuts.into_iter().map(|run| cluster[run].to_vec()));
                is_cut = true;
                break;
            }
        }
        if !is_cut && let Some(pair) = sweep(boxes, cluster, &mut steps)? {
            return Ok(Some(pair));
        }
    }
    Ok(None)
}

/// Subtracts `spent` from the steps left.
fn spend(steps: &mut u64, spent: u64) -> Result<(), OverlapUndecided> {
    *steps = steps.checked_sub(spent).ok_or(OverlapUndecided)?;
    Ok(())
}

/// Splits a cluster, sorted along the dimension, into runs whose borders no box crosses.
fn cuts(boxes: &[Bounds], cluster: &[usize], dim: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut end = 0;
    for (at, &index) in cluster.iter().enumerate() {
        let along = boxes[index].along(dim);
        match runs.last_mut() {
            Some(run) if along.start < end => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
        end = end.max(along.end);
    }
    runs
}

/// Compares boxes that share an index along the dimension that separates the most of them.
fn sweep(
    boxes: &[Bounds],
    mut cluster: Vec<usize>,
    steps: &mut u64,
) -> Result<Option<(usize, usize)>, OverlapUndecided> {
    let dims = boxes[cluster[0]].start.len();
    let mut distinct = |dim: usize| {
        cluster.sort_unstable_by_key(|&index| boxes[index].start[dim]);
        let starts = cluster.chunk_by(|&a, &b| boxes[a].start[dim] == boxes[b].start[dim]);
        starts.count()
    };
    let Some(dim) = (0..dims).max_by_key(|&dim| distinct(dim)) else {
        // Two scalars.
        return Ok(Some((cluster[0], cluster[1])));
    };
    cluster.sort_unstable_by_key(|&index| boxes[index].start[dim]);
    let mut open: Vec<(u64, usize)> = Vec::new();
    for index in cluster {
        let along = boxes[index].along(dim);
        spend(steps, open.len() as u64)?;
        open.retain(|&(end, _)| end > along.start);
        let mut others = open.iter().map(|&(_, other)| other);
        if let Some(other) = others.find(|&other| boxes[other].overlaps(&boxes[index])) {
            return Ok(Some((other, index)));
        }
        open.push((along.end, index));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounds(start: &[u64], shape: &[u64]) -> Bounds {
        Bounds {
            start: start.to_vec(),
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn a_large_grid_is_told_apart_in_any_number_of_dimensions() {
        for (dims, side) in [(1, 100_000_u64), (2, 400), (3, 50), (16, 2)] {
            let place = |index: u64| {
                let at = |dim: u32| index / side.pow(dim) % side * 7;
                bounds(
                    &(0..dims).map(at).collect::<Vec<_>>(),
                    &vec![7; dims as usize],
                )
            };
            let mut grid: Vec<Bounds> = (0..side.pow(dims)).map(place).collect();
            assert_eq!(find_overlap(&grid), Ok(None));
            grid.push(bounds(&vec![6; dims as usize], &vec![1; dims as usize]));
            let found = find_overlap(&grid).unwrap().unwrap();
            assert!([found.0, found.1].contains(&(grid.len() - 1)), "{found:?}");
        }
    }

    /// Rods along each of three dimensions, woven so that no plane passes between them.
    fn weave(count: u64) -> Vec<Bounds> {
        let long = 3 * count;
        let pair = |at: u64| (3 * (at / count), 3 * (at % count));
        let rods = (0..count * count).map(pair).flat_map(|(one, other)| {
            [
                bounds(&[0, one, other + 1], &[long, 1, 1]),
                bounds(&[one + 1, 0, other], &[1, long, 1]),
                bounds(&[one, other + 1, 0], &[1, 1, long]),
            ]
        });
        rods.collect()
    }

    #[test]
    fn a_tangle_is_told_apart_or_refused_in_bounded_time() {
        let mut rods = weave(20);
        assert_eq!(find_overlap(&rods), Ok(None));
        rods.push(bounds(&[5, 5, 5], &[3, 3, 3]));
        assert!(find_overlap(&rods).unwrap().is_some());
        assert_eq!(find_overlap(&weave(120)), Err(OverlapUndecided));
    }

    #[test]
    fn scalars_overlap_and_empty_boxes_do_not() {
        let scalar = bounds(&[], &[]);
        assert_eq!(find_overlap(std::slice::from_ref(&scalar)), Ok(None));
        assert!(find_overlap(&[scalar.clone(), scalar]).unwrap().is_some());
        let empty = bounds(&[1, 1], &[0, 3]);
        assert_eq!(
            find_overlap(&[empty.clone(), empty, bounds(&[0, 0], &[4, 4])]),
            Ok(None)
        );
    }

    #[test]
    fn a_pinwheel_cannot_be_cut_and_has_no_overlap() {
        let mut pinwheel = vec![
            bounds(&[0, 0], &[1, 2]),
            bounds(&[0, 2], &[2, 1]),
            bounds(&[2, 1], &[1, 2]),
            bounds(&[1, 0], &[2, 1]),
            bounds(&[1, 1], &[1, 1]),
        ];
        assert_eq!(find_overlap(&pinwheel), Ok(None));
        pinwheel[4].shape[1] = 2;
        assert!(find_overlap(&pinwheel).unwrap().is_some());
    }

    proptest! {
        #[test]
        fn as_each_with_each(
            dims in 0_usize..4,
            places in prop::collection::vec(any::<[(u8, u8); 3]>(), 0..12),
        ) {
            let boxes: Vec<Bounds> = places
                .iter()
                .map(|place| {
                    let start = place[..dims].iter().map(|&(start, _)| u64::from(start % 12));
                    let shape = place[..dims].iter().map(|&(_, size)| u64::from(size % 7));
                    bounds(&start.collect::<Vec<_>>(), &shape.collect::<Vec<_>>())
                })
                .collect();
            let overlap = |a: usize, b: usize| boxes[a].intersection(&boxes[b]).is_some();
            let any = (0..boxes.len()).any(|a| (0..a).any(|b| overlap(a, b)));
            match find_overlap(&boxes).unwrap() {
                Some((a, b)) => prop_assert!(a != b && overlap(a, b)),
                None => prop_assert!(!any),
            }
        }
    }
}
