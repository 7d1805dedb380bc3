//! Memory that a caller owns and lends: a tensor to save, a tensor to load into.
//!
//! The two types are made at the boundary where raw addresses come in (the unsafe step) and are
//! safe to use above it. Each carries an owner that keeps the memory alive.
//!
//! [`HostRegion`] copies out any byte range of the *row-major* content of a strided array. It never
//! reads the caller's memory through a Rust reference: another thread of the caller may be writing
//! to it, and then the copy is torn, but nothing else is. [`HostRegion::translate_to`] alone lends
//! the content to a function, for ciphers, which take slices and read them in assembly.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::strided::Strided;
use super::{IoBuf, Memory, streaming};

/// Borrowed memory to copy from, contiguous or strided.
pub struct HostRegion {
    address: *const u8,
    len: u64,
    /// `None` for contiguous memory.
    strided: Option<Strided>,
    /// Addresses from the first byte of any item to the last.
    span: Range<usize>,
    /// Dropped last.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the region only reads its memory, which its owner, itself `Send + Sync`, keeps readable
// from any thread.
unsafe impl Send for HostRegion {}
// SAFETY: as above; reading takes `&self` and changes nothing.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    /// A strided array of `shape` with items of `item_bytes`, its first item at `address`. Strides
    /// may be zero or negative.
    ///
    /// # Panics
    /// If `shape` and `strides_bytes` differ in length, or the content exceeds `u64` bytes.
    ///
    /// # Safety
    /// Every item reachable through the shape and the strides stays readable while `owner` lives.
    pub unsafe fn new(
        address: usize,
        item_bytes: usize,
        shape: &[usize],
        strides_bytes: &[isize],
        owner: Box<dyn Any + Send + Sync>,
    ) -> HostRegion {
        assert_eq!(shape.len(), strides_bytes.len(), "a stride per dimension");
        let len = content_bytes(item_bytes, shape);
        let strided = if len == 0 {
            None
        } else {
            let strided = Strided::to_content(item_bytes, shape, strides_bytes);
            (!strided.is_contiguous()).then_some(strided)
        };
        HostRegion {
            address: ptr::with_exposed_provenance(address),
            len,
            strided,
            span: if len == 0 {
                address..address
            } else {
                span(address, item_bytes, shape, strides_bytes)
            },
            _owner: owner,
        }
    }

    /// A region of `len` bytes at `address`.
    ///
    /// # Safety
    /// The bytes stay readable while `owner` lives.
    pub unsafe fn contiguous(
        address: usize,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> HostRegion {
        HostRegion {
            address: ptr::with_exposed_provenance(address),
            len: len as u64,
            strided: None,
            span: address..address + len,
            _owner: owner,
        }
    }

    /// Bytes of the content: the number of items times their size.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no content.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The range of addresses that its items span; in a strided region, other memory may be in
    /// between.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// The addresses of a range of contiguous content.
    ///
    /// # Panics
    /// If it is not contiguous, or the range reaches beyond it.
    pub fn addresses(&self, range: &Range<u64>) -> Range<usize> {
        assert!(self.is_contiguous(), "the content is contiguous");
        let bytes = usize::try_from(range.end - range.start).expect("it fits the address space");
        self.check_range(range.start, bytes);
        let start = self.span.start + range.start as usize;
        start..start + bytes
    }

    /// Whether the content is contiguous and in order.
    pub fn is_contiguous(&self) -> bool {
        self.strided.is_none()
    }

    /// Fills `dst` with the content from byte `start` on, in row-major order.
    ///
    /// # Panics
    /// If that reaches beyond the content.
    pub fn copy_to(&self, start: u64, dst: &mut [u8]) {
        self.copy_with(start, dst, ptr::copy_nonoverlapping);
    }

    /// As [`copy_to`](HostRegion::copy_to), for a `dst` that is not read again soon: contiguous
    /// content is copied past the caches, nearly twice as fast.
    ///
    /// # Panics
    /// As [`copy_to`](HostRegion::copy_to).
    pub fn stream_to(&self, start: u64, dst: &mut [u8]) {
        self.copy_with(start, dst, streaming::copy);
    }

    /// Fills `dst` by `translate`, from content of the same length from byte `start` on. `None` if
    /// the content is not contiguous.
    ///
    /// Other threads may be writing to the content, so `translate` must read each byte at most once
    /// and must be no Rust code that relies on what it has read: it passes the slice to a routine
    /// in assembly.
    ///
    /// # Panics
    /// As [`copy_to`](HostRegion::copy_to).
    pub fn translate_to<T>(
        &self,
        start: u64,
        dst: &mut [u8],
        translate: impl FnOnce(&[u8], &mut [u8]) -> T,
    ) -> Option<T> {
        self.check_range(start, dst.len());
        if self.strided.is_some() || dst.is_empty() {
            return None;
        }
        let start = usize::try_from(start).expect("contiguous memory fits the address space");
        let src = self.address.wrapping_add(start);
        // SAFETY: the range is inside the readable content (checked above), which the owner, and so
        // `self`, keeps for the time of the call. That nobody writes to it cannot be promised; the
        // contract above keeps `translate` from relying on it.
        let content = unsafe { std::slice::from_raw_parts(src, dst.len()) };
        Some(translate(content, dst))
    }

    /// Replaces, in a copy `dst` of the content from byte `start` on, the bytes whose source is at
    /// `address` and after with `bytes`.
    pub(super) fn overlay(&self, start: u64, dst: &mut [u8], address: usize, bytes: &[u8]) {
        let range = start..start + dst.len() as u64;
        let first = address.wrapping_sub(self.address.addr()).cast_signed();
        let window = first..first + bytes.len().cast_signed();
        let mut replace = |content: u64, offset: isize, count: usize| {
            let (to, from) = ((content - start) as usize, (offset - first) as usize);
            dst[to..to + count].copy_from_slice(&bytes[from..from + count]);
        };
        match &self.strided {
            Some(strided) => strided.find_within(&range, &window, &mut replace),
            None => {
                let begin = range.start.max(window.start as u64);
                let end = range.end.min(window.end as u64);
                if begin < end {
                    replace(begin, begin as isize, (end - begin) as usize);
                }
            }
        }
    }

    fn check_range(&self, start: u64, bytes: usize) {
        let end = start.checked_add(bytes as u64);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{bytes} bytes from {start} reach beyond {}",
            self.len
        );
    }

