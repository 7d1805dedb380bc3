//! Borrowed memory: for any shape and any strides, the copied bytes are the row-major content, from
//! any start, for any length.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_io::buffer::{HostRegion, HostRegionMut, Memory};
use proptest::prelude::*;

/// A view of an array, made as array libraries make them, and its memory.
#[derive(Debug)]
struct View {
    memory: Arc<Vec<u8>>,
    item_bytes: usize,
    /// Offset of the first item, in bytes from the start of the memory.
    offset: isize,
    shape: Vec<usize>,
    strides_bytes: Vec<isize>,
}

impl View {
    /// A whole new array, in row-major order, whose bytes differ from place to place.
    fn new(item_bytes: usize, shape: &[usize]) -> View {
        let len = shape.iter().product::<usize>() * item_bytes;
        let bytes = (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
        let mut strides_bytes = vec![0; shape.len()];
        let mut stride = item_bytes as isize;
        for (dim, &size) in shape.iter().enumerate().rev() {
            strides_bytes[dim] = stride;
            stride *= size as isize;
        }
        let memory = Arc::new(bytes.collect());
        View {
            memory,
            item_bytes,
            offset: 0,
            shape: shape.to_vec(),
            strides_bytes,
        }
    }

    fn transposed(mut self, first: usize, second: usize) -> View {
        self.shape.swap(first, second);
        self.strides_bytes.swap(first, second);
        self
    }

    /// The slice `[start::step]` of a dimension, possibly reversed.
    fn sliced(mut self, dim: usize, start: usize, step: usize, backwards: bool) -> View {
        let kept = self.shape[dim].saturating_sub(start).div_ceil(step);
        self.offset += self.strides_bytes[dim] * start.min(self.shape[dim]) as isize;
        self.strides_bytes[dim] *= step as isize;
        self.shape[dim] = kept;
        if backwards && kept > 0 {
            self.offset += self.strides_bytes[dim] * (kept as isize - 1);
            self.strides_bytes[dim] = -self.strides_bytes[dim];
        }
        self
    }

    /// Adds a dimension in which all indices are the same item.
    fn expanded(mut self, dim: usize, size: usize) -> View {
        self.shape.insert(dim, size);
        self.strides_bytes.insert(dim, 0);
        self
    }

    fn region(&self) -> HostRegion {
        let address = self
            .memory
            .as_ptr()
            .expose_provenance()
            .wrapping_add_signed(self.offset);
        let (shape, strides, owner) = (&self.shape, &self.strides_bytes, Arc::clone(&self.memory));
        // SAFETY: the operations above keep every item inside `memory`, which the region owns a
        // share of.
        unsafe { HostRegion::new(address, self.item_bytes, shape, strides, Box::new(owner)) }
    }

    /// The row-major content, item by item.
    fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        let mut index = vec![0; self.shape.len()];
        for _ in 0..self.shape.iter().product::<usize>() {
            let places = index.iter().zip(&self.strides_bytes);
            let at = places.fold(self.offset, |at, (&i, &stride)| at + i as isize * stride);
            content.extend_from_slice(&self.memory[at as usize..][..self.item_bytes]);
            for dim in (0..index.len()).rev() {
                index[dim] += 1;
                if index[dim] < self.shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        content
    }

    /// Compares a copy of `[start, start + len)` with the content.
    fn check(&self, content: &[u8], start: usize, len: usize) {
        let mut copy = vec![0xee; len + 2];
        self.region().copy_to(start as u64, &mut copy[1..=len]);
        assert_eq!(copy[1..=len], content[start..start + len]);
        assert_eq!(
            (copy[0], copy[len + 1]),
            (0xee, 0xee),
            "bytes around the destination"
        );
    }
}

fn item_bytes() -> impl Strategy<Value = usize> {
    prop_oneof![
        Just(1),
        Just(2),
        Just(4),
        Just(8),
        Just(16),
        Just(3),
        Just(12),
        Just(32)
    ]
}

#[derive(Clone, Debug)]
enum Change {
    Transpose(prop::sample::Index, prop::sample::Index),
    Slice(prop::sample::Index, usize, usize, bool),
    Expand(prop::sample::Index, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let dim = any::<prop::sample::Index>;
    prop_oneof![
        3 => (dim(), dim()).prop_map(|(first, second)| Change::Transpose(first, second)),
        2 => (dim(), 0..3_usize, 1..4_usize, any::<bool>())
            .prop_map(|(dim, start, step, back)| Change::Slice(dim, start, step, back)),
        1 => (dim(), 1..4_usize).prop_map(|(dim, size)| Change::Expand(dim, size)),
    ]
}

fn view() -> impl Strategy<Value = View> {
    let shape = prop::collection::vec(1..9_usize, 0..5);
    let changes = prop::collection::vec(change(), 0..5);
    (item_bytes(), shape, changes).prop_map(|(item_bytes, shape, changes)| {
        let mut view = View::new(item_bytes, &shape);
        for change in changes {
            let dims = view.shape.len();
            view = match change {
                Change::Expand(dim, size) => view.expanded(dim.index(dims + 1), size),
                _ if dims == 0 => view,
                Change::Transpose(first, second) => {
                    view.transposed(first.index(dims), second.index(dims))
                }
                Change::Slice(dim, start, step, back) => {
                    view.sliced(dim.index(dims), start, step, back)
                }
            };
        }
        view
    })
}

/// Cases per property: fewer where every instruction is interpreted.
const CASES: u32 = if cfg!(miri) { 20 } else { 2000 };

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(CASES)
    })]

    #[test]
    fn any_part_of_any_view(
        view in view(),
        cuts in prop::collection::vec(any::<[u16; 2]>(), 1..6),
    ) {
        let content = view.content();
        prop_assert_eq!(view.region().len(), content.len() as u64);
        view.check(&content, 0, content.len());
        for [start, len] in cuts {
            let start = start as usize % (content.len() + 1);
            view.check(&content, start, len as usize % (content.len() - start + 1));
        }
    }
}

