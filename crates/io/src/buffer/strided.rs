//! Copies of an array whose items have different strides in the source and the destination. The
//! *content* is its items in row-major order; any byte range of it can be copied. When copying out
//! of an array, the content is the destination; when scattering into one, the content, or rows of
//! it, is the source.
//!
//! Dimensions that are contiguous on both sides are merged first, so that most arrays become one
//! block, or rows of large blocks, and `memcpy` does the work. The remaining arrays, mostly
//! transposes, are copied in planes of two dimensions.

#![allow(unsafe_code)]

mod plane;

use std::ops::Range;
use std::ptr;

use plane::{Side, copy_planes, take_plane};

/// An array and its strides on both sides.
#[derive(Debug)]
pub(super) struct Strided {
    /// Contiguous bytes at each index.
    block_bytes: usize,
    /// From the outermost to the innermost; empty where everything is contiguous.
    dims: Vec<Dim>,
}

/// One dimension, after merging.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    src_stride: isize,
    dst_stride: isize,
    /// Blocks at one index of this dimension: the product of the sizes further in.
    blocks: u64,
}

/// Rows of the content, of equal lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    /// Offset of the first row in the source, in bytes from the first item.
    pub(super) src_offset: isize,
    /// The same in the destination.
    pub(super) dst_offset: isize,
    pub(super) row_bytes: usize,
    pub(super) count: usize,
    /// Distance between rows in the source.
    pub(super) src_stride: isize,
    /// The same in the destination.
    pub(super) dst_stride: isize,
}

/// Strides of a contiguous array in row-major order.
pub(super) fn row_major(item_bytes: usize, shape: &[usize]) -> Vec<isize> {
    let mut stride = item_bytes;
    let mut strides: Vec<isize> = vec![0; shape.len()];
    for (place, &size) in strides.iter_mut().zip(shape).rev() {
        *place = stride.cast_signed();
        stride = stride.wrapping_mul(size);
    }
    strides
}

impl Strided {
    /// Merges dimensions that are contiguous on both sides. No dimension may be empty.
    pub(super) fn new(
        item_bytes: usize,
        shape: &[usize],
        src_strides: &[isize],
        dst_strides: &[isize],
    ) -> Strided {
        let mut block_bytes = item_bytes;
        let mut dims: Vec<Dim> = Vec::new();
        let strides = src_strides.iter().zip(dst_strides);
        for (&size, (&src_stride, &dst_stride)) in shape.iter().zip(strides).rev() {
            let follows = |stride: isize, inner: isize, size: usize| {
                stride == inner.wrapping_mul(size.cast_signed())
            };
            let block = block_bytes.cast_signed();
            match dims.last_mut() {
                _ if size == 1 => {}
                None if src_stride == block && dst_stride == block => block_bytes *= size,
                Some(inner)
                    if follows(src_stride, inner.src_stride, inner.size)
                        && follows(dst_stride, inner.dst_stride, inner.size) =>
                {
                    inner.size *= size;
                }
                _ => dims.push(Dim {
                    size,
                    src_stride,
                    dst_stride,
                    blocks: 0,
                }),
            }
        }
        let mut blocks = 1;
        for dim in &mut dims {
            dim.blocks = blocks;
            blocks *= dim.size as u64;
        }
        dims.reverse();
        Strided { block_bytes, dims }
    }

    /// For copies whose destination is the content itself.
    pub(super) fn to_content(item_bytes: usize, shape: &[usize], strides: &[isize]) -> Strided {
        Strided::new(item_bytes, shape, strides, &row_major(item_bytes, shape))
    }

    /// Whether everything is contiguous on both sides.
    pub(super) fn is_contiguous(&self) -> bool {
        self.dims.is_empty()
    }

    /// Whether the source is in the order of the content: each index of a dimension ends before the
    /// next one begins.
    pub(super) fn is_in_order(&self) -> bool {
        let mut span = self.block_bytes as i128;
        self.dims.iter().rev().all(|dim| {
            let stride = dim.src_stride as i128;
            let is_apart = stride >= span;
            span += stride * (dim.size as i128 - 1);
            is_apart
        })
    }

    /// How many bytes of the content precede byte `offset` of a source that is in order.
    pub(super) fn content_before(&self, mut offset: u64) -> u64 {
        let block_bytes = self.block_bytes as u64;
        let mut content = 0;
        for dim in &self.dims {
            let stride = dim.src_stride.unsigned_abs() as u64;
            let index = offset / stride;
            if index >= dim.size as u64 {
                return content + dim.size as u64 * dim.blocks * block_bytes;
            }
            content += index * dim.blocks * block_bytes;
            offset -= index * stride;
        }
        content + offset.min(block_bytes)
    }