    /// Copies content into `dst`, contiguous content by `copy`, which is equivalent to `memcpy`:
    /// source, destination and length, with both sides valid and apart.
    fn copy_with(&self, start: u64, dst: &mut [u8], copy: unsafe fn(*const u8, *mut u8, usize)) {
        self.check_range(start, dst.len());
        match &self.strided {
            Some(strided) => {
                let range = start..start + dst.len() as u64;
                let dst = dst.as_mut_ptr().wrapping_sub(start as usize);
                // SAFETY: the range is inside the content (checked above), every item of which is
                // readable while the owner, and so `self`, lives (`new`). As content, its byte
                // `start` lands on the first of the exclusive slice, its last on the slice's last.
                unsafe { strided.copy(self.address, dst, range) };
            }
            None if dst.is_empty() => {}
            None => {
                let start =
                    usize::try_from(start).expect("contiguous memory fits the address space");
                let src = self.address.wrapping_add(start);
                // SAFETY: the range is inside the readable content (as above), and `dst` is a
                // distinct exclusive slice of the same length.
                unsafe { copy(src, dst.as_mut_ptr(), dst.len()) };
            }
        }
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegion")
            .field("address", &self.address)
            .field("len", &self.len)
            .field("strided", &self.strided)
            .finish_non_exhaustive()
    }
}

/// The addresses that the items of a non-empty array span.
fn span(address: usize, item_bytes: usize, shape: &[usize], strides: &[isize]) -> Range<usize> {
    let (mut low, mut high) = (address, address);
    for (&size, &stride) in shape.iter().zip(strides) {
        let reach = stride.unsigned_abs() * (size - 1);
        match stride < 0 {
            true => low -= reach,
            false => high += reach,
        }
    }
    low..high + item_bytes
}

pub(super) fn content_bytes(item_bytes: usize, shape: &[usize]) -> u64 {
    // An empty dimension empties the array, however large the others are.
    if shape.contains(&0) {
        return 0;
    }
    shape
        .iter()
        .try_fold(item_bytes as u64, |bytes, &size| {
            bytes.checked_mul(size as u64)
        })
        .expect("the content fits a u64")
}

impl HostRegion {
    /// A range of memory that several regions may share.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub fn within(memory: &Arc<Memory>, range: Range<usize>) -> HostRegion {
        let address = memory.as_slice()[range.clone()]
            .as_ptr()
            .expose_provenance();
        let owner = Box::new(Arc::clone(memory));
        // SAFETY: the bytes were just found to be in the memory, which is mapped as long as the
        // owner lives; behind an `Arc` nobody can write to it.
        unsafe { HostRegion::contiguous(address, range.len(), owner) }
    }
}

impl From<Vec<u8>> for HostRegion {
    /// Bytes that the region itself owns.
    fn from(bytes: Vec<u8>) -> HostRegion {
        // Moving the vector into the box moves only its header: the bytes stay in place.
        let (address, len) = (bytes.as_ptr().expose_provenance(), bytes.len());
        // SAFETY: the bytes are initialised and live, unchanged, as long as the vector, which the
        // region owns and nothing else reaches.
        unsafe { HostRegion::contiguous(address, len, Box::new(bytes)) }
    }
}