/// Larger than a tile in both directions, and not a multiple of it.
#[test]
fn large_transposes() {
    let (rows, columns) = if cfg!(miri) { (33, 37) } else { (301, 517) };
    for item_bytes in [1, 2, 4, 8, 16, 6] {
        let view = View::new(item_bytes, &[rows, columns]).transposed(0, 1);
        let content = view.content();
        let len = content.len();
        view.check(&content, 0, len);
        view.check(&content, 1, len - 2);
        view.check(&content, len / 3 + 5, len / 2);
        view.check(&content, 10 * item_bytes, item_bytes);
    }
    for (first, second) in [(0, 2), (0, 1), (1, 2)] {
        let view = View::new(4, &[19, 35, 37]).transposed(first, second);
        let content = view.content();
        view.check(&content, 0, content.len());
        view.check(&content, 4321, content.len() - 9999);
    }
}

#[test]
fn what_lies_together_is_contiguous() {
    assert!(View::new(4, &[]).region().is_contiguous());
    assert!(View::new(4, &[3, 1, 5]).region().is_contiguous());
    assert!(
        View::new(4, &[1, 7])
            .transposed(0, 1)
            .region()
            .is_contiguous()
    );
    assert!(
        View::new(4, &[3, 5])
            .sliced(0, 1, 1, false)
            .region()
            .is_contiguous()
    );
    assert!(
        !View::new(4, &[3, 5])
            .transposed(0, 1)
            .region()
            .is_contiguous()
    );
    assert!(
        !View::new(4, &[3, 5])
            .sliced(1, 1, 1, false)
            .region()
            .is_contiguous()
    );
    assert!(
        !View::new(4, &[3])
            .sliced(0, 0, 1, true)
            .region()
            .is_contiguous()
    );
}

