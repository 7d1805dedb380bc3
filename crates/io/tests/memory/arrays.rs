//! Filling borrowed arrays: with any strides, and any runs of bytes, every item gets into its place
//! and nothing else is touched.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use penstock_io::buffer::{Bounds, HostArrayMut, Scatter};
use proptest::prelude::*;

const UNTOUCHED: u8 = 0xee;

/// An array with its dimensions in any order, any step, and any direction in memory.
#[derive(Clone, Debug)]
struct Array {
    item_bytes: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    first: usize,
    bytes: Vec<u8>,
}

impl Array {
    fn new(item_bytes: usize, shape: &[usize], order: &[usize], steps: &[(usize, bool)]) -> Array {
        let mut strides = vec![0; shape.len()];
        let (mut stride, mut first) = (item_bytes, 0);
        for &dim in order.iter().rev() {
            let (step, backwards) = steps[dim];
            stride *= step;
            strides[dim] = stride.cast_signed();
            if backwards {
                strides[dim] = -strides[dim];
                first += stride * (shape[dim] - 1);
            }
            stride *= shape[dim];
        }
        Array {
            item_bytes,
            shape: shape.to_vec(),
            strides,
            first,
            bytes: vec![UNTOUCHED; stride],
        }
    }

    fn plain(item_bytes: usize, shape: &[usize]) -> Array {
        let order: Vec<usize> = (0..shape.len()).collect();
        Array::new(item_bytes, shape, &order, &vec![(1, false); shape.len()])
    }

    fn borrow(&mut self) -> HostArrayMut {
        let address = self.bytes.as_mut_ptr().expose_provenance() + self.first;
        let (item_bytes, shape, strides) = (self.item_bytes, &self.shape, Some(&self.strides[..]));
        // SAFETY: every item is inside `bytes`, which a test reads only after all parts are
        // dropped.
        let array = unsafe { HostArrayMut::new(address, item_bytes, shape, strides, Box::new(())) };
        array.expect("items that lie apart")
    }

    /// The bytes of each item, in row-major order.
    fn places(&self) -> Vec<Range<usize>> {
        let mut places = vec![self.first.cast_signed()];
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let along = |place: isize| (0..size.cast_signed()).map(move |i| place + i * stride);
            places = places.into_iter().flat_map(along).collect();
        }
        let item = |place: isize| place as usize..place as usize + self.item_bytes;
        places.into_iter().map(item).collect()
    }

    /// Whether it holds this content, and nothing around it was changed.
    fn holds(&self, content: &[u8]) -> bool {
        let mut expected = vec![UNTOUCHED; self.bytes.len()];
        for (place, item) in self
            .places()
            .into_iter()
            .zip(content.chunks(self.item_bytes))
        {
            expected[place].copy_from_slice(item);
        }
        self.bytes == expected
    }
}

fn noise(bytes: usize) -> Vec<u8> {
    let byte = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 % 0xee;
    (0..bytes as u64).map(byte).collect()
}

/// A box inside a plain array: its strides there, the bytes from its first to its last item, and
/// the content of the box.
fn source(item_bytes: usize, shape: &[usize], margins: &[usize]) -> (Vec<usize>, Vec<u8>, Vec<u8>) {
    let whole: Vec<usize> = shape
        .iter()
        .zip(margins)
        .map(|(size, more)| size + more)
        .collect();
    let of_whole = Array::plain(item_bytes, &whole);
    let inner = Array {
        shape: shape.to_vec(),
        ..of_whole.clone()
    };
    let places = inner.places();
    let run = noise(places[places.len() - 1].end);
    let content = places
        .iter()
        .flat_map(|place| run[place.clone()].to_vec())
        .collect();
    let strides = of_whole
        .strides
        .iter()
        .map(|stride| stride.cast_unsigned())
        .collect();
    (strides, run, content)
}

#[derive(Clone, Debug)]
struct Case {
    item_bytes: usize,
    shape: Vec<usize>,
    margins: Vec<usize>,
    order: Vec<usize>,
    steps: Vec<(usize, bool)>,
    cuts: Vec<prop::sample::Index>,
}

