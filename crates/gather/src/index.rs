//! Maps rows to cache slots, and decides which row is evicted for a new one.
//!
//! Pure: it owns no row's memory, does no I/O and takes no lock. Its owner looks up one row at a
//! time.
//!
//! Eviction order: first rows whose next use is unknown, in the order of a [`Policy`]; then rows
//! of batches announced in advance, those of the farthest batch first (Belady, 1966). A row that
//! is needed no sooner than every evictable one is not admitted. Pinned rows stay.
//!
//! A slot takes 24 bytes, 16 for the lookup of its key, and up to 12 for the lookup of small
//! tables' rows; S3-FIFO remembers nine evicted keys for each ten slots, at 27 to 55 bytes each. A key announced in advance takes 12 to 24
//! bytes for each batch that has it, 8 to 16 more if its row is cached, and 19 to 39 for its
//! lookup.

mod ghost;
pub(crate) mod key;
mod lookup;
mod order;
mod place;
mod queue;
mod replay;
mod s3fifo;
mod sieve;
mod slot_map;
mod slot_table;
mod unsorted;
mod window;

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashSet};

pub use place::Slot;
pub use replay::replay;

use key::table_of;
use order::Order;
use place::{NEVER, Place, REFUSALS_MAX, SlotState};
use s3fifo::S3Fifo;
use sieve::Sieve;
use slot_map::SlotMap;
use unsorted::Unsorted;
use window::Window;

/// Keys whose entries are prefetched before the lookup.
pub(crate) const FETCHED: usize = 64;

/// Eviction order of rows whose next use is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// SIEVE (Zhang et al., NSDI 2024).
    Sieve,
    /// S3-FIFO (Yang et al., SOSP 2023).
    S3Fifo,
    /// No eviction: only pinned rows are kept, and announced batches are ignored.
    Static,
    /// Nothing is kept at all.
    None,
}

/// The slots of cached rows, and their eviction order.
#[derive(Debug)]
pub struct Index {
    places: Vec<Place>,
    /// Slots by the key of their place.
    slots: SlotMap,
    hasher: DefaultHashBuilder,
    /// Slots from here on have never had a row.
    untouched: Slot,
    /// Earlier slots without a row.
    free: Vec<Slot>,
    pinned: HashSet<u64>,
    window: Window,
    /// Batches announced after the window's, which are sorted only when a row has to be evicted.
    unsorted: Unsorted,
    /// Whether rows were admitted since a batch was reached: then the next batch will admit some
    /// too.
    has_admitted: bool,
    order: Order,
    policy: Policy,
}

impl Index {
    /// An empty index of so many slots.
    pub fn new(slots: Slot, policy: Policy) -> Index {
        let keeps_rows = policy != Policy::None;
        let slots = if keeps_rows { slots } else { 0 };
        Index {
            places: vec![Place::default(); slots as usize],
            slots: SlotMap::new(slots),
            hasher: DefaultHashBuilder::default(),
            untouched: 0,
            free: Vec::new(),
            pinned: HashSet::new(),
            window: Window::default(),
            unsorted: Unsorted::default(),
            has_admitted: true,
            order: match policy {
                Policy::S3Fifo => Order::S3Fifo(S3Fifo::new(slots)),
                // A static cache needs it for rows that were unpinned.
                _ => Order::Sieve(Sieve::default()),
            },
            policy,
        }
    }

    /// Takes a slot for a row that is not cached, evicting a row that satisfies `may_go`. `None`
    /// if the row is not worth it, or none of the few dozen candidates examined may go.
    pub fn admit(&mut self, key: u64, may_go: impl FnMut(Slot) -> bool) -> Option<Slot> {
        self.take_in(key, false, may_go)
    }

    /// As [`admit`](Index::admit), for a row that counts as being read until
    /// [`arrived`](Index::arrived) or [`forget`](Index::forget).
    pub(crate) fn admit_coming(
        &mut self,
        key: u64,
        may_go: impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        self.take_in(key, true, may_go)
    }

    /// The row of a slot has arrived.
    pub(crate) fn arrived(&mut self, slot: Slot) {
        let place = &mut self.places[slot as usize];
        place.comes = false;
        let (key, due) = (place.key, place.due);
        if due != NEVER {
            let next = self.window.use_of(due);
            debug_assert_eq!(
                self.window.next(self.hasher.hash_one(key), key),
                Some(next),
                "it was kept up to date"
            );
            self.set_next_use(slot, Some(next));
        }
    }

