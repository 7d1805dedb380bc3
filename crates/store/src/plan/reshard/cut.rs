//! The intersection of a stored box with a requested one, cut into runs of the file.

use std::ops::Range;

use penstock_io::buffer::Bounds;

use crate::format::digest::CHUNK_BYTES;

/// Minimum size of a run that is contiguous in the file and in memory and read in place: each costs
/// a request, and some hundred bytes of plan.
pub(super) const PLAIN_BYTES_MIN: u64 = 256 << 10;

/// A run of a file, and the destination of its items in the requested box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// Index of the entry.
    pub(crate) entry: usize,
    /// Bytes of its file.
    pub(crate) range: Range<u64>,
    /// The run's destination in the requested box.
    pub(crate) to: Bounds,
    /// Bytes between neighbours along each dimension, in the file.
    pub(crate) source_strides: Vec<usize>,
}

/// A requested box, and the memory for it.
pub(crate) struct WantedBox<'a> {
    pub(crate) bounds: &'a Bounds,
    pub(crate) item_bytes: usize,
    /// Bytes between neighbours along each dimension, in memory.
    pub(crate) strides: &'a [isize],
}

/// The layout in the file of the intersection of a stored box and a requested one.
struct Layout {
    /// Bytes between neighbours along each dimension.
    strides: Vec<u64>,
    /// For each dimension, the bytes from the first to the last item of that dimension and the
    /// inner ones, at one index of the outer ones; at the end the size of an item.
    spans: Vec<u64>,
    /// Bytes of the intersection within them.
    bytes: Vec<u64>,
}

impl Layout {
    fn new(stored: &Bounds, common: &Bounds, item_bytes: u64) -> Layout {
        let dims = common.shape.len();
        let mut layout = Layout {
            strides: vec![item_bytes; dims],
            spans: vec![item_bytes; dims + 1],
            bytes: vec![item_bytes; dims + 1],
        };
        for dim in (0..dims).rev() {
            if dim + 1 < dims {
                layout.strides[dim] = layout.strides[dim + 1] * stored.shape[dim + 1];
            }
            let size = common.shape[dim];
            layout.spans[dim] = (size - 1) * layout.strides[dim] + layout.spans[dim + 1];
            layout.bytes[dim] = size * layout.bytes[dim + 1];
        }
        layout
    }

    /// How many of the outer dimensions are iterated, each index a run. If long runs are
    /// contiguous, in the file and at `strides` in memory, those are the runs. Otherwise a run may
    /// have gaps smaller than a chunk: the chunks in it are read and verified in any case.
    fn depth(&self, common: &Bounds, strides: &[isize]) -> usize {
        let dims = common.shape.len();
        let first = |holds: &dyn Fn(usize) -> bool| {
            let inner = (0..dims).rev();
            let inner = inner.take_while(|&dim| common.shape[dim] == 1 || holds(dim));
            inner.last().unwrap_or(dims)
        };
        let plain = first(&|dim| {
            let inner_bytes = self.bytes[dim + 1];
            self.strides[dim] == inner_bytes && strides[dim] as i128 == i128::from(inner_bytes)
        });
        if self.bytes[plain] >= PLAIN_BYTES_MIN {
            return plain;
        }
        // Gaps grow outwards.
        first(&|dim| self.strides[dim] - self.spans[dim + 1] < CHUNK_BYTES)
    }
}

/// Cuts the intersection of a stored box (an entry, its first byte in the file, and its bounds)
/// with a requested one into runs.
pub(super) fn cut_common(
    (entry, first_byte, stored): (usize, u64, &Bounds),
    common: &Bounds,
    wanted: &WantedBox<'_>,
    fragments: &mut Vec<Fragment>,
) {
    let dims = common.shape.len();
    let layout = Layout::new(stored, common, wanted.item_bytes as u64);
    let depth = layout.depth(common, wanted.strides);
    let source_strides: Vec<usize> = layout.strides.iter().map(|&s| s as usize).collect();
    let offset = |dim: usize| (common.start[dim] - stored.start[dim]) * layout.strides[dim];
    let first_byte = first_byte + (0..dims).map(offset).sum::<u64>();
    let offset = |dim: usize| common.start[dim] - wanted.bounds.start[dim];
    let to = Bounds {
        start: (0..dims).map(offset).collect(),
        shape: common.shape.clone(),
    };
    let runs: u64 = common.shape[..depth].iter().product();
    for run in 0..runs {
        let (mut index, mut start, mut to) = (run, first_byte, to.clone());
        for dim in (0..depth).rev() {
            let at = index % common.shape[dim];
            index /= common.shape[dim];
            start += at * layout.strides[dim];
            to.start[dim] += at;
            to.shape[dim] = 1;
        }
        fragments.push(Fragment {
            entry,
            range: start..start + layout.spans[depth],
            to,
            source_strides: source_strides.clone(),
        });
    }
}
