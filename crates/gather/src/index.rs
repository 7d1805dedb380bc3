//! Which rows have which slots, and who goes when another one comes.
//!
//! Pure: it knows no memory, reads nothing and locks nothing. Whoever holds it asks for one row at a
//! time.
//!
//! Who goes, first to last: rows of which nobody knows when they are needed next, in the order of a
//! [`Policy`]; then those of batches that are known ahead, the farthest batch first (Belady, 1966).
//! A row that is needed no sooner than whatever could go is not admitted. Pinned rows stay.
//!
//! A slot takes 24 bytes, and 11 to 23 for being found by its key; S3-FIFO remembers nine keys that
//! have gone for each ten slots, in 27 to 55 bytes each. A key that is known ahead takes 12 to 24
//! bytes a batch that has it, 8 to 16 more if its row is there, and 19 to 39 for being found.

mod ghost;
mod order;
mod place;
mod queue;
mod replay;
mod s3fifo;
mod sieve;
mod unsorted;
mod window;

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashSet, HashTable};

pub use place::Slot;
pub use replay::replay;

use order::Order;
use place::{NEVER, Place, REFUSALS_MAX, State};
use s3fifo::S3Fifo;
use sieve::Sieve;
use unsorted::Unsorted;
use window::Window;

/// Keys that are fetched before they are looked for.
pub(crate) const FETCHED: usize = 64;

/// Who goes among rows of which nobody knows when they are needed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// SIEVE (Zhang et al., NSDI 2024).
    Sieve,
    /// S3-FIFO (Yang et al., SOSP 2023).
    S3Fifo,
    /// Nobody: only pinned rows are kept, and nothing is known ahead.
    Static,
    /// Nothing is kept at all.
    None,
}

/// See the module's description.
#[derive(Debug)]
pub struct Index {
    places: Vec<Place>,
    /// By the key of the place.
    slots: HashTable<Slot>,
    hasher: DefaultHashBuilder,
    /// Slots from here on never had a row.
    untouched: Slot,
    /// Those before it that have none.
    free: Vec<Slot>,
    pinned: HashSet<u64>,
    window: Window,
    /// What is known behind that, and not looked at before a row has to go.
    unsorted: Unsorted,
    /// Whether rows were admitted since a batch was reached: then some will be for the next one.
    has_admitted: bool,
    order: Order,
    policy: Policy,
}

impl Index {
    /// No row has any of so many slots.
    pub fn new(slots: Slot, policy: Policy) -> Index {
        let keeps_rows = policy != Policy::None;
        let slots = if keeps_rows { slots } else { 0 };
        Index {
            places: vec![Place::default(); slots as usize],
            // What has gone leaves marks, for which a table that is fuller is built anew one day,
            // twice as large, under the lock.
            slots: HashTable::with_capacity(2 * slots as usize),
            hasher: DefaultHashBuilder::default(),
            untouched: 0,
            free: Vec::new(),
            pinned: HashSet::new(),
            window: Window::default(),
            unsorted: Unsorted::default(),
            has_admitted: true,
            order: match policy {
                Policy::S3Fifo => Order::S3Fifo(S3Fifo::new(slots)),
                // Of a static cache, rows that are not pinned any more.
                _ => Order::Sieve(Sieve::default()),
            },
            policy,
        }
    }

    /// The slot of a row that is there or comes: a hit. Where the batch that was reached last has
    /// the row, that use of it is over.
    pub fn find(&mut self, key: u64) -> Option<Slot> {
        let hash = self.hasher.hash_one(key);
        let slot = self.slot_of(hash, key);
        self.used(hash, key, slot);
        slot
    }

    /// As [`find`](Index::find), of keys one after the other, up to some dozens of them, but the slots of those
    /// alone whose rows are there: of one that comes nobody knows yet what it will be. The processor
    /// fetches what that takes for all of them at once: to wait for memory is most of the time that it
    /// takes.
    pub(crate) fn find_each(&mut self, keys: &[u64]) -> [Option<Slot>; FETCHED] {
        let mut hashes = [0; FETCHED];
        let mut slots = [None; FETCHED];
        let mut sum = 0;
        for ((&key, hash), slot) in keys.iter().zip(&mut hashes).zip(&mut slots) {
            *hash = self.hasher.hash_one(key);
            *slot = self.slot_of(*hash, key);
            sum += self.window.next(*hash, key).unwrap_or(0);
        }
        // Loads whose results nobody needs would be left out.
        std::hint::black_box(sum);
        for ((&key, hash), found) in keys.iter().zip(hashes).zip(&mut slots) {
            self.used(hash, key, *found);
            *found = found.filter(|&slot| !self.places[slot as usize].comes);
        }
        slots
    }

    /// Somebody looks for a key, and finds it in that slot or not.
    fn used(&mut self, hash: u64, key: u64, slot: Option<Slot>) {
        self.unsorted.used(key);
        let next = self.window.used(hash, key);
        let Some(slot) = slot else { return };
        self.order.used(&mut self.places, slot);
        if let Some(next) = next {
            self.settle(slot, next);
        }
    }

    /// Has the processor fetch what finding some keys takes, for all of them at once: to wait for
    /// memory is most of the time that it takes. For as many as are looked for right after it, some
    /// dozens; nothing else changes.
    pub fn fetch(&self, keys: &[u64]) {
        let mut sum = 0;
        for &key in keys {
            let hash = self.hasher.hash_one(key);
            if let Some(slot) = self.slot_of(hash, key) {
                sum += u64::from(self.places[slot as usize].uses);
            }
            sum += self.window.next(hash, key).unwrap_or(0);
        }
        // Loads whose results nobody needs would be left out.
        std::hint::black_box(sum);
    }