fn case() -> impl Strategy<Value = Case> {
    let item_bytes = prop::sample::select(vec![1, 2, 3, 4, 8, 12, 16]);
    (item_bytes, prop::collection::vec(1..8_usize, 0..5)).prop_flat_map(|(item_bytes, shape)| {
        let dims = shape.len();
        let margin = prop_oneof![2 => Just(0), 1 => 0..4_usize];
        let step = prop_oneof![3 => Just((1, false)), 1 => (1..3_usize, any::<bool>())];
        (
            prop::collection::vec(margin, dims),
            Just((0..dims).collect::<Vec<_>>()).prop_shuffle(),
            prop::collection::vec(step, dims),
            prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        )
            .prop_map(move |(margins, order, steps, cuts)| Case {
                item_bytes,
                shape: shape.clone(),
                margins,
                order,
                steps,
                cuts,
            })
    })
}

/// Fills a scatter run by run; the runs are split off first and filled in another order.
fn fill(mut scatter: Scatter, run: &[u8], mut cuts: Vec<usize>) -> u64 {
    assert_eq!(scatter.range(), 0..run.len() as u64);
    cuts.sort_unstable();
    let mut windows: Vec<Scatter> = Vec::new();
    for cut in cuts {
        let rest = scatter.split_off(cut as u64);
        windows.push(std::mem::replace(&mut scatter, rest));
    }
    windows.push(scatter);
    let fill = |window: &mut Scatter| {
        let range = window.range();
        window.fill(range.start, &run[range.start as usize..range.end as usize])
    };
    windows.iter_mut().rev().map(fill).sum()
}

/// Cases per property: fewer where every instruction is interpreted.
const CASES: u32 = if cfg!(miri) { 20 } else { 2000 };

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(CASES)
    })]

    #[test]
    fn any_box_of_a_run_into_any_array(case in case()) {
        let Case { item_bytes, shape, margins, order, steps, cuts } = case;
        let (strides, run, content) = source(item_bytes, &shape, &margins);
        let cuts = cuts.iter().map(|cut| cut.index(run.len() + 1)).collect();
        let mut array = Array::new(item_bytes, &shape, &order, &steps);
        let scatter = array.borrow().into_scatter(&strides);
        prop_assert_eq!(fill(scatter, &run, cuts), content.len() as u64);
        prop_assert!(array.holds(&content));
    }

    #[test]
    fn plain_arrays_become_plain_memory(case in case()) {
        let Case { item_bytes, shape, order, steps, .. } = case;
        let mut array = Array::new(item_bytes, &shape, &order, &steps);
        let content = noise(shape.iter().product::<usize>() * item_bytes);
        let is_plain = array.strides.iter().zip(&Array::plain(item_bytes, &shape).strides)
            .zip(&shape).all(|((one, other), &size)| size == 1 || one == other);
        match array.borrow().into_region() {
            Ok(region) => {
                prop_assert!(is_plain && region.len() == content.len());
                region.into_buf().as_mut_slice().copy_from_slice(&content);
                prop_assert!(array.holds(&content));
            }
            Err(_) => prop_assert!(!is_plain),
        }
    }
}

/// Larger than a tile in both directions, and not a multiple of it.
#[test]
fn large_transposes() {
    let (rows, columns) = if cfg!(miri) { (33, 37) } else { (301, 517) };
    for item_bytes in [1, 2, 4, 8, 16, 6] {
        let (strides, run, content) = source(item_bytes, &[rows, columns], &[0, 3]);
        let mut array = Array::new(item_bytes, &[rows, columns], &[1, 0], &[(1, false); 2]);
        let cuts = vec![run.len() / 3 + 5, run.len() / 2];
        fill(array.borrow().into_scatter(&strides), &run, cuts);
        assert!(array.holds(&content), "{item_bytes} bytes");
    }
}

