//! A bounded pool of equal, page-aligned buffers.
//!
//! Buffers are cut from slabs, each one mapping in huge pages. A slab is allocated when a buffer is
//! first needed, and kept until the pool and its last buffer are dropped or the free slabs are
//! released: a page fault is paid once per page, not once per use. The buffer returned last is
//! handed out first, so a pipeline that needs few buffers touches few pages. When the budget is
//! spent, taking waits: the budget bounds memory, and the wait is the back-pressure.

#![allow(unsafe_code)]

mod slab;

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_cuda::Device;

use super::IoBuf;
use crate::trace::meter;
use crate::{Error, Result};
use slab::Slab;

/// Buffers of one size within a byte budget. Clones share the buffers and the budget.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<PoolShared>,
}

struct PoolShared {
    buffer_bytes: usize,
    /// Distance between buffers of a slab: `buffer_bytes` rounded up to whole pages.
    stride_bytes: usize,
    /// The device that buffers are pinned for, if they are.
    pinned: Option<Pinned>,
    state: Mutex<PoolState>,
    returned: Condvar,
}

/// How buffers are pinned.
struct Pinned {
    device: Arc<Device>,
    /// The process that has them; forks do not inherit them.
    process: u32,
    /// Whether slabs outlive the pool, for later pools.
    is_kept: bool,
}

struct PoolState {
    /// The budget in buffers.
    buffers_max: usize,
    slabs: Vec<Slab>,
    /// Why a slab could not be pinned, if one could not.
    unpinned: Option<String>,
    /// Buffers cut from slabs so far.
    buffers: usize,
    /// Whether a thread is making a slab, which it does without the lock: pinning takes long.
    is_growing: bool,
    free: Vec<FreeBuffer>,
    taken: usize,
    taken_max: usize,
}

/// The address of a buffer that nobody holds.
struct FreeBuffer(NonNull<u8>);

// SAFETY: the address alone gives no access; the `IoBuf` made from it owns the buffer.
unsafe impl Send for FreeBuffer {}

impl Pool {
    /// A pool of buffers of `buffer_bytes` that together never exceed `budget_bytes`, except that
    /// one buffer is always allowed, so that work can proceed.
    ///
    /// # Panics
    /// If `buffer_bytes` is zero or beyond half the address space.
    pub fn new(buffer_bytes: usize, budget_bytes: usize) -> Pool {
        Pool::made(buffer_bytes, budget_bytes, None)
    }

    /// A pool as from [`new`](Pool::new) whose buffers are pinned, so that devices access them
    /// directly. Where the system refuses to pin more, buffers stay unpinned and copies are slower;
    /// see [`unpinned`](Pool::unpinned). Only this process can use the pool, and no fork of it.
    ///
    /// # Panics
    /// As [`new`](Pool::new).
    pub fn pinned(buffer_bytes: usize, budget_bytes: usize, device: &Arc<Device>) -> Pool {
        Pool::of(buffer_bytes, budget_bytes, device, false)
    }

    /// A pool as from [`pinned`](Pool::pinned) that leaves its pinned memory to later pools of this
    /// process.
    ///
    /// # Panics
    /// As [`new`](Pool::new).
    pub fn pinned_and_kept(buffer_bytes: usize, budget_bytes: usize, device: &Arc<Device>) -> Pool {
        Pool::of(buffer_bytes, budget_bytes, device, true)
    }

    fn of(buffer_bytes: usize, budget_bytes: usize, device: &Arc<Device>, is_kept: bool) -> Pool {
        let pinned = Pinned {
            device: Arc::clone(device),
            process: crate::process::id(),
            is_kept,
        };
        Pool::made(buffer_bytes, budget_bytes, Some(pinned))
    }

