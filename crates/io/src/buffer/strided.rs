//! Gathering the row-major content of a strided array into contiguous bytes.
//!
//! Dimensions that lie together in memory are merged first, so that most arrays become one block,
//! or rows of large blocks, and `memcpy` does the work. What is left, transposes above all, is
//! copied in planes of two dimensions: the innermost one and the one along which the memory is
//! closest together. Where these differ, the plane is copied in tiles through a buffer that stays
//! in the first-level cache, so that both sides see runs of [`RUN_BYTES`] instead of single items
//! (measured on a 4096 x 4096 transpose: five to eight times the rate of single items).

#![allow(unsafe_code)]

use std::ptr;

/// Two cache lines: the run that a tile reads and writes at a time.
const RUN_BYTES: usize = 128;

/// Room for the largest tile: `RUN_BYTES` runs of one-byte items.
const TILE_BYTES: usize = RUN_BYTES * RUN_BYTES;

/// The shape of an array that is not contiguous.
#[derive(Debug)]
pub(super) struct Strided {
    /// Bytes that lie together at each index.
    block_bytes: usize,
    /// From the outermost to the innermost; never empty.
    dims: Vec<Dim>,
}

/// One dimension, after merging.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    stride_bytes: isize,
    /// Blocks at one index of this dimension: the product of the sizes further in.
    blocks: u64,
}

/// One dimension of a box that is copied whole.
#[derive(Clone, Copy)]
struct Side {
    size: usize,
    src_stride: isize,
    dst_stride: usize,
}

impl Strided {
    /// Merges what lies together; `None` if that is everything. No dimension may be empty.
    pub(super) fn new(item_bytes: usize, shape: &[usize], strides: &[isize]) -> Option<Strided> {
        let mut block_bytes = item_bytes;
        let mut dims: Vec<Dim> = Vec::new();
        for (&size, &stride_bytes) in shape.iter().zip(strides).rev() {
            let outermost = dims.last_mut();
            match outermost {
                _ if size == 1 => {}
                None if stride_bytes == block_bytes.cast_signed() => block_bytes *= size,
                Some(inner)
                    if stride_bytes
                        == inner.stride_bytes.wrapping_mul(inner.size.cast_signed()) =>
                {
                    inner.size *= size;
                }
                _ => dims.push(Dim {
                    size,
                    stride_bytes,
                    blocks: 0,
                }),
            }
        }
        if dims.is_empty() {
            return None;
        }
        let mut blocks = 1;
        for dim in &mut dims {
            dim.blocks = blocks;
            blocks *= dim.size as u64;
        }
        dims.reverse();
        Some(Strided { block_bytes, dims })
    }

    /// Fills `dst` with the content from byte `start` on.
    ///
    /// # Safety
    /// `src` is the first item of an array of this shape, `start + dst.len()` does not exceed its
    /// content, and every item in that range is readable and outside `dst`.
    pub(super) unsafe fn copy(&self, src: *const u8, start: u64, dst: &mut [u8]) {
        let block_bytes = self.block_bytes as u64;
        let mut block = start / block_bytes;
        let mut rest = dst;
        let skipped = (start % block_bytes) as usize;
        if skipped > 0 {
            let (head, tail) = rest.split_at_mut(rest.len().min(self.block_bytes - skipped));
            // SAFETY: `head` ends inside block `block`, which the caller vouches for.
            unsafe { copy_bytes(self.block(src, block).wrapping_add(skipped), head) };
            block += 1;
            rest = tail;
        }
        let whole = rest.len() / self.block_bytes;
        let (blocks, tail) = rest.split_at_mut(whole * self.block_bytes);
        if whole > 0 {
            // SAFETY: `blocks` has room for exactly these blocks, and the caller vouches for them.
            unsafe { self.copy_range(0, src, block, block + whole as u64, blocks.as_mut_ptr()) };
        }
        if !tail.is_empty() {
            let src = self.block(src, block + whole as u64);
            // SAFETY: `tail` is shorter than its block, and the caller vouches for that.
            unsafe { copy_bytes(src, tail) };
        }
    }