    /// Copies the content from byte `range.start` up to `range.end`.
    ///
    /// # Safety
    /// `src` and `dst` are the addresses, real or nominal, of the array's first item on either
    /// side; all bytes of the range are readable in the source and writable in the destination, and
    /// the two are apart.
    pub(super) unsafe fn copy(&self, src: *const u8, dst: *mut u8, range: Range<u64>) {
        let block_bytes = self.block_bytes as u64;
        let (mut block, skipped) = (range.start / block_bytes, range.start % block_bytes);
        if skipped > 0 {
            let bytes = (block_bytes - skipped).min(range.end - range.start) as usize;
            let (src, dst) = self.block(src, dst, block);
            let skipped = skipped as usize;
            let (src, dst) = (src.wrapping_add(skipped), dst.wrapping_add(skipped));
            // SAFETY: a part of block `block`, inside the range of the caller's promise.
            unsafe { ptr::copy_nonoverlapping(src, dst, bytes) };
            block += 1;
        }
        let (end, left) = (range.end / block_bytes, range.end % block_bytes);
        if block > end {
            return;
        }
        if block < end {
            // SAFETY: whole blocks of the caller's range.
            unsafe { self.copy_range(0, src, dst, block..end) };
        }
        if left > 0 {
            let (src, dst) = self.block(src, dst, end);
            // SAFETY: the first bytes of block `end`, inside the caller's range.
            unsafe { ptr::copy_nonoverlapping(src, dst, left as usize) };
        }
    }

    /// Calls `found` with the rows that make up the content of `range`, in order.
    pub(super) fn find_rows(&self, range: Range<u64>, found: &mut dyn FnMut(Rows)) {
        let block_bytes = self.block_bytes as u64;
        let inner = self.dims.last();
        let mut content = range.start;
        while content < range.end {
            let (block, skipped) = (content / block_bytes, content % block_bytes);
            let left = range.end - content;
            // Part of a block, or all the whole ones of a row.
            let (row_bytes, count) = match inner {
                Some(inner) if skipped == 0 && left >= block_bytes => {
                    let behind = inner.size as u64 - block % inner.size as u64;
                    (block_bytes, behind.min(left / block_bytes))
                }
                _ => ((block_bytes - skipped).min(left), 1),
            };
            let (src_offset, dst_offset) = self.offsets(block);
            found(Rows {
                src_offset: src_offset + skipped as isize,
                dst_offset: dst_offset + skipped as isize,
                row_bytes: row_bytes as usize,
                count: count as usize,
                src_stride: inner.map_or(0, |inner| inner.src_stride),
                dst_stride: inner.map_or(0, |inner| inner.dst_stride),
            });
            content += row_bytes * count;
        }
    }

    /// Offsets of a block in the source and in the destination, in bytes from the first item.
    fn offsets(&self, block: u64) -> (isize, isize) {
        self.dims.iter().fold((0, 0), |(src, dst), dim| {
            let index = (block / dim.blocks % dim.size as u64) as isize;
            (src + index * dim.src_stride, dst + index * dim.dst_stride)
        })
    }

    /// Calls `found` for each part of the content within `range` whose source is inside `window`
    /// (in bytes from the first item): its offset in the content, its offset in the source, and its
    /// length.
    pub(super) fn find_within(
        &self,
        range: &Range<u64>,
        window: &Range<isize>,
        found: &mut dyn FnMut(u64, isize, usize),
    ) {
        self.find_from(0, (0, 0), range, window, found);
    }