    fn made(buffer_bytes: usize, budget_bytes: usize, pinned: Option<Pinned>) -> Pool {
        assert!(buffer_bytes > 0, "a pool of empty buffers");
        assert!(
            buffer_bytes <= usize::MAX / 2,
            "buffer_bytes {buffer_bytes} beyond any memory"
        );
        let stride_bytes = buffer_bytes.next_multiple_of(rustix::param::page_size());
        let state = PoolState {
            buffers_max: (budget_bytes / stride_bytes).max(1),
            slabs: Vec::new(),
            unpinned: None,
            buffers: 0,
            is_growing: false,
            free: Vec::new(),
            taken: 0,
            taken_max: 0,
        };
        let shared = PoolShared {
            buffer_bytes,
            stride_bytes,
            pinned,
            state: Mutex::new(state),
            returned: Condvar::new(),
        };
        Pool {
            shared: Arc::new(shared),
        }
    }

    /// Takes a buffer with `len` and capacity `buffer_bytes`; waits for a return where all are
    /// taken. The content is undefined: whatever the buffer last held. A thread that holds all
    /// buffers itself waits forever.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the system has no memory for a slab, [`Error::Forked`] in a fork
    /// of the process that pinned it.
    pub fn take(&self) -> Result<IoBuf> {
        self.check_process()?;
        let mut state = self.shared.lock();
        while !state.has_room() {
            state = self
                .shared
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.take_from(state)
    }

    /// A buffer as from [`take`](Pool::take), or `None` where that would wait.
    pub fn try_take(&self) -> Result<Option<IoBuf>> {
        self.take_timeout(Duration::ZERO)
    }

    /// A buffer as from [`take`](Pool::take), or `None` where the budget is spent. It does wait for
    /// a slab that another thread is making.
    pub fn take_unless_spent(&self) -> Result<Option<IoBuf>> {
        self.check_process()?;
        let state = self.shared.lock();
        let is_coming = |state: &mut PoolState| !state.is_spent() && !state.has_room();
        let waited = self.shared.returned.wait_while(state, is_coming);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        match state.is_spent() {
            true => Ok(None),
            false => self.take_from(state).map(Some),
        }
    }

    /// A buffer as from [`take`](Pool::take), or `None` where none is returned within `timeout`.
    pub fn take_timeout(&self, timeout: Duration) -> Result<Option<IoBuf>> {
        self.check_process()?;
        let mut state = self.shared.lock();
        if !state.has_room() && !timeout.is_zero() {
            let returned = &self.shared.returned;
            let waited = returned.wait_timeout_while(state, timeout, |state| !state.has_room());
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if !state.has_room() {
            return Ok(None);
        }
        self.take_from(state).map(Some)
    }

    /// Raises the budget to `budget_bytes`; a lower one changes nothing.
    pub fn raise_budget(&self, budget_bytes: usize) {
        let mut state = self.shared.lock();
        let buffers = budget_bytes / self.shared.stride_bytes;
        state.buffers_max = state.buffers_max.max(buffers);
        drop(state);
        self.shared.returned.notify_all();
    }

    /// Returns slabs whose buffers are all free to the system.
    pub fn release_free(&self) {
        let released = self.shared.lock().split_off_free(self.shared.stride_bytes);
        // Dropped outside of the lock, as unmapping takes long.
        drop(released);
    }

    /// Returns the pinned memory that earlier pools of this process left to the system.
    pub fn release_kept() {
        slab::release_kept();
    }

    /// Whether the pool pins its buffers.
    pub fn is_pinned(&self) -> bool {
        self.shared.pinned.is_some()
    }

    /// Why some buffers are not pinned, if the pool pins and some are not.
    pub fn unpinned(&self) -> Option<String> {
        self.shared.lock().unpinned.clone()
    }

    /// Whether this process may use the buffers: it is not a fork of the one that pinned them.
    pub fn is_ours(&self) -> bool {
        self.check_process().is_ok()
    }

    fn check_process(&self) -> Result<()> {
        match &self.shared.pinned {
            Some(Pinned { process, .. }) if self.shared.is_foreign() => {
                Err(Error::Forked { process: *process })
            }
            _ => Ok(()),
        }
    }

    /// Bytes of each buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.shared.buffer_bytes
    }

    /// The most bytes that buffers can have together: the budget, rounded down to whole buffers.
    pub fn budget_bytes(&self) -> usize {
        self.shared.lock().buffers_max * self.shared.stride_bytes
    }

    /// Bytes of all slabs, whether their buffers are taken or not.
    pub fn held_bytes(&self) -> usize {
        self.shared.lock().buffers * self.shared.stride_bytes
    }

    /// Bytes of the buffers that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.shared.lock().taken * self.shared.stride_bytes
    }

