//! Memory in equal slots; each slot has one writer or any number of readers.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use penstock_cuda::Device;

use super::cuda::{Mapped, Mapping};
use super::{IoBuf, Memory};
use crate::Result;

/// Equal slots of memory: each keeps its bytes until somebody claims it for writing.
///
/// A read costs one check of the slot's flag. In return no slot can be claimed while anybody reads
/// any slot: reads are for copies, and short.
///
/// Kernels of a device read slots as well, once they are [mapped](Slots::map): a slot that is
/// [lent](Lent) to a device cannot be claimed.
pub struct Slots {
    /// For a device to read; dropped before the memory is.
    mapping: OnceLock<std::result::Result<Mapping, String>>,
    memory: Backing,
    start: NonNull<u8>,
    stride_bytes: usize,
    /// For each slot, whether it has a writer.
    claimed: Box<[AtomicBool]>,
    /// Readers hold it shared, claims take it exclusively.
    gate: RwLock<()>,
    /// Bytes up to the last slot that was ever claimed.
    claimed_bytes: AtomicUsize,
    /// Bytes from the first slot on whose pages were populated.
    populated_bytes: AtomicUsize,
}

/// Memory populated at a time: a huge page.
const POPULATED_BYTES: usize = 2 << 20;
/// The most memory populated beyond the last slot that was claimed.
const POPULATED_AHEAD_BYTES: usize = 64 << 20;

enum Backing {
    Plain(Memory),
    Mapped(Mapped),
}

impl Backing {
    fn len(&self) -> usize {
        match self {
            Backing::Plain(memory) => memory.len(),
            Backing::Mapped(memory) => memory.len(),
        }
    }

    fn as_non_null(&self) -> NonNull<u8> {
        match self {
            Backing::Plain(memory) => memory.as_non_null(),
            Backing::Mapped(memory) => memory.as_non_null(),
        }
    }

    /// Whether this process has the memory; a fork may not.
    fn is_ours(&self) -> bool {
        match self {
            Backing::Plain(memory) => memory.is_ours(),
            Backing::Mapped(memory) => memory.is_ours(),
        }
    }
}