/// Borrowed contiguous memory to fill.
pub struct HostRegionMut {
    address: NonNull<u8>,
    len: usize,
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the region has the exclusive right to its memory (`new`), which `owner`, itself `Send +
// Sync`, keeps alive.
unsafe impl Send for HostRegionMut {}
// SAFETY: `&HostRegionMut` gives out no access to the memory.
unsafe impl Sync for HostRegionMut {}

impl HostRegionMut {
    /// A region of `len` bytes at `address`.
    ///
    /// # Panics
    /// If `address` is null and `len` is not zero.
    ///
    /// # Safety
    /// The bytes are initialised and stay readable and writable while `owner` lives, and nothing
    /// else reads or writes them until this region, the [`IoBuf`] made of it and all windows split
    /// off are dropped.
    pub unsafe fn new(address: usize, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        let address = NonNull::new(ptr::with_exposed_provenance_mut(address));
        assert!(
            address.is_some() || len == 0,
            "{len} bytes at a null address"
        );
        HostRegionMut {
            address: address.unwrap_or(NonNull::dangling()),
            len,
            owner,
        }
    }

    /// Bytes to fill.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to fill.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, for deciding whether a device can reach the memory directly.
    pub fn address(&self) -> usize {
        self.address.as_ptr() as usize
    }

    /// Converts the memory to a buffer for I/O; its last window drops the owner.
    pub fn into_buf(self) -> IoBuf {
        // SAFETY: the caller of `new` promised initialised, exclusive memory for as long as `owner`
        // lives; the buffer takes the owner along and the region is gone.
        unsafe { IoBuf::new(self.address, self.len, Arc::new(self.owner)) }
    }
}

impl fmt::Debug for HostRegionMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegionMut")
            .field("address", &self.address)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_content_is_translated_and_other_content_is_not() {
        let memory: Vec<u8> = (0..64).collect();
        let address = memory.as_ptr().expose_provenance();
        // SAFETY: all items are in the memory, which is kept.
        let of = |shape: &[usize], strides: &[isize]| unsafe {
            HostRegion::new(address, 1, shape, strides, Box::new(()))
        };
        let add = |from: &[u8], to: &mut [u8]| {
            to.iter_mut()
                .zip(from)
                .for_each(|(to, from)| *to = from + 1);
        };
        let mut translated = [0; 4];
        let region = of(&[8, 8], &[8, 1]);
        assert!(region.translate_to(60, &mut translated, add).is_some());
        assert_eq!(translated, [61, 62, 63, 64]);
        let region = of(&[8, 8], &[1, 8]);
        assert!(region.translate_to(60, &mut translated, add).is_none());
        assert_eq!(translated, [61, 62, 63, 64]);
    }

    #[test]
    fn what_lies_in_a_window_is_replaced_and_nothing_else() {
        let memory = vec![1_u8; 4096];
        let address = memory.as_ptr().expose_provenance();
        let cases: [(usize, &[usize], &[isize]); 5] = [
            (1, &[4096], &[1]),
            (2, &[16, 32], &[2, 32]),
            (4, &[8, 3, 5], &[4, -320, 64]),
            (3, &[2, 4, 7], &[1500, 0, 40]),
            (1, &[9, 9, 9], &[-9, 1, 81]),
        ];
        for (item_bytes, shape, strides) in cases {
            let first = address + 1000 * usize::from(shape.len() > 1);
            // SAFETY: all items are in the memory, which is kept.
            let region =
                unsafe { HostRegion::new(first, item_bytes, shape, strides, Box::new(())) };
            let len = region.len();
            for window in [0..4096, 990..1100, 1003..1004, 1500..2600, 100..1001] {
                for range in [0..len, 5..len - 3, len / 2..len / 2 + 7] {
                    let mut marked = memory.clone();
                    marked[window.clone()].fill(2);
                    let at = marked.as_ptr().expose_provenance() + (first - address);
                    // SAFETY: as above.
                    let expected =
                        unsafe { HostRegion::new(at, item_bytes, shape, strides, Box::new(())) };
                    let mut copies = [(); 2].map(|()| vec![0; (range.end - range.start) as usize]);
                    expected.copy_to(range.start, &mut copies[0]);
                    region.copy_to(range.start, &mut copies[1]);
                    let kept = vec![2; window.len()];
                    region.overlay(range.start, &mut copies[1], address + window.start, &kept);
                    assert!(copies[0] == copies[1], "{shape:?} {window:?} {range:?}");
                }
            }
        }
    }
}