    /// The most bytes of buffers ever taken at once.
    pub fn peak_bytes(&self) -> usize {
        self.shared.lock().taken_max * self.shared.stride_bytes
    }

    fn take_from<'a>(&'a self, mut state: MutexGuard<'a, PoolState>) -> Result<IoBuf> {
        if state.free.is_empty() {
            state = self.shared.add_slab(state)?;
        }
        let FreeBuffer(address) = state.free.pop().expect("a slab holds at least one buffer");
        state.taken += 1;
        state.taken_max = state.taken_max.max(state.taken);
        meter::taken(self.shared.stride_bytes);
        let owner = Arc::new(Slot {
            shared: Arc::clone(&self.shared),
            address,
        });
        // SAFETY: the buffer is `buffer_bytes` of a zeroed mapping that lives as long as `shared`,
        // which the slot holds. It was on the free list, where it returns only once the slot, and
        // with it every window on the buffer, is dropped: nobody else reaches it.
        Ok(unsafe { IoBuf::new(address, self.shared.buffer_bytes, owner) })
    }
}

impl PoolShared {
    /// Whether the memory belongs to another process, of which this one is a fork.
    fn is_foreign(&self) -> bool {
        let pinned = self.pinned.as_ref();
        pinned.is_some_and(|pinned| pinned.process != crate::process::id())
    }

    /// No panic leaves the state half changed, so a poisoned lock is used as it is.
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps one more slab and puts its buffers on the free list, the first one on top.
    fn add_slab<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
    ) -> Result<MutexGuard<'a, PoolState>> {
        let slab_bytes = Slab::suited_bytes(self.pinned.is_some());
        let buffers = (slab_bytes / self.stride_bytes).clamp(1, state.buffers_max - state.buffers);
        state.is_growing = true;
        drop(state);
        let growing = Growing(self);
        let made = self.make_slab(buffers * self.stride_bytes);
        let mut state = self.lock();
        state.is_growing = false;
        std::mem::forget(growing);
        // Several waiters may take a buffer now; after a failure another one has to try.
        self.returned.notify_all();
        let (slab, unpinned) = made?;
        state.unpinned = unpinned.or(state.unpinned.take());
        let start = slab.as_non_null();
        state.free.extend((0..buffers).rev().map(|index| {
            // SAFETY: `index < buffers`, so the buffer lies inside the slab.
            FreeBuffer(unsafe { start.add(index * self.stride_bytes) })
        }));
        state.slabs.push(slab);
        state.buffers += buffers;
        Ok(state)
    }

    /// Makes a slab; also returns why it is not pinned where it should be.
    fn make_slab(&self, bytes: usize) -> Result<(Slab, Option<String>)> {
        let Some(pinned) = &self.pinned else {
            return Ok((Slab::plain(bytes)?, None));
        };
        let is_kept = pinned.is_kept;
        match is_kept
            .then(|| slab::take_kept(bytes, &pinned.device))
            .flatten()
        {
            Some(slab) => Ok((slab, None)),
            None => Slab::pinned(bytes, &pinned.device),
        }
    }
}

/// Allows the next thread to make a slab, even after a panic while making one.
struct Growing<'a>(&'a PoolShared);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.0.lock().is_growing = false;
        self.0.returned.notify_all();
    }
}

impl Drop for PoolShared {
    fn drop(&mut self) {
        if self.pinned.as_ref().is_some_and(|pinned| pinned.is_kept) {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            slab::keep(std::mem::take(&mut state.slabs));
        }
    }
}

impl PoolState {
    /// Whether a buffer is free, or one can be made.
    fn has_room(&self) -> bool {
        let is_waiting = self.free.is_empty() && self.is_growing;
        !is_waiting && !self.is_spent()
    }

    /// Whether the budget is spent.
    fn is_spent(&self) -> bool {
        self.taken >= self.buffers_max
    }