#[test]
fn boxes_are_filled_side_by_side() {
    let mut array = Array::new(2, &[6, 40], &[1, 0], &[(1, false), (2, true)]);
    let halves = [(0, 17), (17, 23)].map(|(start, size)| Bounds {
        start: vec![0, start],
        shape: vec![6, size],
    });
    let parts = array.borrow().split(&halves).unwrap();
    let content = noise(6 * 40 * 2);
    thread::scope(|scope| {
        for (part, bounds) in parts.into_iter().zip(&halves) {
            let first = bounds.start[1] as usize * 2;
            let run = &content[first..first + 5 * 80 + bounds.shape[1] as usize * 2];
            scope.spawn(|| fill(part.into_scatter(&[80, 2]), run, vec![1, 100]));
        }
    });
    assert!(array.holds(&content));
}

#[test]
#[should_panic(expected = "overlap")]
fn boxes_that_overlap_are_no_split() {
    let whole = Bounds::whole(&[3, 3]);
    let _ = Array::plain(1, &[3, 3])
        .borrow()
        .split(&[whole.clone(), whole]);
}

#[test]
#[should_panic(expected = "fit the array")]
fn a_box_beyond_the_array_is_no_split() {
    let beyond = Bounds {
        start: vec![2, 0],
        shape: vec![2, 3],
    };
    let _ = Array::plain(1, &[3, 3]).borrow().split(&[beyond]);
}

#[test]
#[should_panic(expected = "row-major order")]
fn a_source_that_folds_is_no_run() {
    Array::plain(4, &[3, 3]).borrow().into_scatter(&[8, 4]);
}

#[test]
#[should_panic(expected = "of 0..36")]
fn bytes_beyond_the_run_have_no_place() {
    Array::plain(4, &[3, 3])
        .borrow()
        .into_scatter(&[12, 4])
        .fill(30, &[0; 7]);
}

#[test]
fn items_that_may_share_memory_are_refused() {
    let is_taken = |item_bytes, shape: &[usize], strides: &[isize]| {
        let mut bytes = vec![0_u8; 1000];
        let address = bytes.as_mut_ptr().expose_provenance() + 500;
        // SAFETY: nothing is filled.
        let array =
            unsafe { HostArrayMut::new(address, item_bytes, shape, Some(strides), Box::new(())) };
        array.is_some()
    };
    assert!(is_taken(4, &[3, 5], &[20, 4]));
    assert!(is_taken(4, &[3, 5], &[-20, 4]));
    assert!(is_taken(4, &[3, 5], &[4, 12]));
    assert!(is_taken(4, &[1, 5], &[0, 4]));
    assert!(is_taken(4, &[0, 5], &[0, 0]));
    assert!(!is_taken(4, &[3, 5], &[0, 4]));
    assert!(!is_taken(4, &[3, 5], &[16, 4]));
    assert!(!is_taken(4, &[5], &[3]));
    assert!(!is_taken(1, &[usize::MAX, 2], &[1, isize::MAX]));
    assert!(!is_taken(1, &[3], &[isize::MIN]));
}

/// Counts its drops.
struct Owner(Arc<AtomicUsize>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_owner_lives_as_long_as_any_part() {
    let drops = Arc::new(AtomicUsize::new(0));
    let mut bytes = vec![0_u8; 12];
    let (address, owner) = (
        bytes.as_mut_ptr().expose_provenance(),
        Box::new(Owner(Arc::clone(&drops))),
    );
    // SAFETY: `bytes` outlives the array, and nothing else touches it meanwhile.
    let array = unsafe { HostArrayMut::new(address, 1, &[3, 4], None, owner) }.unwrap();
    let rows = [0, 2].map(|row| Bounds {
        start: vec![row, 0],
        shape: vec![1, 4],
    });
    let mut parts = array.split(&rows).unwrap().into_iter();
    let region = parts.next().unwrap().into_region().unwrap();
    let mut scatter = parts.next().unwrap().into_scatter(&[4, 1]);
    region.into_buf().as_mut_slice().fill(1);
    let rest = scatter.split_off(2);
    drop(scatter);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(rest);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    assert_eq!(bytes, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
}
