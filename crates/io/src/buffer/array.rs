//! Strided host memory that a caller lends for filling: as a whole, box by box, or from byte runs
//! of a file that holds such a box.
//!
//! Rust references to the memory are formed only through [`HostRegionMut`], for contiguous parts.
//! Each part that is split off owns its items alone, so workers fill one array in parallel.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::bounds::{Bounds, OverlapUndecided, find_overlap};
use super::region::HostRegionMut;
use super::strided::{Strided, row_major};

/// A borrowed array to fill; its items share no memory.
pub struct HostArrayMut {
    address: *mut u8,
    item_bytes: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the array has the exclusive right to its items (`new`), which `owner`, itself `Send +
// Sync`, keeps alive.
unsafe impl Send for HostArrayMut {}
// SAFETY: `&HostArrayMut` gives out no access to the memory.
unsafe impl Sync for HostArrayMut {}

impl HostArrayMut {
    /// An array of `shape` with items of `item_bytes`, its first item at `address`. Without
    /// `strides_bytes` the order is row-major; strides may be negative. Returns `None` where two
    /// items share memory, or where the strides are too irregular to exclude it; slices and
    /// transposes of plain arrays are accepted.
    ///
    /// # Safety
    /// The bytes of all items are initialised and stay readable and writable while `owner` lives,
    /// and nothing else reads or writes them until this array and everything made from it are
    /// dropped.
    pub unsafe fn new(
        address: usize,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: Option<&[isize]>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Option<HostArrayMut> {
        let strides = match strides_bytes {
            Some(strides) => strides.to_vec(),
            None => row_major(item_bytes, shape),
        };
        is_apart(item_bytes, shape, &strides).then(|| HostArrayMut {
            address: ptr::with_exposed_provenance_mut(address),
            item_bytes,
            shape: shape.to_vec(),
            strides,
            owner: Arc::new(owner),
        })
    }

    /// Bytes of an item.
    pub fn item_bytes(&self) -> usize {
        self.item_bytes
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Bytes between neighbours along each dimension.
    pub fn strides_bytes(&self) -> &[isize] {
        &self.strides
    }

    /// Address of the first item.
    pub fn address(&self) -> usize {
        self.address as usize
    }

    /// Bytes to fill.
    pub fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.item_bytes
    }

    /// Whether there is nothing to fill.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits the array into the given boxes; items in no box stay untouched.
    ///
    /// # Errors
    /// [`OverlapUndecided`] where proving that no two boxes overlap would take too long.
    ///
    /// # Panics
    /// If a box reaches beyond the array or overlaps another.
    pub fn split(self, boxes: &[Bounds]) -> Result<Vec<HostArrayMut>, OverlapUndecided> {
        let shape: Vec<u64> = self.shape.iter().map(|&size| size as u64).collect();
        assert!(
            boxes.iter().all(|part| part.fits(&shape)),
            "boxes fit the array"
        );
        let overlap = find_overlap(boxes)?;
        assert!(overlap.is_none(), "boxes {overlap:?} overlap");
        let part = |part: &Bounds| {
            let places = part.start.iter().zip(&self.strides);
            let address = places.fold(self.address, |address, (&start, &stride)| {
                address.wrapping_offset((start as isize).wrapping_mul(stride))
            });
            HostArrayMut {
                address,
                item_bytes: self.item_bytes,
                shape: part.shape.iter().map(|&size| size as usize).collect(),
                strides: self.strides.clone(),
                owner: Arc::clone(&self.owner),
            }
        };
        // No two boxes have an item in common, and no two items have memory in common.
        Ok(boxes.iter().map(part).collect())
    }

    /// Converts to contiguous memory, if the items are contiguous in row-major order.
    ///
    /// # Errors
    /// The array itself where they are not.
    pub fn into_region(self) -> Result<HostRegionMut, HostArrayMut> {
        let plain = row_major(self.item_bytes, &self.shape);
        let sides = self.shape.iter().zip(self.strides.iter().zip(&plain));
        let is_plain = self.is_empty()
            || sides
                .into_iter()
                .all(|(&size, (stride, plain))| size == 1 || stride == plain);
        if !is_plain {
            return Err(self);
        }
        let (address, bytes) = (self.address.expose_provenance(), self.len());
        // SAFETY: the items are the array's alone and alive with the owner (`new`), their bytes are
        // all of these, and the array is gone.
        Ok(unsafe { HostRegionMut::new(address, bytes, Box::new(self.owner)) })
    }

    /// Converts to a destination that is filled from a run of bytes, in which the items have other
    /// strides.
    ///
    /// # Panics
    /// If the array is empty, or the items of the run are not in row-major order.
    pub fn into_scatter(self, source_strides_bytes: &[usize]) -> Scatter {
        assert!(!self.is_empty(), "there is something to fill");
        let source: Vec<isize> = source_strides_bytes
            .iter()
            .map(|s| s.cast_signed())
            .collect();
        let strided = Strided::new(self.item_bytes, &self.shape, &source, &self.strides);
        assert!(strided.is_in_order(), "items come in row-major order");
        let reach = self.shape.iter().zip(source_strides_bytes);
        let last: usize = reach.map(|(size, stride)| (size - 1) * stride).sum();
        Scatter {
            range: 0..(last + self.item_bytes) as u64,
            to: Arc::new(Destination {
                address: self.address,
                strided,
                _owner: self.owner,
            }),
        }
    }
}

impl fmt::Debug for HostArrayMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArrayMut")
            .field("address", &self.address)
            .field("item_bytes", &self.item_bytes)
            .field("shape", &self.shape)
            .field("strides", &self.strides)
            .finish_non_exhaustive()
    }
}