    fn find_from(
        &self,
        depth: usize,
        (content, offset): (u64, isize),
        range: &Range<u64>,
        window: &Range<isize>,
        found: &mut dyn FnMut(u64, isize, usize),
    ) {
        let block_bytes = self.block_bytes as u64;
        let Some(dim) = self.dims.get(depth) else {
            let first = range.start.saturating_sub(content);
            let first = first.max((window.start - offset).max(0) as u64);
            let end = block_bytes.min(range.end.saturating_sub(content));
            let end = end.min((window.end - offset).max(0) as u64);
            if first < end {
                found(
                    content + first,
                    offset + first as isize,
                    (end - first) as usize,
                );
            }
            return;
        };
        let (mut low, mut high) = (0, self.block_bytes as isize);
        for inner in &self.dims[depth + 1..] {
            let reach = inner.src_stride * (inner.size as isize - 1);
            low += reach.min(0);
            high += reach.max(0);
        }
        let step = dim.blocks * block_bytes;
        let mut first = (range.start.saturating_sub(content) / step) as isize;
        let behind = range.end.saturating_sub(content).div_ceil(step);
        let mut end = behind.min(dim.size as u64) as isize;
        // The indices whose items reach into the window form one range.
        let (after, before) = (window.start - offset - high, window.end - offset - low);
        let stride = dim.src_stride.abs();
        let (after, before) = match dim.src_stride < 0 {
            true => (-before, -after),
            false => (after, before),
        };
        if stride > 0 {
            first = first.max(after.div_euclid(stride) + 1);
            end = end.min((before - 1).div_euclid(stride) + 1);
        } else if after >= 0 || before <= 0 {
            return;
        }
        for index in first..end {
            let place = (
                content + index as u64 * step,
                offset + index * dim.src_stride,
            );
            self.find_from(depth + 1, place, range, window, found);
        }
    }

    /// The two addresses of a block.
    fn block(&self, src: *const u8, dst: *mut u8, block: u64) -> (*const u8, *mut u8) {
        self.dims.iter().fold((src, dst), |(src, dst), dim| {
            let index = block / dim.blocks % dim.size as u64;
            dim.at(src, dst, index)
        })
    }

    /// Copies the blocks `range` of the sub-array of `dims[depth..]` at `src` and `dst`: whole
    /// indices as a box, and the partial index on either side one dimension further in.
    ///
    /// # Safety
    /// Those blocks are readable at `src`, writable at `dst`, and the two are apart.
    unsafe fn copy_range(&self, depth: usize, src: *const u8, dst: *mut u8, range: Range<u64>) {
        let Some(&dim) = self.dims.get(depth) else {
            // SAFETY: without a dimension the array is one block.
            return unsafe { ptr::copy_nonoverlapping(src, dst, self.block_bytes) };
        };
        let (first, last) = (range.start.div_ceil(dim.blocks), range.end / dim.blocks);
        if first > last {
            // All of it lies strictly inside one index.
            let from = last * dim.blocks;
            let (src, dst) = dim.at(src, dst, last);
            let inner = range.start - from..range.end - from;
            // SAFETY: a part of the caller's range, in the coordinates of that index.
            unsafe { self.copy_range(depth + 1, src, dst, inner) };
            return;
        }
        let (whole_start, whole_end) = (first * dim.blocks, last * dim.blocks);
        if range.start < whole_start {
            let (src, dst) = dim.at(src, dst, first - 1);
            let inner = range.start - (whole_start - dim.blocks)..dim.blocks;
            // SAFETY: the part of the caller's range before index `first`.
            unsafe { self.copy_range(depth + 1, src, dst, inner) };
        }
        if first < last {
            let (src, dst) = dim.at(src, dst, first);
            // SAFETY: the indices `first..last`, all of them inside the caller's range.
            unsafe { self.copy_box(depth, (last - first) as usize, src, dst) };
        }
        if whole_end < range.end {
            let (src, dst) = dim.at(src, dst, last);
            // SAFETY: the part of the caller's range from index `last` on.
            unsafe { self.copy_range(depth + 1, src, dst, 0..range.end - whole_end) };
        }
    }

    /// Copies `count` whole indices of `dims[depth]`.
    ///
    /// # Safety
    /// As [`copy_range`](Strided::copy_range), for these indices.
    unsafe fn copy_box(&self, depth: usize, count: usize, src: *const u8, dst: *mut u8) {
        let mut sides: Vec<Side> = self.dims[depth..]
            .iter()
            .map(|dim| Side {
                size: dim.size,
                src_stride: dim.src_stride,
                dst_stride: dim.dst_stride,
            })
            .collect();
        sides[0].size = count;
        let plane = take_plane(&mut sides, self.block_bytes);
        // SAFETY: the loops below visit every index of the box once, within the caller's bounds.
        unsafe { copy_planes(&sides, &plane, src, dst) };
    }
}

impl Dim {
    /// The two addresses of an index.
    fn at(&self, src: *const u8, dst: *mut u8, index: u64) -> (*const u8, *mut u8) {
        let index = index as isize;
        (
            src.wrapping_offset(index.wrapping_mul(self.src_stride)),
            dst.wrapping_offset(index.wrapping_mul(self.dst_stride)),
        )
    }
}