// SAFETY: the bytes of a slot are accessed through the one `IoBuf` of its claim, and through
// `Reading` while it is not claimed; nobody can claim it while a `Reading` holds the gate, or it is
// lent to a device.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Allocates `count` slots of `stride_bytes`, all zero, the first one page aligned.
    pub fn allocate(count: u32, stride_bytes: usize) -> Result<Arc<Slots>> {
        let bytes = (count as usize).saturating_mul(stride_bytes);
        let memory = Memory::allocate(bytes)?;
        Ok(Slots::of(Backing::Plain(memory), count, stride_bytes))
    }

    /// As [`allocate`](Slots::allocate), in pinned memory whose slots kernels of a device may read
    /// while they are not claimed. Forks do not inherit it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), and [`Error::Cuda`](crate::Error::Cuda)
    /// where it cannot be pinned.
    pub fn mapped(device: &Arc<Device>, count: u32, stride_bytes: usize) -> Result<Arc<Slots>> {
        let bytes = (count as usize).saturating_mul(stride_bytes);
        let memory = Mapped::allocate(device, bytes)?;
        Ok(Slots::of(Backing::Mapped(memory), count, stride_bytes))
    }

    fn of(memory: Backing, count: u32, stride_bytes: usize) -> Arc<Slots> {
        Arc::new(Slots {
            mapping: OnceLock::new(),
            start: memory.as_non_null(),
            memory,
            stride_bytes,
            claimed: (0..count).map(|_| AtomicBool::new(false)).collect(),
            gate: RwLock::new(()),
            claimed_bytes: AtomicUsize::new(0),
            populated_bytes: AtomicUsize::new(0),
        })
    }

    /// The first slot's address for kernels; `None` unless the memory was allocated by
    /// [`mapped`](Slots::mapped).
    pub fn device_address(&self) -> Option<u64> {
        match &self.memory {
            Backing::Plain(_) => None,
            Backing::Mapped(memory) => Some(memory.device_address()),
        }
    }

    /// Maps at least the first `slots` for kernels of a device; memory not mapped before is touched
    /// and pinned in the process. Only one device can have them.
    ///
    /// # Errors
    /// The reason, in words. Slots mapped before stay mapped.
    pub fn map(&self, device: &Arc<Device>, slots: u32) -> std::result::Result<(), String> {
        let Backing::Plain(memory) = &self.memory else {
            return Err("they are another kernel's".to_owned());
        };
        let made = self.mapping.get_or_init(|| {
            let mapping = Mapping::of(device, memory, self.claimed.len());
            mapping.map_err(|error| error.to_string())
        });
        let mapping = made.as_ref().map_err(Clone::clone)?;
        if !Arc::ptr_eq(mapping.device(), device) {
            return Err("another device has them".to_owned());
        }
        let bytes = slots as usize * self.stride_bytes;
        mapping.grow(memory, bytes)
    }

    fn mapping(&self) -> Option<&Mapping> {
        self.mapping.get()?.as_ref().ok()
    }

    /// Whether a device reads a slot.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn is_lent(&self, slot: u32) -> bool {
        self.mapping().is_some_and(|mapping| mapping.is_lent(slot))
    }

    /// The number of slots.
    pub fn count(&self) -> u32 {
        self.claimed.len() as u32
    }

    /// Bytes of each slot.
    pub fn stride_bytes(&self) -> usize {
        self.stride_bytes
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Takes a slot for writing, until the last window on it is dropped; `None` where it has a
    /// writer or a device reads it, and in a fork that does not have the memory. Waits for readers.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn claim(self: &Arc<Self>, slot: u32) -> Option<IoBuf> {
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        if !self.memory.is_ours() || self.is_lent(slot) {
            return None;
        }
        if self.claimed[slot as usize].swap(true, Ordering::Acquire) {
            return None;
        }
        drop(gate);
        let end = (slot as usize + 1) * self.stride_bytes;
        if self.claimed_bytes.load(Ordering::Relaxed) < end {
            self.claimed_bytes.fetch_max(end, Ordering::Relaxed);
        }
        let owner = Arc::new(Claim {
            slots: Arc::clone(self),
            slot,
        });
        let address = self.address(slot);
        // SAFETY: the slot is within the memory, which is initialised, writable, and lives as long
        // as the owner; it stays claimed until the owner is dropped, which keeps all others out of
        // it.
        Some(unsafe { IoBuf::new(address, self.stride_bytes, owner) })
    }

    /// Asks the kernel for pages of slots that are in use, and of as many next ones, 64 MiB at
    /// most. A read into a slot without a page waits for it, and so do the reads submitted after
    /// it: 2 ms on a machine whose host takes free pages back. For threads that wait anyway.
    ///
    /// # Returns
    /// Whether there was memory to populate.
    pub fn populate_next(&self) -> bool {
        let Backing::Plain(memory) = &self.memory else {
            return false;
        };
        let claimed = self.claimed_bytes.load(Ordering::Relaxed);
        if claimed == 0 || !memory.is_ours() {
            return false;
        }
        // A cache of which little is used takes little more.
        let goal = memory
            .len()
            .min(claimed + claimed.min(POPULATED_AHEAD_BYTES));
        let next = |start| (start < goal).then_some(start + POPULATED_BYTES);
        let taken = &self.populated_bytes;
        match taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(start) => {
                memory.populate(start..memory.len().min(start + POPULATED_BYTES));
                true
            }
            Err(_) => false,
        }
    }

    /// Bytes of slots that [`populate_next`](Slots::populate_next) got pages for.
    pub fn populated_bytes(&self) -> usize {
        self.populated_bytes
            .load(Ordering::Relaxed)
            .min(self.memory.len())
    }

    /// Blocks claims, so that any slot that is not claimed can be read.
    pub fn read(&self) -> Reading<'_> {
        self.reading(self.gate.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`read`](Slots::read), unless somebody is about to claim a slot.
    pub fn try_read(&self) -> Option<Reading<'_>> {
        let gate = match self.gate.try_read() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(gate)) => gate.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.reading(gate))
    }

    fn reading<'a>(&'a self, gate: RwLockReadGuard<'a, ()>) -> Reading<'a> {
        Reading {
            slots: self,
            is_ours: self.memory.is_ours(),
            _gate: gate,
        }
    }

    #[inline]
    fn address(&self, slot: u32) -> NonNull<u8> {
        // SAFETY: `slot < count`, as its flag was checked, so this is within the memory.
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

/// The processor follows longer rows by itself.
#[cfg(target_arch = "x86_64")]
const PREFETCHED_BYTES: usize = 512;
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// How many slots are given back together.
const FETCHED: usize = 64;

/// Slots that kernels of a device read, each for one row of a result; dropping it gives them back.
#[derive(Debug)]
pub struct Lent {
    slots: Arc<Slots>,
    /// Positions in the result, and the slots' addresses for kernels.
    places: Vec<(usize, u64)>,
    numbers: Vec<u32>,
}

impl Lent {
    /// An empty list for slots that are mapped for a device.
    pub fn of(slots: &Arc<Slots>) -> Lent {
        Lent {
            slots: Arc::clone(slots),
            places: Vec::new(),
            numbers: Vec::new(),
        }
    }

    /// Fetches the marks of some slots into the processor's caches, all at once, because memory
    /// latency is most of the cost of [`take`](Lent::take). Nothing else changes.
    pub fn fetch(&self, slots: impl Iterator<Item = u32>) {
        let Some(mapping) = self.slots.mapping() else {
            return;
        };
        let mark = |slot: u32| {
            let is_claimed = self.slots.claimed[slot as usize].load(Ordering::Relaxed);
            usize::from(is_claimed) + usize::from(mapping.is_lent(slot))
        };
        // Keeps the compiler from removing loads whose results are unused.
        std::hint::black_box(slots.map(mark).sum::<usize>());
    }

    /// Adds a slot for a position after those already added; returns false where the slot has a
    /// writer or is not mapped.
    ///
    /// # Panics
    /// If there is no such slot, or `reading` is of other slots.
    pub fn take(&mut self, reading: &Reading<'_>, position: usize, slot: u32) -> bool {
        assert!(
            std::ptr::eq(reading.slots, &raw const *self.slots),
            "of others"
        );
        let Some(mapping) = self.slots.mapping() else {
            return false;
        };
        let stride_bytes = self.slots.stride_bytes;
        let found = mapping.find(slot as usize * stride_bytes, stride_bytes);
        let (Some(address), Some(_)) = (found, reading.slot(slot)) else {
            return false;
        };
        // Nobody can claim it before the gate is released, and after that its mark is visible.
        mapping.lend(slot);
        self.places.push((position, address));
        self.numbers.push(slot);
        true
    }

    /// The most bytes of each slot.
    pub fn stride_bytes(&self) -> usize {
        self.slots.stride_bytes
    }

    /// The number of slots.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Whether it has no slot.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Positions in ascending order, and the slots' addresses for kernels.
    pub(super) fn places(&self) -> &[(usize, u64)] {
        &self.places
    }

    /// The device that the slots are mapped for.
    pub(super) fn device(&self) -> Option<&Arc<Device>> {
        self.slots.mapping().map(Mapping::device)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(mapping) = self.slots.mapping() {
            for slots in self.numbers.chunks(FETCHED) {
                self.fetch(slots.iter().copied());
                for &slot in slots {
                    mapping.give_back(slot);
                }
            }
        }
    }
}

/// The right to write to a slot, given back on drop.
struct Claim {
    slots: Arc<Slots>,
    slot: u32,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.slots.claimed[self.slot as usize].store(false, Ordering::Release);
    }
}

