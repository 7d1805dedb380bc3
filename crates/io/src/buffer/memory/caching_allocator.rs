//! A cache of freed memory of any size, for the next allocation.
//!
//! Fresh memory costs a page fault for each page, more than it takes to fill it from a fast device.
//! A [`Pool`](crate::buffer::Pool) lends buffers of one size to operations; a
//! [`CachingHostAllocator`] hands out whole [`Memory`] of the requested size, and gets it back on
//! drop.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;

use super::Memory;
use crate::{Error, Result};

/// Sizes from here on are whole huge pages, smaller ones whole pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A cache of freed memory, bounded by a byte budget; clones share it.
#[derive(Clone, Debug)]
pub struct CachingHostAllocator {
    shared: Arc<AllocatorShared>,
}

#[derive(Debug)]
struct AllocatorShared {
    budget_bytes: usize,
    is_locked: bool,
    state: Mutex<AllocatorState>,
}

#[derive(Debug, Default)]
struct AllocatorState {
    /// Memory that nobody has, by size.
    free: BTreeMap<usize, Vec<Memory>>,
    free_bytes: usize,
    taken_bytes: usize,
}

/// Memory that returns to its cache on drop.
#[derive(Debug)]
pub struct CachedMemory {
    memory: Option<Memory>,
    len: usize,
    home: Weak<AllocatorShared>,
}

impl CachingHostAllocator {
    /// A cache whose memory, taken and free, never exceeds `budget_bytes`; locked in RAM or not.
    pub fn new(budget_bytes: usize, is_locked: bool) -> CachingHostAllocator {
        let state = Mutex::default();
        CachingHostAllocator {
            shared: Arc::new(AllocatorShared {
                budget_bytes,
                is_locked,
                state,
            }),
        }
    }

    /// Takes memory of `len` bytes with undefined content. It uses the smallest free memory that is
    /// large enough and at most a quarter too large; else it allocates, and drops free memory that
    /// does not fit where the budget needs that.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the budget, the system, or the limit on locked memory has no
    /// room.
    pub fn take(&self, len: usize) -> Result<CachedMemory> {
        let bytes = whole_bytes(len).ok_or_else(|| out_of_memory(len, Errno::NOMEM.into()))?;
        let found = self.shared.lock().take_free(bytes);
        let memory = match found {
            Some(memory) => memory,
            None => self.shared.allocate(bytes)?,
        };
        Ok(CachedMemory {
            memory: Some(memory),
            len,
            home: Arc::downgrade(&self.shared),
        })
    }

    /// Returns all free memory to the system.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        let free = std::mem::take(&mut state.free);
        state.free_bytes = 0;
        drop(state);
        drop(free);
    }

    /// Bytes that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.shared.lock().taken_bytes
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> usize {
        self.shared.lock().free_bytes
    }
}

impl AllocatorShared {
    fn lock(&self) -> MutexGuard<'_, AllocatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        let given_up = {
            let mut state = self.lock();
            let room = self.budget_bytes.saturating_sub(state.taken_bytes);
            if bytes > room {
                let spent = "the budget of the buffers is spent".to_owned();
                return Err(out_of_memory(bytes, std::io::Error::other(spent)));
            }
            state.taken_bytes += bytes;
            state.give_up(room - bytes)
        };
        drop(given_up);
        let made = Memory::allocate(bytes).and_then(|memory| {
            match self.is_locked {
                true => memory
                    .lock()
                    .map_err(|source| out_of_memory(bytes, source))?,
                false => memory.populate(0..bytes),
            }
            Ok(memory)
        });
        made.inspect_err(|_| self.lock().taken_bytes -= bytes)
    }
}

impl AllocatorState {
    fn take_free(&mut self, bytes: usize) -> Option<Memory> {
        let most = bytes.saturating_add(bytes / 4);
        let size = *self.free.range(bytes..=most).next()?.0;
        let same = self.free.get_mut(&size)?;
        let memory = same.pop()?;
        if same.is_empty() {
            self.free.remove(&size);
        }
        self.free_bytes -= size;
        self.taken_bytes += size;
        Some(memory)
    }