/// Whether no two items share memory, and all fit into one address space: from the smallest stride
/// to the largest, each has to step over everything that the smaller ones span.
pub(super) fn is_apart(item_bytes: usize, shape: &[usize], strides: &[isize]) -> bool {
    assert_eq!(shape.len(), strides.len(), "a stride per dimension");
    let fits = |bytes: usize| isize::try_from(bytes).is_ok();
    if shape.contains(&0) || item_bytes == 0 {
        return true;
    }
    let sides = shape.iter().zip(strides).filter(|&(&size, _)| size > 1);
    let mut sides: Vec<(usize, usize)> = sides
        .map(|(&size, &stride)| (stride.unsigned_abs(), size))
        .collect();
    sides.sort_unstable();
    let mut span = Some(item_bytes);
    for (stride, size) in sides {
        span = span.filter(|&span| span <= stride).and_then(|span| {
            let reach = stride.checked_mul(size - 1)?;
            span.checked_add(reach)
        });
    }
    span.is_some_and(fits)
}

struct Destination {
    address: *mut u8,
    strided: Strided,
    /// Dropped last.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is reached through scatters alone, each of which has the exclusive right to
// the items that its range holds: the array that they were made of had it, and ranges never
// overlap. The owner, itself `Send + Sync`, keeps it alive.
unsafe impl Send for Destination {}
// SAFETY: as above; a shared destination is written to in places that no two scatters share.
unsafe impl Sync for Destination {}

/// Items of a borrowed array that a run of bytes holds, possibly with other items or gaps between
/// them.
pub struct Scatter {
    /// The bytes of the run that have not been copied yet.
    range: Range<u64>,
    to: Arc<Destination>,
}

impl Scatter {
    /// The range of bytes of the run that it takes; byte 0 is the first of the box.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Cuts it in two: `self` takes the bytes of the run before `at`, the result those from `at`
    /// on.
    ///
    /// # Panics
    /// If `at` lies outside the range.
    pub fn split_off(&mut self, at: u64) -> Scatter {
        assert!(
            self.range.start <= at && at <= self.range.end,
            "cut at {at} of {:?}",
            self.range
        );
        let range = at..self.range.end;
        self.range.end = at;
        Scatter {
            range,
            to: Arc::clone(&self.to),
        }
    }

    /// Copies the items out of `bytes`, which are the run's bytes from `at` on, to their places;
    /// returns how many bytes it copied.
    ///
    /// # Panics
    /// If the bytes reach beyond the range.
    pub fn fill(&mut self, at: u64, bytes: &[u8]) -> u64 {
        let end = at + bytes.len() as u64;
        assert!(
            self.range.start <= at && end <= self.range.end,
            "bytes {at}..{end} of {:?}",
            self.range
        );
        let strided = &self.to.strided;
        let content = strided.content_before(at)..strided.content_before(end);
        let copied = content.end - content.start;
        let src = bytes.as_ptr().wrapping_sub(at as usize);
        // SAFETY: the content between the two is what lies in bytes `at..end` of the run, and
        // these are `bytes`. No other scatter has these bytes of the run, so the items, or parts
        // of items, that they go to are this one's to write (`HostArrayMut::new`) and no part of
        // `bytes`.
        unsafe { strided.copy(src, self.to.address, content) };
        copied
    }
}

impl fmt::Debug for Scatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scatter")
            .field("range", &self.range)
            .field("address", &self.to.address)
            .finish_non_exhaustive()
    }
}