    /// The address of a block.
    fn block(&self, src: *const u8, block: u64) -> *const u8 {
        self.dims.iter().fold(src, |src, dim| {
            let index = block / dim.blocks % dim.size as u64;
            src.wrapping_offset((index as isize).wrapping_mul(dim.stride_bytes))
        })
    }

    /// Copies the blocks `[begin, end)` of the sub-array of `dims[depth..]` at `src`: the whole
    /// indices as a box, and what is left of the indices on either side one dimension further in.
    ///
    /// # Safety
    /// Those blocks are readable at `src`, and `dst` is writable for their bytes and apart.
    unsafe fn copy_range(&self, depth: usize, src: *const u8, begin: u64, end: u64, dst: *mut u8) {
        let dim = self.dims[depth];
        let at = |index: u64| src.wrapping_offset((index as isize).wrapping_mul(dim.stride_bytes));
        let to = |block: u64| dst.wrapping_add((block - begin) as usize * self.block_bytes);
        let (first, last) = (begin.div_ceil(dim.blocks), end / dim.blocks);
        if first > last {
            // All of it lies strictly inside one index.
            let from = last * dim.blocks;
            // SAFETY: a part of the caller's range, in the coordinates of that index.
            unsafe { self.copy_range(depth + 1, at(last), begin - from, end - from, dst) };
            return;
        }
        let (whole_begin, whole_end) = (first * dim.blocks, last * dim.blocks);
        if begin < whole_begin {
            let from = whole_begin - dim.blocks;
            // SAFETY: the part of the caller's range before index `first`.
            unsafe { self.copy_range(depth + 1, at(first - 1), begin - from, dim.blocks, dst) };
        }
        if first < last {
            // SAFETY: the indices `first..last`, all of them inside the caller's range.
            unsafe { self.copy_box(depth, (last - first) as usize, at(first), to(whole_begin)) };
        }
        if whole_end < end {
            // SAFETY: the part of the caller's range from index `last` on.
            unsafe { self.copy_range(depth + 1, at(last), 0, end - whole_end, to(whole_end)) };
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
                src_stride: dim.stride_bytes,
                dst_stride: dim.blocks as usize * self.block_bytes,
            })
            .collect();
        sides[0].size = count;
        let columns = sides.pop().expect("a dimension at least");
        // The order of the outer loops is free: the plane takes the side that is closest together.
        let closest = (0..sides.len()).min_by_key(|&side| sides[side].src_stride.unsigned_abs());
        let rows = closest.map_or(
            Side {
                size: 1,
                src_stride: 0,
                dst_stride: 0,
            },
            |side| sides.remove(side),
        );
        let plane = Plane {
            rows,
            columns,
            block_bytes: self.block_bytes,
        };
        // SAFETY: the loops below visit every index of the box once, within the caller's bounds.
        unsafe { copy_planes(&sides, &plane, src, dst) };
    }
}

/// # Safety
/// The box spanned by `outer` and `plane` is readable at `src` and writable at `dst`, and apart.
unsafe fn copy_planes(outer: &[Side], plane: &Plane, src: *const u8, dst: *mut u8) {
    let Some((side, outer)) = outer.split_first() else {
        // SAFETY: with no side left, the box is the plane.
        return unsafe { plane.copy(src, dst) };
    };
    for index in 0..side.size {
        let src = src.wrapping_offset(side.src_stride.wrapping_mul(index.cast_signed()));
        let dst = dst.wrapping_add(side.dst_stride * index);
        // SAFETY: one index of the outermost side of the caller's box.
        unsafe { copy_planes(outer, plane, src, dst) };
    }
}

/// A two-dimensional box; the columns lie together in the destination.
struct Plane {
    rows: Side,
    columns: Side,
    block_bytes: usize,
}

impl Plane {
    /// # Safety
    /// The plane is readable at `src` and writable at `dst`, and apart.
    unsafe fn copy(&self, src: *const u8, dst: *mut u8) {
        let copy: unsafe fn(&Plane, *const u8, *mut u8) = match self.block_bytes {
            1 => Plane::copy_items::<1>,
            2 => Plane::copy_items::<2>,
            4 => Plane::copy_items::<4>,
            8 => Plane::copy_items::<8>,
            16 => Plane::copy_items::<16>,
            _ => Plane::copy_blocks,
        };
        // SAFETY: the caller's promise, handed on; where there is an `N`, it is the block's size.
        unsafe { copy(self, src, dst) }
    }

