//! Copies a box plane by plane: along the two dimensions in which the source and the destination
//! have their smallest strides.
//!
//! Where these differ, the plane is copied in tiles through a buffer that stays in the first-level
//! cache, so that both sides see runs of [`RUN_BYTES`] instead of single items (measured on a 4096
//! x 4096 transpose: five to eight times the rate of single items).

#![allow(unsafe_code)]

use std::ptr;

/// Two cache lines: the run that a tile reads and writes at a time.
const RUN_BYTES: usize = 128;

/// Room for the largest tile: `RUN_BYTES` runs of one-byte items.
const TILE_BYTES: usize = RUN_BYTES * RUN_BYTES;

/// One dimension of a box that is copied whole.
#[derive(Clone, Copy)]
pub(super) struct Side {
    pub(super) size: usize,
    pub(super) src_stride: isize,
    pub(super) dst_stride: isize,
}

/// Removes and returns the two sides that are copied together; the order of all loops is free.
/// Columns are the destination's smallest stride, rows the source's.
pub(super) fn take_plane(sides: &mut Vec<Side>, block_bytes: usize) -> Plane {
    let closest = |sides: &[Side], stride: fn(&Side) -> isize| {
        // Of equal strides, the innermost.
        (0..sides.len())
            .rev()
            .min_by_key(|&side| stride(&sides[side]).unsigned_abs())
    };
    let columns = closest(sides, |side| side.dst_stride).expect("a dimension at least");
    let columns = sides.remove(columns);
    let rows = closest(sides, |side| side.src_stride).map_or(
        Side {
            size: 1,
            src_stride: 0,
            dst_stride: 0,
        },
        |side| sides.remove(side),
    );
    Plane {
        rows,
        columns,
        block_bytes,
    }
}

/// Copies the planes of a box, one for each index of the `outer` sides.
///
/// # Safety
/// The box spanned by `outer` and `plane` is readable at `src` and writable at `dst`, and apart.
pub(super) unsafe fn copy_planes(outer: &[Side], plane: &Plane, src: *const u8, dst: *mut u8) {
    let Some((side, outer)) = outer.split_first() else {
        // SAFETY: with no side left, the box is the plane.
        return unsafe { plane.copy(src, dst) };
    };
    for index in 0..side.size {
        let (src, dst) = (side.src(src, index), side.dst(dst, index));
        // SAFETY: one index of the outermost side of the caller's box.
        unsafe { copy_planes(outer, plane, src, dst) };
    }
}

impl Side {
    fn src(&self, src: *const u8, index: usize) -> *const u8 {
        src.wrapping_offset(self.src_stride.wrapping_mul(index.cast_signed()))
    }

    fn dst(&self, dst: *mut u8, index: usize) -> *mut u8 {
        dst.wrapping_offset(self.dst_stride.wrapping_mul(index.cast_signed()))
    }
}

/// A two-dimensional box.
pub(super) struct Plane {
    rows: Side,
    columns: Side,
    block_bytes: usize,
}

impl Plane {
    /// Copies the plane.
    ///
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
        // SAFETY: the caller's promise, passed on; `N`, where there is one, is the block's size.
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
            unsafe { self.copy_row::<N>(src, self.columns.src_stride, dst, self.columns.size) };
        }
    }

    /// Copies `count` items to the first of a row. The branch on contiguous items lets the compiler
    /// optimise them.
    ///
    /// # Safety
    /// As [`copy_run`], to neighbouring columns.
    #[inline(always)]
    unsafe fn copy_row<const N: usize>(
        &self,
        src: *const u8,
        src_stride: isize,
        dst: *mut u8,
        count: usize,
    ) {
        let (together, dst_stride) = (const { N.cast_signed() }, self.columns.dst_stride);
        if dst_stride == together {
            // SAFETY: the caller's promise.
            unsafe { copy_run::<N>(src, src_stride, dst, together, count) };
        } else {
            // SAFETY: the caller's promise.
            unsafe { copy_run::<N>(src, src_stride, dst, dst_stride, count) };
        }
    }

    /// Copies blocks of `N` bytes through a tile in the cache.
    ///
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
                    unsafe {
                        copy_run::<N>(src, self.rows.src_stride, into, N.cast_signed(), rows);
                    }
                }
                for index in 0..rows {
                    let from = tile.wrapping_add(index * N);
                    let dst = self.dst(dst, row + index, column);
                    // SAFETY: one item out of each of the `columns` runs filled above, into
                    // `columns` blocks along one row of the caller's plane.
                    unsafe { self.copy_row::<N>(from, RUN_BYTES.cast_signed(), dst, columns) };
                }
            }
        }
    }

    fn src(&self, src: *const u8, row: usize, column: usize) -> *const u8 {
        self.columns.src(self.rows.src(src, row), column)
    }

    fn dst(&self, dst: *mut u8, row: usize, column: usize) -> *mut u8 {
        self.columns.dst(self.rows.dst(dst, row), column)
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
    dst_stride: isize,
    count: usize,
) {
    for index in 0..count {
        let src = src.wrapping_offset(src_stride.wrapping_mul(index.cast_signed()));
        let dst = dst.wrapping_offset(dst_stride.wrapping_mul(index.cast_signed()));
        // SAFETY: item `index < count` of the caller's source; any address is aligned for bytes.
        let item = unsafe { src.cast::<[u8; N]>().read() };
        // SAFETY: item `index < count` of the caller's destination.
        unsafe { dst.cast::<[u8; N]>().write(item) };
    }
}
