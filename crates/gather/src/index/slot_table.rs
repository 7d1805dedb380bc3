//! Finds the slot of a key by its hash.
//!
//! A table of our own, since a batch looks many keys up at once: the entries of all keys are
//! fetched first, and their places while the last entries arrive. A lookup is then two fetches that
//! overlap with those of other keys, instead of a chain of three.

use super::place::Slot;

/// The slots of keys, by linear probing at a load of one half at the most.
///
/// An entry is the upper half of the key's hash and the number of its slot plus one; 0 is an empty
/// entry, so that the memory of a new table is not touched. The hash gives the entry's preferred
/// position too, so a removal moves later entries without looking at their keys, and leaves nothing
/// behind.
#[derive(Debug)]
pub(super) struct SlotTable {
    entries: Box<[u64]>,
}

const EMPTY: u64 = 0;

impl SlotTable {
    /// An empty table for so many slots.
    pub(super) fn new(slots: Slot) -> SlotTable {
        SlotTable {
            entries: vec![EMPTY; 2 * (slots as usize).max(1)].into_boxed_slice(),
        }
    }

    /// Loads the entry at which the search for a hash begins; the value means nothing.
    pub(super) fn fetch(&self, hash: u64) -> u64 {
        self.entries[self.preferred(mixed(hash))]
    }

    /// The slot of a hash that is probably the key's, to be fetched.
    pub(super) fn guess(&self, hash: u64) -> Option<Slot> {
        self.find(hash, |_| true)
    }

    /// The slot of a hash for which `is_it` holds.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(Slot) -> bool) -> Option<Slot> {
        let hash = mixed(hash);
        let mut at = self.preferred(hash);
        loop {
            let entry = self.entries[at];
            if entry == EMPTY {
                return None;
            }
            if is_of(entry, hash) && is_it(slot_of(entry)) {
                return Some(slot_of(entry));
            }
            at = self.after(at);
        }
    }

    /// Adds a slot, which is not in the table.
    pub(super) fn insert(&mut self, hash: u64, slot: Slot) {
        let hash = mixed(hash);
        let mut at = self.preferred(hash);
        while self.entries[at] != EMPTY {
            at = self.after(at);
        }
        self.entries[at] = hash & UPPER | (u64::from(slot) + 1);
    }

    /// Removes a slot.
    ///
    /// # Panics
    /// If it is not there under this hash.
    pub(super) fn remove(&mut self, hash: u64, slot: Slot) {
        let hash = mixed(hash);
        let mut hole = self.preferred(hash);
        while self.entries[hole] != hash & UPPER | (u64::from(slot) + 1) {
            assert!(self.entries[hole] != EMPTY, "a slot with a row is found");
            hole = self.after(hole);
        }
        let mut at = hole;
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry == EMPTY {
                break;
            }
            // An entry may move to any position from its preferred one on.
            if self.distance(self.preferred(entry), at) >= self.distance(hole, at) {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = EMPTY;
    }

    /// Where a mixed hash, or the entry of one, belongs.
    fn preferred(&self, hash: u64) -> usize {
        ((u128::from(hash >> 32) * self.entries.len() as u128) >> 32) as usize
    }

    fn after(&self, at: usize) -> usize {
        match at + 1 == self.entries.len() {
            true => 0,
            false => at + 1,
        }
    }

    /// How many positions on `to` is from `from`, around the end.
    fn distance(&self, from: usize, to: usize) -> usize {
        match to >= from {
            true => to - from,
            false => to + self.entries.len() - from,
        }
    }
}

/// Mixes a hash once more: the hasher multiplies once, by a number that it draws, and some numbers
/// put the keys of neighbouring rows next to each other.
fn mixed(hash: u64) -> u64 {
    // The golden ratio, as in Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4).
    let product = u128::from(hash) * 0x9e37_79b9_7f4a_7c15;
    product as u64 ^ (product >> 64) as u64
}

const UPPER: u64 = 0xffff_ffff_0000_0000;

fn is_of(entry: u64, hash: u64) -> bool {
    (entry ^ hash) & UPPER == 0
}

fn slot_of(entry: u64) -> Slot {
    (entry as u32).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Few different hashes: long runs of entries, around the end too.
    fn hash_of(slot: Slot) -> u64 {
        [0, 1, 2, 3, 5, 8, 13, u64::MAX][slot as usize % 8]
    }

    /// Lookups of neighbouring rows end soon for each number that the hasher may draw.
    #[test]
    fn keys_of_neighbouring_rows_are_apart() {
        let mut seed = 1_u64;
        for _ in 0..200 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let slots = 10_000;
            let mut table = SlotTable::new(slots);
            let hash_of = |row: u64| {
                let product = u128::from(row ^ seed) * u128::from(seed);
                product as u64 ^ (product >> 64) as u64
            };
            for slot in 0..slots {
                table.insert(hash_of(u64::from(slot)), slot);
            }
            let run = table
                .entries
                .split(|&entry| entry == EMPTY)
                .map(<[u64]>::len)
                .max();
            assert!(run.unwrap() < 400, "{seed:#x}: {run:?} entries in a row");
        }
    }

    #[test]
    fn it_has_what_was_inserted_and_not_removed() {
        for slots in [1, 2, 3, 7, 100] {
            let mut table = SlotTable::new(slots);
            let mut expected = HashMap::new();
            let mut random = u64::from(slots);
            for _ in 0..5000 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let slot = (random >> 33) as Slot % slots;
                match expected.remove(&slot) {
                    Some(hash) => table.remove(hash, slot),
                    None => {
                        table.insert(hash_of(slot), slot);
                        expected.insert(slot, hash_of(slot));
                    }
                }
                for slot in 0..slots {
                    let found = table.find(hash_of(slot), |one| one == slot);
                    assert_eq!(found, expected.get(&slot).map(|_| slot));
                }
            }
        }
    }

    #[test]
    #[should_panic = "a slot with a row is found"]
    fn what_is_not_there_is_not_removed() {
        let mut table = SlotTable::new(3);
        table.insert(hash_of(1), 1);
        table.remove(hash_of(6), 2);
    }
}