    /// Copies blocks of any size, one `memcpy` each.
    ///
    /// # Safety
    /// As [`copy`](Plane::copy).
    unsafe fn copy_blocks(&self, src: *const u8, dst: *mut u8) {
        for row in 0..self.rows.size {
            for column in 0..self.columns.size {
                let (src, dst) = (self.src(src, row, column), self.dst(dst, row, column));
                // SAFETY: one block of the caller's plane on either side.
                unsafe { ptr::copy_nonoverlapping(src, dst, self.block_bytes) };
            }
        }
    }

    /// Copies blocks of `N` bytes, in tiles if that reads the source in longer runs.
    ///
    /// # Safety
    /// As [`copy`](Plane::copy), and `N` is the size of a block.
    unsafe fn copy_items<const N: usize>(&self, src: *const u8, dst: *mut u8) {
        let transposed =
            self.rows.src_stride.unsigned_abs() < self.columns.src_stride.unsigned_abs();
        if transposed && self.rows.size > 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_tiles::<N>(src, dst) };
        }
        for row in 0..self.rows.size {
            let (src, dst) = (self.src(src, row, 0), self.dst(dst, row, 0));
            // SAFETY: one row of the caller's plane.
            unsafe { copy_run::<N>(src, self.columns.src_stride, dst, N, self.columns.size) };
        }
    }

    /// # Safety
    /// As [`copy_items`](Plane::copy_items).
    unsafe fn copy_tiles<const N: usize>(&self, src: *const u8, dst: *mut u8) {
        let side = RUN_BYTES / N;
        let mut tile = [0_u8; TILE_BYTES];
        let tile = tile.as_mut_ptr();
        for row in (0..self.rows.size).step_by(side) {
            let rows = side.min(self.rows.size - row);
            for column in (0..self.columns.size).step_by(side) {
                let columns = side.min(self.columns.size - column);
                for index in 0..columns {
                    let src = self.src(src, row, column + index);
                    let into = tile.wrapping_add(index * RUN_BYTES);
                    // SAFETY: `rows` blocks down one column of the caller's plane, into run
                    // `index` of the tile, which has room for `side >= rows` of them.
                    unsafe { copy_run::<N>(src, self.rows.src_stride, into, N, rows) };
                }
                for index in 0..rows {
                    let from = tile.wrapping_add(index * N);
                    let dst = self.dst(dst, row + index, column);
                    // SAFETY: one item out of each of the `columns` runs filled above, into
                    // `columns` blocks along one row of the caller's plane.
                    unsafe { copy_run::<N>(from, RUN_BYTES.cast_signed(), dst, N, columns) };
                }
            }
        }
    }

    fn src(&self, src: *const u8, row: usize, column: usize) -> *const u8 {
        src.wrapping_offset(self.rows.src_stride.wrapping_mul(row.cast_signed()))
            .wrapping_offset(self.columns.src_stride.wrapping_mul(column.cast_signed()))
    }

    fn dst(&self, dst: *mut u8, row: usize, column: usize) -> *mut u8 {
        dst.wrapping_add(self.rows.dst_stride * row + self.columns.dst_stride * column)
    }
}

/// Copies `count` items of `N` bytes that lie `src_stride` apart to items that lie `dst_stride`
/// apart.
///
/// # Safety
/// The items are readable, the destination is writable, and the two are apart.
#[inline(always)]
unsafe fn copy_run<const N: usize>(
    src: *const u8,
    src_stride: isize,
    dst: *mut u8,
    dst_stride: usize,
    count: usize,
) {
    for index in 0..count {
        let src = src.wrapping_offset(src_stride.wrapping_mul(index.cast_signed()));
        let dst = dst.wrapping_add(dst_stride * index);
        // SAFETY: item `index < count` of the caller's source; any address is aligned for bytes.
        let item = unsafe { src.cast::<[u8; N]>().read() };
        // SAFETY: item `index < count` of the caller's destination.
        unsafe { dst.cast::<[u8; N]>().write(item) };
    }
}

/// # Safety
/// `dst.len()` bytes at `src` are readable and apart from `dst`.
unsafe fn copy_bytes(src: *const u8, dst: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
}