/// The right to read slots; see [`Slots::read`].
pub struct Reading<'a> {
    slots: &'a Slots,
    /// Whether this process has the memory; it is asked once, as a row may take less time.
    is_ours: bool,
    _gate: RwLockReadGuard<'a, ()>,
}

impl Reading<'_> {
    /// The bytes of a slot; `None` where it has a writer, and in a fork that does not have the
    /// memory.
    ///
    /// # Panics
    /// If there is no such slot.
    #[inline]
    pub fn slot(&self, slot: u32) -> Option<&[u8]> {
        if self.slots.claimed[slot as usize].load(Ordering::Acquire) || !self.is_ours {
            return None;
        }
        let address = self.slots.address(slot).as_ptr();
        // SAFETY: the slot is within the memory, which is initialised and lives as long as the
        // borrow of `slots`. It is not claimed, and nobody claims it before `self` is dropped.
        Some(unsafe { std::slice::from_raw_parts(address, self.slots.stride_bytes) })
    }

    /// Asks the processor to fetch a slot that is read soon, where it can be asked.
    ///
    /// # Panics
    /// If there is no such slot.
    #[inline]
    pub fn prefetch(&self, slot: u32) {
        assert!(slot < self.slots.count(), "there is no slot {slot}");
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

            let address = self.slots.address(slot).as_ptr();
            for at in (0..self.slots.stride_bytes.min(PREFETCHED_BYTES)).step_by(LINE_BYTES) {
                // SAFETY: a prefetch reads nothing that a program could see; the address is
                // within the memory.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(at).cast()) };
            }
        }
    }
}