#[test]
fn an_empty_array_may_lie_anywhere_and_be_of_any_size_otherwise() {
    // SAFETY: there is no item to read.
    let region =
        unsafe { HostRegion::new(0, 8, &[usize::MAX, 0, usize::MAX], &[1, 1, 1], Box::new(())) };
    assert_eq!(region.len(), 0);
    region.copy_to(0, &mut []);
}

#[test]
fn one_item_seen_more_often_than_memory_could_hold() {
    let item = Arc::new(vec![1_u8, 2, 3, 4]);
    let (address, owner) = (
        item.as_ptr().expose_provenance(),
        Box::new(Arc::clone(&item)),
    );
    // SAFETY: with zero strides every index is the one item, which the region owns.
    let region = unsafe { HostRegion::new(address, 4, &[1 << 30, 1 << 30], &[0, 0], owner) };
    assert_eq!(region.len(), 1 << 62);
    let mut copy = [0; 10];
    region.copy_to((1 << 62) - 10, &mut copy);
    assert_eq!(copy, [3, 4, 1, 2, 3, 4, 1, 2, 3, 4]);
}

#[test]
fn bytes_of_its_own() {
    let region = HostRegion::from(vec![1, 2, 3, 4]);
    let mut copy = [0; 3];
    region.copy_to(1, &mut copy);
    assert_eq!((region.len(), copy), (4, [2, 3, 4]));
}

#[test]
#[should_panic(expected = "reach beyond 60")]
fn beyond_the_content_there_is_nothing() {
    View::new(4, &[3, 5]).region().copy_to(57, &mut [0; 4]);
}

/// Counts its drops.
struct Owner(Arc<AtomicUsize>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_owner_lives_as_long_as_anything_can_reach_the_memory() {
    let drops = Arc::new(AtomicUsize::new(0));
    let mut memory = vec![0_u8; 100];
    let address = memory.as_mut_ptr().expose_provenance();
    let owner = Box::new(Owner(Arc::clone(&drops)));
    // SAFETY: nothing else touches `memory` before the last window is dropped, below.
    let region = unsafe { HostRegionMut::new(address, 100, owner) };
    assert_eq!(region.len(), 100);
    let mut buf = region.into_buf();
    assert_eq!((buf.len(), buf.address()), (100, address));
    let mut rest = buf.split_off(60);
    buf.as_mut_slice().fill(1);
    rest.as_mut_slice().fill(2);
    drop(buf);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(rest);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    assert_eq!((memory[59], memory[60], memory[99]), (1, 2, 2));

    let owner = Box::new(Owner(Arc::clone(&drops)));
    // SAFETY: `memory` outlives the region and is not written to meanwhile.
    let region = unsafe { HostRegion::contiguous(memory.as_ptr().expose_provenance(), 100, owner) };
    let mut copy = [0; 2];
    region.copy_to(59, &mut copy);
    assert_eq!(copy, [1, 2]);
    drop(region);
    assert_eq!(drops.load(Ordering::SeqCst), 2);
}

#[test]
fn regions_within_memory_share_it_and_keep_it() {
    let mut memory = Memory::allocate(10_000).unwrap();
    for (index, byte) in memory.as_mut_slice().iter_mut().enumerate() {
        *byte = index as u8;
    }
    let memory = Arc::new(memory);
    let regions = [0..5000, 300..301, 4000..10_000, 7..7]
        .map(|range: Range<usize>| (HostRegion::within(&memory, range.clone()), range));
    drop(memory);
    for (region, range) in regions {
        assert_eq!(region.len(), range.len() as u64);
        let mut copied = vec![0; range.len()];
        region.copy_to(0, &mut copied);
        let expected: Vec<u8> = range.map(|index| index as u8).collect();
        assert_eq!(copied, expected);
    }
}

#[test]
#[should_panic(expected = "range")]
fn a_region_beyond_the_memory_is_refused() {
    let memory = Arc::new(Memory::allocate(100).unwrap());
    drop(HostRegion::within(&memory, 50..101));
}