    /// Room for a row that is not there. Who goes for it satisfies `may_go`. `None` where it is not
    /// worth it, or nobody may go, as far as a look at a few dozen of them tells.
    pub fn admit(&mut self, key: u64, may_go: impl FnMut(Slot) -> bool) -> Option<Slot> {
        self.take_in(key, false, may_go)
    }

    /// As [`admit`](Index::admit), for a row that is on its way until [`arrived`](Index::arrived)
    /// says otherwise, or [`forget`](Index::forget).
    pub(crate) fn admit_coming(
        &mut self,
        key: u64,
        may_go: impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        self.take_in(key, true, may_go)
    }

    /// The row of a slot is there.
    pub(crate) fn arrived(&mut self, slot: Slot) {
        let place = &mut self.places[slot as usize];
        place.comes = false;
        let key = place.key;
        if place.due != NEVER {
            let next = self.window.next(self.hasher.hash_one(key), key);
            self.settle(slot, next);
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
        let Index {
            slots,
            places,
            hasher,
            ..
        } = self;
        let hash_of = |&slot: &Slot| hasher.hash_one(places[slot as usize].key);
        slots.insert_unique(hash, slot, hash_of);
        if is_pinned {
            self.places[slot as usize].state = State::Pinned;
        } else {
            self.order.insert(&mut self.places, slot);
            self.settle(slot, next);
        }
        Some(slot)
    }

    /// What was to come has failed.
    pub fn forget(&mut self, key: u64) {
        let hash = self.hasher.hash_one(key);
        if let Some(slot) = self.slot_of(hash, key) {
            self.leave(slot);
            self.vacate(slot);
            self.free.push(slot);
        }
    }

    /// Nobody will ask for these any more.
    pub(crate) fn forget_all(&mut self, is_gone: impl Fn(u64) -> bool) {
        self.pinned.retain(|&key| !is_gone(key));
        for slot in 0..self.untouched {
            let place = &self.places[slot as usize];
            if place.state != State::Free && is_gone(place.key) {
                self.forget(place.key);
            }
        }
    }

    /// Has rows stay whatever happens, once they are admitted.
    ///
    /// # Returns
    /// How many of them do: no more are pinned than there are slots.
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
                (place.state, place.due) = (State::Pinned, NEVER);
            }
        }
        count
    }

    /// Has pinned rows go like any others from now on.
    pub fn unpin(&mut self, keys: &[u64]) {
        self.sort();
        for &key in keys {
            let hash = self.hasher.hash_one(key);
            if self.pinned.remove(&key)
                && let Some(slot) = self.slot_of(hash, key)
            {
                self.places[slot as usize].state = State::Out;
                let next = self.window.next(hash, key);
                self.settle(slot, next);
            }
        }
    }

    /// Tells of a batch that will be gathered after all that are known: which keys it will ask
    /// for.
    ///
    /// # Returns
    /// Its number, counted from 0.
    pub fn foresee(&mut self, keys: &[u64]) -> u64 {
        if matches!(self.policy, Policy::Static | Policy::None) {
            return self.window.add();
        }
        self.unsorted.add(keys, self.window.next_batch())
    }

    /// Looks at the batches that nobody has looked at. That it comes late changes nothing: no row has
    /// gone meanwhile, and what was used by now is told behind it.
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
                    if let Some(at) = self.window.foresee(hash, key, &self.hasher)
                        && let Some(slot) = self.slot_of(hash, key)
                    {
                        self.settle(slot, Some(at));
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
                self.settle(slot, next);
            }
        }
    }

    /// That batch is gathered now: what is found from here on is a use by it, if it has the key.
    /// The one before it is over.
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

    /// That batch is over, or will not be gathered.
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
                self.settle(slot, next);
            }
        }
        self.window.end(batch);
    }

    /// Slots from here on never had a row.
    pub(crate) fn untouched(&self) -> Slot {
        self.untouched
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many keys are known ahead, once a batch; those of a batch that has ended may be kept until
    /// all before it have.
    pub fn len_ahead(&self) -> usize {
        self.window.len() + self.unsorted.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    fn slot_of(&self, hash: u64, key: u64) -> Option<Slot> {
        let is_it = |&slot: &Slot| self.places[slot as usize].key == key;
        self.slots.find(hash, is_it).copied()
    }

    /// Notes when a row is needed next.
    fn settle(&mut self, slot: Slot, next: Option<u64>) {
        let place = &mut self.places[slot as usize];
        match (place.state, next) {
            (State::Pinned, _) => {}
            (_, Some(at)) => self.window.put(at, slot, &mut self.places),
            (state, None) => {
                place.due = NEVER;
                if state == State::Out {
                    self.order.rejoin(&mut self.places, slot);
                }
            }
        }
    }

    /// Takes a row out of the queue that it is in.
    fn leave(&mut self, slot: Slot) {
        if let State::Queued | State::Main = self.places[slot as usize].state {
            self.order.remove(&mut self.places, slot);
        }
    }

    /// A slot without a row.
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

    /// A slot whose row goes for one that is needed next by that batch.
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

    /// Nobody finds the row of a slot any more.
    fn vacate(&mut self, slot: Slot) {
        let hash = self.hasher.hash_one(self.places[slot as usize].key);
        match self.slots.find_entry(hash, |&one| one == slot) {
            Ok(entry) => drop(entry.remove()),
            Err(_) => unreachable!("a slot with a row is found by its key"),
        }
        self.places[slot as usize] = Place::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many rows are on their way, the one that is needed last of those that are there goes.
    #[test]
    fn rows_on_their_way_are_in_nobodys_way() {
        let mut index = Index::new(110, Policy::Sieve);
        let keys: Vec<u64> = (0..111).collect();
        index.foresee(&[110]);
        index.foresee(&keys[..110]);
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