    /// Removes free memory, the largest first, until at most `left_bytes` of it are left.
    fn give_up(&mut self, left_bytes: usize) -> Vec<Memory> {
        let mut given_up = Vec::new();
        while self.free_bytes > left_bytes
            && let Some(mut largest) = self.free.last_entry()
        {
            if let Some(memory) = largest.get_mut().pop() {
                self.free_bytes -= memory.len();
                given_up.push(memory);
            }
            if largest.get().is_empty() {
                largest.remove();
            }
        }
        given_up
    }
}

impl CachedMemory {
    /// Bytes that were requested.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether zero bytes were requested.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, page aligned.
    pub fn address(&self) -> usize {
        self.memory.as_ref().map_or(0, Memory::address)
    }
}

impl Drop for CachedMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        let Some(home) = self.home.upgrade() else {
            return;
        };
        let mut state = home.lock();
        state.taken_bytes -= memory.len();
        state.free_bytes += memory.len();
        state.free.entry(memory.len()).or_default().push(memory);
    }
}

fn whole_bytes(len: usize) -> Option<usize> {
    let unit = match len < HUGE_PAGE_BYTES {
        true => rustix::param::page_size(),
        false => HUGE_PAGE_BYTES,
    };
    len.max(1).checked_next_multiple_of(unit)
}

fn out_of_memory(bytes: usize, source: std::io::Error) -> Error {
    Error::OutOfMemory { bytes, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_comes_back_to_whoever_asks_for_about_as_much() {
        let allocator = CachingHostAllocator::new(64 * MIB, false);
        let first = allocator.take(10 * MIB).unwrap();
        let address = first.address();
        assert_eq!(address % HUGE_PAGE_BYTES, 0);
        assert_eq!(allocator.taken_bytes(), 10 * MIB);
        drop(first);
        assert_eq!(
            (allocator.taken_bytes(), allocator.free_bytes()),
            (0, 10 * MIB)
        );
        let other = allocator.take(4 * MIB).unwrap();
        assert_ne!(other.address(), address);
        let same = allocator.take(9 * MIB).unwrap();
        assert_eq!((same.address(), same.len()), (address, 9 * MIB));
        assert_eq!(allocator.free_bytes(), 0);
    }

    #[test]
    fn the_budget_bounds_what_is_taken_and_free_together() {
        let allocator = CachingHostAllocator::new(16 * MIB, false);
        let held = allocator.take(8 * MIB).unwrap();
        drop(allocator.take(6 * MIB).unwrap());
        // A new allocation drops free memory that does not fit.
        let small: Vec<_> = (0..4).map(|_| allocator.take(2 * MIB).unwrap()).collect();
        assert_eq!(
            (allocator.taken_bytes(), allocator.free_bytes()),
            (16 * MIB, 0)
        );
        assert!(matches!(allocator.take(1), Err(Error::OutOfMemory { .. })));
        assert!(matches!(
            allocator.take(usize::MAX),
            Err(Error::OutOfMemory { .. })
        ));
        drop(small);
        assert_eq!(allocator.free_bytes(), 8 * MIB);
        allocator.release();
        assert_eq!(
            (allocator.taken_bytes(), allocator.free_bytes()),
            (8 * MIB, 0)
        );
        drop(held);
        // After the cache is gone, its memory is unmapped on drop.
        let left = allocator.take(MIB).unwrap();
        drop(allocator);
        drop(left);
    }

    #[test]
    fn nothing_has_an_address_too() {
        let allocator = CachingHostAllocator::new(MIB, false);
        let nothing = allocator.take(0).unwrap();
        assert!(nothing.is_empty());
        assert_ne!(nothing.address(), 0);
    }
}
