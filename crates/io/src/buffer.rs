//! Memory that I/O reads into and writes from.
//!
//! [`Memory`] is owned, page aligned and zeroed. [`Pool`] cuts equal buffers from such memory
//! within a byte budget; waiting for one is the back-pressure of every pipeline above.
//! [`HostRegion`], [`HostRegionMut`] and [`HostArrayMut`] borrow memory of the caller, a tensor for
//! instance; a [`Watch`] reports whether anybody writes to it.
//!
//! Engines take memory as [`IoBuf`]: an owned window that nothing else reaches while it exists. An
//! operation takes the whole window, so safe code cannot touch, free or reuse bytes that the kernel
//! is still working on. [`HostRegion`] and [`Scatter`] are the exceptions: bytes are only copied
//! out of them or into them.

#![allow(unsafe_code)]

mod array;
mod bounds;
mod cuda;
mod lease;
mod lent;
mod lent_mut;
mod memory;
mod pool;
mod region;
mod side_by_side;
mod slots;
mod streaming;
mod strided;
mod watch;

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

pub use array::{HostArrayMut, Scatter};
pub use bounds::{Bounds, OverlapUndecided, find_overlap};
pub use cuda::{
    Cut, DeviceArrayMut, DeviceBlock, DeviceCopies, DeviceFills, DeviceRegion, DeviceScatter,
    DeviceStreams, DeviceToHost, HostToDevice, Moving, RowGatherKernel, Snapshot, Words,
};
pub use lease::Lease;
pub use lent::Region;
pub use lent_mut::{ArrayMut, RegionMut};
pub use memory::available::available_bytes;
pub use memory::caching_allocator::{CachedMemory, CachingHostAllocator};
pub use memory::reserve::reserve;
pub use memory::{Memory, MemoryHandle};
pub use pool::Pool;
pub use region::{HostRegion, HostRegionMut};
pub use side_by_side::stream_side_by_side;
pub use slots::{Lent, Reading, Slots};
pub use streaming::stream_copy;
pub use watch::{Edges, HugePages, Unwatchable, Watch};

/// The owner that keeps the bytes of an [`IoBuf`] alive; dropped after the last window on them.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// An exclusive, owned window on memory that I/O reads into or writes from.
///
/// It covers `capacity` bytes of which the first `len` take part in I/O; a fresh one has both
/// equal. Windows on one allocation never overlap: [`split_off`](IoBuf::split_off) is the only way
/// to make a second one.
pub struct IoBuf {
    address: NonNull<u8>,
    len: usize,
    capacity: usize,
    /// Bytes before `address` that belong to this window and are skipped for now.
    advanced: usize,
    /// Whether the memory is a caller's, lent for writes to a file.
    is_lent: bool,
    owner: Owner,
}

