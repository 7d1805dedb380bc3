//! Finds the slot of a key: by its row where the table is small, else by its hash.

use super::place::{Place, Slot};
use super::slot_table::SlotTable;
use crate::index::key::{row_of, table_of};

/// Rows of all small tables together for each slot: 12 bytes of the 64 that a slot counts for.
const ROWS_PER_SLOT: u64 = 3;

/// The slots of keys.
///
/// The rows of a small table are numbered in an array, so that a lookup is one load. Arrays of
/// larger tables would take more memory than the rows in the cache deserve.
#[derive(Debug)]
pub(super) struct SlotMap {
    hashed: SlotTable,
    /// The rows of each table, by its number; `None` for a table that is looked up by hashes.
    tables: Vec<Option<RowSlots>>,
    /// How many rows further tables may have in arrays.
    rows_left: u64,
    len: usize,
}

/// The slot of each row of a table.
#[derive(Debug)]
pub(super) struct RowSlots {
    /// The number of the slot plus one; 0 for none, so that the memory of a new array is not
    /// touched.
    entries: Box<[u32]>,
}

impl RowSlots {
    /// The slot of a row.
    ///
    /// # Panics
    /// If the table has no such row.
    pub(super) fn find(&self, row: u64) -> Option<Slot> {
        self.entries[row as usize].checked_sub(1)
    }
}

impl SlotMap {
    /// An empty map for so many slots.
    pub(super) fn new(slots: Slot) -> SlotMap {
        SlotMap {
            hashed: SlotTable::new(slots),
            tables: Vec::new(),
            rows_left: ROWS_PER_SLOT * u64::from(slots),
            len: 0,
        }
    }

    /// Numbers the rows of a table that has none here, if that takes little memory.
    pub(super) fn add_table(&mut self, table: u64, rows: u64) {
        if rows > self.rows_left {
            return;
        }
        self.rows_left -= rows;
        let table = table as usize;
        if self.tables.len() <= table {
            self.tables.resize_with(table + 1, || None);
        }
        self.tables[table] = Some(RowSlots {
            entries: vec![0; rows as usize].into_boxed_slice(),
        });
    }

    /// Forgets a table that has no rows here any more.
    pub(super) fn remove_table(&mut self, table: u64) {
        let removed = self.tables.get_mut(table as usize).and_then(Option::take);
        self.rows_left += removed.map_or(0, |rows| rows.entries.len() as u64);
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The rows of a table, if they are numbered.
    pub(super) fn rows(&self, table: u64) -> Option<&RowSlots> {
        self.tables.get(table as usize)?.as_ref()
    }

    /// Loads the entry at which the search for a key begins; the value means nothing.
    pub(super) fn fetch(&self, hash: u64, key: u64) -> u64 {
        match self.rows(table_of(key)) {
            Some(rows) => rows.find(row_of(key)).map_or(0, u64::from),
            None => self.hashed.fetch(hash),
        }
    }

    /// The slot that is probably the key's, to be fetched.
    pub(super) fn guess(&self, hash: u64, key: u64) -> Option<Slot> {
        match self.rows(table_of(key)) {
            Some(rows) => rows.find(row_of(key)),
            None => self.hashed.guess(hash),
        }
    }

    /// The slot of a key.
    pub(super) fn find(&self, hash: u64, key: u64, places: &[Place]) -> Option<Slot> {
        match self.rows(table_of(key)) {
            Some(rows) => rows.find(row_of(key)),
            None => self
                .hashed
                .find(hash, |slot| places[slot as usize].key == key),
        }
    }

    /// Adds a key that has no slot.
    pub(super) fn insert(&mut self, hash: u64, key: u64, slot: Slot) {
        self.len += 1;
        match self.entry(key) {
            Some(entry) => *entry = slot + 1,
            None => self.hashed.insert(hash, slot),
        }
    }

    /// Removes a key with its slot.
    ///
    /// # Panics
    /// If it has another slot, or none.
    pub(super) fn remove(&mut self, hash: u64, key: u64, slot: Slot) {
        self.len -= 1;
        match self.entry(key) {
            Some(entry) => {
                let found = std::mem::take(entry);
                assert_eq!(found, slot + 1, "a slot with a row is found");
            }
            None => self.hashed.remove(hash, slot),
        }
    }

    /// The entry of a row that is numbered.
    fn entry(&mut self, key: u64) -> Option<&mut u32> {
        let rows = self.tables.get_mut(table_of(key) as usize)?.as_mut()?;
        Some(&mut rows.entries[row_of(key) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::key::key_of;

    #[test]
    fn tables_have_arrays_while_these_are_small() {
        let mut map = SlotMap::new(10);
        map.add_table(0, 31);
        map.add_table(1, 20);
        map.add_table(2, 11);
        map.add_table(3, 10);
        let has_array = |map: &SlotMap| [0, 1, 2, 3, 4].map(|table| map.rows(table).is_some());
        assert_eq!(has_array(&map), [false, true, false, true, false]);
        map.remove_table(1);
        map.remove_table(0);
        map.add_table(4, 20);
        assert_eq!(has_array(&map), [false, false, false, true, true]);
    }

    #[test]
    fn keys_of_both_kinds_of_tables_are_apart() {
        let mut map = SlotMap::new(10);
        map.add_table(1, 30);
        map.add_table(2, 1);
        let keys = [key_of(1, 5), key_of(2, 5), key_of(1, 0), key_of(2, 0)];
        let mut places = [Place::default(); 10];
        for (slot, key) in (0..).zip(keys) {
            assert_eq!(map.find(key, key, &places), None);
            places[slot as usize] = Place::of(key);
            map.insert(key, key, slot);
        }
        let found = keys.map(|key| map.find(key, key, &places));
        assert_eq!((found, map.len()), ([0, 1, 2, 3].map(Some), 4));
        for (slot, key) in (0..).zip(keys) {
            map.remove(key, key, slot);
            assert_eq!(map.find(key, key, &places), None);
        }
        assert!(map.is_empty());
    }
}
