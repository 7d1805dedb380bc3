//! Lookups of keys.

use std::hash::BuildHasher;

use super::place::Slot;
use super::{FETCHED, Index};
use crate::index::key::{row_of, table_of};

impl Index {
    /// The slot of a row that is cached or being read: a hit. If the batch reached last has the
    /// key, that use of it is over.
    pub fn find(&mut self, key: u64) -> Option<Slot> {
        let hash = self.hasher.hash_one(key);
        let slot = self.slot_of(hash, key);
        self.used(hash, key, slot);
        slot
    }

    /// As [`find`](Index::find), for up to [`FETCHED`] keys of one table in order, but without the
    /// slots of rows that are being read, whose reads may fail. The processor fetches the entries of all
    /// keys at once, because memory latency is most of the cost.
    pub(crate) fn find_each(&mut self, keys: &[u64]) -> [Option<Slot>; FETCHED] {
        let mut slots = [None; FETCHED];
        if self.window.reached().is_none()
            && let Some(&first) = keys.first()
            && let Some(rows) = self.slots.rows(table_of(first))
        {
            self.unsorted.used(keys);
            let uses_max = self.order.uses_max();
            for (&key, found) in keys.iter().zip(&mut slots) {
                if let Some(slot) = rows.find(row_of(key)) {
                    let place = &mut self.places[slot as usize];
                    place.count_use(uses_max);
                    *found = (!place.comes).then_some(slot);
                }
            }
            return slots;
        }
        let hashes = self.fetch(keys);
        for ((&key, hash), found) in keys.iter().zip(hashes).zip(&mut slots) {
            let slot = self.slot_of(hash, key);
            self.used(hash, key, slot);
            *found = slot.filter(|&slot| !self.places[slot as usize].comes);
        }
        slots
    }

    /// Records a lookup of a key, which found this slot or none.
    fn used(&mut self, hash: u64, key: u64, slot: Option<Slot>) {
        self.unsorted.used(&[key]);
        let next = self.window.used(hash, key);
        let Some(slot) = slot else { return };
        self.places[slot as usize].count_use(self.order.uses_max());
        if let Some(next) = next {
            self.set_next_use(slot, next);
        }
    }

    /// Fetches the entries of up to [`FETCHED`] keys into the processor's caches, all at once,
    /// because memory latency is most of a lookup's cost; nothing else changes. Returns the keys'
    /// hashes. For keys that are looked up right after it.
    pub(crate) fn fetch(&self, keys: &[u64]) -> [u64; FETCHED] {
        let mut hashes = [0; FETCHED];
        let mut sum = 0;
        for (&key, hash) in keys.iter().zip(&mut hashes) {
            *hash = self.hasher.hash_one(key);
            sum ^= self.slots.fetch(*hash, key);
        }
        for (&key, &hash) in keys.iter().zip(&hashes) {
            if let Some(slot) = self.slots.guess(hash, key) {
                sum ^= u64::from(self.places[slot as usize].uses);
            }
            sum ^= self.window.next(hash, key).unwrap_or(0);
        }
        // Keeps the compiler from removing loads whose results are unused.
        std::hint::black_box(sum);
        hashes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Policy;
    use crate::index::key::key_of;

    const SLOTS: Slot = 40;
    const TABLE_ROWS: u64 = 60;

    /// Numbers that look drawn at random.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) % end
        }

        fn keys(&mut self, table: u64) -> Vec<u64> {
            let count = 1 + self.below(FETCHED as u64);
            (0..count)
                .map(|_| key_of(table, self.below(TABLE_ROWS)))
                .collect()
        }
    }

    /// Looks keys up as a batch does: cached ones, then the others, some of which stay under way.
    fn gather(index: &mut Index, keys: &[u64], random: &mut Random) -> Vec<Option<Slot>> {
        let mut seen = index.find_each(keys)[..keys.len()].to_vec();
        for &key in keys {
            let found = index.find(key);
            seen.push(found);
            if found.is_some() {
                continue;
            }
            let admitted = index.admit_coming(key, |_| true);
            seen.push(admitted);
            match (admitted, random.below(8)) {
                (Some(_), 0) => index.forget(key),
                (Some(_), 1) | (None, _) => {}
                (Some(slot), _) => index.arrived(slot),
            }
        }
        seen
    }

    /// Some steps with batches of two tables, one of which is removed now and then.
    fn steps(mut index: Index, mut random: Random, has_arrays: bool) -> Vec<Vec<Option<Slot>>> {
        let add = |index: &mut Index, table| {
            if has_arrays {
                index.add_table(table, TABLE_ROWS);
                assert!(index.slots.rows(table).is_some());
            }
        };
        add(&mut index, 0);
        add(&mut index, 1);
        let mut seen = Vec::new();
        for _ in 0..400 {
            let table = random.below(2);
            let keys = random.keys(table);
            match random.below(8) {
                0 => drop(index.pin(&keys[..1])),
                1 => index.unpin(&keys),
                2 => {
                    let batch = index.hint(&keys);
                    let other = random.keys(table);
                    seen.push(gather(&mut index, &other, &mut random));
                    index.reach(batch);
                    seen.push(gather(&mut index, &keys, &mut random));
                    index.cancel(batch);
                }
                3 if random.below(8) == 0 => {
                    // Rows on their way are those of batches, which end before a table does.
                    for slot in 0..SLOTS {
                        if index.places[slot as usize].comes {
                            index.arrived(slot);
                        }
                    }
                    index.remove_table(table);
                    add(&mut index, table);
                }
                _ => seen.push(gather(&mut index, &keys, &mut random)),
            }
        }
        seen
    }

    #[test]
    fn arrays_find_what_hashes_find() {
        for policy in [Policy::Sieve, Policy::S3Fifo, Policy::Static] {
            for seed in 0..20 {
                let index = || Index::new(SLOTS, policy);
                let by_array = steps(index(), Random(seed), true);
                let by_hash = steps(index(), Random(seed), false);
                assert_eq!(by_array, by_hash, "{policy:?}, {seed}");
            }
        }
    }
}