// SAFETY: an `IoBuf` is the only way to reach its bytes while it exists (each constructor takes the
// exclusive right to them), and its owner is `Send + Sync`; so it moves between threads as a `Vec`
// would.
unsafe impl Send for IoBuf {}
// SAFETY: `&IoBuf` only gives out `&[u8]`.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// A window on `capacity` bytes at `address`, all of them in use.
    ///
    /// # Safety
    /// The bytes are initialised, readable and writable as long as `owner` lives, and nothing but
    /// this window (and those split off it) reaches them until it is dropped.
    unsafe fn new(address: NonNull<u8>, capacity: usize, owner: Owner) -> IoBuf {
        IoBuf {
            address,
            len: capacity,
            capacity,
            advanced: 0,
            is_lent: false,
            owner,
        }
    }

    /// A window on memory that others may write to, for writes to a file: nothing is read into it.
    ///
    /// # Safety
    /// The bytes are initialised and readable as long as `owner` lives. The caller passes the
    /// window only to the system, or to a digest, whose result is void after a change.
    unsafe fn lent(address: NonNull<u8>, len: usize, owner: Owner) -> IoBuf {
        IoBuf {
            address,
            len,
            capacity: len,
            advanced: 0,
            is_lent: true,
            owner,
        }
    }

    /// Bytes that take part in I/O.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether `len` is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that `len` can grow to.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the window starts, for checks of alignment.
    pub fn address(&self) -> usize {
        self.address.as_ptr() as usize
    }

    /// The owner that keeps the memory alive.
    #[cfg(feature = "uring")]
    pub(crate) fn owner(&self) -> Owner {
        Arc::clone(&self.owner)
    }

    /// The bytes in use.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the first `len <= capacity` bytes are initialised and alive (`new`), and the
        // borrow of `self` keeps every writer out.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    /// The bytes in use, mutable.
    ///
    /// # Panics
    /// If the memory is lent for writes to a file.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.is_lent, "lent memory is not written to");
        // SAFETY: as in `as_slice`, and the exclusive borrow of the only window on these bytes
        // makes the slice exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }

    /// Sets `len`; the bytes themselves do not change.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity,
            "len {len} exceeds the capacity {}",
            self.capacity
        );
        self.len = len;
    }

    /// Cuts the window in two: `self` keeps `[0, at)`, the result covers `[at, capacity)`. Bytes
    /// that were in use stay in use, on either side.
    ///
    /// # Panics
    /// If `at` exceeds the capacity.
    pub fn split_off(&mut self, at: usize) -> IoBuf {
        assert!(
            at <= self.capacity,
            "split at {at} exceeds the capacity {}",
            self.capacity
        );
        // SAFETY: `at <= capacity`, so the result is inside the window or one past its end.
        let address = unsafe { self.address.add(at) };
        let rest = IoBuf {
            address,
            len: self.len.saturating_sub(at),
            capacity: self.capacity - at,
            advanced: 0,
            is_lent: self.is_lent,
            owner: Arc::clone(&self.owner),
        };
        self.len = self.len.min(at);
        self.capacity = at;
        rest
    }

    /// Skips the first `bytes` of those in use, so that a transfer can continue behind them.
    pub(crate) fn advance(&mut self, bytes: usize) {
        assert!(
            bytes <= self.len,
            "advance by {bytes} exceeds len {}",
            self.len
        );
        // SAFETY: `bytes <= len <= capacity`, so the result is inside the window or one past it.
        self.address = unsafe { self.address.add(bytes) };
        self.len -= bytes;
        self.capacity -= bytes;
        self.advanced += bytes;
    }

    /// Undoes every [`advance`](IoBuf::advance).
    pub(crate) fn restore(&mut self) {
        // SAFETY: `advance` moved the address forward by exactly `advanced` bytes in total, so this
        // is where the window started.
        self.address = unsafe { self.address.sub(self.advanced) };
        self.len += self.advanced;
        self.capacity += self.advanced;
        self.advanced = 0;
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBuf")
            .field("address", &self.address)
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(len: usize) -> IoBuf {
        let mut buf = Memory::allocate(len).unwrap().share().1;
        buf.as_mut_slice()
            .iter_mut()
            .zip((0_u8..=255).cycle())
            .for_each(|(byte, at)| *byte = at);
        buf
    }

    #[test]
    fn a_window_moves_between_threads() {
        fn is_send_and_sync<T: Send + Sync>() {}
        is_send_and_sync::<IoBuf>();
        is_send_and_sync::<Memory>();
        is_send_and_sync::<Pool>();
        is_send_and_sync::<HostRegion>();
        is_send_and_sync::<HostRegionMut>();
    }

    #[test]
    fn split_off_keeps_what_is_in_use_in_use() {
        let mut buf = numbered(100);
        buf.set_len(60);
        let rest = buf.split_off(40);
        assert_eq!((buf.len(), buf.capacity()), (40, 40));
        assert_eq!((rest.len(), rest.capacity()), (20, 60));
        assert_eq!(rest.address(), buf.address() + 40);
        assert_eq!((buf.as_slice()[39], rest.as_slice()[0]), (39, 40));
        let mut buf = rest;
        let rest = buf.split_off(30);
        assert_eq!((buf.len(), rest.len(), rest.capacity()), (20, 0, 30));
        let nothing = buf.split_off(30);
        assert!(nothing.is_empty() && nothing.capacity() == 0);
    }

    #[test]
    fn advance_and_restore_cancel_out() {
        let mut buf = numbered(100);
        buf.set_len(80);
        let address = buf.address();
        buf.advance(30);
        buf.advance(20);
        assert_eq!((buf.len(), buf.capacity(), buf.as_slice()[0]), (30, 50, 50));
        buf.restore();
        assert_eq!(
            (buf.address(), buf.len(), buf.capacity()),
            (address, 80, 100)
        );
        buf.restore();
        assert_eq!(buf.address(), address);
    }

    #[test]
    #[should_panic(expected = "exceeds the capacity 100")]
    fn a_window_does_not_grow() {
        numbered(100).set_len(101);
    }

    #[test]
    #[should_panic(expected = "exceeds the capacity 100")]
    fn a_window_is_not_split_beyond_its_end() {
        numbered(100).split_off(101);
    }
}