    /// Removes and returns the slabs whose buffers are all free.
    fn split_off_free(&mut self, stride_bytes: usize) -> Vec<Slab> {
        self.slabs.sort_unstable_by_key(Slab::address);
        let starts: Vec<usize> = self.slabs.iter().map(Slab::address).collect();
        let slab_of = |buffer: &FreeBuffer| {
            let address = buffer.0.as_ptr() as usize;
            starts.partition_point(|&start| start <= address) - 1
        };
        let mut free_bytes = vec![0; self.slabs.len()];
        for buffer in &self.free {
            free_bytes[slab_of(buffer)] += stride_bytes;
        }
        let is_free = |slab: usize| free_bytes[slab] == self.slabs[slab].len();
        self.free.retain(|buffer| !is_free(slab_of(buffer)));
        let (mut kept, mut released) = (Vec::new(), Vec::new());
        for (slab, free_bytes) in self.slabs.drain(..).zip(free_bytes) {
            if free_bytes == slab.len() {
                self.buffers -= slab.len() / stride_bytes;
                released.push(slab);
            } else {
                kept.push(slab);
            }
        }
        self.slabs = kept;
        released
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("buffer_bytes", &self.buffer_bytes())
            .field("budget_bytes", &self.budget_bytes())
            .field("peak_bytes", &self.peak_bytes())
            .finish_non_exhaustive()
    }
}

/// A taken buffer; it returns to the pool when the last window on it is dropped.
struct Slot {
    shared: Arc<PoolShared>,
    address: NonNull<u8>,
}

// SAFETY: the address is only put back on the free list, never read or written through.
unsafe impl Send for Slot {}
// SAFETY: as above; `&Slot` gives out nothing.
unsafe impl Sync for Slot {}