    fn take_in(
        &mut self,
        key: u64,
        comes: bool,
        mut may_go: impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        let is_pinned = !self.pinned.is_empty() && self.pinned.contains(&key);
        let is_kept = match self.policy {
            Policy::Sieve | Policy::S3Fifo => true,
            Policy::Static => is_pinned,
            Policy::None => false,
        };
        if !is_kept {
            return None;
        }
        self.has_admitted = true;
        self.sort();
        let hash = self.hasher.hash_one(key);
        debug_assert_eq!(self.slot_of(hash, key), None, "a row comes once");
        let next = self.window.next(hash, key);
        let slot = match self.take_free(&mut may_go) {
            Some(slot) => slot,
            None => self.evict(is_pinned, next, &mut may_go)?,
        };
        self.places[slot as usize] = Place {
            comes,
            ..Place::of(key)
        };
        self.slots.insert(hash, key, slot);
        if is_pinned {
            self.places[slot as usize].state = SlotState::Pinned;
        } else {
            self.order.insert(&mut self.places, slot);
            self.set_next_use(slot, next);
        }
        Some(slot)
    }

    /// Removes a row, such as one whose read has failed.
    pub fn forget(&mut self, key: u64) {
        let hash = self.hasher.hash_one(key);
        if let Some(slot) = self.slot_of(hash, key) {
            self.leave(slot);
            self.vacate(slot);
            self.free.push(slot);
        }
    }

    /// Adds a table of so many rows, which is looked up faster if it is small.
    pub(crate) fn add_table(&mut self, table: u64, rows: u64) {
        self.slots.add_table(table, rows);
    }

    /// Removes a table with its rows, whose keys will not be requested again.
    pub(crate) fn remove_table(&mut self, table: u64) {
        let is_gone = |key: u64| table_of(key) == table;
        self.pinned.retain(|&key| !is_gone(key));
        for slot in 0..self.untouched {
            let place = &self.places[slot as usize];
            if place.state != SlotState::Free && is_gone(place.key) {
                self.forget(place.key);
            }
        }
        self.slots.remove_table(table);
    }

    /// Pins rows: once admitted, they are not evicted.
    ///
    /// # Returns
    /// How many of them are pinned; at most as many as there are slots.
    pub fn pin(&mut self, keys: &[u64]) -> usize {
        let mut count = 0;
        for &key in keys {
            if self.pinned.len() == self.places.len() && !self.pinned.contains(&key) {
                continue;
            }
            count += 1;
            if !self.pinned.insert(key) {
                continue;
            }
            if let Some(slot) = self.slot_of(self.hasher.hash_one(key), key) {
                self.leave(slot);
                let place = &mut self.places[slot as usize];
                (place.state, place.due) = (SlotState::Pinned, NEVER);
            }
        }
        count
    }

    /// Unpins rows.
    pub fn unpin(&mut self, keys: &[u64]) {
        self.sort();
        for &key in keys {
            let hash = self.hasher.hash_one(key);
            if self.pinned.remove(&key)
                && let Some(slot) = self.slot_of(hash, key)
            {
                self.places[slot as usize].state = SlotState::Out;
                let next = self.window.next(hash, key);
                self.set_next_use(slot, next);
            }
        }
    }

    /// Announces the keys of a batch that will be gathered after all announced ones.
    ///
    /// # Returns
    /// Its number, counted from 0.
    pub fn hint(&mut self, keys: &[u64]) -> u64 {
        if matches!(self.policy, Policy::Static | Policy::None) {
            return self.window.add();
        }
        self.unsorted.add(keys, self.window.next_batch())
    }

    /// Adds the unsorted batches to the window. The delay changes nothing: no row was evicted
    /// meanwhile, and the lookups since then are replayed.
    fn sort(&mut self) {
        if self.unsorted.is_empty() {
            return;
        }
        let (batches, reached, used) = self.unsorted.take();
        for batch in batches {
            let number = self.window.add();
            if batch.is_over {
                self.window.end(number);
                continue;
            }
            for keys in batch.keys.chunks(FETCHED) {
                self.fetch(keys);
                for &key in keys {
                    let hash = self.hasher.hash_one(key);
                    if let Some(at) = self.window.hint(hash, key, &self.hasher)
                        && let Some(slot) = self.slot_of(hash, key)
                    {
                        self.set_next_use(slot, Some(at));
                    }
                }
            }
        }
        let Some(reached) = reached else { return };
        self.window.reach(reached);
        for key in used {
            let hash = self.hasher.hash_one(key);
            if let Some(next) = self.window.used(hash, key)
                && let Some(slot) = self.slot_of(hash, key)
            {
                self.set_next_use(slot, next);
            }
        }
    }

