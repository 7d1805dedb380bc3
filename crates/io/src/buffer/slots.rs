//! Memory in equal slots, each with one writer or any number of readers.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{IoBuf, Memory};
use crate::Result;

/// The state of a slot that a writer has; else it is how many readers there are.
const CLAIMED: u32 = u32::MAX;

/// Equal slots of memory: what is in them stays until somebody claims one to write to it.
pub struct Slots {
    memory: Memory,
    start: NonNull<u8>,
    stride_bytes: usize,
    states: Box<[AtomicU32]>,
}

// SAFETY: bytes are reached through `Pinned`, while a slot has readers only, and through `IoBuf`s of
// `claim`, while it has that one writer; the state of each slot says which, and changes atomically.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// So many slots of so many bytes, all zero, the first one at a page.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn allocate(count: u32, stride_bytes: usize) -> Result<Arc<Slots>> {
        let bytes = (count as usize).saturating_mul(stride_bytes);
        let memory = Memory::allocate(bytes)?;
        Ok(Arc::new(Slots {
            start: memory.as_non_null(),
            memory,
            stride_bytes,
            states: (0..count).map(|_| AtomicU32::new(0)).collect(),
        }))
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.states.len() as u32
    }

    /// Bytes of each.
    pub fn stride_bytes(&self) -> usize {
        self.stride_bytes
    }

    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Whether nobody reads or writes it now.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn is_idle(&self, slot: u32) -> bool {
        self.states[slot as usize].load(Ordering::Relaxed) == 0
    }

    /// Takes a slot to write to it, until the buffer is dropped; `None` where somebody reads or
    /// writes it.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn claim(self: &Arc<Self>, slot: u32) -> Option<IoBuf> {
        let state = &self.states[slot as usize];
        state
            .compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        let owner = Arc::new(Claim {
            slots: Arc::clone(self),
            slot,
        });
        let address = self.address(slot);
        // SAFETY: the slot is within the memory, which is initialised, writable, and lives as long
        // as the owner; its state, which only the owner's drop changes from here, keeps all others
        // out of it.
        Some(unsafe { IoBuf::new(address, self.stride_bytes, owner) })
    }

    /// Takes a slot to read it; `None` where somebody writes it.
    ///
    /// # Panics
    /// If there is no such slot, or 2³² - 2 readers have it.
    pub fn pin(&self, slot: u32) -> Option<Pinned<'_>> {
        let state = &self.states[slot as usize];
        let mut readers = state.load(Ordering::Relaxed);
        loop {
            if readers == CLAIMED {
                return None;
            }
            assert!(readers < CLAIMED - 1, "too many readers");
            let taken = state.compare_exchange_weak(
                readers,
                readers + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match taken {
                Ok(_) => return Some(Pinned { slots: self, slot }),
                Err(now) => readers = now,
            }
        }
    }

    fn address(&self, slot: u32) -> NonNull<u8> {
        // SAFETY: `slot < count`, as its state was looked at, so this is within the memory.
        unsafe { self.start.add(slot as usize * self.stride_bytes) }
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots")
            .field("count", &self.count())
            .field("stride_bytes", &self.stride_bytes)
            .finish_non_exhaustive()
    }
}

/// The right to write to a slot, given back when it is dropped.
struct Claim {
    slots: Arc<Slots>,
    slot: u32,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.slots.states[self.slot as usize].store(0, Ordering::Release);
    }
}

/// A slot that nobody writes to meanwhile.
pub struct Pinned<'a> {
    slots: &'a Slots,
    slot: u32,
}

impl Pinned<'_> {
    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        let address = self.slots.address(self.slot).as_ptr();
        // SAFETY: the slot is within the memory, which is initialised and lives as long as the
        // borrow of `slots`; its state counts this reader, so nobody writes to it.
        unsafe { std::slice::from_raw_parts(address, self.slots.stride_bytes) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.slots.states[self.slot as usize].fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for Pinned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_slot_has_one_writer_or_readers() {
        let slots = Slots::allocate(3, 1000).unwrap();
        let mut written = slots.claim(1).unwrap();
        written.as_mut_slice().fill(7);
        assert!(slots.claim(1).is_none() && slots.pin(1).is_none() && !slots.is_idle(1));
        let rest = written.split_off(10);
        drop(written);
        assert!(slots.pin(1).is_none(), "part of it is still written to");
        drop(rest);
        let (first, second) = (slots.pin(1).unwrap(), slots.pin(1).unwrap());
        assert!(first.as_slice().iter().all(|&byte| byte == 7));
        drop(first);
        assert!(slots.claim(1).is_none());
        drop(second);
        assert!(slots.is_idle(1) && slots.claim(1).is_some());
        assert!(
            slots
                .pin(0)
                .unwrap()
                .as_slice()
                .iter()
                .all(|&byte| byte == 0)
        );
    }

    #[test]
    fn a_claim_keeps_the_memory() {
        let slots = Slots::allocate(1, 64).unwrap();
        let mut claim = slots.claim(0).unwrap();
        drop(slots);
        claim.as_mut_slice().fill(1);
    }

    #[test]
    fn readers_see_whole_writes() {
        let slots = Slots::allocate(2, 64).unwrap();
        thread::scope(|scope| {
            for value in 1..=2_u8 {
                let slots = &slots;
                scope.spawn(move || {
                    for turn in 0..200_u32 {
                        if let Some(mut claim) = slots.claim(turn % 2) {
                            claim.as_mut_slice().fill(value);
                        }
                    }
                });
                scope.spawn(move || {
                    for turn in 0..200_u32 {
                        if let Some(pinned) = slots.pin(turn % 2) {
                            let bytes = pinned.as_slice();
                            assert!(bytes.iter().all(|byte| byte == &bytes[0]));
                        }
                    }
                });
            }
        });
    }
}