impl fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_slot_is_written_or_read() {
        let slots = Slots::allocate(3, 1000).unwrap();
        let mut written = slots.claim(1).unwrap();
        written.as_mut_slice().fill(7);
        assert!(slots.claim(1).is_none() && slots.read().slot(1).is_none());
        let rest = written.split_off(10);
        drop(written);
        assert!(
            slots.read().slot(1).is_none(),
            "part of it is still written to"
        );
        drop(rest);
        let reading = slots.read();
        assert!(reading.slot(1).unwrap().iter().all(|&byte| byte == 7));
        assert!(reading.slot(0).unwrap().iter().all(|&byte| byte == 0));
        drop(reading);
        assert!(slots.claim(1).is_some());
    }

    #[test]
    fn a_claim_keeps_the_memory() {
        let slots = Slots::allocate(1, 64).unwrap();
        let mut claim = slots.claim(0).unwrap();
        drop(slots);
        claim.as_mut_slice().fill(1);
    }

    #[test]
    fn slots_in_use_and_as_many_next_ones_are_populated() {
        const MIB: usize = 1 << 20;
        let slots = Slots::allocate(200, MIB).unwrap();
        let populated_after = |slot: Option<u32>| {
            drop(slot.map(|slot| slots.claim(slot)));
            while slots.populate_next() {}
            slots.populated_bytes() / MIB
        };
        assert_eq!(populated_after(None), 0, "none is in use");
        slots.claim(0).unwrap().as_mut_slice().fill(7);
        assert_eq!(populated_after(None), 2);
        assert_eq!(populated_after(Some(9)), 20);
        assert_eq!(populated_after(Some(99)), 164);
        assert_eq!(populated_after(Some(3)), 164);
        assert_eq!(populated_after(Some(199)), 200);
        assert!(slots.read().slot(0).unwrap().iter().all(|&byte| byte == 7));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls a library")]
    fn what_is_lent_to_a_device_is_not_claimed() {
        let control = penstock_cuda_fake::Control::new();
        let driver = penstock_cuda::Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device = driver.device(0).unwrap();
        let slots = Slots::allocate(100, 5000).unwrap();
        let lends = |slot| Lent::of(&slots).take(&slots.read(), 0, slot);
        assert!(!lends(0), "it is not mapped");
        slots.map(&device, 10).unwrap();
        // Slots are mapped in whole steps.
        assert!(lends(9) && lends(12) && !lends(13));
        slots.map(&device, 14).unwrap();
        assert!(lends(13) && lends(25) && !lends(26));
        let mut lent = Lent::of(&slots);
        let reading = slots.read();
        assert!(lent.take(&reading, 3, 7) && lent.take(&reading, 5, 7));
        drop(reading);
        let mut twice = Lent::of(&slots);
        assert!(twice.take(&slots.read(), 0, 7));
        assert_eq!((lent.len(), lent.places()[1].0), (2, 5));
        assert!(slots.claim(7).is_none() && slots.is_lent(7));
        drop(lent);
        assert!(slots.claim(7).is_none(), "the other one has it");
        drop(twice);
        let claimed = slots.claim(7).unwrap();
        assert!(!lends(7), "somebody writes to it");
        drop(claimed);
        control.fail_call("cuMemHostRegister_v2", 1, 2);
        assert!(slots.map(&device, 100).is_err());
        control.clear_faults();
        assert!(slots.map(&device, 100).is_err(), "it is not tried again");
        assert!(lends(25) && !lends(26));
        drop(slots);
        assert_eq!(control.leaks().registered, 0);
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
                        if let Some(bytes) = slots.read().slot(turn % 2) {
                            assert!(bytes.iter().all(|byte| byte == &bytes[0]));
                        }
                    }
                });
            }
        });
    }
}