impl Drop for Slot {
    fn drop(&mut self) {
        // A fork does not have the memory, and no thread of it would ever release the lock.
        if self.shared.is_foreign() {
            return;
        }
        let mut state = self.shared.lock();
        state.free.push(FreeBuffer(self.address));
        state.taken -= 1;
        drop(state);
        meter::returned(self.shared.stride_bytes);
        self.shared.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn buffers_are_aligned_whole_and_within_the_budget() {
        let pool = Pool::new(10_000, 50_000);
        let stride = 10_000_usize.next_multiple_of(rustix::param::page_size());
        assert_eq!(pool.buffer_bytes(), 10_000);
        assert_eq!(pool.budget_bytes(), 50_000 / stride * stride);
        let mut taken = Vec::new();
        while let Some(buf) = pool.try_take().unwrap() {
            assert_eq!((buf.len(), buf.capacity()), (10_000, 10_000));
            assert_eq!(buf.address() % rustix::param::page_size(), 0);
            taken.push(buf);
        }
        assert_eq!(taken.len(), 50_000 / stride);
        assert_eq!(pool.peak_bytes(), pool.budget_bytes());
        for (value, buf) in (0..).zip(&mut taken) {
            buf.as_mut_slice().fill(value);
        }
        for (value, buf) in (0..).zip(&taken) {
            assert!(
                buf.as_slice().iter().all(|&byte| byte == value),
                "buffers overlap"
            );
        }
    }

    #[test]
    fn a_budget_below_one_buffer_is_one_buffer() {
        let pool = Pool::new(4096, 0);
        let buf = pool.take().unwrap();
        assert!(pool.try_take().unwrap().is_none());
        drop(buf);
        assert!(pool.try_take().unwrap().is_some());
    }

    #[test]
    fn memory_is_used_again_the_last_returned_first() {
        let pool = Pool::new(4096, 1 << 20);
        let first = pool.take().unwrap();
        let mut second = pool.take().unwrap();
        let address = second.address();
        second.as_mut_slice()[0] = 9;
        second.set_len(1);
        drop(second);
        let again = pool.take().unwrap();
        assert_eq!(again.address(), address);
        assert_eq!(again.len(), 4096, "the length is reset");
        assert_eq!(again.as_slice()[0], 9, "the content is not");
        assert_eq!(
            pool.peak_bytes(),
            2 * 4096_usize.next_multiple_of(rustix::param::page_size())
        );
        drop(first);
    }

    #[test]
    fn a_buffer_returns_with_its_last_part() {
        let pool = Pool::new(8192, 1);
        let mut buf = pool.take().unwrap();
        let rest = buf.split_off(4096);
        drop(buf);
        assert!(pool.try_take().unwrap().is_none());
        drop(rest);
        assert_eq!(pool.try_take().unwrap().unwrap().capacity(), 8192);
    }

    #[test]
    fn taking_waits_for_a_return() {
        let pool = Pool::new(4096, 1);
        let buf = pool.take().unwrap();
        let waiting = {
            let pool = pool.clone();
            std::thread::spawn(move || pool.take().unwrap().len())
        };
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        drop(buf);
        assert_eq!(waiting.join().unwrap(), 4096);
    }

    #[test]
    fn waiting_may_have_an_end() {
        let pool = Pool::new(4096, 1);
        let buf = pool.take().unwrap();
        let moment = Duration::from_millis(1);
        assert!(pool.take_timeout(moment).unwrap().is_none());
        drop(buf);
        assert!(pool.take_timeout(moment).unwrap().is_some());
    }

    #[test]
    fn a_raised_budget_lets_those_who_wait_go_on() {
        let pool = Pool::new(4096, 1);
        let buf = pool.take().unwrap();
        let address = buf.address();
        let waiting = {
            let pool = pool.clone();
            std::thread::spawn(move || pool.take().unwrap().address())
        };
        pool.raise_budget(2 * rustix::param::page_size().max(4096));
        assert_ne!(waiting.join().unwrap(), address);
        pool.raise_budget(0);
        assert!(pool.try_take().unwrap().is_some(), "a budget only grows");
        drop(buf);
    }

    #[test]
    fn free_slabs_are_given_back_and_made_again() {
        const SLAB_BYTES: usize = 16 << 20;
        let buffer_bytes = SLAB_BYTES / 2;
        let pool = Pool::new(buffer_bytes, 3 * SLAB_BYTES);
        let mut taken: Vec<_> = (0..6).map(|_| pool.take().unwrap()).collect();
        assert_eq!(pool.held_bytes(), 3 * SLAB_BYTES);
        let mut kept = taken.remove(3);
        kept.as_mut_slice()[0] = 5;
        drop(taken);
        assert_eq!(pool.taken_bytes(), buffer_bytes);
        pool.release_free();
        assert_eq!(pool.held_bytes(), SLAB_BYTES, "a buffer of one slab is out");
        assert_eq!(kept.as_slice()[0], 5);
        let mut again: Vec<_> = (0..5).map(|_| pool.take().unwrap()).collect();
        again.iter_mut().for_each(|buf| buf.as_mut_slice()[0] = 6);
        assert_eq!(kept.as_slice()[0], 5, "buffers overlap");
        assert!(pool.try_take().unwrap().is_none());
        drop((kept, again));
        pool.release_free();
        assert_eq!(pool.held_bytes(), 0);
    }

    #[test]
    fn many_threads_share_the_budget() {
        const THREADS: usize = 4;
        const ROUNDS: usize = if cfg!(miri) { 20 } else { 2000 };
        let pool = Pool::new(4096, 2 * 4096);
        let (out, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (pool, out, most) = (pool.clone(), &out, &most);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let mut buf = pool.take().unwrap();
                        most.fetch_max(out.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        buf.as_mut_slice()[..64].fill(thread as u8);
                        assert!(
                            buf.as_slice()[..64]
                                .iter()
                                .all(|&byte| byte == thread as u8)
                        );
                        out.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 2);
        assert!(pool.peak_bytes() <= pool.budget_bytes());
    }

    #[test]
    fn a_pool_may_go_before_its_buffers() {
        let pool = Pool::new(4096, 1 << 20);
        let mut buf = pool.take().unwrap();
        drop(pool);
        buf.as_mut_slice().fill(3);
        assert_eq!(buf.as_slice()[4095], 3);
    }
}