    /// Begins a batch: later lookups of its keys count as its uses. The batch before it ends.
    pub fn reach(&mut self, batch: u64) {
        if let Some(open) = self.window.reached().or(self.unsorted.reached())
            && open != batch
        {
            self.cancel(open);
        }
        if std::mem::take(&mut self.has_admitted) {
            self.sort();
        }
        match self.unsorted.has(batch) {
            true => self.unsorted.reach(batch),
            false => self.window.reach(batch),
        }
    }

    /// Ends a batch, or withdraws one that will not be gathered.
    pub fn cancel(&mut self, batch: u64) {
        if self.unsorted.has(batch) {
            self.unsorted.end(batch);
        } else {
            self.end(batch);
        }
        while self.window.is_empty() && self.unsorted.take_ended() {
            self.window.skip();
        }
    }

    fn end(&mut self, batch: u64) {
        for at in self.window.uses(batch) {
            let Some(key) = self.window.key(at) else {
                continue;
            };
            let hash = self.hasher.hash_one(key);
            if let Some(next) = self.window.pass(at, hash)
                && let Some(slot) = self.slot_of(hash, key)
            {
                self.set_next_use(slot, next);
            }
        }
        self.window.end(batch);
    }

    /// Slots from here on have never had a row.
    pub(crate) fn untouched(&self) -> Slot {
        self.untouched
    }

    /// Number of rows, cached or being read.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of announced keys, counted once for each batch; those of an ended batch may be kept
    /// until all earlier batches have ended.
    pub fn len_ahead(&self) -> usize {
        self.window.len() + self.unsorted.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    fn slot_of(&self, hash: u64, key: u64) -> Option<Slot> {
        self.slots.find(hash, key, &self.places)
    }

    /// Records when a row is needed next.
    fn set_next_use(&mut self, slot: Slot, next: Option<u64>) {
        let place = &mut self.places[slot as usize];
        match (place.state, next) {
            (SlotState::Pinned, _) => {}
            (_, Some(at)) => self.window.put(at, slot, &mut self.places),
            (state, None) => {
                place.due = NEVER;
                if state == SlotState::Out {
                    self.order.rejoin(&mut self.places, slot);
                }
            }
        }
    }

    /// Removes a row from its queue.
    fn leave(&mut self, slot: Slot) {
        if let SlotState::Queued | SlotState::Main = self.places[slot as usize].state {
            self.order.remove(&mut self.places, slot);
        }
    }

    /// Takes a slot without a row.
    fn take_free(&mut self, may_go: &mut impl FnMut(Slot) -> bool) -> Option<Slot> {
        let looked_at = self.free.len().saturating_sub(REFUSALS_MAX as usize)..self.free.len();
        if let Some(at) = looked_at.rev().find(|&at| may_go(self.free[at])) {
            return Some(self.free.swap_remove(at));
        }
        if (self.untouched as usize) == self.places.len() {
            return None;
        }
        self.untouched += 1;
        Some(self.untouched - 1)
    }

    /// Takes the slot of a row that is evicted for one whose next use is `next`.
    fn evict(
        &mut self,
        is_pinned: bool,
        next: Option<u64>,
        may_go: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        let slot = match self.order.evict(&mut self.places, may_go) {
            Some(slot) => slot,
            None => {
                let after = if is_pinned { None } else { Some(next?) };
                let slot = self.window.farthest(after, &self.places, may_go)?;
                self.leave(slot);
                slot
            }
        };
        self.vacate(slot);
        Some(slot)
    }

    /// Removes the row of a slot from the lookup table.
    fn vacate(&mut self, slot: Slot) {
        let key = self.places[slot as usize].key;
        self.slots.remove(self.hasher.hash_one(key), key, slot);
        self.places[slot as usize] = Place::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Evicts the cached row that is needed last, however many rows are being read.
    #[test]
    fn rows_on_their_way_are_in_nobodys_way() {
        let mut index = Index::new(110, Policy::Sieve);
        let keys: Vec<u64> = (0..111).collect();
        index.hint(&[110]);
        index.hint(&keys[..110]);
        let slots: Vec<Slot> = (0..110)
            .map(|key| match key < 10 {
                true => index.admit(key, |_| true).unwrap(),
                false => index.admit_coming(key, |_| true).unwrap(),
            })
            .collect();
        let there = slots[..10].to_vec();
        let slot = index.admit(110, |slot| there.contains(&slot));
        assert_eq!(slot, Some(slots[9]));
        for &slot in &slots[10..] {
            index.arrived(slot);
        }
        index.forget(110);
        let slot = index.admit(110, |_| true);
        assert_eq!(slot, Some(slots[9]), "one that is free");
        assert_eq!(index.find(109), Some(slots[109]));
    }
}
